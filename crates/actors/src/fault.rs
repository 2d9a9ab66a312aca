//! Injected failures, for tests: at the n-th message of a kind, or the n-th call to the disk.
//!
//! A *point* is `ACTOR.MESSAGE` or `io.CALL`, counted from 1 over the life of the process, restarts
//! of actors included; `ACTOR` and `io` alone count all of theirs.
//!
//! Invariants:
//! - without a specification nothing is counted and nothing happens;
//! - a request is only lost together with its reply, which then answers `Lost`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use store::{IO_CALLS, Inject, Injection};

use crate::kinds::MESSAGES;

/// What stands for the disk where an actor's name may stand.
const IO: &str = "io";

/// How something fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The actor panics; so does whoever calls the disk.
    Panic,
    /// A request is dropped, its reply answers `Lost`.
    Lost,
    /// A call to the disk fails or comes late; a message can only come late.
    Disk(Injection),
    /// The process ends, as if a library had called `exit`.
    Exit,
    /// The process is killed by its own signal.
    Abort,
}

/// One `--fault`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `POINT:WHAT:N`, or `POINT:WHAT:N+` for the N-th and every later one.
    At { point: String, what: FaultKind, nth: u64, on: bool },
    /// `random:SEED:PER_MILLION`: any point, by chance.
    Random { seed: u64, per_million: u64 },
    /// `record:FILE`: how often each point was reached, and which faults struck, goes there.
    Record(PathBuf),
}

/// What a fault does; opaque outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultKind(What);

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        if let Some(file) = text.strip_prefix("record:").filter(|file| !file.is_empty()) {
            return Ok(Fault::Record(file.into()));
        }
        if let Some(numbers) = text.strip_prefix("random:") {
            return random(numbers).ok_or_else(|| wrong(text));
        }
        let parts: Vec<&str> = text.split(':').collect();
        let [point, what, nth] = parts[..] else { return Err(wrong(text)) };
        let (nth, on) = nth.strip_suffix('+').map_or((nth, false), |nth| (nth, true));
        let nth = nth.parse().ok().filter(|nth| *nth > 0).ok_or_else(|| wrong(text))?;
        let what = what_of(what).ok_or_else(|| wrong(text))?;
        if !can(point, what) {
            return Err(wrong(text));
        }
        Ok(Fault::At { point: point.to_owned(), what: FaultKind(what), nth, on })
    }
}

fn random(numbers: &str) -> Option<Fault> {
    let (seed, per_million) = numbers.split_once(':')?;
    Some(Fault::Random { seed: seed.parse().ok()?, per_million: per_million.parse().ok()? })
}

fn what_of(text: &str) -> Option<What> {
    if let Some(milliseconds) = text.strip_prefix("delay=") {
        return Some(late(milliseconds.parse().ok()?));
    }
    Some(match text {
        "panic" => What::Panic,
        "lost" => What::Lost,
        "eio" => What::Disk(Injection::Eio),
        "enospc" => What::Disk(Injection::NoSpace),
        "eacces" => What::Disk(Injection::Access),
        "short" => What::Disk(Injection::Short),
        "exit" => What::Exit,
        "abort" => What::Abort,
        _ => return None,
    })
}

fn late(milliseconds: u64) -> What {
    What::Disk(Injection::Delay(Duration::from_millis(milliseconds)))
}

/// Whether `what` can happen at `point`.
fn can(point: &str, what: What) -> bool {
    let (room, kind) = point.split_once('.').map_or((point, None), |(r, k)| (r, Some(k)));
    let known = |kinds: &[&str]| kind.is_none_or(|kind| kinds.contains(&kind));
    if room == IO {
        return known(&IO_CALLS) && what != What::Lost;
    }
    let Some(messages) = MESSAGES.iter().find(|messages| messages.actor == room) else {
        return false;
    };
    match what {
        // All of an actor's messages are not lost together: some must not be.
        What::Lost => kind.is_some_and(|kind| messages.requests.contains(&kind)),
        What::Panic | What::Disk(Injection::Delay(_)) | What::Exit | What::Abort => {
            known(messages.requests) || known(messages.others)
        }
        What::Disk(_) => false,
    }
}

fn wrong(text: &str) -> String {
    let mut points = format!("{IO}[.{}]", IO_CALLS.join("|."));
    for messages in MESSAGES {
        let kinds = [messages.requests, messages.others].concat();
        // Writing to a string cannot fail.
        let _ = write!(points, ", {}[.{}]", messages.actor, kinds.join("|."));
    }
    format!(
        "`{text}` is not a fault: expected POINT:WHAT:N, e.g. compute:panic:7 or \
         io.sync:eio:3, random:SEED:PER_MILLION or record:FILE; WHAT is panic, exit, abort or \
         delay=MILLISECONDS, for io also eio, enospc, eacces or short, for requests also lost; \
         points are {points}"
    )
}

/// The faults of a process, and how often each point was reached.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    /// `None`: nothing is injected and nothing counted.
    plan: Option<Arc<Plan>>,
}

#[derive(Debug)]
struct Plan {
    faults: Vec<Fault>,
    reached: Mutex<Reached>,
}

#[derive(Debug, Default)]
struct Reached {
    counts: BTreeMap<String, u64>,
    random: u64,
    strikes: u64,
}

impl FaultPlan {
    /// A plan of these faults.
    pub fn new(faults: Vec<Fault>) -> FaultPlan {
        if faults.is_empty() {
            return FaultPlan::default();
        }
        let seed = faults.iter().find_map(|fault| match fault {
            Fault::Random { seed, .. } => Some(*seed),
            Fault::At { .. } | Fault::Record(_) => None,
        });
        let reached = Reached { random: seed.unwrap_or(0), ..Reached::default() };
        let plan = Plan { faults, reached: Mutex::new(reached) };
        FaultPlan { plan: Some(Arc::new(plan)) }
    }

    /// What an injected engine asks; `None` without faults.
    pub fn inject(&self) -> Option<Inject> {
        let plan = Arc::clone(self.plan.as_ref()?);
        Some(Arc::new(move |call| match plan.reach(IO, call)? {
            What::Disk(injection) => Some(injection),
            what => {
                what.strike(IO, call);
                None
            }
        }))
    }

    /// Lets a message of `kind` through to `actor`, late or never.
    ///
    /// # Panics
    /// If the plan says so: that is what it is for.
    pub(crate) async fn message(&self, actor: &'static str, kind: &'static str) -> Delivery {
        let Some(what) = self.plan.as_ref().and_then(|plan| plan.reach(actor, kind)) else {
            return Delivery::Made;
        };
        match what {
            What::Lost => return Delivery::Lost,
            What::Disk(Injection::Delay(time)) => tokio::time::sleep(time).await,
            what => what.strike(actor, kind),
        }
        Delivery::Made
    }

    /// Writes down how often each point was reached, if that was asked for.
    pub fn write_record(&self) -> std::io::Result<()> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let counts = plan.reached().counts.clone();
        let text: String = counts.iter().map(|(point, n)| format!("{point} {n}\n")).collect();
        plan.append(&text)
    }
}

/// Whether a message arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Made,
    Lost,
}

impl Plan {
    /// Counts a point and says what happens there.
    fn reach(&self, room: &str, kind: &str) -> Option<What> {
        let point = format!("{room}.{kind}");
        let mut reached = self.reached();
        let mut count = |name: &str| {
            let count = reached.counts.entry(name.to_owned()).or_default();
            *count += 1;
            *count
        };
        let (of_room, of_point) = (count(room), count(&point));
        let at = self.faults.iter().find_map(|fault| match fault {
            Fault::At { point: wanted, what, nth, on } => {
                let n = if *wanted == point { of_point } else { of_room };
                let here = *wanted == point || *wanted == room;
                (here && (n == *nth || (*on && n > *nth))).then_some(what.0)
            }
            Fault::Random { .. } | Fault::Record(_) => None,
        });
        let what = at.or_else(|| self.by_chance(&mut reached, &point))?;
        reached.strikes += 1;
        drop(reached);
        // The record is a convenience of tests: what cannot be written is missing there.
        let _ = self.append(&format!("struck {point} {of_point} {what:?}\n"));
        Some(what)
    }

    /// A fault that costs an attempt, not the process.
    fn by_chance(&self, reached: &mut Reached, point: &str) -> Option<What> {
        let per_million = self.faults.iter().find_map(|fault| match fault {
            Fault::Random { per_million, .. } => Some(*per_million),
            Fault::At { .. } | Fault::Record(_) => None,
        })?;
        if reached.next_random() % 1_000_000 >= per_million {
            return None;
        }
        let disk = [Injection::Eio, Injection::Short].map(What::Disk);
        let all = [&[What::Panic, What::Lost, late(5)], &disk[..]].concat();
        let possible: Vec<What> = all.into_iter().filter(|what| can(point, *what)).collect();
        possible.get(reached.next_random() as usize % possible.len().max(1)).copied()
    }

    fn append(&self, text: &str) -> std::io::Result<()> {
        let files = self.faults.iter().filter_map(|fault| match fault {
            Fault::Record(file) => Some(file),
            Fault::At { .. } | Fault::Random { .. } => None,
        });
        for file in files {
            let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
            file.write_all(text.as_bytes())?;
        }
        Ok(())
    }

    fn reached(&self) -> MutexGuard<'_, Reached> {
        // Nothing panics while it is held.
        self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reached {
    /// An LCG: quality does not matter here.
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.random >> 33
    }
}

impl What {
    /// Panics or ends the process.
    fn strike(self, room: &str, kind: &str) {
        match self {
            What::Panic => panic!("injected fault: {room}.{kind}"),
            What::Exit => std::process::exit(EXIT_CODE),
            What::Abort => std::process::abort(),
            What::Lost | What::Disk(_) => {}
        }
    }
}

/// The code of an injected exit: that of a failure after retries.
const EXIT_CODE: i32 = 5;

#[cfg(test)]
mod tests;
