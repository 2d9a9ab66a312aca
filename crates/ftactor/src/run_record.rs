//! `run.json`: every option that changes bits, frozen when a run starts.

use std::path::Path;

use actors::Clip;
use anyhow::Context;
use model::RunShape;
use optim::{AdamW, LrSchedule, Schedule};
use schedule::{AutoLock, Guard, Policy, Trip, Updates};
use serde::{Deserialize, Serialize};
use store::StoreError;

use crate::exit::{Refused, refuse};
use crate::options::{
    ComputeDtype, DeviceChoice, GuardChoice, TrainOptions, UpdateChoice, parse_auto_lock,
    parse_clip,
};

const FORMAT: u32 = 1;

/// What to do about a `run.json` that is lost or damaged.
pub(crate) const RUN_LOST: &str = "going back to a snapshot brings its own (`rollback NAME`), and `solo --new-run \
    --data PATH` starts a new run from the weights";

const MICRO_TOKENS: usize = 2048;
const MOST_TOKENS: usize = 1 << 32;
/// Beyond it one update of AdamW, about `lr` per weight, already ends in infinities.
const MOST_LR: f64 = 100.0;

/// The record. Field names are the options' names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct RunRecord {
    pub(crate) format: u32,
    /// Number of the run in its store: two runs with the same options are two.
    #[serde(default = "first_run")]
    pub(crate) run: u64,
    pub(crate) seq_len: usize,
    pub(crate) batch_rows: usize,
    pub(crate) micro_rows: usize,
    pub(crate) steps: u64,
    pub(crate) lr: f64,
    pub(crate) schedule: String,
    pub(crate) warmup_steps: u64,
    pub(crate) min_lr_ratio: f64,
    pub(crate) weight_decay: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) eps: f64,
    pub(crate) clip: String,
    pub(crate) seed: u64,
    pub(crate) no_shuffle: bool,
    #[serde(default)]
    pub(crate) guard: GuardChoice,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) loss_spike: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) auto_lock: Option<String>,
    pub(crate) device: String,
    pub(crate) compute_dtype: String,
    pub(crate) data: Vec<DataFile>,
    /// The token rows made of the data, inside the store.
    pub(crate) rows_file: String,
    /// Moments and step numbers still have to go back to zero: written before that begins, so that
    /// a kill in between leaves neither the old run nor half of a new one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) reset_first: bool,
    /// The model still has to go back to this snapshot, which this record comes from: written down
    /// before that is done, so that a kill in between leaves no run with another run's state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rollback_first: Option<String>,
}

/// A data file as it was when the run started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DataFile {
    pub(crate) path: String,
    pub(crate) bytes: u64,
    /// xxh3-64 of the contents, 16 hex digits.
    pub(crate) hash: String,
}

/// What defaults depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub(crate) max_positions: usize,
    /// Peak learning rate that suits the store's weights: trained or random.
    pub(crate) lr: f64,
}

/// Rows of a step and of a microbatch, and their length.
pub(crate) fn shape(options: &TrainOptions, defaults: Defaults) -> anyhow::Result<RunShape> {
    let seq_len = options.seq_len.unwrap_or(defaults.max_positions.min(1024));
    if seq_len > defaults.max_positions {
        return refuse(format!(
            "--seq-len {seq_len} is longer than the model's maximum of {} tokens",
            defaults.max_positions
        ));
    }
    if seq_len < 2 {
        return refuse(
            "--seq-len must be at least 2: a row predicts its own tokens from the second on",
        );
    }
    let batch_rows = options.batch_rows.unwrap_or(8);
    if batch_rows == 0 {
        return refuse("--batch-rows must be at least 1");
    }
    let micro_rows = options.micro_rows.unwrap_or_else(|| default_micro_rows(batch_rows, seq_len));
    if micro_rows == 0 || !batch_rows.is_multiple_of(micro_rows) {
        return refuse(format!(
            "--micro-rows {micro_rows} does not divide --batch-rows {batch_rows}"
        ));
    }
    Ok(RunShape { batch_rows, micro_rows, seq_len })
}

/// The largest divisor of `batch_rows` with at most 2048 tokens, at least 1.
fn default_micro_rows(batch_rows: usize, seq_len: usize) -> usize {
    (1..=batch_rows.min(MICRO_TOKENS / seq_len))
        .rev()
        .find(|rows| batch_rows.is_multiple_of(*rows) && rows * seq_len <= MICRO_TOKENS)
        .unwrap_or(1)
}

impl RunRecord {
    /// The record of a new run. `steps` is the run's length.
    pub(crate) fn new(
        options: &TrainOptions,
        defaults: Defaults,
        steps: u64,
        data: Vec<DataFile>,
        rows_file: String,
    ) -> anyhow::Result<RunRecord> {
        let shape = shape(options, defaults)?;
        let record = RunRecord {
            format: FORMAT,
            run: first_run(),
            seq_len: shape.seq_len,
            batch_rows: shape.batch_rows,
            micro_rows: shape.micro_rows,
            steps,
            lr: options.lr.unwrap_or(defaults.lr),
            schedule: options.schedule.clone().unwrap_or_else(|| "cosine".into()),
            warmup_steps: options.warmup_steps.unwrap_or(steps / 100 * 3 + steps % 100 * 3 / 100),
            min_lr_ratio: options.min_lr_ratio.unwrap_or(0.1),
            weight_decay: options.weight_decay.unwrap_or(0.0),
            beta1: options.beta1.unwrap_or(0.9),
            beta2: options.beta2.unwrap_or(0.999),
            eps: options.eps.unwrap_or(1e-8),
            clip: options.clip.clone().unwrap_or_else(|| "global:1.0".into()),
            seed: options.seed.unwrap_or(0),
            no_shuffle: options.no_shuffle,
            guard: options.guard.unwrap_or_default(),
            loss_spike: options.loss_spike,
            auto_lock: options.auto_lock.clone(),
            device: device_kind(options.device).into(),
            compute_dtype: dtype_name(options.compute_dtype).into(),
            data,
            rows_file,
            reset_first: false,
            rollback_first: None,
        };
        record.check()?;
        Ok(record)
    }

    /// Reads the text of the `run.json` of the store in `dir`.
    pub(crate) fn from_json(dir: &Path, text: &str) -> anyhow::Result<RunRecord> {
        let damaged = |error: serde_json::Error| StoreError::Damaged {
            file: dir.join("run.json"),
            what: format!("{error}; {RUN_LOST}"),
        };
        let value: serde_json::Value = serde_json::from_str(text).map_err(damaged)?;
        // First: a newer format may have fields that this version does not know.
        if let Some(format) = value["format"].as_u64().filter(|f| *f != u64::from(FORMAT)) {
            return refuse(format!("run.json has format {format}, this ftactor knows {FORMAT}"));
        }
        let record: RunRecord = serde_json::from_value(value).map_err(damaged)?;
        record.check()?;
        Ok(record)
    }

    /// Number of the run that the text of a `run.json` records, whatever else is wrong with it.
    pub(crate) fn number_in(text: &str) -> u64 {
        let value: Option<serde_json::Value> = serde_json::from_str(text).ok();
        value.and_then(|value| value.get("run")?.as_u64()).unwrap_or(first_run())
    }

    pub(crate) fn to_json(&self) -> anyhow::Result<String> {
        serde_json::to_string_pretty(self).context("run.json")
    }

    /// Options that were given and differ from the record, as `name: run has A, given B`.
    pub(crate) fn differences(&self, options: &TrainOptions) -> anyhow::Result<Vec<String>> {
        let given = serde_json::to_value(options).context("options as JSON")?;
        let frozen = serde_json::to_value(self).context("run.json")?;
        let mut differences = Vec::new();
        let mut frozen = frozen.as_object().cloned().unwrap_or_default();
        // What is not asked for is not written down, and cannot be asked for later.
        frozen.entry("auto-lock").or_insert(serde_json::Value::Null);
        for (name, was) in &frozen {
            let may_change = ["steps", "device", "guard", "loss-spike"].contains(&name.as_str());
            let Some(now) = given.get(name).filter(|_| !may_change) else { continue };
            let equal = match (was.as_f64(), now.as_f64()) {
                (Some(was), Some(now)) => was == now,
                _ => was == now,
            };
            if !equal {
                let was = if was.is_null() { "none".into() } else { was.to_string() };
                differences.push(format!("--{name}: the run has {was}, given {now}"));
            }
        }
        let device = options.device.map(|_| device_kind(options.device));
        if device.is_some_and(|device| device != self.device) {
            differences.push(format!("--device: the run has {}", self.device));
        }
        Ok(differences)
    }

    /// What was frozen, as options.
    pub(crate) fn options(&self) -> anyhow::Result<TrainOptions> {
        let mut fields = serde_json::to_value(self).context("run.json")?;
        if let Some(fields) = fields.as_object_mut() {
            // The rest says what was done with the options, or, the device, only its kind.
            for name in
                ["format", "run", "device", "data", "rows-file", "reset-first", "rollback-first"]
            {
                fields.remove(name);
            }
        }
        serde_json::from_value(fields).context("run.json as options")
    }

    pub(crate) fn shape(&self) -> RunShape {
        RunShape { batch_rows: self.batch_rows, micro_rows: self.micro_rows, seq_len: self.seq_len }
    }

    /// What products are computed with.
    pub(crate) fn dtype(&self) -> compute::ComputeDtype {
        match self.compute_dtype.as_str() {
            "bf16" => compute::ComputeDtype::Bf16,
            _ => compute::ComputeDtype::F32,
        }
    }

    pub(crate) fn clip_rule(&self) -> anyhow::Result<Clip> {
        parse_clip(&self.clip)
    }

    pub(crate) fn adamw(&self) -> AdamW {
        AdamW {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
        }
    }

    pub(crate) fn lr_schedule(&self) -> anyhow::Result<LrSchedule> {
        let kind: Schedule =
            self.schedule.parse().map_err(|e| Refused(format!("--schedule: {e}")))?;
        Ok(LrSchedule {
            kind,
            peak: self.lr,
            warmup_steps: self.warmup_steps,
            total_steps: self.steps,
            min_ratio: self.min_lr_ratio,
        })
    }

    pub(crate) fn guard(&self) -> Guard {
        let on_trip = match self.guard {
            GuardChoice::Stop => Trip::Stop,
            GuardChoice::Skip => Trip::Skip,
        };
        Guard { on_trip, spike: self.loss_spike }
    }

    /// For a model of `layers`.
    pub(crate) fn auto_lock(&self, layers: usize) -> anyhow::Result<Option<AutoLock>> {
        self.auto_lock.as_deref().map(|text| parse_auto_lock(text, layers)).transpose()
    }

    /// When the optimizer runs. The choice changes no bits, so it is not part of the record.
    pub(crate) fn updates(&self, update: Option<UpdateChoice>) -> anyhow::Result<Updates> {
        let global = matches!(self.clip_rule()?, Clip::Global(_));
        match update.unwrap_or(UpdateChoice::Auto) {
            UpdateChoice::Auto if global => Ok(Updates::Auto),
            UpdateChoice::Speculative if global => Ok(Updates::Speculative),
            UpdateChoice::Auto | UpdateChoice::Speculative => Ok(Policy::Fused.into()),
            UpdateChoice::Deferred => Ok(Policy::Deferred.into()),
            UpdateChoice::Fused if global => refuse(
                "--update fused cannot clip by the norm of the whole gradient, which is known only \
                 after it would be needed; use --clip layer:X, --clip none, --update deferred or --update speculative",
            ),
            UpdateChoice::Fused => Ok(Policy::Fused.into()),
        }
    }

    /// Whoever edits `run.json` is told what cannot be.
    fn check(&self) -> anyhow::Result<()> {
        let RunShape { batch_rows, micro_rows, seq_len } = self.shape();
        if seq_len < 2
            || micro_rows == 0
            || batch_rows == 0
            || !batch_rows.is_multiple_of(micro_rows)
        {
            return refuse(format!(
                "rows of {seq_len} tokens, {batch_rows} a step, {micro_rows} together: the last must \
                 divide the one before, and a row needs 2 tokens"
            ));
        }
        if batch_rows.checked_mul(seq_len).is_none_or(|tokens| tokens > MOST_TOKENS) {
            return refuse(format!("--batch-rows {batch_rows}: a step has at most 2^32 tokens"));
        }
        if self.device != "cpu" || !["f32", "bf16"].contains(&self.compute_dtype.as_str()) {
            return refuse(format!(
                "the run computes on {} in {}, this ftactor on cpu in f32 or bf16",
                self.device, self.compute_dtype
            ));
        }
        if self.lr > MOST_LR {
            return refuse(format!("--lr {}: no weight survives that; at most {MOST_LR}", self.lr));
        }
        if self.lr * self.weight_decay > 1.0 {
            return refuse(format!(
                "--weight-decay {} with --lr {}: decay multiplies weights by 1 minus their product, which \
                 must not be negative",
                self.weight_decay, self.lr
            ));
        }
        self.clip_rule()?;
        self.auto_lock(1)?;
        if let Some(spike) = self.loss_spike.filter(|spike| !(spike.is_finite() && *spike > 0.0)) {
            return refuse(format!("--loss-spike {spike}: expected a number above 0, e.g. 10"));
        }
        let wrong = |e: optim::HyperparameterError| Refused(e.to_string());
        self.lr_schedule()?.check().map_err(wrong)?;
        self.adamw().check().map_err(wrong)?;
        Ok(())
    }
}

fn first_run() -> u64 {
    1
}

fn dtype_name(choice: Option<ComputeDtype>) -> &'static str {
    match choice.unwrap_or(ComputeDtype::F32) {
        ComputeDtype::F32 => "f32",
        ComputeDtype::Bf16 => "bf16",
    }
}

fn device_kind(choice: Option<DeviceChoice>) -> &'static str {
    match choice.unwrap_or(DeviceChoice::Auto) {
        DeviceChoice::Auto | DeviceChoice::Cpu => "cpu",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: Defaults = Defaults { max_positions: 2048, lr: 1e-5 };

    fn record(options: &TrainOptions) -> anyhow::Result<RunRecord> {
        RunRecord::new(options, DEFAULTS, 100, Vec::new(), "rows".into())
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let r = record(&TrainOptions::default()).unwrap();
        assert_eq!((r.seq_len, r.batch_rows, r.micro_rows), (1024, 8, 2));
        assert_eq!((r.lr, r.warmup_steps, r.clip.as_str()), (1e-5, 3, "global:1.0"));
        assert_eq!(RunRecord::from_json(Path::new("s"), &r.to_json().unwrap()).unwrap(), r);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let with = |change: fn(&mut TrainOptions)| {
            let mut options = TrainOptions::default();
            change(&mut options);
            record(&options).map(|_| ()).unwrap_err().to_string()
        };
        assert!(with(|o| o.seq_len = Some(4096)).contains("maximum of 2048"));
        assert!(with(|o| o.seq_len = Some(1)).contains("at least 2"));
        assert!(with(|o| o.micro_rows = Some(3)).contains("does not divide"));
        assert!(with(|o| o.batch_rows = Some(0)).contains("at least 1"));
        assert!(with(|o| o.lr = Some(f64::NAN)).contains("lr"));
        assert!(with(|o| o.lr = Some(1e39)).contains("at most 100"));
        assert!(with(|o| o.batch_rows = Some(usize::MAX / 2)).contains("2^32"));
        assert!(with(|o| o.schedule = Some("up".into())).contains("schedule"));
    }

    #[test]
    fn an_edited_record_that_cannot_run_is_refused() {
        let text = record(&TrainOptions::default()).unwrap().to_json().unwrap();
        for (field, value) in
            [("micro-rows", "0"), ("micro-rows", "3"), ("batch-rows", "0"), ("device", "\"tpu\"")]
        {
            let mut edited: serde_json::Value = serde_json::from_str(&text).unwrap();
            edited[field] = serde_json::from_str(value).unwrap();
            assert!(
                RunRecord::from_json(Path::new("s"), &edited.to_string()).is_err(),
                "{field} {value}"
            );
        }
    }

    #[test]
    fn only_given_and_different_options_count_as_differences() {
        let r = record(&TrainOptions { lr: Some(1e-4), ..Default::default() }).unwrap();
        let same = TrainOptions { lr: Some(1e-4), steps: Some(9), ..Default::default() };
        assert_eq!(r.differences(&same).unwrap(), Vec::<String>::new());
        let other = TrainOptions { lr: Some(2e-4), seed: Some(1), ..Default::default() };
        assert_eq!(r.differences(&other).unwrap().len(), 2);
    }
}
