//! System calls against their plain twins; pieces against a plain buffer.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

fn file_of(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    write_at(&file, bytes, 0).unwrap();
    file
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
}

#[test]
fn a_map_shows_what_read_at_reads_and_tells_when_it_is_gone() {
    static RELEASED: AtomicBool = AtomicBool::new(false);
    let bytes = pattern(3 * PAGE_BYTES + 20);
    let file = file_of(&bytes);
    for (offset, len) in [(0, bytes.len()), (PAGE_BYTES, 5), (2304, 9000), (4, 4)] {
        RELEASED.store(false, Ordering::Relaxed);
        let map = map(&file, offset as u64, len, || RELEASED.store(true, Ordering::Relaxed));
        let map = map.unwrap();
        populate(map.bytes()).unwrap();
        let mut read = vec![0; len];
        read_at(&file, &mut read, offset as u64).unwrap();
        assert_eq!(map.bytes(), read);
        assert_eq!(map.bytes(), &bytes[offset..offset + len]);
        assert!(!map.is_writable() && !RELEASED.load(Ordering::Relaxed));
        drop(map);
        assert!(RELEASED.load(Ordering::Relaxed));
    }
}

#[test]
fn populating_and_touching_leave_the_same_bytes() {
    let bytes = pattern(5 * PAGE_BYTES + 1);
    let file = file_of(&bytes);
    let maps = [(); 2].map(|()| map(&file, 0, bytes.len(), || ()).unwrap());
    populate(&maps[0].bytes()[100..]).unwrap();
    touch(&maps[1].bytes()[100..]);
    touch(&[]);
    assert_eq!(maps[0].bytes(), maps[1].bytes());
}

#[test]
fn preallocated_and_written_zeroes_are_the_same() {
    for len in [0, 1, 4096, (1 << 20) + 7] {
        let files = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
        preallocate(files[0].as_file(), len).unwrap();
        write_zeroes(files[1].as_file(), len).unwrap();
        let read = files.map(|file| fs::read(file.path()).unwrap());
        assert_eq!(read[0].len() as u64, len);
        assert_eq!(read[0], read[1]);
    }
}

#[test]
fn writeback_and_advice_change_no_byte() {
    let bytes = pattern(100_000);
    let file = file_of(&bytes);
    let range = 0..bytes.len() as u64;
    start_writeback(&file, &range).unwrap();
    finish_writeback(&file, &range).unwrap();
    drop_cached(&file, &range);
    prefetch(&file, &range);
    let mut read = vec![0; bytes.len()];
    read_at(&file, &mut read, 0).unwrap();
    assert_eq!(read, bytes);
    assert!(read_at(&file, &mut read, 1).is_err());
}

#[test]
fn pieces_filled_from_threads_make_the_block() {
    let lengths = [0, 1, 4095, 5000, 904];
    let (whole, pieces) = cut(HostBytes::zeroed(10_000), &lengths);
    std::thread::scope(|scope| {
        for (i, mut piece) in pieces.into_iter().enumerate() {
            scope.spawn(move || piece.bytes_mut().fill(i as u8));
        }
    });
    let expected: Vec<u8> =
        lengths.iter().enumerate().flat_map(|(i, &len)| vec![i as u8; len]).collect();
    assert_eq!(whole.join().bytes(), expected);
}

#[test]
#[should_panic(expected = "in flight")]
fn a_block_is_not_given_back_while_a_piece_is_left() {
    let (whole, _pieces) = cut(HostBytes::zeroed(8), &[4, 4]);
    whole.join();
}

#[test]
#[should_panic(expected = "cover the block")]
fn pieces_must_cover_the_block() {
    cut(HostBytes::zeroed(8), &[4, 5]);
}

#[test]
fn links_and_free_space_are_seen() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one");
    fs::write(&path, b"x").unwrap();
    assert_eq!(link_count(&path).unwrap(), 1);
    fs::hard_link(&path, dir.path().join("two")).unwrap();
    assert_eq!(link_count(&path).unwrap(), 2);
    assert!(free_bytes(dir.path()).unwrap() > 0);
    assert!(free_bytes(&dir.path().join("none")).is_err());
    sync_dir(dir.path()).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn memory_file_systems_are_recognised() {
    if Path::new("/dev/shm").exists() {
        assert_eq!(file_system(Path::new("/dev/shm")).unwrap(), FileSystem::Tmpfs);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn reads_past_the_cache_give_the_files_bytes_and_leave_none_in_it() {
    // Not in a directory of memory.
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let path = dir.path().join("f");
    let bytes = pattern(5 * PAGE_BYTES + 123);
    fs::write(&path, &bytes).unwrap();
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    drop_cached(&file, &(0..bytes.len() as u64));
    let direct = File::open(&path).unwrap();
    if !pass_cache(&direct) {
        return eprintln!("skipped: this file system cannot");
    }
    for (offset, len) in [(0, bytes.len()), (0, 8), (8, 4000), (PAGE_BYTES, 5), (20_000, 603)] {
        let mut read = vec![0; len];
        read_pages_at(&direct, &mut read, offset as u64).unwrap();
        assert_eq!(read, bytes[offset..offset + len], "{offset} {len}");
    }
    let mut beyond = vec![0; 200];
    let error = read_pages_at(&direct, &mut beyond, bytes.len() as u64 - 100).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    let map = map(&file, 0, bytes.len(), || ()).unwrap();
    assert_eq!(cached_pages(map.bytes()), 0);
}
