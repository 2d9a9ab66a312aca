//! `--supervise`: a parent that starts the same command again when it is killed or fails.
//!
//! Invariants:
//! - the parent holds nothing of the store while a child lives; the disk is all they share;
//! - what ends for a reason that another try cannot change (usage, damage, a guard, no room) is
//!   passed on; so is a stop that the user asked for;
//! - a child whose parent is gone stops by itself, cleanly.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use store::ReadingStore;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::SoloArgs;
use crate::exit;
use crate::machine::{self, LOCK_WAIT};
use crate::out::errln;
use crate::run_record::RunRecord;

/// What Rust ends a process with whose first thread panicked.
const PANICKED: i32 = 101;
/// Set for a child: its parent's number.
const CHILD: &str = "FTACTOR_SUPERVISED";
const FLAG: &str = "--supervise";
const NEW_RUN: &str = "--new-run";
/// Restarts without a committed step in between that are too many.
const RESTARTS: u32 = 5;
const BACK_OFF_MIN: Duration = Duration::from_millis(250);
/// A run that lasted this long has earned a fresh count, even if it committed nothing.
const LONG: Duration = Duration::from_secs(3600);
const POLL: Duration = Duration::from_millis(20);
/// How often a run that found too little disk or memory is tried again.
const ROOM_POLL: Duration = Duration::from_secs(5);

/// Whether this process is one that a supervisor started.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Lets a supervised process stop when its parent dies; nothing happens in any other.
pub(crate) fn follow_parent() -> anyhow::Result<()> {
    let Some(parent) = std::env::var_os(CHILD) else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::TERM)).context("watch the supervisor")?;
    let now = getppid().map(|pid| pid.as_raw_nonzero().to_string());
    if now.is_none_or(|now| parent != now.as_str()) {
        anyhow::bail!("the supervisor is gone");
    }
    Ok(())
}

/// Runs the command of this process until it ends for good; its exit code.
pub(crate) fn run(args: &SoloArgs, store: &Path) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the async runtime")?;
    runtime.block_on(supervise(args, store))
}

async fn supervise(args: &SoloArgs, store: &Path) -> anyhow::Result<ExitCode> {
    let mut watch = Watch::new(store, args.new_run);
    let mut signals = Signals::listen()?;
    // An earlier life came far enough to be worth another one.
    let mut lived = false;
    loop {
        let started = Instant::now();
        let status = watch.one_life(&mut signals).await?;
        if lacks_room(status) && !signals.asked && (lived || watch.progressed()) {
            lived = true;
            // It began with enough: somebody else took the room, and may give it back.
            errln!(
                "supervisor: {}; trying again every {} s",
                describe(status),
                ROOM_POLL.as_secs()
            );
            tokio::select! {
                () = tokio::time::sleep(ROOM_POLL) => continue,
                () = signals.next() => return Ok(ExitCode::from(exit::INTERRUPTED)),
            }
        }
        if let Some(code) = final_code(status, signals.asked) {
            return Ok(ExitCode::from(code));
        }
        lived = true;
        let Some(wait) = watch.next_try(started.elapsed()) else {
            errln!(
                "error: gave up after {RESTARTS} restarts without a committed step; the last end: {}",
                describe(status)
            );
            return Ok(ExitCode::from(exit::FAILED));
        };
        errln!(
            "supervisor: {}; starting again in {:.1} s from the last committed step",
            describe(status),
            wait.as_secs_f64()
        );
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = signals.next() => return Ok(ExitCode::from(exit::INTERRUPTED)),
        }
    }
}

/// What is known between two lives of the run.
struct Watch {
    store: PathBuf,
    /// Number of the store's run before a `--new-run` that is still to be done.
    old_run: Option<u64>,
    step: Option<u64>,
    restarts: u32,
}

impl Watch {
    fn new(store: &Path, new_run: bool) -> Watch {
        let old_run = new_run.then(|| run_number(store));
        Watch { store: store.to_owned(), old_run, step: committed(store), restarts: 0 }
    }

    async fn one_life(&mut self, signals: &mut Signals) -> anyhow::Result<ExitStatus> {
        let mut child = self.spawn()?;
        loop {
            if let Some(status) = child.try_wait().context("wait for the run")? {
                return Ok(status);
            }
            tokio::select! {
                () = tokio::time::sleep(POLL) => {}
                () = signals.next() => forward(&child),
            }
        }
    }

    fn spawn(&mut self) -> anyhow::Result<Child> {
        // Once the new run is written down, the same word would start yet another one.
        let begun = self.old_run.is_some_and(|old| run_number(&self.store) != old);
        let words = std::env::args_os().skip(1);
        let words = words.filter(|word| word != FLAG && !(begun && word == NEW_RUN));
        let program = std::env::current_exe().context("find this program")?;
        // A group of its own: the terminal's Ctrl-C comes once, through the parent.
        let mut command = Command::new(&program);
        command.args(words).env(CHILD, std::process::id().to_string()).process_group(0);
        command.spawn().with_context(|| format!("start {}", program.display()))
    }

    /// Whether something was committed since the last look.
    fn progressed(&self) -> bool {
        committed(&self.store) > self.step
    }

    /// How long to wait before the next try; `None`: there have been too many.
    fn next_try(&mut self, lasted: Duration) -> Option<Duration> {
        let step = committed(&self.store);
        if step > self.step || lasted > LONG {
            self.restarts = 0;
        }
        self.step = step.max(self.step);
        if self.restarts >= RESTARTS {
            return None;
        }
        let wait = BACK_OFF_MIN * (1 << self.restarts);
        self.restarts += 1;
        Some(wait)
    }
}

/// Last committed step, if the store can be read: a child that just died holds no lock.
fn committed(store: &Path) -> Option<u64> {
    let io = machine::engine(machine::store_bytes(store));
    let store = ReadingStore::open(io, store, LOCK_WAIT).ok()?;
    Some(store.state().step.0)
}

/// Number of the store's run; 0 without one.
fn run_number(store: &Path) -> u64 {
    let text = std::fs::read_to_string(store.join("run.json"));
    text.map_or(0, |text| RunRecord::number_in(&text))
}

/// The code to pass on, if another try makes no sense.
fn final_code(status: ExitStatus, asked: bool) -> Option<u8> {
    match status.code() {
        // A failure after retries: the store may only need to be opened again.
        Some(code) if code == i32::from(exit::FAILED) && !asked => None,
        Some(PANICKED) if !asked => None,
        Some(code) if code == i32::from(exit::UNSAID) => Some(exit::FAILED),
        Some(code) => Some(u8::try_from(code).unwrap_or(exit::FAILED)),
        None if asked => Some(exit::INTERRUPTED),
        None => None,
    }
}

fn lacks_room(status: ExitStatus) -> bool {
    status.code() == Some(i32::from(exit::NOT_ENOUGH))
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(_), _) if lacks_room(status) => "there is not enough disk or memory".into(),
        (Some(code), _) => format!("the run ended with exit code {code}"),
        (None, Some(9)) => "the run was killed (signal 9; if nobody did, it ran out of memory: \
                            see the kernel's log and --ram)"
            .into(),
        (None, Some(signal)) => format!("the run was ended by signal {signal}"),
        (None, None) => "the run ended".into(),
    }
}

fn forward(child: &Child) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // A child that has just ended needs no signal.
        let _ = kill_process(pid, Signal::TERM);
    }
}

/// Ctrl-C and SIGTERM.
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    /// Whether one has come.
    asked: bool,
}

impl Signals {
    fn listen() -> anyhow::Result<Signals> {
        let on = |kind| signal(kind).context("listen to signals");
        Ok(Signals {
            interrupt: on(SignalKind::interrupt())?,
            terminate: on(SignalKind::terminate())?,
            asked: false,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
        self.asked = true;
    }
}
