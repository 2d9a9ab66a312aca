//! Layer tables: counts of known models, contiguity, tiles, selections.

use super::*;

fn table(extra: &str) -> LayerTable {
    let config = ModelConfig::from_json(&format!(
        r#"{{"model_type":"llama","vocab_size":49152,"hidden_size":576,"intermediate_size":1536,
            "num_hidden_layers":30,"num_attention_heads":9,"num_key_value_heads":3{extra}}}"#
    ));
    LayerTable::new(&config.unwrap())
}

#[test]
fn smollm2_has_its_published_number_of_parameters() {
    assert_eq!(table(r#","tie_word_embeddings":true"#).elements(), 134_515_008);
}

#[test]
fn tensors_lie_back_to_back() {
    for layer in table(r#","attention_bias":true,"mlp_bias":true"#).layers() {
        let mut end = 0;
        for tensor in &layer.tensors {
            assert_eq!(tensor.offset, end, "{}", tensor.name);
            end = tensor.range().end;
        }
        assert_eq!(end, layer.elements());
    }
}

#[test]
fn head_tiles_cover_the_vocabulary_once() {
    for tied in [true, false] {
        let table = table(&format!(r#","tie_word_embeddings":{tied}"#));
        let tiles = table.tiles(table.head(), Tiling::Whole);
        assert_eq!(tiles[0].elements, 0..576);
        let mut next = 0;
        for tile in &tiles[1..] {
            assert_eq!(tile.vocabulary.start, next);
            assert_eq!(tile.elements.len(), tile.vocabulary.len() * 576);
            assert_eq!(tile.source, if tied { table.embedding() } else { table.head() });
            next = tile.vocabulary.end;
        }
        assert_eq!(next, 49152);
        let source = table.layer(tiles[1].source);
        assert_eq!(tiles.last().unwrap().elements.end, source.elements());
    }
}

#[test]
fn selections_name_layers() {
    let table = table("");
    let ids = |text| table.parse_selection(text).map(|ids| ids.iter().map(|i| i.0).collect());
    assert_eq!(ids("head, embed,0-2,1"), Ok(vec![0u32, 1, 2, 3, 31]));
    for wrong in ["", "30", "2-1", "embed-", "body"] {
        assert!(ids(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn tiles_and_pieces_cover_every_layer_once_however_it_is_cut() {
    for tied in [true, false] {
        let table = table(&format!(r#","mlp_bias":true,"tie_word_embeddings":{tied}"#));
        for tiling in [Tiling::Whole, Tiling::Blocks] {
            for layer in table.layers() {
                let mut pieces = table.pieces(layer.id, tiling);
                if layer.kind == LayerKind::Embedding {
                    assert_eq!(pieces.pop(), Some(0..layer.elements()), "rows");
                    assert_eq!(pieces.is_empty(), !tied);
                    assert_eq!(table.rows_piece(tiling).part as usize, pieces.len());
                }
                let mut end = layer.elements();
                for piece in &pieces {
                    assert_eq!(piece.end, end, "from the end down");
                    end = piece.start;
                }
                assert!(end == 0 || pieces.is_empty(), "{} {tiling:?}", layer.name);
                for tile in table.tiles(layer.id, tiling) {
                    assert_eq!(table.tile(layer.id, tile.id), Some(tile.clone()));
                    assert!(tile.source == layer.id || (tied && layer.id == table.head()));
                    let PieceId { layer, part } = table.piece_of(&tile, tiling);
                    assert_eq!(table.pieces(layer, tiling)[part as usize], tile.elements);
                }
            }
        }
        let [attention, feed_forward] = &table.tiles(LayerId(1), Tiling::Blocks)[..] else {
            panic!("two residual blocks")
        };
        assert_eq!(attention.elements.len(), 576 + 2 * 576 * 576 + 2 * 192 * 576);
        assert_eq!(feed_forward.elements.len(), 576 + 3 * 576 * 1536 + 2 * 1536 + 576);
    }
}
