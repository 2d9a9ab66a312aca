//! Lines for the terminal. Whoever reads them may be gone (`ftactor ... | head -1`): a run goes on
//! without them.

/// `println!` that does not panic when nobody reads.
macro_rules! outln {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stdout(), $($text)*);
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
        let _ = write!(std::io::stdout(), $($text)*);
    }};
}

pub(crate) use {errln, out, outln};
