//! Records: golden bytes and kinds.

use super::*;

pub(crate) fn state() -> State {
    let layer = |slot, t| LayerState { slot, t, locked: false, hashes: [1, 2, t], grad_norm: 0.5 };
    State {
        step: Step(300),
        attempt: Attempt(301),
        layers: vec![layer(Slot::A, 300), layer(Slot::B, 299)],
        epoch: 1,
        index: 7,
        tokens_total: 1 << 20,
        loss: 2.5,
        grad_norm: 1.25,
        clip_factor: 0.8,
        learning_rate: 1e-4,
        counters: [("restarts".to_owned(), 2)].into_iter().collect(),
    }
}

#[test]
fn the_format_is_frozen() {
    let record = encode(5, 9, RecordKind::Committed, &state());
    #[rustfmt::skip]
    let expected = [
        "46545243", "51000000", "0900000000000000", "0300", "0000", // head
        "ac02", "ad02", "02", // step, attempt, layers
        "00", "ac02", "00", "01", "02", "ac02", "000000000000e03f",
        "01", "ab02", "00", "01", "02", "ab02", "000000000000e03f",
        "01", "07", "808040", // epoch, index, tokens
        "0000000000000440", "000000000000f43f", "cdcc4c3f", "2d431cebe2361a3f",
        "01", "08", "7265737461727473", "02", // counters
        "007dd87b085f4d70", // checksum
    ];
    let hex: String = record.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, expected.concat());
}

#[test]
fn a_record_is_read_back() {
    let state = state();
    let mut bytes = encode(5, 9, RecordKind::Committed, &state);
    let len = bytes.len();
    bytes.extend([7; 3]);
    let raw = decode(5, &bytes).unwrap();
    assert_eq!((raw.sequence, raw.kind, raw.bytes), (9, 3, len));
    assert_eq!(decode_state(raw.body).unwrap(), state);
    assert_eq!(decode(6, &bytes), None, "another log's record");
    assert!(decode_state(&raw.body[..raw.body.len() - 1]).is_err());
    assert!(decode_state(&[raw.body, &[0]].concat()).unwrap_err().contains("1 bytes follow"));
}

#[test]
fn rot_is_told_from_what_a_crash_leaves() {
    let mut whole = encode(5, 9, RecordKind::Committed, &state());
    assert!(whole.len() > 100);
    *whole.last_mut().unwrap() ^= 1;
    for offset in [0, 32, 512 - 30, 5000] {
        assert!(is_rotten(&whole, offset), "{offset}");
        assert!(!is_rotten(&whole[..whole.len() - 1], offset), "short");
        assert!(!is_rotten(&[&whole[..], &[0]].concat(), offset), "long");
    }
    // The sector's edge lies in the record, and what is behind it was never written.
    let mut torn = whole.clone();
    torn[30..].fill(0);
    assert!(!is_rotten(&torn, 512 - 30));
    torn[30] = 1;
    assert!(is_rotten(&torn, 512 - 30));
    let mut nothing = whole.clone();
    nothing.fill(0);
    assert!(!is_rotten(&nothing, 0) && !is_rotten(&[], 0));
    whole[4] ^= 1;
    assert!(!is_rotten(&whole, 0), "of another length");
}

#[test]
fn kind_numbers_are_frozen() {
    let names = [
        "OPEN",
        "PREPARED",
        "COMMITTED",
        "SKIPPED",
        "LOCKED",
        "UNLOCKED",
        "ROLLED_BACK",
        "SNAPSHOT",
        "BEFORE",
    ];
    for (i, name) in names.into_iter().enumerate() {
        assert_eq!(RecordKind::from_number(i as u16 + 1).map(RecordKind::name), Some(name));
    }
    assert_eq!((RecordKind::from_number(0), RecordKind::from_number(10)), (None, None));
}
