//! Recorded counters, and a `/sys` made by hand.

use super::*;
use proptest::prelude::*;
use std::fs;

/// A 5.10 kernel's virtio disk: 17 fields.
const DISK: &str = "   48019    20845  7135746    13937    13838    60053 22454448   101989        \
                    0    12648   117886     3989       28 10305456     1924      254       34\n";
/// A kernel before 4.18: 11 fields.
const OLD_DISK: &str = "     100        0     2048       50       10        5      512       20     \
                        3      777       90\n";

fn parse(text: &str) -> Option<(u64, u64, u32)> {
    parse_stat(text, Instant::now()).map(|s| (s.read_bytes, s.written_bytes, s.busy_millis))
}

fn sample(millis: u64, read_bytes: u64, written_bytes: u64, busy_millis: u32) -> DeviceSample {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let taken_at = *START.get_or_init(Instant::now) + Duration::from_millis(millis);
    DeviceSample { taken_at, read_bytes, written_bytes, busy_millis }
}

#[test]
fn recorded_counters_are_understood() {
    assert_eq!(parse(DISK), Some((7_135_746 * 512, 22_454_448 * 512, 12_648)));
    assert_eq!(parse(OLD_DISK), Some((2048 * 512, 512 * 512, 777)));
}

#[test]
fn short_and_corrupt_counters_are_refused() {
    let ten_fields = OLD_DISK.trim().rsplit_once(' ').unwrap().0;
    for text in
        ["", "\n", ten_fields, &OLD_DISK.replace("2048", "x"), &OLD_DISK.replace("512", "-1")]
    {
        assert_eq!(parse(text), None, "{text}");
    }
    assert_eq!(parse(&OLD_DISK.replace("2048", "36028797018963968")), None, "bytes overflow");
    assert_eq!(parse(&OLD_DISK.replace("777", "99999999999999999999")), None);
}

#[test]
fn in_flight_is_not_needed_and_may_be_negative() {
    assert!(parse(&OLD_DISK.replace("     3 ", "    -3 ")).is_some());
}

#[test]
fn rates_are_differences_per_second() {
    let rates = sample(4_000, 9_000, 1_500, 1_100).rates_since(&sample(2_000, 1_000, 500, 100));
    let expect = DeviceRates {
        read_bytes_per_second: 4_000.0,
        written_bytes_per_second: 500.0,
        busy_ratio: 0.5,
    };
    assert_eq!(rates, Some(expect));
}

#[test]
fn busy_time_wraps_as_the_kernel_prints_it_and_never_exceeds_one() {
    let wrapped = sample(1_000, 0, 0, 200).rates_since(&sample(0, 0, 0, u32::MAX - 49));
    assert_eq!(wrapped.unwrap().busy_ratio, 0.25);
    let late_tick = sample(1_000, 0, 0, 1_004).rates_since(&sample(0, 0, 0, 0));
    assert_eq!(late_tick.unwrap().busy_ratio, 1.0);
}

#[test]
fn there_are_no_rates_over_no_time_or_backwards() {
    let now = sample(1_000, 10, 10, 10);
    assert_eq!(now.rates_since(&now), None);
    assert_eq!(now.rates_since(&sample(2_000, 10, 10, 10)), None);
    assert_eq!(now.rates_since(&sample(0, 11, 10, 10)), None);
    assert_eq!(now.rates_since(&sample(0, 10, 11, 10)), None);
}

/// `/sys` with disk `nvme0n1` (259:0), its partition 1 (259:1) and `dm-0` (253:0).
#[cfg(unix)]
fn sysfs() -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let by_number = root.path().join("dev/block");
    fs::create_dir_all(&by_number).unwrap();
    for (number, directory, stat) in [
        ("259:0", "devices/nvme0n1", DISK),
        ("259:1", "devices/nvme0n1/nvme0n1p1", OLD_DISK),
        ("253:0", "devices/dm-0", OLD_DISK),
    ] {
        let directory = root.path().join(directory);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("stat"), stat).unwrap();
        std::os::unix::fs::symlink(&directory, by_number.join(number)).unwrap();
    }
    fs::write(root.path().join("devices/nvme0n1/nvme0n1p1/partition"), "1\n").unwrap();
    (root, by_number)
}

#[cfg(unix)]
#[test]
fn a_partition_is_its_disk_and_device_mapper_is_itself() {
    let (_root, by_number) = sysfs();
    let check = |major, minor, name: &str, read_bytes| {
        let device = BlockDevice::numbered(&by_number, DeviceNumber { major, minor }).unwrap();
        assert_eq!(device.name(), name);
        assert_eq!(device.sample().unwrap().read_bytes, read_bytes);
    };
    check(259, 0, "nvme0n1", 7_135_746 * 512);
    check(259, 1, "nvme0n1", 7_135_746 * 512);
    check(253, 0, "dm-0", 2048 * 512);
}

#[cfg(unix)]
#[test]
fn unlisted_unplugged_and_damaged_devices_say_so() {
    let (root, by_number) = sysfs();
    let find = |minor| BlockDevice::numbered(&by_number, DeviceNumber { major: 259, minor });
    let missing = find(7).unwrap_err();
    assert!(matches!(missing, Unavailable::NotListed { .. }), "{missing}");
    assert!(missing.to_string().contains("259:7"), "{missing}");

    let device = find(0).unwrap();
    fs::write(root.path().join("devices/nvme0n1/stat"), "1 2 3\n").unwrap();
    let damaged = device.sample().unwrap_err().to_string();
    assert!(damaged.ends_with("does not hold block-device counters: `1 2 3`"), "{damaged}");
    fs::remove_file(root.path().join("devices/nvme0n1/stat")).unwrap();
    assert!(matches!(device.sample(), Err(SampleError::Read { .. })));
    assert!(matches!(find(0), Err(Unavailable::Counters(_))));
}

#[cfg(target_os = "linux")]
#[test]
fn a_path_without_a_disk_is_named_with_its_file_system() {
    let error = BlockDevice::behind(Path::new("/proc/self")).unwrap_err().to_string();
    assert!(error.starts_with("/proc/self is on a proc file system"), "{error}");
    let error = BlockDevice::behind(Path::new("/nowhere/store")).unwrap_err();
    assert!(matches!(error, Unavailable::Path { .. }), "{error}");
}

/// On a machine whose temporary directory is on a disk, that disk; elsewhere the reason.
#[cfg(target_os = "linux")]
#[test]
fn the_disk_behind_a_directory_is_found_or_explained() {
    let directory = tempfile::tempdir().unwrap();
    match BlockDevice::behind(directory.path()) {
        Ok(device) => assert!(Path::new("/sys/block").join(device.name()).exists()),
        Err(reason) => assert!(reason.to_string().contains("left out"), "{reason}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn any_text_is_survived(text in "([0-9]{1,21}|[ \n\t]|-|[a-z]|é){0,60}") {
        if let Some((read_bytes, written_bytes, _)) = parse(&text) {
            prop_assert!(read_bytes % SECTOR_BYTES == 0 && written_bytes % SECTOR_BYTES == 0);
        }
    }

    #[test]
    fn printed_counters_come_back(fields in proptest::collection::vec(0_u64..1 << 32, 11..18)) {
        let text = fields.iter().map(u64::to_string).collect::<Vec<_>>().join("    ");
        let expect = (fields[2] * 512, fields[6] * 512, fields[9] as u32);
        prop_assert_eq!(parse(&text), Some(expect));
    }
}
