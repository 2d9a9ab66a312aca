//! New chunks that wait in memory: read like written ones, saved when asked, lost with the process.

use std::path::Path;
use std::sync::Arc;

use model::{LayerId, NextUse, Plane, Precision, Slot, StateLayout, Weights};
use store::{
    Fault, Faulty, Image, Io, OpKind, RecordKind, StoreError, TrainingStore, WrittenAgain, blocking,
};

use crate::support::{
    DIR, assert_contents, contents, create_store_in, open, trained, value, weights,
};

/// An embedding of two chunks, rows of which lie in both.
const CONFIG: &str = r#"{"model_type":"llama","vocab_size":1101,"hidden_size":960,
    "intermediate_size":96,"num_hidden_layers":1,"num_attention_heads":2,
    "num_key_value_heads":1,"max_position_embeddings":32}"#;

const EMBEDDING: LayerId = LayerId(0);

fn again() -> WrittenAgain {
    let at = NextUse { step: 2, turn: 1 };
    WrittenAgain { precision: Precision::Exact, weights: at, state: at, waits: true }
}

/// Layers that a step writes: the ones that [`trained`] names.
fn layers(store: &TrainingStore, step: u64) -> Vec<LayerId> {
    let all = store.table().layers().iter().map(|layer| layer.id);
    all.filter(|&layer| trained(layer, step) == step).collect()
}

/// Lets the contents of a step wait in the slots that are not live.
fn write_waiting(store: &TrainingStore, step: u64) {
    for layer in layers(store, step) {
        let slot = store.state().layers[layer.index()].slot.other();
        for chunk in 0..store.chunks(layer) {
            let bytes = contents(store.layout(), layer, step, store.chunk_elements(layer, chunk));
            let content = (bytes, bytes_hashes(store, layer, step, chunk));
            let at = (layer, slot, chunk);
            blocking(|done| store.write_chunk(at, content, Some(again()), done)).unwrap();
        }
        blocking(|done| store.finish_layer(layer, slot, true, done)).unwrap();
    }
}

fn bytes_hashes(
    store: &TrainingStore,
    layer: LayerId,
    step: u64,
    chunk: usize,
) -> store::ChunkHashes {
    contents(store.layout(), layer, step, store.chunk_elements(layer, chunk)).hashes()
}

/// Saves and commits what waits as `step`.
fn commit(store: &TrainingStore, step: u64) -> Result<(), StoreError> {
    let mut state = store.state();
    let slots = |layer: &LayerId| (*layer, state.layers[layer.index()].slot.other());
    let slots: Vec<_> = layers(store, step).iter().map(slots).collect();
    blocking(|done| store.save_slots(&slots, done))?;
    for (layer, slot) in slots {
        let hashes = blocking(|done| store.finish_layer(layer, slot, true, done))?;
        let layer = &mut state.layers[layer.index()];
        (layer.slot, layer.t, layer.hashes) = (slot, layer.t + 1, hashes);
    }
    (state.step, state.attempt.0) = (model::Step(step), state.attempt.0 + 1);
    blocking(|done| store.commit(RecordKind::Committed, state, done))
}

fn disk(layout: StateLayout) -> (Arc<Faulty>, Arc<dyn Io>) {
    let faulty = Arc::new(Faulty::over_memory(Image::default()));
    let io: Arc<dyn Io> = faulty.clone();
    create_store_in(layout, &io, Path::new(DIR), CONFIG).unwrap();
    (faulty, io)
}

/// Every way to read the new version of the embedding gives the contents of `step`.
fn assert_readable(store: &TrainingStore, step: u64) {
    let (at, layout) = ((EMBEDDING, Slot::B), store.layout());
    let all = store.table().layer(EMBEDDING).elements();
    let cut = store.chunk_elements(EMBEDDING, 0).end;
    for elements in [0..all, 0..cut, cut..all, cut - 512..cut + 512, cut - 256..cut, 512..1024] {
        let values = elements.clone().map(|i| value(EMBEDDING, Plane::Weight, step, i));
        let want = Weights::from_f32(layout, &values.collect::<Vec<_>>()).into_f32();
        let want = want.f32s();
        assert_eq!(weights(store, at, elements.clone()).unwrap(), want, "{elements:?}");
    }
    for chunk in 0..store.chunks(EMBEDDING) {
        let read = blocking(|done| store.read_chunk(EMBEDDING, Slot::B, chunk, done)).unwrap();
        assert_eq!(read.hashes(), store.chunk_hashes(EMBEDDING, Slot::B, chunk));
        assert_eq!(read.hashes(), bytes_hashes(store, EMBEDDING, step, chunk));
    }
    let (width, ids) = (960, [3, 1092, 1092, 1100, 0]);
    let rows = blocking(|done| store.gather_rows(at, width, &ids, Precision::Exact, done));
    let rows = rows.unwrap().into_f32();
    for (row, id) in rows.f32s().chunks(width).zip(ids) {
        let start = id as usize * width;
        assert_eq!(row, weights(store, at, start..start + width).unwrap(), "row {id}");
    }
}

#[test]
fn what_waits_is_read_as_if_it_were_written_and_saved_once() {
    for layout in StateLayout::ALL {
        let (faulty, io) = disk(layout);
        let (store, _) = open(&io, Path::new(DIR)).unwrap();
        store.let_wait(usize::MAX);
        // The first write removes what points into the slot.
        write_waiting(&store, 1);
        let writes = faulty.count(OpKind::Write);
        assert_readable(&store, 1);
        write_waiting(&store, 2);
        assert_readable(&store, 2);
        assert_eq!(faulty.count(OpKind::Write), writes, "nothing goes to the disk");
        commit(&store, 2).unwrap();
        assert!(faulty.count(OpKind::Write) > writes);
        assert_readable(&store, 2);
        assert_contents(&store, 2);
        store.close().unwrap();
        let (store, _) = open(&io, Path::new(DIR)).unwrap();
        assert_contents(&store, 2);
    }
}

#[test]
fn what_has_no_room_is_written_and_the_rest_waits() {
    let state = |store: &TrainingStore| {
        store.table().layers().iter().map(|l| store.layout().bytes(l.elements())).sum::<usize>()
    };
    let mut counts = Vec::new();
    for share in [0, 1, 2, 3, 4] {
        let (faulty, io) = disk(StateLayout::Split8);
        let (store, _) = open(&io, Path::new(DIR)).unwrap();
        store.let_wait(state(&store) * share / 4);
        for step in 1..=2 {
            write_waiting(&store, step);
            assert_readable(&store, step);
        }
        counts.push(faulty.count(OpKind::Write));
        commit(&store, 2).unwrap();
        assert_contents(&store, 2);
    }
    assert!(counts.is_sorted_by(|few, fewer| few > fewer), "{counts:?}");
}

#[test]
fn a_save_that_fails_can_be_made_again() {
    let (faulty, io) = disk(StateLayout::F32);
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    store.let_wait(usize::MAX);
    for fault in [Fault::Eio, Fault::Short, Fault::NoSpace] {
        for nth in [1, 2, 5] {
            write_waiting(&store, 1);
            faulty.fail(OpKind::Write, faulty.count(OpKind::Write) + nth, fault);
            assert!(matches!(
                commit(&store, 1),
                Err(StoreError::Io { .. } | StoreError::NoSpace { .. })
            ));
            assert_readable(&store, 1);
        }
    }
    commit(&store, 1).unwrap();
    assert_contents(&store, 1);
}

#[test]
fn what_waits_dies_with_the_process_or_is_forgotten() {
    let (_, io) = disk(StateLayout::F32);
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    store.let_wait(usize::MAX);
    write_waiting(&store, 1);
    drop(store);
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    assert_contents(&store, 0);
    store.let_wait(usize::MAX);
    write_waiting(&store, 1);
    store.let_wait(0);
    let read = weights(&store, (EMBEDDING, Slot::B), 0..4).unwrap();
    assert_eq!(read, [0.0; 4], "the file");
    write_waiting(&store, 1);
    commit(&store, 1).unwrap();
    assert_contents(&store, 1);
}
