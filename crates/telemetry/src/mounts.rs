//! Which mount a path lies under, from the kernel's mount table.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What is mounted: the file system's type and the device or name it was mounted from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) filesystem: String,
    pub(crate) source: PathBuf,
}

/// The mount in `table` (proc(5), `/proc/pid/mountinfo`) that holds the absolute `path`: the
/// deepest mount point above it, the last of several on the same point. Lines that do not parse
/// are passed over.
pub(crate) fn mount_holding(table: &str, path: &Path) -> Option<Mount> {
    table
        .lines()
        .filter_map(parse_line)
        .filter(|(point, _)| path.starts_with(point))
        .max_by_key(|(point, _)| point.components().count())
        .map(|(_, mount)| mount)
}

/// `id parent major:minor root point options [optional...] - type source super-options`.
fn parse_line(line: &str) -> Option<(PathBuf, Mount)> {
    let (left, right) = line.split_once(" - ")?;
    let point = unescape(left.split(' ').nth(4)?);
    let mut right = right.split(' ');
    let filesystem = right.next()?.to_owned();
    let source = PathBuf::from(unescape(right.next()?));
    Some((PathBuf::from(point), Mount { filesystem, source }))
}

/// Undoes the kernel's `\ooo` (three octal digits) for blanks and backslashes.
fn unescape(field: &str) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let code = if first == b'\\' { tail.get(..3).and_then(octal) } else { None };
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned().into()
}

fn octal(digits: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(digits).ok()?;
    if text.starts_with('+') { None } else { u8::from_str_radix(text, 8).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TABLE: &str = "\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
60 27 0:41 /sub /data rw,noatime shared:3 master:1 - btrfs /dev/nvme0n1p2 rw,subvol=/sub
61 27 0:50 / /data/my\\040disk rw - tmpfs tmp\\134fs rw
62 27 0:51 / /over rw - overlay overlay rw,lowerdir=/a - b
this line is damaged
63 27 0:52 / /over rw - ext4 /dev/sdb1 rw
";

    fn check(path: &str, filesystem: &str, source: &str) {
        let expect = Mount { filesystem: filesystem.into(), source: source.into() };
        assert_eq!(mount_holding(TABLE, Path::new(path)), Some(expect), "{path}");
    }

    #[test]
    fn the_deepest_and_last_mount_holds_a_path() {
        check("/", "ext4", "/dev/vda");
        check("/home/x", "ext4", "/dev/vda");
        check("/database", "ext4", "/dev/vda");
        check("/data/store", "btrfs", "/dev/nvme0n1p2");
        check("/data/my disk/store", "tmpfs", "tmp\\fs");
        check("/over/store", "ext4", "/dev/sdb1");
    }

    #[test]
    fn no_mount_holds_a_relative_path_or_an_empty_table() {
        assert_eq!(mount_holding(TABLE, Path::new("store")), None);
        assert_eq!(mount_holding("", Path::new("/")), None);
    }

    #[test]
    fn unescape_leaves_what_is_no_escape() {
        for (field, expect) in
            [("a\\040b", "a b"), ("\\04", "\\04"), ("\\999", "\\999"), ("\\+12", "\\+12"), ("", "")]
        {
            assert_eq!(unescape(field), OsString::from(expect), "{field}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn any_table_is_survived(table in "([ -~\n\\\\]|é| - |/){0,200}", path in "/[a-z/]{0,9}") {
            if let Some(mount) = mount_holding(&table, Path::new(&path)) {
                prop_assert!(table.contains(&mount.filesystem));
            }
        }
    }
}
