//! `--print-config`: every option's effective value, as TOML that `--options` takes again.
//!
//! What only a model, data or the machine of the moment can say is a comment, and so is what would
//! mean more if it were asked for: written down as an option it would be frozen.

use std::path::Path;

use model::ModelConfig;
use store::ReadingStore;

use crate::cli::SoloArgs;
use crate::options::{DeviceChoice, IoChoice, TrainOptions, UpdateChoice};
use crate::run_record::{Defaults, RunRecord};
use crate::{demo, machine, run_start, solo};

/// The text for `args`, whose options with those of the file are `given`.
pub(crate) fn print_config(args: &SoloArgs, given: &TrainOptions) -> anyhow::Result<String> {
    let given = if args.demo { demo::options(given) } else { given.clone() };
    let is_store = |dir: &&Path| !args.demo && dir.join("store.json").exists();
    let known = match args.store.as_deref().filter(is_store) {
        Some(dir) => Known::of(dir, args.new_run)?,
        None => Known::default(),
    };
    let effective = effective(&given, &known)?;
    let mut text = effective.to_toml()?;
    if !effective.no_shuffle {
        text.push_str("no-shuffle = false\n");
    }
    for line in comments(&effective) {
        text.push_str(&format!("# {line}\n"));
    }
    Ok(text)
}

/// What a store says about its options.
#[derive(Default)]
struct Known {
    defaults: Option<Defaults>,
    /// Of the run that would go on.
    run: Option<RunRecord>,
}

impl Known {
    fn of(dir: &Path, new_run: bool) -> anyhow::Result<Known> {
        let io = machine::engine(machine::store_bytes(dir));
        let store = ReadingStore::open(io, dir, machine::LOCK_WAIT)?;
        let config = ModelConfig::from_json(store.config_json())?;
        let run = store.read_run()?.filter(|_| !new_run);
        Ok(Known {
            defaults: Some(run_start::defaults(&config, store.defaults())),
            run: run.map(|text| RunRecord::from_json(dir, &text)).transpose()?,
        })
    }
}

/// `given`, with all that is known filled in; refused as training would refuse it.
fn effective(given: &TrainOptions, known: &Known) -> anyhow::Result<TrainOptions> {
    let frozen = match &known.run {
        Some(run) => {
            run_start::refuse_differences(&run.differences(given)?)?;
            run.updates(given.update)?;
            run.options()?
        }
        None => of_a_new_run(given, known.defaults)?,
    };
    let mut all = given.over(&frozen)?;
    if all.steps.is_none() && all.epochs.is_none() {
        all.epochs = Some(1);
    }
    all.update.get_or_insert(UpdateChoice::Auto);
    all.device.get_or_insert(DeviceChoice::Auto);
    all.io.get_or_insert(IoChoice::Auto);
    all.commit_every.get_or_insert(1);
    all.recompute_interval.get_or_insert(1);
    Ok(all)
}

/// What a new run with `given` would freeze, as far as that is known; `defaults` are the store's.
fn of_a_new_run(given: &TrainOptions, defaults: Option<Defaults>) -> anyhow::Result<TrainOptions> {
    // Whatever follows from these stand-ins is not taken over.
    let stand_ins = Defaults { max_positions: usize::MAX, lr: 1e-5 };
    let steps = given.steps.unwrap_or(1);
    let record =
        RunRecord::new(given, defaults.unwrap_or(stand_ins), steps, Vec::new(), String::new())?;
    record.updates(given.update)?;
    let mut frozen = record.options()?;
    if defaults.is_none() {
        (frozen.seq_len, frozen.lr) = (given.seq_len, given.lr);
    }
    if frozen.seq_len.is_none() {
        frozen.micro_rows = given.micro_rows;
    }
    if given.steps.is_none() {
        (frozen.steps, frozen.warmup_steps) = (None, given.warmup_steps);
    }
    Ok(frozen)
}

/// A line for every option that has no value yet.
fn comments(all: &TrainOptions) -> Vec<String> {
    let missing = [
        (all.seq_len.is_none(), "seq-len: the smaller of 1024 and the model's maximum"),
        (
            all.micro_rows.is_none(),
            "micro-rows: the largest divisor of batch-rows with at most 2048 tokens",
        ),
        (all.lr.is_none(), "lr: 1e-5 for an imported model, 3e-4 for a new one"),
        (all.warmup_steps.is_none(), "warmup-steps: 3 % of all steps"),
        (all.ram.is_none(), "ram: half of what is available when the run starts"),
        (all.eval_data.is_empty(), "eval-data, eval-every: off"),
        (all.sample_prompt.is_none(), "sample-prompt, sample-every: off"),
        (all.log.is_none(), "log: off"),
        (all.loss_spike.is_none(), "loss-spike: off"),
        (all.auto_lock.is_none(), "auto-lock: off"),
        (all.lock.is_none(), "lock: as the store says"),
        (all.snapshot_every.is_none(), "snapshot-every, keep-snapshots: off"),
    ];
    let mut lines: Vec<String> =
        missing.into_iter().filter(|(is, _)| *is).map(|(_, line)| line.to_owned()).collect();
    if all.threads.is_none() {
        lines.push(format!("threads = {} (all cores of this machine)", machine::cores()));
    }
    if all.metrics.is_none() {
        let address = solo::METRICS_ADDRESS;
        lines.push(format!("metrics = \"{address}\" (done without if it is taken)"));
    }
    lines.push(
        "only on the command line: --store, --data, --new-run, --supervise, --stuck-after, --json, --quiet, \
         --log-json"
            .to_owned(),
    );
    lines
}

#[cfg(test)]
mod tests {
    use clap::Args;

    use super::*;

    #[test]
    fn no_option_is_forgotten() {
        let all = effective(&TrainOptions::default(), &Known::default()).unwrap();
        let lines = [comments(&all).join("\n"), all.to_toml().unwrap()].concat();
        let words = lines.split(|c: char| !c.is_alphanumeric() && c != '-');
        let command = TrainOptions::augment_args(clap::Command::new("options"));
        for name in command.get_arguments().filter_map(clap::Arg::get_long) {
            let is_there = words.clone().any(|word| word == name);
            assert!(is_there || name == "no-shuffle", "no {name} in {lines}");
        }
    }
}
