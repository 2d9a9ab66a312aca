//! What this machine has: memory, cores; and what is opened on it: engine, device, threads.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use actors::FaultPlan;
use anyhow::Context;
use compute::{ComputeDtype, CpuDevice, Device};
use model::{Budget, ModelConfig, Step};
use rayon::{ThreadPool, ThreadPoolBuilder};
use store::{Io, Recovery, StoreError, direct_engine, injected_engine, mmap_engine};

use crate::exit::{Refused, refuse};
use crate::options::IoChoice;
use crate::out::errln;

/// How long a store that somebody else uses is waited for.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(10);

/// Threads of the store's engine: they wait for the disk, so more than cores pay.
const IO_THREADS: usize = 4;

/// Requests that the direct engine has at the kernel.
const IO_DEPTH: u32 = 32;

/// Bytes of memory that a new process could use, within its cgroup.
pub(crate) fn available_ram_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = meminfo_bytes(&meminfo, "MemAvailable").unwrap_or(4 << 30);
    cgroup_limit_bytes().map_or(available, |limit| limit.min(available))
}

fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.split(':').next() == Some(key))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The memory limit of this process's cgroup, version 2 or 1.
fn cgroup_limit_bytes() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().filter_map(limit_file).filter_map(|f| read_number(&f)).min()
}

/// The file with the limit of one line of `/proc/self/cgroup`.
fn limit_file(line: &str) -> Option<String> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let path = path.trim_end_matches('/');
    match controllers {
        "" => Some(format!("/sys/fs/cgroup{path}/memory.max")),
        "memory" => Some(format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes")),
        _ => None,
    }
}

fn read_number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Threads to compute with.
pub(crate) fn threads(wanted: Option<usize>) -> anyhow::Result<Arc<ThreadPool>> {
    const MOST: usize = 1024;
    if let Some(wanted) = wanted.filter(|wanted| !(1..=MOST).contains(wanted)) {
        return refuse(format!("--threads {wanted}: expected 1 to {MOST}"));
    }
    let pool = ThreadPoolBuilder::new()
        .num_threads(wanted.unwrap_or_else(cores))
        .thread_name(|i| format!("pool-{i}"))
        .build()
        .context("start compute threads")?;
    Ok(Arc::new(pool))
}

/// Text of a small file that somebody wrote; a device that never ends is no such file.
pub(crate) fn read_text(path: &Path) -> anyhow::Result<String> {
    const MOST_BYTES: u64 = 16 << 20;
    let unreadable = |why: String| Refused(format!("cannot read {}: {why}", path.display()));
    let mut text = String::new();
    let read = File::open(path).and_then(|f| f.take(MOST_BYTES + 1).read_to_string(&mut text));
    let bytes = read.map_err(|error| unreadable(error.to_string()))?;
    if bytes as u64 > MOST_BYTES {
        return Err(unreadable(String::from("it has more than 16 MiB")).into());
    }
    Ok(text)
}

/// The engine for a store whose live state has `state_bytes`: what fits into memory beside the
/// budget stays cached, the rest makes way at once.
pub(crate) fn engine(state_bytes: u64) -> Arc<dyn Io> {
    mmap_engine(IO_THREADS, is_cacheable(state_bytes))
}

/// Whether the page cache can hold what a store has, both slots, beside the budget.
pub(crate) fn is_cacheable(state_bytes: u64) -> bool {
    state_bytes < available_ram_bytes() / 2
}

/// The engine to train with: the page cache serves what fits into it, and only slows down what
/// does not.
pub(crate) fn training_engine(choice: Option<IoChoice>, state_bytes: u64) -> Arc<dyn Io> {
    let direct = match choice.unwrap_or(IoChoice::Auto) {
        IoChoice::Direct => true,
        IoChoice::Mmap => false,
        IoChoice::Auto => !is_cacheable(state_bytes),
    };
    if direct { direct_engine(IO_DEPTH) } else { engine(state_bytes) }
}

/// `engine`, which fails where the plan says so.
pub(crate) fn failing(engine: Arc<dyn Io>, faults: &FaultPlan) -> Arc<dyn Io> {
    match faults.inject() {
        Some(inject) => injected_engine(engine, inject),
        None => engine,
    }
}

/// Says what opening a store found; `step` is where it now is.
pub(crate) fn tell(recovery: &Recovery, step: Step) {
    for warning in &recovery.warnings {
        errln!("warning: {warning}");
    }
    let Some(cut) = &recovery.cut else { return };
    let (file, offset) = (cut.file.display(), cut.offset);
    if cut.rotten {
        errln!(
            "warning: the last record is damaged, and no copy of it is intact: {file} at byte \
             {offset}; the store is at step {step}, and a step committed after that is lost"
        );
    } else {
        errln!("note: the last record was torn and is left out: {file} at byte {offset}");
    }
}

/// Opens the CPU device, once per call.
pub(crate) fn cpu(
    config: &ModelConfig,
    dtype: ComputeDtype,
    budget: &Budget,
    threads: &Arc<ThreadPool>,
) -> Box<dyn Device> {
    Box::new(CpuDevice::new(config, dtype, budget.clone(), Arc::clone(threads)))
}

/// Bytes of all state files below a store's directory: how large the live state and its twin are.
pub(crate) fn store_bytes(dir: &Path) -> u64 {
    let entries = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten();
    let files = |slot: &Path| -> u64 {
        entries(slot).filter_map(|f| f.metadata().ok()).map(|m| m.len()).sum()
    };
    entries(&dir.join("layers"))
        .flat_map(|layer| ["a", "b"].map(|slot| files(&layer.path().join(slot))))
        .sum()
}

/// Whether `path`, which need not exist yet, is `dir` or below it.
pub(crate) fn is_inside(path: &Path, dir: &Path) -> bool {
    let here = Path::new(".");
    let there = path.ancestors().map(|p| if p.as_os_str().is_empty() { here } else { p });
    let nearest = there.into_iter().find_map(|p| p.canonicalize().ok());
    nearest.zip(dir.canonicalize().ok()).is_some_and(|(path, dir)| path.starts_with(dir))
}

/// Opens a store that somebody else may be using, whose lock is waited for: after a moment with a
/// word about it.
pub(crate) fn patiently<T>(
    open: impl Fn(Duration) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    const SILENT: Duration = Duration::from_secs(1);
    match open(SILENT) {
        Err(StoreError::InUse { dir }) => {
            errln!("waiting for {}, which another process uses ...", dir.display());
            open(LOCK_WAIT - SILENT)
        }
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_kernel_s_text() {
        let text = "MemTotal:       100 kB\nMemAvailable:      7 kB\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable"), Some(7 * 1024));
        assert_eq!(meminfo_bytes("MemAvailable: x", "MemAvailable"), None);
    }

    #[test]
    fn both_cgroup_versions_name_their_limit() {
        assert_eq!(limit_file("0::/a/b").unwrap(), "/sys/fs/cgroup/a/b/memory.max");
        let v1 = limit_file("9:memory:/a").unwrap();
        assert_eq!(v1, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes");
        assert_eq!(limit_file("1:cpu:/a"), None);
    }
}
