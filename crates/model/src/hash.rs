//! Hash values as the 16 hex digits that users see.

/// A 64-bit hash as 16 lower-case hex digits.
pub fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

/// The inverse of [`hex`]; `None` unless `text` is exactly 16 hex digits.
pub fn parse_hex(text: &str) -> Option<u64> {
    (text.len() == 16).then(|| u64::from_str_radix(text, 16).ok()).flatten()
}
