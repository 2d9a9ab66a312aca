//! [`Watch`]: notices what takes longer than it ever did.
//!
//! A *lane* is a kind of request to an actor, such as backward commands or layer updates. Its history
//! is the times between answers while such requests were in flight.
//!
//! Invariants:
//! - time counts only as far as the watch itself was awake: a stopped process, a sleeping machine or
//!   a jumping clock makes nobody late;
//! - nobody is late before the lane has a history, or before [`Patience::least`] has passed;
//! - a run that waits for nothing and is not over stands still, which is its machines' fault.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::directory::{Directory, Mailbox};
use crate::reply::{Failure, Reply};

/// Answers that a lane's history remembers.
const REMEMBERED: usize = 256;
/// Answers without which a lane has no history yet.
const FEWEST: usize = 8;
/// Deviations from the median that are still usual.
const DEVIATIONS: f64 = 20.0;
/// A lane with rare long work is not late before this many times its longest.
const TIMES_LONGEST: f64 = 4.0;
/// How much longer than usual a lane without history may take.
const FIRST_TIME: u32 = 30;

/// How long somebody may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Nobody is late earlier.
    pub least: Duration,
}

impl Patience {
    /// Nobody is late before so many seconds.
    pub fn of_seconds(seconds: u64) -> Patience {
        Patience { least: Duration::from_secs(seconds) }
    }
}

impl Default for Patience {
    fn default() -> Patience {
        Patience::of_seconds(120)
    }
}

/// Somebody who is late.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Late {
    pub(crate) lane: LaneName,
    pub(crate) waited: Duration,
    /// The median of its history.
    pub(crate) usual: Duration,
}

/// Actor, and kind of the request.
type LaneName = (&'static str, &'static str);

/// The lane of an actor's mailbox: messages wait there, and none is taken in.
const MAILBOX: &str = "message";

/// What is in flight, and how long such things took; shared by whoever asks and whoever watches.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    lanes: Arc<Mutex<BTreeMap<LaneName, Lane>>>,
}

/// How long nothing has been in flight and no message been taken in.
#[derive(Debug, Default)]
struct Stillness {
    taken: u64,
    waited: Duration,
}

impl Stillness {
    /// `taken`: messages that all actors have taken in so far.
    fn pass(
        &mut self,
        busy: bool,
        taken: u64,
        awake: Duration,
        patience: Patience,
    ) -> Option<Late> {
        let moves = busy || taken != self.taken;
        self.waited = if moves { Duration::ZERO } else { self.waited + awake };
        self.taken = taken;
        let late = Late { lane: ("run", "anything"), waited: self.waited, usual: Duration::ZERO };
        (self.waited > patience.least).then_some(late)
    }
}

#[derive(Debug, Default)]
struct Lane {
    in_flight: usize,
    /// Messages that an actor has taken in.
    taken: u64,
    /// The last answer, or when work came to an idle lane.
    since: Option<Instant>,
    /// Awake time since then, as far as the watch has seen it.
    waited: Duration,
    history: VecDeque<f64>,
    longest: f64,
}

impl Watch {
    /// `reply`, whose way to its answer counts from now on.
    pub(crate) fn over<T: 'static>(&self, lane: LaneName, reply: Reply<T>) -> Reply<T> {
        self.asked(lane, Instant::now());
        let watch = self.clone();
        Reply::new(move |result| {
            watch.answered(lane, Instant::now());
            reply.send(result);
        })
    }

    fn asked(&self, lane: LaneName, now: Instant) {
        let mut lanes = self.lanes();
        let lane = lanes.entry(lane).or_default();
        if lane.in_flight == 0 {
            lane.begin(now);
        }
        lane.in_flight += 1;
    }

    fn answered(&self, lane: LaneName, now: Instant) {
        let mut lanes = self.lanes();
        let lane = lanes.entry(lane).or_default();
        lane.in_flight = lane.in_flight.saturating_sub(1);
        lane.remember(now);
        lane.begin(now);
    }

    /// What waits for an actor.
    fn mailbox(&self, actor: &'static str, mailbox: Mailbox, now: Instant) {
        let mut lanes = self.lanes();
        let lane = lanes.entry((actor, MAILBOX)).or_default();
        let taken = mailbox.posted.saturating_sub(mailbox.depth as u64);
        if lane.taken != taken || lane.in_flight == 0 {
            lane.begin(now);
        }
        (lane.taken, lane.in_flight) = (taken, mailbox.depth);
    }

    /// Lets `awake` pass; who is late then.
    fn pass(&self, awake: Duration, patience: Patience) -> Option<Late> {
        let mut lanes = self.lanes();
        let busy = lanes.iter_mut().filter(|(_, lane)| lane.in_flight > 0);
        let mut longest = None;
        let waiting = busy.map(|(&name, lane)| {
            lane.waited += awake;
            let usual = Duration::from_secs_f64(lane.median());
            // Taking a message in is no work.
            let limit = if name.1 == MAILBOX { patience.least } else { lane.limit(patience) };
            longest = longest.max((lane.waited > limit).then_some(lane.waited));
            Late { lane: name, waited: lane.waited, usual }
        });
        // All of them get older, so no lane may be left out.
        let waiting: Vec<Late> = waiting.collect();
        culprit(waiting, longest?, 2 * awake)
    }

    fn is_busy(&self) -> bool {
        self.lanes().values().any(|lane| lane.in_flight > 0)
    }

    fn lanes(&self) -> MutexGuard<'_, BTreeMap<LaneName, Lane>> {
        // Every change is a single complete one.
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of those who have waited as long as the one who is late, give or take `slack`, the one that the
/// others wait for: an update waits for the disk, never the other way round.
fn culprit(waiting: Vec<Late>, longest: Duration, slack: Duration) -> Option<Late> {
    let innermost = |late: &Late| match late.lane.0 {
        "store" | "compute" => 2,
        "optimizer" => 1,
        _ => 0,
    };
    let among = waiting.into_iter().filter(|late| late.waited.abs_diff(longest) <= slack);
    among.max_by_key(|late| (innermost(late), late.waited))
}

impl Lane {
    fn begin(&mut self, now: Instant) {
        self.since = Some(now);
        self.waited = Duration::ZERO;
    }

    fn remember(&mut self, now: Instant) {
        let Some(since) = self.since else { return };
        let seen = self.waited + 2 * TICK_MAX;
        let seconds = now.duration_since(since).min(seen).as_secs_f64();
        if self.history.len() == REMEMBERED {
            self.history.pop_front();
        }
        self.history.push_back(seconds);
        self.longest = self.longest.max(seconds);
    }

    fn median(&self) -> f64 {
        median(self.history.iter().copied().collect())
    }

    fn limit(&self, patience: Patience) -> Duration {
        if self.history.len() < FEWEST {
            return patience.least * FIRST_TIME;
        }
        let middle = self.median();
        let deviation = median(self.history.iter().map(|s| (s - middle).abs()).collect());
        let usual = (middle + DEVIATIONS * deviation).max(TIMES_LONGEST * self.longest);
        patience.least.max(Duration::from_secs_f64(usual))
    }
}

/// How often the watch looks, at most.
const TICK_MAX: Duration = Duration::from_secs(1);

/// Watches until the other end of `closed` is gone; whoever is late ends the run.
pub(crate) fn keep_watch(
    watch: &Watch,
    directory: &Directory,
    patience: Patience,
    closed: &Receiver<()>,
) {
    let tick = TICK_MAX.min(patience.least / 4);
    let mut last = Instant::now();
    let mut stillness = Stillness::default();
    while closed.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
        let now = Instant::now();
        let mut taken = 0;
        for (actor, mailbox) in directory.mailboxes() {
            watch.mailbox(actor, mailbox, now);
            taken += mailbox.posted.saturating_sub(mailbox.depth as u64);
        }
        // A stopped process wakes up here as well, long after.
        let awake = now.duration_since(last).min(2 * tick);
        last = now;
        let late = watch.pass(awake, patience);
        let late = late.or_else(|| stillness.pass(watch.is_busy(), taken, awake, patience));
        if let Some(Late { lane: (actor, what), waited, usual }) = late {
            let (waited, usual) = (waited.as_secs_f64(), usual.as_secs_f64());
            tracing::error!(actor, what, waited, usual, "stuck");
            directory.end(Err(Failure::Stuck { actor, what, waited, usual }));
            return;
        }
    }
}

/// The middle of `values`, the upper one of two; 0 of none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const X: LaneName = ("compute", "x");

    /// One request, answered after `time`; when that is.
    fn take(watch: &Watch, lane: LaneName, now: Instant, time: Duration) -> Instant {
        watch.asked(lane, now);
        assert_eq!(watch.pass(time, Patience { least: 1000 * SECOND }), None);
        watch.answered(lane, now + time);
        now + time
    }

    /// A lane with answers of 1, 2, 3, 1, 2, ... seconds.
    fn experienced() -> Watch {
        let watch = Watch::default();
        let mut now = Instant::now();
        for i in 0..60 {
            now = take(&watch, X, now, Duration::from_secs(1 + i % 3));
        }
        watch
    }

    fn seconds_until_late(watch: &Watch, patience: Patience) -> usize {
        (1..100_000).find(|_| watch.pass(SECOND, patience).is_some()).unwrap()
    }

    #[test]
    fn whoever_exceeds_its_own_history_is_late() {
        // Median 2, median deviation 1: 22 seconds; four times the longest: 12.
        let watch = experienced();
        watch.asked(X, Instant::now());
        assert_eq!(seconds_until_late(&watch, Patience::of_seconds(5)), 23);
        let late = watch.pass(SECOND, Patience::of_seconds(5)).unwrap();
        assert_eq!((late.lane, late.waited.as_secs(), late.usual.as_secs()), (X, 24, 2));
        watch.answered(X, Instant::now());
        assert_eq!(
            watch.pass(1000 * SECOND, Patience::of_seconds(5)),
            None,
            "nothing is in flight"
        );
    }

    #[test]
    fn patience_and_a_first_time_wait_longer() {
        let watch = experienced();
        watch.asked(X, Instant::now());
        assert_eq!(seconds_until_late(&watch, Patience::of_seconds(60)), 61);
        let new = Watch::default();
        new.asked(X, Instant::now());
        assert_eq!(seconds_until_late(&new, Patience::of_seconds(60)), 60 * 30 + 1);
    }

    #[test]
    fn whoever_is_waited_for_is_told_of() {
        let late = |actor, what, seconds| Late {
            lane: (actor, what),
            waited: Duration::from_secs_f64(seconds),
            usual: Duration::ZERO,
        };
        let all = || {
            vec![
                late("optimizer", "update", 2.1),
                late("store", "read_chunk", 1.7),
                late("store", "commit", 90.0),
                late("run", MAILBOX, 0.1),
            ]
        };
        let told = |seconds| {
            let longest = Duration::from_secs_f64(seconds);
            culprit(all(), longest, Duration::from_millis(500)).map(|late| late.lane)
        };
        assert_eq!(told(2.1), Some(("store", "read_chunk")));
        assert_eq!(told(90.0), Some(("store", "commit")));
        let alone = vec![late("optimizer", "update", 2.1)];
        let told = culprit(alone, Duration::from_secs_f64(2.1), Duration::ZERO);
        assert_eq!(told.map(|late| late.lane), Some(("optimizer", "update")));
    }

    #[test]
    fn rare_long_work_is_remembered() {
        let watch = Watch::default();
        let mut now = Instant::now();
        for i in 0..200 {
            now = take(&watch, X, now, if i == 0 { 50 * SECOND } else { SECOND / 100 });
        }
        watch.asked(X, Instant::now());
        assert_eq!(seconds_until_late(&watch, Patience::of_seconds(1)), 201);
    }

    #[test]
    fn an_idle_lane_begins_anew() {
        let watch = experienced();
        assert_eq!(watch.pass(500 * SECOND, Patience::of_seconds(5)), None);
        watch.asked(X, Instant::now());
        assert_eq!(watch.pass(SECOND, Patience::of_seconds(5)), None);
    }

    #[test]
    fn time_in_which_the_process_was_stopped_is_nobodys() {
        let watch = Watch::default();
        let mut now = Instant::now();
        for _ in 0..FEWEST {
            watch.asked(X, now);
            now += 1000 * SECOND;
            watch.answered(X, now);
        }
        watch.asked(X, now);
        // Two seconds at most of each thousand were seen.
        assert_eq!(seconds_until_late(&watch, Patience::of_seconds(1)), 9);
    }

    #[test]
    fn a_run_that_waits_for_nothing_is_noticed() {
        let until_late = |events: &mut dyn Iterator<Item = (bool, u64)>| {
            let mut stillness = Stillness::default();
            let patience = Patience::of_seconds(2);
            events
                .take(10_000)
                .position(|(busy, taken)| stillness.pass(busy, taken, SECOND, patience).is_some())
        };
        assert_eq!(until_late(&mut std::iter::repeat((true, 5))), None);
        // Somebody who looks again every two seconds, because the disk is full.
        assert_eq!(until_late(&mut (0..).map(|n| (false, n / 2))), None);
        assert_eq!(until_late(&mut (0..).map(|n| (n < 7, 5))), Some(9));
    }

    #[test]
    fn messages_that_nobody_takes_are_noticed() {
        let watch = Watch::default();
        let until_late = |mailboxes: &mut dyn Iterator<Item = (u64, usize)>| {
            mailboxes.take(10_000).position(|(posted, depth)| {
                watch.mailbox("node", Mailbox { posted, depth }, Instant::now());
                watch.pass(SECOND, Patience::of_seconds(2)).is_some()
            })
        };
        assert_eq!(until_late(&mut (3..).map(|posted| (posted, 3))), None);
        assert_eq!(until_late(&mut std::iter::repeat((9, 0))), None);
        assert_eq!(until_late(&mut (9..).map(|n| (n, n as usize - 8))), Some(2));
    }
}
