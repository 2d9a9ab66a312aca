//! Learning rate schedules: shapes, ends, and runs too short to have a shape.

use optim::{HyperparameterError, LrSchedule, Schedule};
use proptest::prelude::*;

const CASES: u32 = 2000;
const KINDS: [Schedule; 4] =
    [Schedule::Constant, Schedule::Cosine, Schedule::Linear, Schedule::Wsd];

fn schedule(kind: Schedule, warmup_steps: u64, total_steps: u64) -> LrSchedule {
    LrSchedule { kind, peak: 2.0, warmup_steps, total_steps, min_ratio: 0.1 }
}

/// Learning rates at chosen steps, to 1e-12.
fn check(schedule: LrSchedule, expected: &[(u64, f64)]) {
    for (step, lr) in expected {
        let got = schedule.at(*step);
        assert!((got - lr).abs() < 1e-12, "{schedule:?} step {step}: {got}, expected {lr}");
    }
}

#[test]
fn constant_warms_up_and_stays() {
    let schedule = schedule(Schedule::Constant, 4, 10);
    check(schedule, &[(1, 0.5), (2, 1.0), (4, 2.0), (5, 2.0), (10, 2.0), (99, 2.0)]);
}

#[test]
fn cosine_passes_the_middle_half_way() {
    let schedule = schedule(Schedule::Cosine, 2, 12);
    let quarter = 0.2 + 1.8 * 0.5 * (1.0 + (std::f64::consts::PI * 0.2).cos());
    check(schedule, &[(1, 1.0), (2, 2.0), (4, quarter), (7, 1.1), (12, 0.2), (13, 0.2)]);
}

#[test]
fn linear_falls_by_equal_amounts() {
    let schedule = schedule(Schedule::Linear, 2, 12);
    check(schedule, &[(2, 2.0), (3, 1.82), (7, 1.1), (11, 0.38), (12, 0.2), (50, 0.2)]);
}

#[test]
fn wsd_decays_over_the_last_fifth() {
    let even = schedule(Schedule::Wsd, 10, 100);
    check(even, &[(10, 2.0), (11, 2.0), (80, 2.0), (81, 1.91), (90, 1.1), (100, 0.2), (101, 0.2)]);
    // A fifth of 11 steps, rounded up, is 3.
    let odd = schedule(Schedule::Wsd, 0, 11);
    check(odd, &[(1, 2.0), (8, 2.0), (9, 1.4), (10, 0.8), (11, 0.2)]);
    // The warmup leaves one step of decay.
    check(schedule(Schedule::Wsd, 9, 10), &[(9, 2.0), (10, 0.2)]);
}

#[test]
fn runs_without_room_for_decay_hold_the_peak() {
    for kind in KINDS {
        check(schedule(kind, 0, 0), &[(0, 2.0), (1, 2.0), (7, 2.0)]);
        check(schedule(kind, 4, 4), &[(0, 0.5), (1, 0.5), (4, 2.0), (5, 2.0)]);
        check(schedule(kind, 4, 2), &[(2, 1.0), (4, 2.0), (9, 2.0)]);
        check(schedule(kind, u64::MAX, u64::MAX), &[(u64::MAX, 2.0)]);
    }
    check(schedule(Schedule::Cosine, 0, 1), &[(1, 0.2)]);
}

#[test]
fn names_round_trip() {
    for kind in KINDS {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    let error = "Cosine".parse::<Schedule>().unwrap_err();
    let text = "unknown schedule \"Cosine\": use constant, cosine, linear or wsd";
    assert_eq!(error.to_string(), text);
}

#[test]
fn impossible_numbers_are_refused_by_name() {
    let good = schedule(Schedule::Linear, 1, 2);
    assert_eq!(good.check(), Ok(()));
    for peak in [-1.0, f64::NAN, f64::INFINITY] {
        let error = LrSchedule { peak, ..good }.check().unwrap_err();
        assert!(matches!(error, HyperparameterError::OutOfRange { name: "lr", .. }), "{error}");
    }
    for min_ratio in [-0.1, 1.1, f64::NAN] {
        let error = LrSchedule { min_ratio, ..good }.check().unwrap_err().to_string();
        assert_eq!(error, format!("min-lr-ratio is {min_ratio}, but must be between 0 and 1"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn rises_to_the_peak_then_falls_to_the_minimum(
        kind in prop::sample::select(&KINDS[..]),
        peak in 1e-8..1.0,
        warmup_steps in 0_u64..50,
        total_steps in 0_u64..200,
        min_ratio in 0.0..=1.0,
    ) {
        let schedule = LrSchedule { kind, peak, warmup_steps, total_steps, min_ratio };
        let rates: Vec<f64> = (1..=total_steps + 60).map(|step| schedule.at(step)).collect();
        let (warmup, rest) = rates.split_at(warmup_steps as usize);
        prop_assert!(warmup.is_sorted_by(|a, b| a < b));
        prop_assert!(warmup.last().is_none_or(|last| *last == peak));
        let slack = 1.0 + 4.0 * f64::EPSILON;
        prop_assert!(rest.is_sorted_by(|a, b| *b <= *a * slack), "{rest:?}");
        let decays = kind != Schedule::Constant && total_steps > warmup_steps;
        let end = if decays { peak * min_ratio } else { peak };
        prop_assert_eq!(*rest.last().unwrap(), end);
        prop_assert!(rates.iter().all(|lr| (0.0..=peak * slack).contains(lr)));
    }

    #[test]
    fn any_numbers_of_steps_are_safe(
        kind in prop::sample::select(&KINDS[..]),
        step in any::<u64>(),
        warmup_steps in any::<u64>(),
        total_steps in any::<u64>(),
    ) {
        let lr = schedule(kind, warmup_steps, total_steps).at(step);
        prop_assert!((0.0..=2.0 + 1e-12).contains(&lr), "{lr}");
    }
}
