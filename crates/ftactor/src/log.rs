//! The step log: one JSON object a step and a line for every event.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use actors::{Event, StepReport};
use anyhow::Context;
use serde_json::{Value, json};

/// An append-only JSONL file.
#[derive(Debug)]
pub(crate) struct StepLog {
    path: PathBuf,
    file: File,
    /// Something could not be written: that is told once.
    is_broken: bool,
}

impl StepLog {
    pub(crate) fn open(path: &Path) -> anyhow::Result<StepLog> {
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("open step log {}", path.display()))?;
        Ok(StepLog { path: path.to_path_buf(), file, is_broken: false })
    }

    /// Appends a line. A log that cannot be written is reported once and does not end the run.
    pub(crate) fn write(&mut self, line: &Value) {
        let Err(error) = writeln!(self.file, "{line}") else { return };
        if !std::mem::replace(&mut self.is_broken, true) {
            tracing::warn!(path = %self.path.display(), %error, "lines of the step log are lost");
        }
    }
}

/// A step as a log line.
pub(crate) fn step_line(report: &StepReport, rss_bytes: Option<u64>) -> Value {
    json!({
        "step": report.step,
        "committed": report.committed,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "clip_factor": report.clip_factor,
        "lr": report.learning_rate,
        "tokens": report.tokens,
        "tokens_total": report.tokens_total,
        "seconds": report.seconds,
        "tokens_per_second": report.tokens as f64 / report.seconds,
        "read_bytes": report.read_bytes,
        "written_bytes": report.written_bytes,
        "stall_seconds": {
            "storage": report.stall.storage,
            "compute": report.stall.compute,
            "optimizer": report.stall.optimizer,
            "network": report.stall.network,
        },
        "commit_wait_seconds": report.stall.commit,
        "drift": worst_drift(report),
        "phase_seconds": {
            "forward": report.phase.forward,
            "backward": report.phase.backward,
            "optimizer": report.phase.optimizer,
            "commit": report.phase.commit,
        },
        "ram_used_bytes": report.ram_used_bytes,
        "ram_peak_bytes": report.ram_peak_bytes,
        "rss_bytes": rss_bytes,
    })
}

/// How far rounding has led the worst layer away; see [`LayerStep::drift`](actors::LayerStep::drift).
fn worst_drift(report: &StepReport) -> Option<f64> {
    report.layers.iter().filter_map(|layer| layer.drift).reduce(f64::max)
}

/// An event as a log line.
pub(crate) fn event_line(event: &Event) -> Value {
    match event {
        Event::Started { step, last_step } => {
            json!({"event": "start", "step": step, "last_step": last_step})
        }
        Event::Aborted { step, attempt, reason, .. } => {
            json!({"event": "abort", "step": step, "attempt": attempt, "reason": reason})
        }
        Event::Redone { step, attempt, factor } => {
            json!({"event": "redo", "step": step, "attempt": attempt, "clip_factor": factor})
        }
        Event::Paused { step, reason } => {
            json!({"event": "pause", "step": step, "reason": reason})
        }
        Event::Resumed { step } => json!({"event": "resume", "step": step}),
        Event::Restarted { actor, reason } => {
            json!({"event": "restart", "actor": actor, "reason": reason})
        }
        Event::Skipped { step, reason } => {
            json!({"event": "skip", "step": step, "reason": reason})
        }
        Event::Locked { step, layers } => {
            json!({"event": "lock", "step": step, "layers": layers})
        }
        Event::Ended { step, end } => {
            json!({"event": "stop", "step": step, "end": format!("{end:?}").to_lowercase()})
        }
    }
}
