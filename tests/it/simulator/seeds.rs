//! Ten thousand runs that are killed, fail, lock and skip, each compared with a calm one.

use schedule::Trip;

use super::overlap::{UNIT, balanced};
use super::*;

const SEEDS: u64 = 10_000;

/// Processes of one run after which something does not end.
const PROCESSES: u64 = 500;

/// What happened over many seeds.
#[derive(Debug, Default)]
struct Tally {
    deaths: u64,
    aborts: u64,
    skips: u64,
    locks: u64,
    spikes_watched: u64,
    given_up: u64,
    /// Settled steps that were made again.
    again: u64,
}

/// Draws numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = mix(self.0, 1);
        (self.0 >> 16) % sides
    }

    fn one_in(&mut self, sides: u64) -> bool {
        self.roll(sides) == 0
    }
}

fn setup(seed: u64) -> Setup {
    let mut dice = Dice(mix(seed, 0));
    let updates =
        [Policy::Fused.into(), Policy::Deferred.into(), Updates::Speculative, Updates::Auto]
            [dice.roll(4) as usize];
    let layers = 1 + dice.roll(5) as usize;
    let all = layers + 2;
    let steps = 3 + dice.roll(10);
    let mut locked: Vec<bool> = (0..all).map(|_| dice.one_in(4)).collect();
    if dice.one_in(3) {
        // A locked prefix.
        let prefix = dice.roll(all as u64) as usize;
        locked.iter_mut().enumerate().for_each(|(l, locked)| *locked = l < prefix);
    }
    let trained = dice.roll(all as u64) as usize;
    locked[trained] = false;
    let on_trip = if dice.one_in(4) { Trip::Stop } else { Trip::Skip };
    let spike = dice.one_in(2).then_some(6.0);
    let auto_lock = dice.one_in(2).then(|| AutoLock {
        threshold: 0.1,
        steps: 1 + dice.roll(3),
        floor: dice.roll(all as u64) as usize,
    });
    // As after 30 quiet steps.
    let number = |name: &str, value: u64| (name.to_owned(), value);
    let counters = BTreeMap::from([
        number("losses_seen", 30),
        number("loss_mean_bits", 3.0f64.to_bits()),
        number("loss_deviation_bits", 0.05f64.to_bits()),
        number("of_somebody_else", 7),
    ]);
    let calm = balanced(updates, 2 + dice.roll(2) as usize);
    // All steps of a commit have to get through.
    let commit_every = [1, 1, 2, 3, 7][dice.roll(5) as usize];
    let calmer = commit_every * commit_every;
    // Slow answers of the device let a layer's update overtake its own sweep.
    let unbind = if dice.one_in(3) { 80 * UNIT } else { 0 };
    Setup {
        layers,
        tied: dice.one_in(2),
        tiling: if dice.one_in(2) { Tiling::Whole } else { Tiling::Blocks },
        commit_every,
        fused_wait: if dice.one_in(2) { Wait::None } else { Wait::Layer },
        costs: Costs { unbind, ..calm.costs },
        micros: 1 + dice.roll(2) as u32,
        tight: dice.one_in(3),
        interval: [1, 1, 2, 3][dice.roll(4) as usize],
        kept: [0, 0, 1, 3, 100][dice.roll(5) as usize],
        steps,
        faults_per_million: [0, 2_000, 8_000][dice.roll(3) as usize] / calmer,
        deaths_per_million: [0, 3_000, 15_000][dice.roll(3) as usize] / calmer,
        fatal: dice.one_in(3),
        jitter_percent: 300,
        locked,
        counters,
        guard: Guard { on_trip, spike },
        auto_lock,
        data: Data {
            seed: mix(seed, 2),
            faults_per_thousand: [0, 0, 100, 300, 900][dice.roll(5) as usize],
            quiet_from: (0..all).map(|_| dice.roll(2) * dice.roll(steps)).collect(),
            // Nobody fuses where the whole norm decides, but by speculation.
            clips: updates != Policy::Fused.into(),
        },
        seed,
        ..calm
    }
}

/// The records of a run in which nothing goes wrong but the data, by another policy.
fn calm(setup: &Setup) -> (End, Vec<Record>) {
    let other = match setup.updates {
        Updates::Always(Policy::Deferred) => Updates::Speculative,
        _ => Policy::Deferred.into(),
    };
    let mut world = World::new(Setup {
        updates: other,
        commit_every: 1,
        tight: false,
        interval: 1,
        faults_per_million: 0,
        deaths_per_million: 0,
        jitter_percent: 0,
        ..setup.clone()
    });
    let end = world.run();
    (end, std::mem::take(&mut world.records))
}

/// Runs a seed to its end, through every death, failure and stop.
fn play(seed: u64, tally: &mut Tally) {
    let setup = setup(seed);
    let (calm_end, calm_records) = calm(&setup);
    let last = calm_records.len() as u64 - 1;
    assert_eq!(calm_end == End::Completed, last == setup.steps, "replay({seed});");
    let calm_records = Rc::new(calm_records);
    let mut world = World::new(setup);
    world.calm = Some(Rc::clone(&calm_records));
    for _ in 0..PROCESSES {
        if world.next_random().is_multiple_of(4) {
            let when = world.now + world.next_random() % (100 * UNIT);
            world.at(when, Happening::Run(RunEvent::StopRequested));
        }
        let end = world.run();
        assert_eq!(world.process.run.durable(), world.disk.record.step);
        if end == calm_end && world.disk.record.step.0 == last {
            let Record { skipped, ledger, .. } = &world.disk.record;
            let locks = |locked: &[bool]| locked.iter().filter(|locked| **locked).count() as u64;
            tally.deaths += world.deaths;
            tally.aborts += world.aborts;
            tally.again += world.again;
            tally.skips += skipped.len() as u64;
            tally.locks += locks(&ledger.locked) - locks(&world.setup.locked);
            tally.spikes_watched += u64::from(world.setup.guard.spike.is_some());
            tally.given_up += u64::from(calm_end == End::Failed);
            return;
        }
        assert_ne!(end, End::Completed, "completed at step {}", world.disk.record.step);
        world.begin_again();
    }
    panic!("{PROCESSES} processes do not get to step {last}");
}

/// One seed, as a failure prints it.
fn replay(seed: u64) {
    play(seed, &mut Tally::default());
}

#[test]
fn whatever_happens_a_run_comes_to_what_a_calm_one_comes_to() {
    let mut tally = Tally::default();
    (0..SEEDS).for_each(|seed| play(seed, &mut tally));
    println!("{tally:?}");
    let Tally { deaths, aborts, skips, locks, spikes_watched, given_up, again } = tally;
    assert!(again > SEEDS / 2, "only {again} settled steps were made again");
    assert!(deaths > SEEDS, "only {deaths} deaths");
    assert!(aborts > SEEDS, "only {aborts} dropped attempts");
    assert!(skips > SEEDS / 2, "only {skips} skipped steps");
    assert!(locks > SEEDS / 4, "only {locks} layers locked by themselves");
    assert!(spikes_watched > SEEDS / 4 && given_up > SEEDS / 20, "{spikes_watched} {given_up}");
}

#[test]
fn a_pasted_seed_is_played_again() {
    replay(4_711);
}
