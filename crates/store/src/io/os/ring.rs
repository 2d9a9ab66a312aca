//! [`Ring`]: io_uring on a thread of its own.
//!
//! Invariants:
//! - memory and descriptors of an operation belong to the ring from its submission to its completion;
//! - every job is done exactly once, after all of its bytes have moved, or with its first error;
//! - never more than `depth` operations are at the kernel.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use crate::io::job::Moves;
use crate::io::job::{Flying, Job, Progress, is_transient};

/// The entry that wakes the thread; jobs count from zero.
const WAKE: u64 = u64::MAX;

/// Jobs go in from any thread; the ring's thread ends when the last is done and this is dropped.
#[derive(Debug)]
pub(crate) struct Ring {
    shared: Arc<Shared>,
}

struct Shared {
    inbox: Mutex<Inbox>,
    wake: OwnedFd,
}

#[derive(Default)]
struct Inbox {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}

impl Ring {
    /// A ring with room for `depth` operations at the kernel.
    ///
    /// # Errors
    /// Where the kernel has no io_uring, or forbids it.
    pub(crate) fn start(depth: u32) -> io::Result<Ring> {
        let uring = IoUring::new((depth + 1).next_power_of_two())?;
        // SAFETY: plain call; a new descriptor or an error.
        let wake = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if wake < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let wake = unsafe { OwnedFd::from_raw_fd(wake) };
        let shared = Arc::new(Shared { inbox: Mutex::default(), wake });
        let thread = Thread {
            uring,
            shared: Arc::clone(&shared),
            depth: depth as usize,
            flying: (0..depth).map(|_| None).collect(),
            free: (0..depth as usize).collect(),
            count: Box::new(0),
        };
        thread::Builder::new().name("store-ring".into()).spawn(move || thread.run())?;
        Ok(Ring { shared })
    }

    pub(crate) fn send(&self, job: Job) {
        self.shared.inbox().jobs.push_back(job);
        self.shared.ring_the_bell();
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.shared.inbox().closed = true;
        self.shared.ring_the_bell();
    }
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        // Only whole jobs go in and out.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring_the_bell(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight bytes that live during the call. A counter that is full has rung already.
        unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

struct Thread {
    uring: IoUring,
    shared: Arc<Shared>,
    depth: usize,
    flying: Vec<Option<Flying>>,
    free: Vec<usize>,
    /// What the bell's read fills.
    count: Box<u64>,
}

impl Thread {
    fn run(mut self) {
        self.listen();
        loop {
            let closed = self.take_jobs();
            if closed && self.free.len() == self.depth {
                return;
            }
            match self.uring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if is_transient(&error) => {}
                // Nothing can be submitted any more: what is at the kernel may still write to its
                // memory, so that must never be given back.
                Err(error) => return self.give_up(&error),
            }
            let arrived: Vec<(u64, i32)> = self
                .uring
                .completion()
                .map(|entry: cqueue::Entry| (entry.user_data(), entry.result()))
                .collect();
            for (name, result) in arrived {
                match name {
                    WAKE => self.listen(),
                    name => self.arrived(name as usize, result),
                }
            }
        }
    }

    /// Puts waiting jobs on the ring while there is room; whether no more will come.
    fn take_jobs(&mut self) -> bool {
        while !self.free.is_empty() {
            let mut inbox = self.shared.inbox();
            let Some(job) = inbox.jobs.pop_front() else { return inbox.closed };
            drop(inbox);
            let Some(place) = self.free.pop() else { return false };
            self.flying[place] = Some(Flying::new(job));
            self.go_on(place);
        }
        false
    }

    fn listen(&mut self) {
        let bell = types::Fd(self.shared.wake.as_raw_fd());
        let count: *mut u64 = &raw mut *self.count;
        let entry = opcode::Read::new(bell, count.cast(), 8).build().user_data(WAKE);
        self.push(&entry);
    }

    /// Submits what is left of a job.
    fn go_on(&mut self, place: usize) {
        let Some(flying) = &mut self.flying[place] else { return };
        let entry = entry(flying).user_data(place as u64);
        self.push(&entry);
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: what the entry points to is kept in `flying`, or in `self.count`, until its
        // completion; `give_up` keeps it for ever.
        let pushed = unsafe { self.uring.submission().push(entry) };
        // The ring has room for `depth` jobs and the bell.
        assert!(pushed.is_ok(), "the submission queue is full");
    }

    fn arrived(&mut self, place: usize, result: i32) {
        let Some(flying) = self.flying[place].as_mut() else { return };
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        match flying.moved_more(result) {
            Progress::More => self.go_on(place),
            Progress::End(result) => {
                let Some(flying) = self.flying[place].take() else { return };
                self.free.push(place);
                flying.finish(result);
            }
        }
    }

    fn give_up(mut self, error: &io::Error) {
        let told = || io::Error::new(error.kind(), format!("io_uring has failed: {error}"));
        for flying in self.flying.iter_mut().filter_map(Option::take) {
            flying.abandon(told());
        }
        loop {
            let mut inbox = self.shared.inbox();
            match inbox.jobs.pop_front() {
                Some(job) => {
                    drop(inbox);
                    Flying::new(job).finish(Err(told()));
                }
                None if inbox.closed => return,
                None => {
                    drop(inbox);
                    let mut count = [0; 8];
                    // SAFETY: eight bytes that live during the call.
                    unsafe {
                        libc::read(self.shared.wake.as_raw_fd(), count.as_mut_ptr().cast(), 8)
                    };
                }
            }
        }
    }
}

/// The request that moves what comes next.
fn entry(flying: &mut Flying) -> squeue::Entry {
    let (range, at) = (flying.next_range(), flying.next_offset());
    let fd = types::Fd(flying.next_file().as_raw_fd());
    match flying.moves() {
        Moves::Into(part) => {
            let bytes = &mut part.bytes_mut()[range];
            opcode::Read::new(fd, bytes.as_mut_ptr(), bytes.len() as u32).offset(at).build()
        }
        Moves::From(bytes, within) => {
            let bytes = &bytes.bytes()[within.clone()][range];
            opcode::Write::new(fd, bytes.as_ptr(), bytes.len() as u32).offset(at).build()
        }
        Moves::Nothing => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
    }
}
