//! Row files: read, damaged, written by many at once, left behind.

use std::fs;
use std::path::Path;

use data::{ErrorKind, HEADER_BYTES, Rows, RowsError, prepare, remove_temporaries};
use proptest::prelude::*;

use crate::support::Case;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_changed_row_file_is_noticed(at in 0_usize..8192, flip in 1_u8..) {
        let case = Case::new(&[("a.txt", &[b'a'; 900])]);
        case.prepare(100).unwrap();
        let mut bytes = fs::read(case.out()).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= flip;
        fs::write(case.out(), bytes).unwrap();
        match Rows::open(case.out()) {
            Ok(rows) => {
                prop_assert!(at >= HEADER_BYTES as usize);
                let refused = Rows::open_verified(case.out());
                prop_assert!(matches!(refused, Err(RowsError::Hash { .. })), "byte {}", at);
                let noticed = matches!(rows.verify(), Err(RowsError::Hash { .. }));
                prop_assert!(noticed, "byte {}", at);
                // Reading may see the damage or not; it never panics.
                (0..rows.rows()).for_each(|row| drop(rows.row(row)));
            }
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Damaged),
        }
    }
}

#[test]
fn batches_of_rows_are_read() {
    let case = Case::new(&[("a.txt", b"0123456789abcdef")]);
    case.prepare(4).unwrap();
    let rows = Rows::open(case.out()).unwrap();
    let (mut tokens, mut targets) = (vec![9], vec![true]);
    rows.read(&[2, 0, 2], &mut tokens, &mut targets).unwrap();
    let expected: Vec<u32> = b"89ab012389ab".iter().map(|byte| u32::from(*byte)).collect();
    assert_eq!(tokens, expected);
    assert_eq!(targets, [false, true, true, true].repeat(3));
    assert_eq!(rows.count_targets(&[2, 0, 2]).unwrap(), 9);
    let error = rows.row(4).unwrap_err();
    assert!(matches!(error, RowsError::NoSuchRow { row: 4, rows: 4, .. }));
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn row_files_of_another_length_are_refused() {
    let case = Case::new(&[("a.txt", &[b'a'; 900])]);
    case.prepare(100).unwrap();
    let whole = fs::read(case.out()).unwrap();
    for length in [0, 1, 4095, 4096, whole.len() - 1] {
        fs::write(case.out(), &whole[..length]).unwrap();
        assert!(matches!(Rows::open(case.out()), Err(RowsError::Length { .. })), "{length}");
    }
    fs::write(case.out(), [&whole[..], b"x"].concat()).unwrap();
    assert!(matches!(Rows::open(case.out()), Err(RowsError::Length { .. })));
}

/// What stood under the name before is what stands there after a failure.
#[test]
fn a_failure_leaves_the_old_rows() {
    let case = Case::new(&[("a.txt", b"hello")]);
    case.prepare(2).unwrap();
    let before = fs::read(case.out()).unwrap();
    fs::write(&case.paths[0], b"\xff").unwrap();
    assert!(case.prepare(2).is_err());
    assert_eq!(fs::read(case.out()).unwrap(), before);
    assert_eq!(fs::read_dir(case.out().parent().unwrap()).unwrap().count(), 1);
}

fn names_in(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// One writer begins, another writes the same rows from begin to end, the first goes on.
#[test]
fn two_writers_of_one_row_file_do_not_meet() {
    let case = Case::new(&[("a.txt", &[b'a'; 3000])]);
    case.prepare(7).unwrap();
    let alone = fs::read(case.out()).unwrap();
    fs::remove_file(case.out()).unwrap();
    let mut between = None;
    let outer = prepare(&case.plan(7), &case.out(), &mut |_| {
        between.get_or_insert_with(|| {
            let inner = case.prepare(7).unwrap();
            Rows::open_verified(case.out()).unwrap();
            inner
        });
    });
    assert_eq!(outer.unwrap(), between.unwrap());
    assert_eq!(fs::read(case.out()).unwrap(), alone);
    assert_eq!(names_in(case.out().parent().unwrap()), ["rows.bin"]);
}

#[test]
fn many_writers_of_one_row_file_agree() {
    let case = Case::new(&[("a.txt", &[b'a'; 300_000])]);
    let prepared: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| case.prepare(7).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(prepared.windows(2).all(|pair| pair[0] == pair[1]));
    Rows::open_verified(case.out()).unwrap();
    assert_eq!(names_in(case.out().parent().unwrap()), ["rows.bin"]);
}

/// A failure takes its own temporary file away, not another writer's.
#[test]
fn a_failure_leaves_the_files_of_other_writers() {
    let case = Case::new(&[("a.txt", &[b'a'; 3000])]);
    let bad = Case::new(&[("b.txt", b"\xff")]);
    let mut seen = Vec::new();
    prepare(&case.plan(7), &case.out(), &mut |_| {
        let directory = case.out().parent().unwrap().to_path_buf();
        assert!(prepare(&bad.plan(7), &case.out(), &mut |_| ()).is_err());
        seen = names_in(&directory);
    })
    .unwrap();
    let [only] = &seen[..] else { panic!("{seen:?}") };
    assert!(only.starts_with("rows.bin.") && only.ends_with(".tmp"), "{only}");
    Rows::open_verified(case.out()).unwrap();
}

#[test]
fn leftovers_are_removed_and_nothing_else() {
    let case = Case::new(&[("a.txt", &[b'a'; 3000])]);
    let directory = case.out().parent().unwrap().to_path_buf();
    assert_eq!(remove_temporaries(&directory).unwrap(), 0);
    case.prepare(7).unwrap();
    for name in ["rows.bin.tmp", "rows.bin.1-0.tmp", "other.bin.99-7.tmp", "tmp", "notes.tmp.txt"] {
        fs::write(directory.join(name), b"x").unwrap();
    }
    fs::create_dir(directory.join("folder.tmp")).unwrap();
    assert_eq!(remove_temporaries(&directory).unwrap(), 2);
    let left = ["folder.tmp", "notes.tmp.txt", "rows.bin", "rows.bin.tmp", "tmp"];
    assert_eq!(names_in(&directory), left);
    assert_eq!(remove_temporaries(&directory).unwrap(), 0);
    let error = remove_temporaries(&case.paths[0]).unwrap_err();
    assert!(error.to_string().contains("a.txt"), "{error}");
}
