//! The epoch order is a permutation that looks random, and cursors walk it.

use data::{Cursor, Order, Sampler};
use proptest::prelude::*;

fn epoch(order: Order, epoch: u64) -> Vec<u64> {
    (0..order.rows).map(|index| order.row(epoch, index)).collect()
}

fn is_permutation(mut order: Vec<u64>) -> bool {
    order.sort_unstable();
    order.iter().enumerate().all(|(index, row)| index as u64 == *row)
}

#[test]
fn every_small_size_is_permuted() {
    for rows in 1..=300 {
        let order = Order { seed: 7, rows, shuffle: true };
        assert!(is_permutation(epoch(order, rows)), "{rows}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_size_seed_and_epoch_is_permuted(
        rows in 1_u64..20_000, seed in any::<u64>(), number in any::<u64>(),
    ) {
        let order = Order { seed, rows, shuffle: true };
        prop_assert!(is_permutation(epoch(order, number)));
    }

    #[test]
    fn huge_sizes_stay_inside(rows in 1_u64.., seed in any::<u64>(), index in any::<u64>()) {
        let order = Order { seed, rows, shuffle: true };
        prop_assert!(order.row(3, index % rows) < rows);
    }

    #[test]
    fn batches_are_the_epochs_order(
        rows in 1_u64..300, batch_rows in 1_u64..40, seed in any::<u64>(), shuffle in any::<bool>(),
    ) {
        let order = Order { seed, rows, shuffle };
        let sampler = Sampler::new(order, batch_rows);
        let mut cursor = Cursor::default();
        for step in 0..3 * sampler.steps_per_epoch() {
            prop_assert_eq!(cursor, sampler.cursor_at(step));
            prop_assert_eq!(sampler.check(cursor), Ok(()));
            let (ids, next) = sampler.batch(cursor);
            prop_assert_eq!(ids.len() as u64, batch_rows);
            for (offset, id) in (0_u64..).zip(ids) {
                prop_assert_eq!(id, order.row(cursor.epoch, (cursor.index + offset) % rows));
            }
            prop_assert!(next.epoch > cursor.epoch || next.index == cursor.index + batch_rows);
            cursor = next;
        }
        prop_assert_eq!(cursor, Cursor { epoch: 3, index: 0 });
    }
}

#[test]
fn epochs_and_seeds_differ() {
    let order = Order { seed: 0, rows: 1000, shuffle: true };
    let first = epoch(order, 0);
    assert_ne!(first, epoch(order, 1));
    assert_ne!(first, epoch(Order { seed: 1, ..order }, 0));
    assert_eq!(first, epoch(order, 0));
    assert_eq!(epoch(Order { shuffle: false, ..order }, 5), (0..1000).collect::<Vec<_>>());
}

/// Each of the 24 orders of 4 rows comes about equally often.
#[test]
fn small_orders_are_uniform() {
    let order = Order { seed: 3, rows: 4, shuffle: true };
    let mut counts = std::collections::BTreeMap::<Vec<u64>, f64>::new();
    for number in 0..24_000 {
        *counts.entry(epoch(order, number)).or_default() += 1.0;
    }
    let chi_squared: f64 = counts.values().map(|count| (count - 1000.0).powi(2) / 1000.0).sum();
    assert_eq!(counts.len(), 24);
    // 23 degrees of freedom: above 60 once in 25,000 times for a uniform source.
    assert!(chi_squared < 60.0, "{chi_squared}");
}

/// Where a row lands, and how far the rows of a pair land from each other, has no pattern.
#[test]
fn large_orders_are_uniform() {
    let rows = 5000;
    let order = Order { seed: 9, rows, shuffle: true };
    let (mut cells, mut neighbours) = (vec![0.0; 100], 0.0);
    let epochs = 40;
    for number in 0..epochs {
        let ids = epoch(order, number);
        for (index, id) in ids.iter().enumerate() {
            cells[(index / 500) * 10 + (*id / 500) as usize] += 1.0;
        }
        neighbours += ids.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count() as f64;
    }
    let expected = (rows * epochs) as f64 / 100.0;
    let chi_squared: f64 =
        cells.iter().map(|count: &f64| (count - expected).powi(2) / expected).sum();
    // 81 degrees of freedom: above 140 once in 20,000 times for a uniform source.
    assert!(chi_squared < 140.0, "{chi_squared}");
    // A random order has 2 such neighbours on average: 80 of them here, with a deviation of 9.
    assert!((40.0..125.0).contains(&neighbours), "{neighbours}");
}

/// Runs that were begun with these orders are resumed with them. The numbers are from a second
/// implementation, in Python.
#[test]
fn the_order_never_changes() {
    let order = Order { seed: 42, rows: 10, shuffle: true };
    assert_eq!(epoch(order, 0), [2, 9, 8, 5, 4, 7, 3, 6, 0, 1]);
    assert_eq!(epoch(order, 1), [7, 4, 9, 5, 8, 2, 6, 1, 3, 0]);
    let order = Order { seed: 42, rows: 1 << 40, shuffle: true };
    assert_eq!([order.row(5, 0), order.row(5, 1)], [666062256794, 693431136186]);
}

#[test]
fn a_cursor_from_another_run_is_refused() {
    let sampler = Sampler::new(Order { seed: 0, rows: 10, shuffle: true }, 4);
    assert!(sampler.check(Cursor { epoch: 9, index: 6 }).is_ok());
    assert!(sampler.check(Cursor { epoch: 9, index: 7 }).is_err());
    assert!(sampler.check(Cursor { epoch: 0, index: u64::MAX }).is_err());
}
