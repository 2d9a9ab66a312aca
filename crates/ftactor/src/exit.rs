//! From errors to messages and exit codes.

use std::process::ExitCode;

use crate::out::errln;
use crate::supervise;
use actors::Failure;
use convert::ConvertError;
use model::BudgetError;
use store::StoreError;

pub(crate) const SELFTEST_FAILED: u8 = 1;
pub(crate) const USAGE: u8 = 2;
pub(crate) const DAMAGED: u8 = 3;
pub(crate) const NOT_ENOUGH: u8 = 4;
pub(crate) const FAILED: u8 = 5;
pub(crate) const IN_USE: u8 = 6;
pub(crate) const GUARD: u8 = 7;
pub(crate) const INTERRUPTED: u8 = 130;
/// From a process to its supervisor only: all was done, but what it had to say was lost.
pub(crate) const UNSAID: u8 = 74;

/// What to do about damage, wherever it was found.
pub(crate) const DAMAGE_REMEDY: &str = "`ftactor verify` lists all damage, and what to go back to for it; \
    else put the named file back from a copy of the store, or import the model again";

/// Something the user asked for that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Refused(pub(crate) String);

/// A [`Refused`] as an `anyhow::Error`.
pub(crate) fn refuse<T>(message: impl Into<String>) -> anyhow::Result<T> {
    Err(Refused(message.into()).into())
}

/// Prints clap's message; help and version are no failure.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    // A closed terminal is nobody to tell.
    let _ = error.print();
    if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
}

/// Everything was done but for the saying of it.
pub(crate) fn output_lost() -> ExitCode {
    errln!("error: standard output cannot be written (is its disk full?): some of it is lost");
    // Not worth a restart.
    ExitCode::from(if supervise::is_child() { UNSAID } else { FAILED })
}

/// Prints an error with its causes, once each.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    errln!("error: {text}");
    let code = code(error);
    if code == DAMAGED {
        errln!("{DAMAGE_REMEDY}");
    }
    ExitCode::from(code)
}

/// The documented exit code of an error: that of the first cause that has one.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(code_of).unwrap_or(USAGE)
}

fn code_of(cause: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if let Some(error) = cause.downcast_ref::<StoreError>() {
        return Some(store_code(error));
    }
    if let Some(error) = cause.downcast_ref::<ConvertError>() {
        return Some(convert_code(error));
    }
    if let Some(error) = cause.downcast_ref::<data::DataError>() {
        return Some(data_code(error.kind()));
    }
    if let Some(error) = cause.downcast_ref::<data::RowsError>() {
        return Some(data_code(error.kind()));
    }
    if let Some(error) = cause.downcast_ref::<data::TokenizerError>() {
        return Some(data_code(error.kind()));
    }
    if let Some(error) = cause.downcast_ref::<Failure>() {
        return Some(failure_code(error));
    }
    if cause.is::<BudgetError>() {
        return Some(NOT_ENOUGH);
    }
    if cause.is::<Refused>() {
        return Some(USAGE);
    }
    cause.downcast_ref::<std::io::Error>().map(|_| FAILED)
}

fn store_code(error: &StoreError) -> u8 {
    match error {
        StoreError::Invalid(_) => USAGE,
        StoreError::Damaged { .. } | StoreError::Poisoned { damaged: true, .. } => DAMAGED,
        StoreError::NoSpace { .. } | StoreError::Memory(_) => NOT_ENOUGH,
        StoreError::InUse { .. } => IN_USE,
        StoreError::Io { .. } | StoreError::Poisoned { .. } => FAILED,
    }
}

fn convert_code(error: &ConvertError) -> u8 {
    match error.kind() {
        convert::ErrorKind::Invalid => USAGE,
        convert::ErrorKind::Damaged => DAMAGED,
        convert::ErrorKind::Space => NOT_ENOUGH,
        convert::ErrorKind::InUse => IN_USE,
        convert::ErrorKind::Io => FAILED,
    }
}

fn data_code(kind: data::ErrorKind) -> u8 {
    match kind {
        data::ErrorKind::Invalid => USAGE,
        data::ErrorKind::Damaged => DAMAGED,
        data::ErrorKind::NoSpace => NOT_ENOUGH,
        data::ErrorKind::Io => FAILED,
    }
}

/// A failure that ended a run.
pub(crate) fn failure_code(failure: &Failure) -> u8 {
    match failure {
        Failure::Store(error) => store_code(error),
        Failure::Data(error) => data_code(error.kind()),
        Failure::AllLocked => USAGE,
        Failure::Memory(_) => NOT_ENOUGH,
        Failure::Logits
        | Failure::NotFinite { .. }
        | Failure::Spike { .. }
        | Failure::Update { .. } => GUARD,
        Failure::Device(_) | Failure::Lost | Failure::Dead { .. } | Failure::Stuck { .. } => FAILED,
    }
}
