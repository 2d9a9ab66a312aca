//! Logs: choosing between copies, and 20,000 broken ones.

use proptest::prelude::*;
use twox_hash::XxHash3_64;

use super::*;
use crate::record::tests::state;

fn log_of(number: u64, steps: u64) -> Vec<u8> {
    let mut bytes = head(number).to_vec();
    for step in 0..=steps {
        let kind = if step == 0 { RecordKind::Open } else { RecordKind::Committed };
        bytes.extend(record::encode(number, 10 + step, kind, &state_of(step)));
    }
    bytes
}

fn state_of(step: u64) -> State {
    State { step: model::Step(step), ..state() }
}

/// A record with a valid checksum around anything.
fn raw(number: u64, sequence: u64, kind: u16, body: &[u8]) -> Vec<u8> {
    let mut record = RECORD_MAGIC.to_vec();
    record.extend((body.len() as u32).to_le_bytes());
    record.extend(sequence.to_le_bytes());
    record.extend(kind.to_le_bytes());
    record.extend([0, 0]);
    record.extend(body);
    record.extend(XxHash3_64::oneshot_with_seed(number, &record).to_le_bytes());
    record
}

fn step(parsed: &Parsed) -> Option<u64> {
    parsed.last.as_ref().map(|(_, state)| state.step.0)
}

#[test]
fn tails_are_told_apart() {
    let whole = log_of(2, 3);
    let parsed = parse(2, &whole, record::decode).unwrap();
    assert_eq!((step(&parsed), parsed.tail), (Some(3), Tail::Clean));
    let torn = parse(2, &whole[..whole.len() - 1], record::decode).unwrap();
    assert_eq!(step(&torn), Some(2));
    assert!(matches!(torn.tail, Tail::Torn { .. }));
    let mut damaged = whole.clone();
    damaged[log_of(2, 1).len() + 30] ^= 1;
    let at = log_of(2, 1).len() as u64;
    assert_eq!(
        parse(2, &damaged, record::decode).unwrap().tail,
        Tail::Damaged { at, sequence: 13 }
    );
    let other = parse(3, &whole, record::decode).unwrap();
    assert_eq!(
        (other.last, other.tail),
        (None, Tail::Torn { at: 0, rotten: false }),
        "of another number"
    );
}

#[test]
fn what_was_before_stands_in_front_of_what_a_log_starts_from() {
    let record = |sequence, kind, step| record::encode(1, sequence, kind, &state_of(step));
    let log = |records: &[Vec<u8>]| [head(1).to_vec(), records.concat()].concat();
    let (before, open) = (record(4, RecordKind::Before, 7), record(5, RecordKind::Open, 8));
    let parsed = parse(1, &log(&[before.clone(), open.clone()]), record::decode).unwrap();
    assert_eq!(
        (step(&parsed), parsed.before, parsed.tail),
        (Some(8), Some(state_of(7)), Tail::Clean)
    );
    let committed = record(6, RecordKind::Committed, 9);
    let longer = log(&[before.clone(), open.clone(), committed]);
    let parsed = parse(1, &longer, record::decode).unwrap();
    assert_eq!((step(&parsed), parsed.before), (Some(9), Some(state_of(8))));
    // Alone it is no log, and a log has one at most, in front.
    let end = log(std::slice::from_ref(&before)).len() as u64;
    let alone = parse(1, &log(std::slice::from_ref(&before)), record::decode).unwrap();
    assert_eq!(
        (alone.last.clone(), alone.tail.clone()),
        (None, Tail::Torn { at: end, rotten: false })
    );
    assert!(choose("1", [Ok(alone.clone()), Ok(alone)]).unwrap_err().contains("no copy is intact"));
    let again = record(5, RecordKind::Before, 7);
    let late = record(6, RecordKind::Before, 7);
    for records in [vec![before.clone(), again, open.clone()], vec![before, open, late]] {
        assert!(parse(1, &log(&records), record::decode).unwrap_err().contains("BEFORE"));
    }
}

#[test]
fn newer_logs_are_refused_by_name() {
    let mut newer = log_of(1, 0);
    newer[8] = 7;
    let checksum = hash(&newer[..24]).to_le_bytes();
    newer[24..32].copy_from_slice(&checksum);
    assert!(parse(1, &newer, record::decode).unwrap_err().contains("version 7"));
    let body = log_of(1, 0);
    for (kind, name) in [(1, "OPEN"), (2, "PREPARED"), (99, "kind 99")] {
        let log = [body.clone(), raw(1, 11, kind, &[])].concat();
        assert!(parse(1, &log, record::decode).unwrap_err().contains(name));
    }
}

#[test]
fn a_repeated_record_is_damage() {
    let mut log = log_of(1, 2);
    let last = log[log_of(1, 1).len()..].to_vec();
    log.extend(last);
    assert!(matches!(parse(1, &log, record::decode).unwrap().tail, Tail::Damaged { .. }));
}

#[test]
fn the_better_copy_is_chosen() {
    let copy = |steps: u64, cut: usize| {
        let bytes = log_of(1, steps);
        Ok(parse(1, &bytes[..bytes.len() - cut], record::decode).unwrap())
    };
    let missing = || Err(String::from("is missing"));
    for (first, second, expected) in [
        (copy(3, 0), copy(3, 0), Some((3, 0, None))),
        (copy(3, 1), copy(3, 0), Some((3, 1, None))),
        (copy(3, 1), copy(2, 0), Some((2, 1, None))),
        (copy(3, 1), missing(), Some((2, 0, Some(())))),
        (missing(), copy(3, 0), Some((3, 1, None))),
        (copy(2, 0), copy(3, 0), Some((3, 1, None))),
        (missing(), missing(), None),
        (copy(0, 1), copy(0, 1), None),
    ] {
        let chosen = choose("1", [first, second]).ok();
        let seen = chosen.map(|c| (c.state.step.0, c.copy, c.torn_at.map(|_| ())));
        assert_eq!(seen, expected);
    }
}

#[test]
fn a_record_behind_damage_that_the_other_copy_lacks_is_not_given_up() {
    let mut damaged = log_of(1, 3);
    damaged[log_of(1, 1).len() + 30] ^= 1;
    let damaged = || Ok(parse(1, &damaged, record::decode).unwrap());
    let lagging = Ok(parse(1, &log_of(1, 2), record::decode).unwrap());
    assert!(choose("1", [damaged(), lagging]).unwrap_err().contains("behind damage"));
    let whole = Ok(parse(1, &log_of(1, 3), record::decode).unwrap());
    assert_eq!(choose("1", [damaged(), whole]).unwrap().state.step.0, 3);
}

#[test]
fn copies_that_disagree_are_damage() {
    let with = |step: u64| {
        let record = record::encode(1, 10, RecordKind::Open, &state_of(step));
        Ok(parse(1, &[&head(1)[..], &record[..]].concat(), record::decode).unwrap())
    };
    assert!(choose("1", [with(1), with(2)]).unwrap_err().contains("disagree"));
}

#[test]
fn file_names_have_numbers() {
    let path = path(Path::new("s"), 12, "mirror");
    assert_eq!(path, Path::new("s/commit/00000012.mirror"));
    assert_eq!(number_of("00000012.mirror"), Some(12));
    for name in ["12", "12.txt", "x.log", "12.log.tmp", "-1.log", ".log"] {
        assert_eq!(number_of(name), None, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..<_>::default() })]

    #[test]
    fn broken_logs_yield_only_states_that_were_written(
        steps in 0u64..4,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
        noise in prop::collection::vec(any::<u8>(), 0..80),
    ) {
        let whole = log_of(1, steps);
        let mut broken = whole.clone();
        for (at, byte) in edits {
            let at = at.index(broken.len());
            broken[at] = byte;
        }
        broken.truncate(cut.index(broken.len() + 1));
        broken.extend(&noise);
        if let Ok(Parsed { last: Some((sequence, state)), .. }) = parse(1, &broken, record::decode) {
            prop_assert!(sequence >= 10 && sequence <= 10 + steps);
            prop_assert_eq!(state, state_of(sequence - 10));
        }
        let _ = parse(1, &noise, record::decode);
    }

    #[test]
    fn valid_checksums_around_anything_never_panic(
        records in prop::collection::vec(
            (8u64..14, 0u16..12, prop::collection::vec(any::<u8>(), 0..120), any::<bool>()), 0..4),
    ) {
        let mut bytes = log_of(1, 1);
        for (sequence, kind, body, real) in records {
            let body = if real { postcard::to_stdvec(&state()).unwrap() } else { body };
            bytes.extend(raw(1, sequence, kind, &body));
        }
        let parsed = parse(1, &bytes, record::decode);
        if let Ok(Parsed { tail: Tail::Clean, last, .. }) = &parsed {
            prop_assert!(last.is_some());
        }
        let _ = choose("1", [parsed, Err("is missing".into())]);
    }
}
