//! Training options: the same words as flags and as keys of a TOML file.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use actors::Clip;
use anyhow::Context;
use clap::{Args, ValueEnum};
use schedule::AutoLock;
use serde::{Deserialize, Deserializer, Serialize};

use crate::exit::{Refused, refuse};
use crate::machine;

/// Everything a user may set; `None` means the default or what the run was started with.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct TrainOptions {
    /// Tokens of a row [default: the smaller of 1024 and the model's maximum]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seq_len: Option<usize>,
    /// Rows of a step [default: 8]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) batch_rows: Option<usize>,
    /// Rows that pass a layer together; divides batch-rows [default: up to 2048 tokens]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) micro_rows: Option<usize>,
    /// Steps of the run
    #[arg(long, conflicts_with = "epochs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) steps: Option<u64>,
    /// Passes over the data [default: 1]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) epochs: Option<u64>,
    /// Peak learning rate [default: 1e-5 for an imported model, 3e-4 for a new one]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lr: Option<f64>,
    /// constant, cosine, linear or wsd [default: cosine]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) schedule: Option<String>,
    /// Steps of linear warmup [default: 3 % of all steps]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) warmup_steps: Option<u64>,
    /// Lowest learning rate as a part of the peak [default: 0.1]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) min_lr_ratio: Option<f64>,
    /// Decoupled weight decay, on matrices only [default: 0]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) weight_decay: Option<f64>,
    /// [default: 0.9]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) beta1: Option<f64>,
    /// [default: 0.999]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) beta2: Option<f64>,
    /// [default: 1e-8]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eps: Option<f64>,
    /// global:X, layer:X or none [default: global:1.0]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) clip: Option<String>,
    /// When the optimizer runs [default: auto]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) update: Option<UpdateChoice>,
    /// Order of the rows [default: 0]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seed: Option<u64>,
    /// Take the rows in their order
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) no_shuffle: bool,
    /// Where layers are computed [default: auto]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<DeviceChoice>,
    /// Number format of products [default: f32]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compute_dtype: Option<ComputeDtype>,
    /// Cap on heap memory, e.g. 2G [default: half of what is available]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ram: Option<String>,
    /// Threads for products and the optimizer [default: all cores]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) threads: Option<usize>,
    /// How the store is read and written [default: auto]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) io: Option<IoChoice>,
    /// Keep the input of every so-many-th layer and compute what lies between once more on the way back:
    /// less memory or disk for activations, more reads of weights [default: 1]
    #[arg(long, value_name = "K", value_parser = at_least_one)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) recompute_interval: Option<usize>,
    /// Commit every so many steps: what is new stays in RAM where that has room, and a crash takes back
    /// up to so many steps [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) commit_every: Option<u64>,
    /// What happens when loss, gradient or update is not finite, or the loss spikes: the run ends, or
    /// goes on without that step's rows [default: stop]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) guard: Option<GuardChoice>,
    /// A loss above its average by so many average deviations is one that the guard acts on
    #[arg(long, value_name = "DEVIATIONS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) loss_spike: Option<f64>,
    /// Lock a layer whose gradient has been this small beside its weights (RMS) for so many steps;
    /// FLOOR layers stay unlocked [default of FLOOR: half of them]
    #[arg(long, value_name = "THRESHOLD:STEPS[:FLOOR]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) auto_lock: Option<String>,
    /// Layers to lock before the run goes on, e.g. embed,0-11: read, never trained
    #[arg(long, value_name = "LAYERS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lock: Option<String>,
    /// Take a snapshot every so many steps or epochs, e.g. 500, 500steps, 1epochs
    #[arg(long, value_name = "N[steps|epochs]")]
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "text_or_number", default)]
    pub(crate) snapshot_every: Option<String>,
    /// Snapshots of --snapshot-every to keep; older ones go [default: 2]
    #[arg(long, value_name = "N", requires = "snapshot_every")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) keep_snapshots: Option<usize>,
    /// Data whose loss is measured during the run
    #[arg(long, value_name = "PATH", num_args = 1.., requires = "eval_every")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) eval_data: Vec<PathBuf>,
    /// Steps between two measurements
    #[arg(long, value_name = "N", requires = "eval_data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eval_every: Option<u64>,
    /// A text that the model continues during the run
    #[arg(long, value_name = "TEXT", requires = "sample_every")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sample_prompt: Option<String>,
    /// Steps between two samples
    #[arg(long, value_name = "N", requires = "sample_prompt")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sample_every: Option<u64>,
    /// One JSON object a step goes to this file
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) log: Option<PathBuf>,
    /// Address of the Prometheus endpoint, or `off` [default: 127.0.0.1:9464]
    #[arg(long, value_name = "ADDR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) metrics: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum UpdateChoice {
    Auto,
    /// While the backward sweep runs; clips by layer or not at all
    Fused,
    /// After the norm of the whole gradient is known
    Deferred,
    /// While the backward sweep runs, as if nothing had to be clipped; again with the factor if something
    /// has to
    Speculative,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum GuardChoice {
    /// End the run with code 7; nothing of the step is kept
    #[default]
    Stop,
    /// Pass the step's rows over; five in a row end the run
    Skip,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DeviceChoice {
    Auto,
    Cpu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ComputeDtype {
    F32,
    /// Operands rounded to bfloat16, sums in float32
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IoChoice {
    Auto,
    Mmap,
    Direct,
}

impl TrainOptions {
    /// The file's options, overlaid by the flags'.
    pub(crate) fn with_file(&self, file: Option<&Path>) -> anyhow::Result<TrainOptions> {
        let Some(path) = file else { return self.clone().checked() };
        let text = machine::read_text(path)?;
        let base: TrainOptions = toml::from_str(&text)
            .map_err(|e| Refused(format!("{}: {}", path.display(), e.to_string().trim())))?;
        base.check_numbers()?;
        self.check_numbers()?;
        self.over(&base)?.checked()
    }

    /// Layers from one kept input to the next.
    pub(crate) fn recompute_interval(&self) -> usize {
        self.recompute_interval.unwrap_or(1)
    }

    /// Steps from one commit to the next.
    pub(crate) fn commit_every(&self) -> u64 {
        self.commit_every.unwrap_or(1)
    }

    /// The options, if they make sense together.
    fn checked(self) -> anyhow::Result<TrainOptions> {
        self.check_numbers()?;
        if self.steps.is_some() && self.epochs.is_some() {
            return refuse("steps and epochs both say how long: give one of them");
        }
        if self.eval_data.is_empty() != self.eval_every.is_none() {
            return refuse("eval-data and eval-every go together");
        }
        if let Some(every) = &self.snapshot_every {
            parse_every(every)?;
        }
        if self.keep_snapshots.is_some() && self.snapshot_every.is_none() {
            return refuse("keep-snapshots goes together with snapshot-every");
        }
        if self.sample_prompt.is_none() != self.sample_every.is_none() {
            return refuse("sample-prompt and sample-every go together");
        }
        for (name, value) in [
            ("epochs", self.epochs),
            ("eval-every", self.eval_every),
            ("sample-every", self.sample_every),
            ("keep-snapshots", self.keep_snapshots.map(|n| n as u64)),
            ("threads", self.threads.map(|n| n as u64)),
            ("commit-every", self.commit_every),
            ("recompute-interval", self.recompute_interval.map(|n| n as u64)),
        ] {
            if value == Some(0) {
                return refuse(format!("--{name} must be at least 1"));
            }
        }
        Ok(self)
    }

    /// Options are merged as JSON, which has no such numbers.
    fn check_numbers(&self) -> anyhow::Result<()> {
        for (name, value) in [
            ("lr", self.lr),
            ("min-lr-ratio", self.min_lr_ratio),
            ("weight-decay", self.weight_decay),
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("eps", self.eps),
            ("loss-spike", self.loss_spike),
        ] {
            if let Some(value) = value.filter(|value| !value.is_finite()) {
                return refuse(format!("--{name} {value}: expected a finite number"));
            }
        }
        Ok(())
    }

    /// `base`, with everything that is set here taking its place.
    pub(crate) fn over(&self, base: &TrainOptions) -> anyhow::Result<TrainOptions> {
        let mut merged = serde_json::to_value(base).context("options as JSON")?;
        let mine = serde_json::to_value(self).context("options as JSON")?;
        if let (Some(merged), Some(mine)) = (merged.as_object_mut(), mine.as_object()) {
            // Two ways to say how long: the flag's way wins whole.
            if mine.contains_key("steps") || mine.contains_key("epochs") {
                merged.remove("steps");
                merged.remove("epochs");
            }
            merged.extend(mine.clone());
        }
        serde_json::from_value(merged).context("merge options")
    }

    /// The options as TOML.
    pub(crate) fn to_toml(&self) -> anyhow::Result<String> {
        toml::to_string(self).context("options as TOML")
    }
}

/// `THRESHOLD:STEPS` or `THRESHOLD:STEPS:FLOOR`; `layers` is how many the model has.
pub(crate) fn parse_auto_lock(text: &str, layers: usize) -> anyhow::Result<AutoLock> {
    let wrong = || {
        let what = "expected THRESHOLD:STEPS[:FLOOR], e.g. 1e-4:100 or 1e-4:100:8";
        Refused(format!("--auto-lock {text}: {what}"))
    };
    let parts: Vec<&str> = text.split(':').collect();
    let (threshold, steps, floor) = match parts[..] {
        [threshold, steps] => (threshold, steps, None),
        [threshold, steps, floor] => (threshold, steps, Some(floor)),
        _ => return Err(wrong().into()),
    };
    let threshold: f64 = threshold.parse().map_err(|_| wrong())?;
    let steps: u64 = steps.parse().map_err(|_| wrong())?;
    let floor = floor.map_or(Ok(layers.div_ceil(2)), str::parse).map_err(|_| wrong())?;
    if !(threshold.is_finite() && threshold > 0.0) || steps == 0 || floor == 0 {
        return Err(wrong().into());
    }
    Ok(AutoLock { threshold, steps, floor })
}

/// How often something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Every {
    Steps(u64),
    Epochs(u64),
}

/// `500`, `500steps` or `2epochs`.
pub(crate) fn parse_every(text: &str) -> anyhow::Result<Every> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let number = digits.parse().ok().filter(|number| *number > 0);
    match (number, text[digits.len()..].trim()) {
        (Some(number), "" | "step" | "steps") => Ok(Every::Steps(number)),
        (Some(number), "epoch" | "epochs") => Ok(Every::Epochs(number)),
        _ => refuse(format!(
            "--snapshot-every {text}: expected a number of steps or epochs, e.g. 500 or 1epochs"
        )),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "expected a number of layers, at least 1".into())
}

/// In a file `snapshot-every = 500` is as good as `"500"`.
fn text_or_number<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given {
        Number(u64),
        Text(String),
    }
    Ok(Some(match Given::deserialize(value)? {
        Given::Number(number) => number.to_string(),
        Given::Text(text) => text,
    }))
}

/// `global:X`, `layer:X` or `none`.
pub(crate) fn parse_clip(text: &str) -> anyhow::Result<Clip> {
    let wrong = || Refused(format!("--clip {text}: expected global:X, layer:X or none"));
    if text == "none" {
        return Ok(Clip::None);
    }
    let (kind, max) = text.split_once(':').ok_or_else(wrong)?;
    let max = f64::from_str(max).ok().filter(|m| m.is_finite() && *m > 0.0).ok_or_else(wrong)?;
    match kind {
        "global" => Ok(Clip::Global(max)),
        "layer" => Ok(Clip::Layer(max)),
        _ => Err(wrong().into()),
    }
}

/// `512`, `380M`, `2G`, `1.5G`: K, M, G and T are binary.
pub(crate) fn parse_size(text: &str) -> anyhow::Result<usize> {
    let wrong = || {
        refuse(format!(
            "`{text}` is no size: expected a number of bytes, or one with K, M, G or T (binary), e.g. 380M or 2G"
        ))
    };
    let number = text.trim_end_matches(['K', 'M', 'G', 'T']);
    let unit = match &text[number.len()..] {
        "" => 1u64,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => return wrong(),
    };
    match number.parse::<f64>() {
        Ok(value) if value >= 0.0 && value * (unit as f64) < (1u64 << 62) as f64 => {
            Ok((value * unit as f64) as usize)
        }
        _ => wrong(),
    }
}

/// A size of memory in the units that options have, rounded up: given again it is no less.
pub(crate) fn show_ram(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 {
        format!("{:.0}M", mib.ceil())
    } else {
        format!("{:.1}G", (mib / 102.4).ceil() / 10.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary() {
        for (text, bytes) in [("0", 0), ("12", 12), ("380M", 380 << 20), ("1.5G", 3 << 29)] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for wrong in ["", "G", "-1", "2GB", "1e99", "nan"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn automatic_locks_are_parsed_or_refused() {
        let rule = |threshold, steps, floor| AutoLock { threshold, steps, floor };
        assert_eq!(parse_auto_lock("1e-4:100", 9).unwrap(), rule(1e-4, 100, 5));
        assert_eq!(parse_auto_lock("0.5:1:3", 9).unwrap(), rule(0.5, 1, 3));
        for wrong in ["", "1", "0:1", "nan:1", "1:0", "1:1:0", "1:1:1:1", "x:1", "-1:1"] {
            assert!(parse_auto_lock(wrong, 9).is_err(), "{wrong}");
        }
    }

    #[test]
    fn intervals_are_steps_or_epochs() {
        for (text, every) in [
            ("500", Every::Steps(500)),
            ("3steps", Every::Steps(3)),
            ("1epochs", Every::Epochs(1)),
            ("2 epochs", Every::Epochs(2)),
        ] {
            assert_eq!(parse_every(text).unwrap(), every, "{text}");
        }
        for wrong in ["", "0", "steps", "1h", "-1", "1.5epochs"] {
            assert!(parse_every(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn clip_rules_are_parsed_or_refused() {
        assert_eq!(parse_clip("global:1.0").unwrap(), Clip::Global(1.0));
        assert_eq!(parse_clip("layer:0.5").unwrap(), Clip::Layer(0.5));
        assert_eq!(parse_clip("none").unwrap(), Clip::None);
        for wrong in ["", "global", "global:0", "global:-1", "global:nan", "row:1"] {
            assert!(parse_clip(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn options_that_make_no_sense_are_refused_from_flags_and_files() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("options.toml");
        for text in
            ["lr = nan", "eps = inf", "steps = 1\nepochs = 1", "eval-every = 3", "threads = 0"]
        {
            std::fs::write(&file, text).unwrap();
            assert!(TrainOptions::default().with_file(Some(&file)).is_err(), "{text}");
        }
        let flags = TrainOptions { lr: Some(f64::NAN), ..Default::default() };
        assert!(flags.with_file(None).is_err());
    }

    #[test]
    fn flags_win_over_the_file_and_steps_replace_epochs() {
        let file = TrainOptions { epochs: Some(3), lr: Some(0.1), ..Default::default() };
        let flags = TrainOptions { steps: Some(7), ..Default::default() };
        let merged = flags.over(&file).unwrap();
        assert_eq!((merged.steps, merged.epochs, merged.lr), (Some(7), None, Some(0.1)));
    }
}
