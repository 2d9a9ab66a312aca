//! Lines for the terminal. Whoever reads them may be gone (`ftactor ... | head -1`): a run goes on
//! without them. Output that a full disk swallowed is remembered, and told at the end.

use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static LOST: AtomicBool = AtomicBool::new(false);

/// Takes the result of a write to standard output.
pub(crate) fn written(result: io::Result<()>) {
    if result.is_err_and(|error| error.kind() != ErrorKind::BrokenPipe) {
        LOST.store(true, Ordering::Relaxed);
    }
}

/// Whether any output was lost so far.
pub(crate) fn is_lost() -> bool {
    written(io::stdout().flush());
    LOST.load(Ordering::Relaxed)
}

/// `println!` that does not panic when nobody reads.
macro_rules! outln {
    ($($text:tt)*) => {{
        use std::io::Write;
        $crate::out::written(writeln!(std::io::stdout(), $($text)*));
    }};
}

/// `eprintln!` that does not panic when nobody reads.
macro_rules! errln {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

/// `print!` that does not panic when nobody reads.
macro_rules! out {
    ($($text:tt)*) => {{
        use std::io::Write;
        $crate::out::written(write!(std::io::stdout(), $($text)*));
    }};
}

pub(crate) use {errln, out, outln};
