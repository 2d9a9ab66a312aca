//! The operating system's side: device numbers, `/sys` and `/proc`; elsewhere than on Linux the
//! answers are `None`.

use std::io;
use std::path::Path;

/// Where the kernel lists block devices by number.
pub(crate) const BLOCK_DEVICES: &str = "/sys/dev/block";

/// Major and minor number of a device; major 0 is a file system without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceNumber {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// The device of the file system that holds `path`; `None` where there are no such numbers.
pub(crate) fn device_holding(path: &Path) -> io::Result<Option<DeviceNumber>> {
    number_of(path, Which::Holding)
}

/// The device that the device node `path` stands for; `None` where there are no such numbers.
pub(crate) fn device_named(path: &Path) -> io::Result<Option<DeviceNumber>> {
    number_of(path, Which::Named)
}

/// The mounts as in proc(5), `/proc/pid/mountinfo`.
pub(crate) fn mount_table() -> Option<String> {
    std::fs::read_to_string("/proc/self/mountinfo").ok()
}

/// This process's memory as in proc(5), `/proc/pid/status`.
pub(crate) fn process_status() -> Option<String> {
    std::fs::read_to_string("/proc/self/status").ok()
}

/// This process's storage traffic as in proc(5), `/proc/pid/io`.
pub(crate) fn process_io() -> Option<String> {
    std::fs::read_to_string("/proc/self/io").ok()
}

#[derive(Clone, Copy)]
enum Which {
    Holding,
    Named,
}

#[cfg(target_os = "linux")]
fn number_of(path: &Path, which: Which) -> io::Result<Option<DeviceNumber>> {
    use std::os::linux::fs::MetadataExt;
    let metadata = std::fs::metadata(path)?;
    Ok(Some(decode(match which {
        Which::Holding => metadata.st_dev(),
        Which::Named => metadata.st_rdev(),
    })))
}

#[cfg(not(target_os = "linux"))]
fn number_of(path: &Path, _: Which) -> io::Result<Option<DeviceNumber>> {
    std::fs::metadata(path).map(|_| None)
}

/// The kernel's 64-bit `dev_t` as user space sees it (makedev(3)): 12 + 20 bits of major, 8 + 24
/// bits of minor, interleaved.
#[cfg(target_os = "linux")]
fn decode(device: u64) -> DeviceNumber {
    let major = ((device >> 8) & 0xfff) | ((device >> 32) & 0xffff_f000);
    let minor = (device & 0xff) | ((device >> 12) & 0xffff_ff00);
    DeviceNumber { major: major as u32, minor: minor as u32 }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn decode_takes_both_halves_of_both_numbers() {
        let expect = |device, major, minor| {
            assert_eq!(decode(device), DeviceNumber { major, minor }, "{device:#x}");
        };
        expect(0x0000_0000_0000_0801, 8, 1);
        expect(0x0000_0000_0010_03ff, 3, 0x1ff);
        expect(0xabcd_e123_4567_89ab, 0xabcd_e789, 0x1234_56ab);
    }
}
