//! Engines against a plain buffer, fan-in, and the pool.

use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

use model::NextUse;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Write(usize, usize, u8),
    Read(usize, usize),
    Sync,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let span = (0usize..9000, 0usize..9000);
    let step = prop_oneof![
        (span.clone(), any::<u8>()).prop_map(|((at, len), fill)| Step::Write(at, len, fill)),
        span.prop_map(|(at, len)| Step::Read(at / 4 * 4, len)),
        Just(Step::Sync),
    ];
    prop::collection::vec(step, 1..20)
}

/// Runs the steps on a file of an engine and on a vector.
fn compare(io: &dyn Io, dir: &Path, steps: &[Step]) {
    let path = dir.join("file");
    io.create_dir(dir).unwrap();
    let file = io.create(&path, 5000).unwrap();
    let mut expected = vec![0; 5000];
    for step in steps {
        match *step {
            Step::Write(at, len, fill) => {
                let mut block = HostBytes::zeroed(len);
                block.bytes_mut().fill(fill);
                wait(|done| write_block(io, file, at as u64, &Arc::new(block), done)).unwrap();
                if len > 0 {
                    memory::overlay(&mut expected, at, &vec![fill; len]);
                }
            }
            Step::Read(at, len) => {
                // Nothing is there everywhere, beyond the end as well.
                let wanted = if len == 0 { Some(&[][..]) } else { expected.get(at..at + len) };
                assert_eq!(read_both_ways(io, file, at, len).as_deref(), wanted);
            }
            Step::Sync => wait(|done| io.submit(Op::Sync { file }, done)).unwrap(),
        }
        assert_eq!(io.len(file).unwrap(), expected.len() as u64);
    }
    io.close(file);
    io.unlink(&path).unwrap();
}

/// Through the engine's own target and through a heap block, which must agree.
fn read_both_ways(io: &dyn Io, file: FileId, at: usize, len: usize) -> Option<Vec<u8>> {
    let heap = read_now(io, file, at as u64, len).ok().map(|block| block.bytes().to_vec());
    let bound = io.target(file, at as u64, len, &Budget::new(len), AfterUse::Forget).ok().and_then(
        |target| {
            let (sender, receiver) = mpsc::channel();
            let done = Box::new(move |block| sender.send(block).unwrap());
            read_target(io, file, at as u64, target, done);
            receiver.recv().unwrap().ok()
        },
    );
    assert_eq!(bound.map(|block| block.bytes().to_vec()), heap);
    heap
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..<_>::default() })]

    #[test]
    fn engines_behave_like_a_buffer(steps in steps()) {
        let dir = tempfile::tempdir().unwrap();
        compare(&Memory::from_image(Image::default()), dir.path(), &steps);
        compare(&Faulty::over_memory(Image::default()), dir.path(), &steps);
        for keep_cached in [true, false] {
            compare(&*mmap_engine(2, keep_cached), dir.path(), &steps);
        }
        compare(&*direct_engine(4), dir.path(), &steps);
        compare(&*direct::direct_engine_of_threads(4), dir.path(), &steps);
    }
}

#[test]
fn names_behave_alike_on_every_engine() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("d");
    let engines: [Arc<dyn Io>; 4] = [
        memory_engine(),
        Arc::new(Faulty::over_memory(Image::default())),
        mmap_engine(1, true),
        direct_engine(4),
    ];
    for io in engines {
        assert!(io.create(&dir.join("a"), 1).is_err(), "no directory yet");
        io.create_dir(&dir).unwrap();
        io.create_dir(&dir).unwrap();
        io.create(&dir.join("a"), 3).unwrap();
        assert!(io.create(&dir.join("a"), 3).is_err(), "exclusive");
        io.create(&dir.join("b"), 0).unwrap();
        assert_eq!(io.list(&dir).unwrap(), ["a", "b"]);
        io.rename(&dir.join("a"), &dir.join("b")).unwrap();
        assert_eq!(io.list(&dir).unwrap(), ["b"]);
        assert_eq!(io.len(io.open(&dir.join("b"), Access::Read).unwrap()).unwrap(), 3);
        assert_eq!(io.link_count(&dir.join("b")).unwrap(), 1);
        let (b, c, d) = (dir.join("b"), dir.join("c"), dir.join("d"));
        io.link(&b, &c).unwrap();
        io.create(&d, 3).unwrap();
        assert_eq!(io.link_count(&b).unwrap(), 2);
        assert!(io.is_same(&b, &c).unwrap() && !io.is_same(&b, &d).unwrap());
        assert!(!io.is_same(&b, &dir.join("e")).unwrap(), "missing");
        io.unlink(&c).unwrap();
        io.unlink(&d).unwrap();
        assert!(io.open(&dir.join("a"), Access::Read).is_err());
        assert!(io.unlink(&dir.join("a")).is_err());
        assert!(io.remove_dir(&dir).is_err(), "not empty");
        io.sync_dir(&dir).unwrap();
        io.unlink(&dir.join("b")).unwrap();
        io.remove_dir(&dir).unwrap();
        assert!(!io.exists(&dir).unwrap() && io.list(&dir).is_err());
    }
}

#[test]
fn counters_count_bytes_and_syncs() {
    let dir = tempfile::tempdir().unwrap();
    for io in [memory_engine(), mmap_engine(1, true), direct_engine(4)] {
        io.create_dir(dir.path()).unwrap();
        let path = dir.path().join("f");
        let file = io.create(&path, 0).unwrap();
        let block = Arc::new(HostBytes::zeroed(100));
        wait(|done| write_block(&*io, file, 0, &block, done)).unwrap();
        wait(|done| io.submit(Op::Sync { file }, done)).unwrap();
        read_now(&*io, file, 10, 20).unwrap();
        let expected = IoCounters { read_bytes: 20, written_bytes: 100, syncs: 1 };
        assert_eq!(io.counters(), expected);
        io.unlink(&path).unwrap();
    }
}

#[test]
fn a_fan_reports_once_after_the_last_with_the_worst_error() {
    let (sender, receiver) = mpsc::channel();
    let fan = fan_in(3, Box::new(move |result| sender.send(result).unwrap()));
    let error = |name: &str| IoError::new("write", Path::new(name), io::ErrorKind::Other.into());
    fan.branch()(Err(error("plain")));
    fan.branch()(Ok(()));
    assert!(receiver.try_recv().is_err());
    fan.branch()(Err(error("lost").losing_writes()));
    let reported = receiver.try_recv().unwrap().unwrap_err();
    assert!(reported.lost_writes && reported.path == Path::new("lost"));
    let (sender, receiver) = mpsc::channel();
    fan_in(0, Box::new(move |result| sender.send(result.is_ok()).unwrap()));
    assert!(receiver.try_recv().unwrap());
}

#[test]
fn a_panicking_job_costs_no_thread() {
    static DONE: AtomicUsize = AtomicUsize::new(0);
    let pool = pool::Pool::new("test", 1);
    let (sender, receiver) = mpsc::channel();
    // Resuming skips the hook that would print a report.
    pool.run(|| std::panic::resume_unwind(Box::new(())));
    for _ in 0..3 {
        let sender = sender.clone();
        pool.run(move || {
            DONE.fetch_add(1, Ordering::Relaxed);
            sender.send(()).unwrap();
        });
    }
    for _ in 0..3 {
        receiver.recv().unwrap();
    }
    assert_eq!(DONE.load(Ordering::Relaxed), 3);
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_read_again_soon_stays_cached_and_the_rest_goes() {
    // Beside the build, which mostly is on a disk: pages of a memory file system never go.
    let build = std::env::current_exe().unwrap();
    let temporary = tempfile::tempdir_in(build.parent().unwrap()).unwrap();
    if os::file_system(temporary.path()).unwrap() == os::FileSystem::Tmpfs {
        eprintln!("skipped: the build is on tmpfs");
        return;
    }
    let io = mmap_engine(1, false);
    let (path, len) = (temporary.path().join("f"), 64 * model::PAGE_BYTES);
    let file = io.create(&path, len as u64).unwrap();
    wait(|done| write_block(&*io, file, 0, &Arc::new(HostBytes::zeroed(len)), done)).unwrap();
    wait(|done| io.submit(Op::Sync { file }, done)).unwrap();
    let read = |after| {
        let target = io.target(file, 0, len, &Budget::new(len), after).unwrap();
        let (sender, receiver) = mpsc::channel();
        read_target(&*io, file, 0, target, Box::new(move |block| sender.send(block).unwrap()));
        drop(receiver.recv().unwrap().unwrap());
    };
    let plain = std::fs::File::open(&path).unwrap();
    let cached = || os::cached_pages(os::map(&plain, 0, len, || ()).unwrap().bytes());
    read(AfterUse::Soon(NextUse { step: 1, turn: 1 }));
    assert_eq!(cached(), 64);
    read(AfterUse::Forget);
    assert_eq!(cached(), 0);
}

#[test]
fn what_is_read_again_comes_from_memory_until_it_is_written_or_its_room_is_needed() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("f");
    let io = direct_engine(4);
    let (len, budget) = (16 * model::PAGE_BYTES, Budget::new(40 * model::PAGE_BYTES));
    let file = io.create(&path, len as u64).unwrap();
    let write = |byte: u8| {
        let mut block = HostBytes::zeroed(len);
        block.bytes_mut().fill(byte);
        wait(|done| write_block(&*io, file, 0, &Arc::new(block), done)).unwrap();
    };
    let read = |offset: usize, len: usize, after| {
        let target = io.target(file, offset as u64, len, &budget, after).unwrap();
        let (sender, receiver) = mpsc::channel();
        let done = Box::new(move |block| sender.send(block).unwrap());
        read_target(&*io, file, offset as u64, target, done);
        let block = receiver.recv().unwrap().unwrap();
        let block = io.keeping(file, offset as u64, block, &budget, after);
        let first = block.bytes()[0];
        assert!(block.bytes().iter().all(|byte| *byte == first));
        first
    };
    let later = AfterUse::Later(NextUse { step: 1, turn: 1 });
    // Somebody else, whom the engine does not see.
    let behind = |byte: u8| std::fs::write(&path, vec![byte; len]).unwrap();

    write(1);
    assert_eq!(read(0, len, later), 1);
    behind(2);
    assert_eq!(read(0, len, later), 1, "the whole, from memory");
    assert_eq!(read(4096, 8192, AfterUse::Forget), 1, "a part, from memory");
    assert_eq!(read(len - 4096, 4096, AfterUse::Forget), 1, "the last part");
    assert_eq!(read(0, len, later), 2, "nothing is kept behind its last part");
    behind(3);
    drop(budget.block(39 * model::PAGE_BYTES).unwrap());
    assert_eq!(read(0, len, later), 3, "its room was needed");
    write(4);
    assert_eq!(read(4096, 4096, AfterUse::Forget), 4, "it was written");
    behind(5);
    assert_eq!(read(0, len, AfterUse::Forget), 5);
    behind(6);
    assert_eq!(read(0, len, AfterUse::Forget), 6, "nobody wanted it kept");
    assert_eq!(io.counters().read_bytes, (5 * len + 4096) as u64, "what memory had is not read");
}

#[test]
fn what_is_written_is_read_from_memory_across_its_pieces() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("f");
    let io = direct_engine(4);
    let (page, budget) = (model::PAGE_BYTES, Budget::new(40 * model::PAGE_BYTES));
    let len = 8 * page;
    let file = io.create(&path, len as u64).unwrap();
    let write = |at: usize, byte: u8| {
        let mut block = budget.block(2 * page).unwrap();
        block.bytes_mut().fill(byte);
        let after = AfterUse::Later(NextUse { step: 1, turn: at as u32 });
        let block = io.keeping(file, at as u64, block, &budget, after);
        wait(|done| write_block(&*io, file, at as u64, &Arc::new(block), done)).unwrap();
    };
    let read = |at: usize, len: usize| {
        let target = io.target(file, at as u64, len, &budget, AfterUse::Forget).unwrap();
        let (sender, receiver) = mpsc::channel();
        let done = Box::new(move |block| sender.send(block).unwrap());
        read_target(&*io, file, at as u64, target, done);
        let block = receiver.recv().unwrap().unwrap();
        block.bytes().chunks(page / 2).map(|half| half[0]).collect::<Vec<_>>()
    };
    [0, 1, 2, 3].iter().for_each(|&i| write(2 * page * i, i as u8 + 1));
    std::fs::write(&path, vec![9; len]).unwrap();
    let half = page / 2;
    assert_eq!(read(half, 2 * page), [1, 1, 1, 2], "the first piece ends in it");
    assert_eq!(read(half, page), [9, 9], "and is gone");
    assert_eq!(read(3 * page, 3 * page), [2, 2, 3, 3, 3, 3]);
    assert_eq!(read(5 * page, 3 * page), [9; 6], "not all of it is there");
    assert_eq!(read(6 * page, 2 * page), [4; 4]);
}
