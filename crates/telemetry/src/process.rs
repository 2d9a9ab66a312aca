//! What this process holds in memory and has moved to and from storage, by the kernel's account.

use crate::os;

/// This process's memory at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    rss_bytes: Option<u64>,
    peak_rss_bytes: Option<u64>,
    anonymous_bytes: Option<u64>,
}

impl ProcessMemory {
    /// Reads the kernel's account now; every value is `None` where there is none.
    pub fn sample() -> ProcessMemory {
        os::process_status().as_deref().map_or_else(ProcessMemory::default, ProcessMemory::parse)
    }

    /// Resident memory: anonymous, file-backed (maps) and shared.
    pub fn rss_bytes(&self) -> Option<u64> {
        self.rss_bytes
    }

    /// The largest resident memory since the process started.
    pub fn peak_rss_bytes(&self) -> Option<u64> {
        self.peak_rss_bytes
    }

    /// Resident memory that no file backs: heap and stacks, without maps of the store.
    pub fn anonymous_bytes(&self) -> Option<u64> {
        self.anonymous_bytes
    }

    fn parse(status: &str) -> ProcessMemory {
        ProcessMemory {
            rss_bytes: field_kib(status, "VmRSS"),
            peak_rss_bytes: field_kib(status, "VmHWM"),
            anonymous_bytes: field_kib(status, "RssAnon"),
        }
    }
}

/// Bytes that this process made the storage layer move (not those served by the page cache).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessIo {
    /// Bytes fetched from storage.
    pub read_bytes: u64,
    /// Bytes sent, or due to be sent, to storage.
    pub written_bytes: u64,
}

impl ProcessIo {
    /// Reads the kernel's account now; `None` where there is none.
    pub fn sample() -> Option<ProcessIo> {
        os::process_io().as_deref().and_then(ProcessIo::parse)
    }

    fn parse(io: &str) -> Option<ProcessIo> {
        let number = |name| field(io, name)?.parse().ok();
        Some(ProcessIo { read_bytes: number("read_bytes")?, written_bytes: number("write_bytes")? })
    }
}

/// The value of the line `name: value`, trimmed.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value.trim())
}

/// A field in the kernel's "kB", which are KiB, in bytes.
fn field_kib(text: &str, name: &str) -> Option<u64> {
    let number = field(text, name)?.strip_suffix("kB")?.trim_end();
    number.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STATUS: &str = "Name:\tftactor\nVmPeak:\t  999 kB\nVmHWM:\t    2304 kB\n\
                          VmRSS:\t    2272 kB\nRssAnon:\t     152 kB\nThreads:\t2\n";
    const IO: &str = "rchar: 6976\nwchar: 1\nread_bytes: 4096\nwrite_bytes: 8192\n\
                      cancelled_write_bytes: 7\n";

    #[test]
    fn recorded_files_are_understood() {
        let memory = ProcessMemory::parse(STATUS);
        assert_eq!(memory.rss_bytes(), Some(2272 * 1024));
        assert_eq!(memory.peak_rss_bytes(), Some(2304 * 1024));
        assert_eq!(memory.anonymous_bytes(), Some(152 * 1024));
        let expect = ProcessIo { read_bytes: 4096, written_bytes: 8192 };
        assert_eq!(ProcessIo::parse(IO), Some(expect));
    }

    #[test]
    fn missing_and_damaged_fields_are_none() {
        for status in ["", "VmRSS:", "VmRSS: kB", "VmRSS: 1", "VmRSS: -1 kB", "VmRSS 1 kB"] {
            assert_eq!(ProcessMemory::parse(status), ProcessMemory::default(), "{status}");
        }
        assert_eq!(ProcessMemory::parse("VmRSS: 18446744073709551615 kB").rss_bytes(), None);
        for io in ["", "read_bytes: 1", "read_bytes: 1\nwrite_bytes: x"] {
            assert_eq!(ProcessIo::parse(io), None, "{io}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_is_seen_to_grow() {
        let before = ProcessMemory::sample().anonymous_bytes().unwrap();
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = ProcessMemory::sample();
        assert!(after.anonymous_bytes().unwrap() >= before + (60 << 20));
        assert!(after.peak_rss_bytes() >= after.rss_bytes());
        drop(block);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn any_text_is_survived(text in "((VmRSS|read_bytes|write_bytes|[a-z]{0,5})[: \n\t0-9kB-]{0,9}){0,9}") {
            let _ = ProcessIo::parse(&text);
            let rss_bytes = ProcessMemory::parse(&text).rss_bytes();
            prop_assert!(rss_bytes.is_none_or(|bytes| bytes % 1024 == 0));
        }
    }
}
