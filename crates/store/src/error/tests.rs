//! What a full disk says, and sizes as people read them.

use super::*;

fn full(wanted: u64) -> String {
    let source = io::ErrorKind::StorageFull.into();
    let error = IoError::new("create directory", Path::new("/d"), source);
    StoreError::from(error.wanting(wanted)).to_string()
}

#[test]
fn a_full_disk_says_only_what_is_known() {
    assert_eq!(full(0), "the disk at /d is full");
    assert_eq!(full(12_300_000_000), "the disk at /d is full: 12.3 GB needed");
    let error = StoreError::NoSpace { path: "/d".into(), needed: 5_000_000, available: 1_500_000 };
    assert_eq!(
        error.to_string(),
        "not enough disk at /d: 5.0 MB needed, 1.5 MB available, 3.5 MB missing"
    );
}

#[test]
fn too_many_open_files_name_the_limit() {
    let text = |number| {
        let source = io::Error::from_raw_os_error(number);
        StoreError::from(IoError::new("open", Path::new("/d/f"), source)).to_string()
    };
    assert!(text(libc::EMFILE).starts_with("cannot open /d/f: Too many open files"));
    assert!(text(libc::EMFILE).ends_with("; raise the limit with `ulimit -n`"));
    assert!(text(libc::ENFILE).contains("fs.file-max"));
    assert!(!text(libc::EIO).contains("limit"));
}

#[test]
fn sizes_are_decimal() {
    for (bytes, text) in [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (380_000_000, "380.0 MB"),
        (999_950_000, "1.0 GB"),
        (2_000_000_000_000, "2.0 TB"),
    ] {
        assert_eq!(show_bytes(bytes), text);
    }
}

#[test]
fn a_read_that_ends_early_is_damage() {
    let early = |context| {
        IoError::new(context, Path::new("/d"), io::ErrorKind::UnexpectedEof.into()).into()
    };
    assert!(matches!(early("read"), StoreError::Damaged { .. }));
    assert!(matches!(early("write"), StoreError::Io { .. }));
}
