//! The limits' sums.

use super::*;
use crate::ModelConfig;

fn table(layers: usize, tied: bool) -> LayerTable {
    let config = ModelConfig::from_json(&format!(
        r#"{{"model_type":"llama","vocab_size":256,"hidden_size":64,"intermediate_size":128,
            "num_hidden_layers":{layers},"num_attention_heads":4,"tie_word_embeddings":{tied}}}"#
    ));
    LayerTable::new(&config.unwrap())
}

const SHAPE: RunShape = RunShape { batch_rows: 4, micro_rows: 2, seq_len: 32 };
const WORKSPACE: Workspace = Workspace {
    precision: Precision::Exact,
    bound_bytes: 0,
    command_bytes: 1 << 20,
    kept_bytes: 1 << 16,
    logits_bytes: 1 << 14,
};

#[test]
fn a_budget_too_small_names_what_is_needed_and_that_suffices() {
    let table = table(4, true);
    let Err(BudgetError::TooSmall { needed_bytes, .. }) =
        Limits::new(&table, StateLayout::F32, SHAPE, |_| WORKSPACE, Wait::Model, 1, 1000)
    else {
        panic!("1000 bytes accepted")
    };
    let limits = Limits::new(
        &table,
        StateLayout::F32,
        SHAPE,
        |_| WORKSPACE,
        Wait::Model,
        1,
        needed_bytes as usize,
    )
    .unwrap();
    let layer = table.layer(crate::LayerId(1)).elements() * 4;
    assert_eq!((limits.weight_bytes, limits.kept), (2 * layer, 0));
    assert!(
        Limits::new(
            &table,
            StateLayout::F32,
            SHAPE,
            |_| WORKSPACE,
            Wait::Model,
            1,
            needed_bytes as usize - 1
        )
        .is_err()
    );
}

#[test]
fn the_smallest_budget_parks_and_spills_and_depth_does_not_count() {
    let needed = |layers| match Limits::new(
        &table(layers, true),
        StateLayout::F32,
        SHAPE,
        |_| WORKSPACE,
        Wait::Model,
        1,
        0,
    ) {
        Err(BudgetError::TooSmall { needed_bytes, .. }) => needed_bytes as usize,
        other => panic!("{other:?}"),
    };
    assert_eq!(needed(6), needed(180));
    let limits = Limits::new(
        &table(6, true),
        StateLayout::F32,
        SHAPE,
        |_| WORKSPACE,
        Wait::Model,
        1,
        needed(6),
    )
    .unwrap();
    assert_eq!(limits.boundaries, 3 * SHAPE.micros());
    assert_eq!(limits.parked, [false, true, true, true, true, true, true, false]);
    assert_eq!(limits.spilled, [true; 8], "an embedding that is tied, too");
}

#[test]
fn spare_memory_keeps_everything() {
    let limits = Limits::new(
        &table(4, false),
        StateLayout::F32,
        SHAPE,
        |_| WORKSPACE,
        Wait::Model,
        1,
        1 << 30,
    )
    .unwrap();
    assert!(!limits.parked.contains(&true) && !limits.spilled.contains(&true));
    assert_eq!(limits.kept, 4 * SHAPE.micros());
    assert_eq!(limits.tiling, Tiling::Whole);
    let layer = limits.layer_gradient_bytes[1];
    assert_eq!(limits.weight_bytes, (2 + EXTRA_TILES) * layer);
}

#[test]
fn without_waiting_gradients_nothing_spills() {
    let table = table(6, false);
    let Err(BudgetError::TooSmall { needed_bytes, .. }) =
        Limits::new(&table, StateLayout::F32, SHAPE, |_| WORKSPACE, Wait::None, 1, 0)
    else {
        panic!("accepted")
    };
    let limits = Limits::new(
        &table,
        StateLayout::F32,
        SHAPE,
        |_| WORKSPACE,
        Wait::None,
        1,
        needed_bytes as usize,
    )
    .unwrap();
    assert!(!limits.spilled.contains(&true));
}

#[test]
fn what_stays_in_memory_fits_the_limit() {
    let table = table(9, true);
    let mut last = None;
    for ram_bytes in (0..24 << 20).step_by(100_000) {
        let Ok(limits) =
            Limits::new(&table, StateLayout::F32, SHAPE, |_| WORKSPACE, Wait::Model, 1, ram_bytes)
        else {
            continue;
        };
        let sum: usize =
            (1..11).filter(|&l| !limits.spilled[l]).map(|l| limits.layer_gradient_bytes[l]).sum();
        let making = limits.layer_gradient_bytes[0] + 2 * limits.layer_gradient_bytes[1];
        assert!(sum + making <= limits.gradient_bytes, "{ram_bytes}");
        let inputs = limits.parked[1..].iter().filter(|p| !**p).count() * SHAPE.micros();
        assert!(inputs <= limits.boundaries, "{ram_bytes}");
        last = Some(limits);
    }
    assert!(last.is_some_and(|l| !l.spilled.contains(&true)));
}

#[test]
fn layers_are_streamed_in_blocks_only_where_they_do_not_fit_whole() {
    let config = ModelConfig::from_json(
        r#"{"model_type":"llama","vocab_size":256,"hidden_size":256,"intermediate_size":6000,
            "num_hidden_layers":4,"num_attention_heads":4,"tie_word_embeddings":true}"#,
    );
    let table = LayerTable::new(&config.unwrap());
    let at = |ram| Limits::new(&table, StateLayout::F32, SHAPE, |_| WORKSPACE, Wait::None, 1, ram);
    let needed = match at(0) {
        Err(BudgetError::TooSmall { needed_bytes, .. }) => needed_bytes as usize,
        other => panic!("{other:?}"),
    };
    let (attention, feed_forward) = (4 * 256 * 256 + 256, 3 * 256 * 6000 + 256);
    let layer = attention + feed_forward;
    let least = at(needed).unwrap();
    assert_eq!((least.tiling, least.weight_bytes), (Tiling::Blocks, layer * 4));
    assert_eq!((least.parked.len(), &least.piece_bytes[1]), (2 + 2 * 4, &least.piece_bytes[4]));
    // They meet inside the first chunk, which is copied for both.
    assert_eq!(least.piece_bytes[1][0], (layer + CHUNK_ELEMENTS) * 4);
    assert_eq!(least.piece_bytes[1][1], (attention + CHUNK_ELEMENTS) * 4);
    let plenty = at(1 << 30).unwrap();
    assert_eq!((plenty.tiling, &plenty.piece_bytes[1]), (Tiling::Whole, &vec![layer * 4]));
    assert_eq!(plenty.parked.len(), 2 + 4);
}

#[test]
fn groups_keep_one_input_each_and_all_of_the_uppermost_one() {
    let table = table(10, true);
    let at = |interval, ram| {
        let workspace = |_| WORKSPACE;
        Limits::new(&table, StateLayout::F32, SHAPE, workspace, Wait::None, interval, ram)
    };
    let least = |interval| match at(interval, 0) {
        Err(BudgetError::TooSmall { needed_bytes, .. }) => needed_bytes as usize,
        other => panic!("{other:?}"),
    };
    let parked = |interval| {
        let limits = at(interval, least(interval)).unwrap();
        let groups = limits.parked_groups().map(|group| group.start).collect::<Vec<_>>();
        (groups, limits.boundaries / SHAPE.micros())
    };
    assert_eq!(parked(1), ((1..=10).collect(), 3));
    assert_eq!(parked(2), (vec![1, 3, 5, 7], 3));
    assert_eq!(parked(3), (vec![1, 4, 7], 4));
    assert_eq!(parked(10), (vec![], 11));
    // With much of it none is parked.
    for interval in [1, 2, 3, 10, 1000] {
        let limits = at(interval, 1 << 30).unwrap();
        assert_eq!(limits.parked_groups().count(), 0, "{interval}");
        assert_eq!(limits.tiling, Tiling::Whole);
    }
}

#[test]
fn groups_begin_where_training_does() {
    let table = table(7, false);
    let of = |interval, lowest| {
        let groups = Groups::new(&table, Tiling::Whole, interval, LayerId(lowest));
        (1..=7).map(|s| (groups.keeps(Stage(s)), groups.is_remade(Stage(s)))).collect::<Vec<_>>()
    };
    let kept = |all: Vec<(bool, bool)>| all.iter().map(|(k, _)| u8::from(*k)).collect::<Vec<_>>();
    let remade = |all: Vec<(bool, bool)>| all.iter().map(|(_, r)| u8::from(*r)).collect::<Vec<_>>();
    assert_eq!(kept(of(1, 0)), [1; 7]);
    assert_eq!(remade(of(1, 0)), [0; 7]);
    assert_eq!(
        (kept(of(3, 0)), remade(of(3, 0))),
        (vec![1, 0, 0, 1, 0, 0, 1], vec![1, 1, 1, 1, 1, 1, 0])
    );
    assert_eq!((kept(of(3, 1)), remade(of(3, 1))), (kept(of(3, 0)), remade(of(3, 0))));
    // The first two decoder layers stay as they are.
    assert_eq!(kept(of(3, 3))[2..], [1, 0, 0, 1, 1]);
    assert_eq!(remade(of(3, 3))[2..], [1, 1, 1, 0, 0]);
    assert_eq!(kept(of(usize::MAX, 0)), [1; 7]);
}
