//! Steps that went wrong never reach the weights: passed over, or the end of the run.

use actors::{Event, Failure};
use model::LayerId;
use schedule::{End, Guard, Policy, Trip};

use crate::lab::FAMILIES;
use crate::rig::{Ask, Rig, Wrong, essence};

const SKIP: Guard = Guard { on_trip: Trip::Skip, spike: None };

fn skipped(events: &[Event]) -> Vec<(u64, String)> {
    let of = |event: &Event| match event {
        Event::Skipped { step, reason } => Some((*step, reason.clone())),
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

#[test]
fn a_step_that_is_not_finite_leaves_what_passing_its_rows_over_leaves() {
    for (model, policy) in [(FAMILIES[0], Policy::Deferred), (FAMILIES[1], Policy::Fused)] {
        let by_hand = Rig::new(model);
        by_hand.run(&Ask { last_step: 3, updates: policy.into(), ..Ask::default() });
        by_hand.pass_over();
        let want = essence(&by_hand.run(&Ask { updates: policy.into(), ..Ask::default() }).state);
        for wrong in [Wrong::Loss, Wrong::Gradient(LayerId(1)), Wrong::Gradient(LayerId(2))] {
            for tight in [false, true] {
                let rig = Rig::new(model);
                let wrong = vec![(4, wrong)];
                let ran = rig.run(&Ask {
                    updates: policy.into(),
                    guard: SKIP,
                    tight,
                    wrong,
                    ..Ask::default()
                });
                assert_eq!(ran.summary.end, End::Completed, "{:?}", ran.summary.failure);
                assert!(ran.summary.failure.is_none() && ran.summary.commits == 8);
                assert_eq!(essence(&ran.state), want, "{policy:?}");
                let told = skipped(&ran.events);
                assert!(told.len() == 1 && told[0].0 == 4, "{told:?}");
                assert!(told[0].1.contains("not finite"), "{told:?}");
                assert_eq!(ran.steps.len(), 8);
                assert_eq!(ran.state.counters["skipped"], 1);
                assert!(ran.state.layers.iter().all(|layer| layer.t == 8));
            }
        }
    }
}

#[test]
fn unless_asked_otherwise_such_a_step_ends_the_run_and_can_be_run_again() {
    for policy in [Policy::Deferred, Policy::Fused] {
        let calm =
            Rig::new(FAMILIES[1]).run(&Ask { updates: policy.into(), ..Ask::default() }).state;
        for wrong in [Wrong::Loss, Wrong::Gradient(LayerId(1))] {
            let rig = Rig::new(FAMILIES[1]);
            let ran =
                rig.run(&Ask { updates: policy.into(), wrong: vec![(4, wrong)], ..Ask::default() });
            assert_eq!((ran.summary.end, ran.summary.step), (End::Failed, 3));
            let failure = ran.summary.failure.unwrap();
            let says = matches!(*failure, Failure::NotFinite { step: 4, .. });
            let names = matches!(&*failure, Failure::Update { step: 4, layer } if layer == "0");
            assert!(says || (names && policy == Policy::Fused), "{failure}");
            let went_on = rig.run(&Ask { updates: policy.into(), ..Ask::default() });
            assert_eq!(went_on.summary.end, End::Completed);
            assert_eq!(essence(&went_on.state), essence(&calm));
        }
    }
}

#[test]
fn the_sixth_skip_in_a_row_ends_the_run() {
    let rig = Rig::new(FAMILIES[0]);
    let wrong: Vec<_> = (2..=9).map(|step| (step, Wrong::Loss)).collect();
    let ran = rig.run(&Ask { guard: SKIP, wrong, ..Ask::default() });
    assert_eq!((ran.summary.end, ran.summary.step), (End::Failed, 6));
    assert!(matches!(*ran.summary.failure.unwrap(), Failure::NotFinite { step: 7, .. }));
    assert_eq!(skipped(&ran.events).len(), 5);
    // The counter is in the record: a process that begins there does not count anew.
    let again = rig.run(&Ask { guard: SKIP, wrong: vec![(1, Wrong::Loss)], ..Ask::default() });
    assert_eq!((again.summary.end, again.summary.step), (End::Failed, 6));
    let healed = rig.run(&Ask { guard: SKIP, ..Ask::default() });
    assert_eq!((healed.summary.end, healed.state.layers[0].t), (End::Completed, 4));
}
