//! Overlap on the virtual clock, and the machines' invariants under seeded faults.

use super::*;

pub(super) const UNIT: Time = 1_000_000;

/// I/O by the bytes per parameter of a fused step: 4 read forward; 4 read backward and 20 moved by
/// the update. In both sweeps a layer's I/O takes as long as its compute.
pub(super) fn balanced(updates: impl Into<Updates>, weight_buffers: usize) -> Setup {
    Setup {
        layers: 32,
        tied: true,
        tiling: Tiling::Whole,
        micros: 2,
        updates: updates.into(),
        commit_every: 1,
        fused_wait: Wait::None,
        weight_buffers,
        tight: false,
        interval: 1,
        kept: 0,
        steps: 4,
        costs: Costs {
            read: 4 * UNIT,
            update: 20 * UNIT,
            forward: 4 * UNIT,
            backward: 24 * UNIT,
            commit: UNIT,
            park: UNIT,
            unbind: 0,
        },
        faults_per_million: 0,
        fatal: false,
        deaths_per_million: 0,
        jitter_percent: 0,
        bad_batch: 0,
        locked: Vec::new(),
        counters: BTreeMap::new(),
        guard: Guard::default(),
        auto_lock: None,
        data: Data::default(),
        seed: 0,
    }
}

/// Time of a step in the steady state, as a part of `1.1 * max(I/O, compute) + one layer`.
fn step_time_ratio(setup: Setup) -> f64 {
    let (layers, costs) = (setup.layers as u64, setup.costs);
    let mut world = World::new(setup);
    assert_eq!(world.run(), End::Completed);
    let io = layers * (2 * costs.read + costs.update);
    let compute = layers * (costs.forward + costs.backward);
    let one_layer = compute / layers;
    let step = world.durable_at[3] - world.durable_at[2];
    step as f64 / (1.1 * io.max(compute) as f64 + one_layer as f64)
}

#[test]
fn reading_writing_and_computing_overlap() {
    let ratio = step_time_ratio(balanced(Policy::Fused, 2));
    assert!(ratio <= 1.0, "a step takes {ratio:.3} of its bound");
}

#[test]
fn without_prefetch_the_bound_is_missed() {
    let ratio = step_time_ratio(balanced(Policy::Fused, 1));
    assert!(ratio > 1.0, "one buffer should not overlap, but takes {ratio:.3} of the bound");
}

#[test]
fn every_policy_and_shape_commits_every_step() {
    let all = [Policy::Fused.into(), Policy::Deferred.into(), Updates::Speculative, Updates::Auto];
    let waits = [(Tiling::Whole, Wait::None), (Tiling::Blocks, Wait::None)];
    let waits = waits.into_iter().chain([(Tiling::Blocks, Wait::Layer)]);
    for (updates, (tiling, fused_wait)) in
        all.into_iter().flat_map(|updates| waits.clone().map(move |wait| (updates, wait)))
    {
        for tied in [true, false] {
            for (micros, tight, interval) in [
                (1, false, 1),
                (3, false, 2),
                (1, true, 1),
                (3, true, 1),
                (1, true, 2),
                (3, true, 3),
            ] {
                let shape = Setup { tied, micros, tight, layers: 5, ..balanced(updates, 2) };
                let setup = Setup { tiling, fused_wait, interval, ..shape };
                let mut world = World::new(setup);
                assert_eq!(world.run(), End::Completed);
                assert_eq!((world.durable_at.len(), world.aborts), (4, 0));
            }
        }
    }
}

#[test]
fn speculation_costs_an_attempt_where_it_was_wrong_and_auto_gives_it_up() {
    let run = |updates: Updates| {
        let data = Data { clips: true, seed: 3, ..Data::default() };
        let mut world = World::new(Setup { steps: 40, layers: 3, data, ..balanced(updates, 2) });
        assert_eq!(world.run(), End::Completed);
        assert_eq!(world.durable_at.len(), 40);
        let clipped = (1..=40).filter(|&step| world.setup.data.clipped(Step(step))).count() as u64;
        (world.aborts, clipped, world.records.pop().unwrap())
    };
    let (deferred, clipped, want) = run(Policy::Deferred.into());
    assert!(deferred == 0 && clipped > 10, "{deferred} {clipped}");
    let (speculative, _, record) = run(Updates::Speculative);
    assert_eq!(speculative, clipped);
    assert!(record.agrees(&want));
    let (auto, _, record) = run(Updates::Auto);
    assert!(auto > 0 && auto < clipped / 2, "{auto} of {clipped}");
    assert!(record.agrees(&want));
}

#[test]
fn faults_cost_attempts_and_never_a_committed_step() {
    let (mut aborts, mut failed) = (0, 0);
    for seed in 0..1000 {
        let policy = if seed % 2 == 0 { Policy::Fused } else { Policy::Deferred };
        let mut world = World::new(Setup {
            layers: 1 + seed as usize % 4,
            tied: seed % 3 == 0,
            tight: seed % 5 < 2,
            micros: 1 + seed as u32 % 3,
            steps: 6,
            faults_per_million: 8_000,
            jitter_percent: 300,
            seed,
            ..balanced(policy, 2 + seed as usize % 2)
        });
        match world.run() {
            End::Completed => assert_eq!(world.durable_at.len(), 6, "seed {seed}"),
            // Three attempts of one step in a row failed.
            End::Failed => failed += 1,
            End::Stopped => panic!("seed {seed}: nobody asked it to stop"),
        }
        aborts += world.aborts;
    }
    assert!(aborts > 300, "only {aborts} aborts: the faults do not bite");
    assert!(failed < 200, "{failed} of 1000 runs gave up");
}

#[test]
fn an_input_comes_back_only_after_it_has_left() {
    for weight_buffers in 2..5 {
        let mut setup = Setup { tight: true, layers: 4, ..balanced(Policy::Fused, weight_buffers) };
        setup.costs.park = 500 * UNIT;
        assert_eq!(World::new(setup).run(), End::Completed);
    }
}

#[test]
fn a_stop_ends_the_run_at_a_committed_step() {
    for seed in 0..200 {
        let mut world = World::new(Setup {
            layers: 3,
            steps: 50,
            jitter_percent: 200,
            seed,
            ..balanced(Policy::Deferred, 2)
        });
        let when = world.next_random() % (400 * UNIT);
        world.at(when, Happening::Run(RunEvent::StopRequested));
        assert_eq!(world.run(), End::Stopped, "seed {seed}");
        assert!(world.durable_at.len() < 50);
        assert_eq!(world.process.run.durable(), Step(world.durable_at.len() as u64));
    }
}

/// Nothing that is settled is lost by a stop.
#[test]
fn a_stop_commits_what_is_settled() {
    let (mut partial, mut whole) = (0, 0);
    for seed in 0..400 {
        let policy = if seed % 2 == 0 { Policy::Fused } else { Policy::Deferred };
        let mut world = World::new(Setup {
            layers: 3,
            steps: 50,
            commit_every: 2 + seed % 5,
            jitter_percent: 200,
            seed,
            ..balanced(policy, 2)
        });
        let when = world.next_random() % (2000 * UNIT);
        world.at(when, Happening::Run(RunEvent::StopRequested));
        assert_eq!(world.run(), End::Stopped, "seed {seed}");
        assert_eq!(world.again, 0, "seed {seed}");
        let at = world.disk.record.step.0;
        *(if at.is_multiple_of(world.setup.commit_every) { &mut whole } else { &mut partial }) += 1;
    }
    assert!(partial > 100 && whole > 20, "{partial} {whole}");
}

#[test]
fn commits_come_as_often_as_asked_for() {
    for updates in [Policy::Fused.into(), Policy::Deferred.into(), Updates::Auto] {
        let setup = Setup { steps: 11, commit_every: 4, layers: 3, ..balanced(updates, 2) };
        let mut world = World::new(setup);
        assert_eq!(world.run(), End::Completed);
        let steps: Vec<u64> = world.records.iter().map(|record| record.step.0).collect();
        assert_eq!((steps, world.aborts), (vec![0, 4, 8, 11], 0));
    }
}

#[test]
fn giving_up_drops_what_is_swept_and_commits_what_is_being_updated() {
    let mut dropped = 0;
    for seed in 0..200 {
        let policy = if seed % 2 == 0 { Policy::Fused } else { Policy::Deferred };
        let bad_batch = 2 + seed % 5;
        let mut world = World::new(Setup {
            layers: 3,
            steps: 9,
            jitter_percent: 300,
            bad_batch,
            seed,
            ..balanced(policy, 2)
        });
        assert_eq!(world.run(), End::Failed, "seed {seed}");
        // Its rows are asked for when the step before begins; the one before that may be updating.
        assert_eq!(world.durable_at.len() as u64, bad_batch - 2, "seed {seed}");
        dropped += world.aborts;
    }
    assert_eq!(dropped, 200);
}
