//! Where log events go: the standard error stream, as text for people or JSON lines for machines.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Starts logging to the standard error stream, as JSON lines if `json`. `RUST_LOG` chooses what
/// (`warn` unless set); directives in it that do not parse are reported and passed over.
///
/// Returns whether this call installed the subscriber: a second call, or one after somebody
/// else's, changes nothing.
pub fn init_tracing(json: bool) -> bool {
    let filter =
        EnvFilter::builder().with_default_directive(LevelFilter::WARN.into()).from_env_lossy();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    if json { builder.json().try_init().is_ok() } else { builder.try_init().is_ok() }
}
