//! `--print-config`: every option's effective value, as TOML that `--options` takes again.
//!
//! What only a model, data or the machine of the moment can say is a comment, and so is what would
//! mean more if it were asked for: written down as an option it would be frozen.

use std::path::Path;

use model::ModelConfig;
use store::ReadingStore;

use crate::cli::SoloArgs;
use crate::options::{ComputeDtype, DeviceChoice, IoChoice, TrainOptions, UpdateChoice};
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
    // Whatever follows from these stand-ins is not taken over.
    let defaults = known.defaults.unwrap_or(Defaults { max_positions: usize::MAX, lr: 1e-5 });
    let record = match &known.run {
        Some(run) => {
            run_start::refuse_differences(&run.differences(given)?)?;
            run.clone()
        }
        None => {
            let steps = given.steps.unwrap_or(1);
            RunRecord::new(given, defaults, steps, Vec::new(), String::new())?
        }
    };
    record.updates(given.update)?;
    let mut all = given.clone();
    if known.defaults.is_some() {
        all.seq_len.get_or_insert(record.seq_len);
        all.lr.get_or_insert(record.lr);
    }
    all.batch_rows.get_or_insert(record.batch_rows);
    if all.seq_len.is_some() {
        all.micro_rows.get_or_insert(record.micro_rows);
    }
    fill_length(&mut all, known.run.as_ref());
    if known.run.is_some() || all.steps.is_some() {
        all.warmup_steps.get_or_insert(record.warmup_steps);
    }
    fill_constants(&mut all, record);
    Ok(all)
}

fn fill_length(all: &mut TrainOptions, run: Option<&RunRecord>) {
    if all.steps.is_some() || all.epochs.is_some() {
        return;
    }
    match run {
        Some(run) => all.steps = Some(run.steps),
        None => all.epochs = Some(1),
    }
}

/// What depends on nothing but the run.
fn fill_constants(all: &mut TrainOptions, record: RunRecord) {
    all.schedule.get_or_insert(record.schedule);
    all.min_lr_ratio.get_or_insert(record.min_lr_ratio);
    all.weight_decay.get_or_insert(record.weight_decay);
    all.beta1.get_or_insert(record.beta1);
    all.beta2.get_or_insert(record.beta2);
    all.eps.get_or_insert(record.eps);
    all.clip.get_or_insert(record.clip);
    all.seed.get_or_insert(record.seed);
    all.no_shuffle = record.no_shuffle;
    all.guard.get_or_insert(record.guard);
    all.loss_spike = all.loss_spike.or(record.loss_spike);
    all.auto_lock = all.auto_lock.take().or(record.auto_lock);
    all.update.get_or_insert(UpdateChoice::Auto);
    all.device.get_or_insert(DeviceChoice::Auto);
    all.compute_dtype.get_or_insert(ComputeDtype::F32);
    all.io.get_or_insert(IoChoice::Auto);
    all.commit_every.get_or_insert(1);
    all.recompute_interval.get_or_insert(1);
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
