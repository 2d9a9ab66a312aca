//! Locked layers stand still to the byte while the others learn.

use actors::Event;
use schedule::{AutoLock, End, Policy};

use crate::lab::{FAMILIES, contents};
use crate::rig::{Ask, Rig, essence};

/// Contents of a layer's first slot: the live one of a locked layer, written by every second step of
/// another one.
fn files(rig: &Rig, layer: &str) -> Vec<(std::path::PathBuf, u64)> {
    contents(&format!("{}/layers/{layer}/a", rig.dir))
}

#[test]
fn locked_layers_keep_every_byte_and_the_loss_still_falls() {
    // By layer: embed, 0, 1, 2, head.
    for locked in [vec![0], vec![0, 1, 2], vec![1, 3], vec![4], vec![2, 3, 4], vec![0, 1, 2, 3]] {
        let mut states = Vec::new();
        for (policy, tight) in
            [(Policy::Deferred, false), (Policy::Deferred, true), (Policy::Fused, true)]
        {
            let rig = Rig::new(FAMILIES[1]);
            let names = ["embed", "0", "1", "2", "head"];
            assert_eq!(rig.layers(), names.len());
            rig.lock(&locked);
            let before: Vec<_> = names.iter().map(|name| files(&rig, name)).collect();
            let ran = rig.run(&Ask { updates: policy.into(), tight, ..Ask::default() });
            assert_eq!(ran.summary.end, End::Completed, "{:?}", ran.summary.failure);
            for (layer, name) in names.iter().enumerate() {
                let stands = locked.contains(&layer);
                assert_eq!(files(&rig, name) == before[layer], stands, "{name} of {locked:?}");
                assert_eq!(ran.state.layers[layer].t, if stands { 0 } else { 9 });
                assert!(ran.steps.iter().all(|step| step.layers[layer].locked == stands));
                let still = ran.steps.iter().all(|step| step.layers[layer].grad_norm == 0.0);
                assert_eq!(still, stands, "{name} of {locked:?}");
            }
            let (first, last) = (&ran.steps[0], &ran.steps[8]);
            assert!(last.loss < first.loss, "{} to {} with {locked:?}", first.loss, last.loss);
            states.push(essence(&ran.state));
        }
        assert!(states.iter().all(|state| *state == states[0]), "{locked:?}");
    }
}

#[test]
fn a_tied_embedding_locks_the_projection_as_well() {
    for policy in [Policy::Deferred, Policy::Fused] {
        let rig = Rig::new(FAMILIES[0]);
        rig.lock(&[0, 1, 2]);
        let before = files(&rig, "embed");
        let ran = rig.run(&Ask { updates: policy.into(), ..Ask::default() });
        assert_eq!(ran.summary.end, End::Completed);
        assert_eq!(files(&rig, "embed"), before);
        let steps: Vec<u64> = ran.state.layers.iter().map(|layer| layer.t).collect();
        assert_eq!(steps, [0, 0, 0, 9]);
    }
}

#[test]
fn layers_lock_themselves_alike_whether_the_run_is_interrupted_or_not() {
    let rule = AutoLock { threshold: 1e3, steps: 2, floor: 2 };
    let ask = |policy: Policy, last_step| Ask {
        updates: policy.into(),
        last_step,
        auto_lock: Some(rule),
        ..Ask::default()
    };
    let whole = Rig::new(FAMILIES[1]).run(&ask(Policy::Deferred, 9));
    // Weights are known from step 1 on, so steps 2 and 3 are the two quiet ones.
    let told = |event: &Event| match event {
        Event::Locked { step, layers } => Some((*step, layers.len())),
        _ => None,
    };
    let told: Vec<_> = whole.events.iter().filter_map(told).collect();
    assert_eq!(told, [(3, 3)]);
    let mut steps: Vec<u64> = whole.state.layers.iter().map(|layer| layer.t).collect();
    steps.sort_unstable();
    assert_eq!(steps, [3, 3, 3, 9, 9]);
    for policy in [Policy::Deferred, Policy::Fused] {
        for pause in 1..5 {
            let rig = Rig::new(FAMILIES[1]);
            rig.run(&ask(policy, pause));
            let ran = rig.run(&ask(policy, 9));
            assert_eq!(essence(&ran.state), essence(&whole.state), "{policy:?} {pause}");
            assert_eq!(ran.state.counters, whole.state.counters, "{policy:?} {pause}");
        }
    }
}
