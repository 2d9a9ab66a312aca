//! The budget against a plain count, and blocks whose contents stay while there is room.

use proptest::prelude::*;

use super::*;

fn at(step: u64, turn: u32) -> NextUse {
    NextUse { step, turn }
}

#[test]
fn spare_blocks_stay_until_their_room_is_needed_and_the_one_needed_last_goes_first() {
    let budget = Budget::new(100);
    let keep = |byte: u8, next_use| {
        let mut block = budget.block(30).unwrap();
        block.bytes_mut().fill(byte);
        budget.spare(block, next_use)
    };
    let spares = [keep(1, at(1, 5)), keep(2, at(2, 0)), keep(3, at(1, 7))];
    let mut to = [0; 4];
    assert!(spares[1].copy(26, &mut to) && to == [2; 4]);
    // Ten bytes are free, thirty more are needed.
    let other = budget.block(40).unwrap();
    assert!(!spares[1].copy(0, &mut to) && spares[1].take().is_none());
    assert!(spares[0].copy(0, &mut to) && to == [1; 4]);
    let taken = spares[2].take().unwrap();
    assert_eq!(taken.bytes(), [3; 30]);
    assert!(matches!(budget.block(70), Err(BudgetError::Exhausted { .. })));
    drop((other, taken));
    assert!(spares[0].take().is_none());
    assert_eq!(budget.block(100).unwrap().len(), 100);
}

#[test]
fn what_nobody_came_for_goes_before_what_is_needed_last() {
    let budget = Budget::new(90);
    let keep = |next_use| budget.spare(budget.block(30).unwrap(), next_use);
    let forgotten = keep(at(3, 9));
    let (soon, late) = (keep(at(4, 0)), keep(at(5, 0)));
    drop(budget.block(30).unwrap());
    assert!(forgotten.take().is_none() && soon.take().is_some() && late.take().is_some());
}

#[test]
fn a_spare_that_was_taken_does_not_count_as_one() {
    let budget = Budget::new(60);
    let spare = budget.spare(budget.block(30).unwrap(), at(1, 9));
    drop(spare.take());
    let kept = budget.spare(budget.block(30).unwrap(), at(1, 1));
    let _all = [budget.block(30).unwrap()];
    assert!(kept.take().is_some());
    for turn in 0..10_000 {
        drop(budget.spare(budget.block(30).unwrap(), at(1, turn)).take());
    }
    assert!(budget.account().spares.len() <= 2 * SPARES_MIN, "spares that are gone pile up");
}

#[test]
fn dropped_blocks_are_reused_and_make_room_for_other_lengths() {
    let budget = Budget::new(10_000);
    let address = budget.block(8_000).unwrap().bytes().as_ptr();
    assert_eq!(budget.block(8_000).unwrap().bytes().as_ptr(), address);
    assert_eq!(budget.block(9_000).unwrap().len(), 9_000);
    assert_eq!((budget.used_bytes(), budget.peak_bytes()), (0, 9_000));
}

#[test]
#[cfg(target_os = "linux")]
fn pages_that_make_room_serve_in_blocks_of_other_lengths() {
    let mib = 1 << 20;
    let budget = Budget::new(41 * mib);
    for round in 0..3 {
        let small: Vec<HostBytes> = (0..10).map(|_| budget.block(4 * mib).unwrap()).collect();
        let seen = small.iter().filter(|block| block.bytes()[mib] == 9).count();
        // The large one's last, short page is fresh every time.
        assert_eq!(seen, if round == 0 { 0 } else { 10 });
        drop(small);
        let mut large = budget.block(40 * mib + 5).unwrap();
        large.bytes_mut().fill(9);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_budget_never_exceeds_its_total(lengths in prop::collection::vec(1usize..5_000, 1..40), scale in 0usize..2) {
        // Blocks of the heap, and maps of their own.
        let (unit, total) = ([1, 1_999][scale], [10_000, 19_990_000][scale]);
        let budget = Budget::new(total);
        let mut living: Vec<HostBytes> = Vec::new();
        for len in lengths {
            let len = len * unit;
            let sum: usize = living.iter().map(HostBytes::len).sum();
            match budget.block(len) {
                Ok(block) => {
                    prop_assert!(sum + len <= total);
                    living.push(block);
                }
                Err(BudgetError::Exhausted { used_bytes, .. }) => {
                    prop_assert!(sum + len > total);
                    prop_assert_eq!(used_bytes, sum);
                    living.remove(0);
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }
}
