//! Numbers and values formatted for people.

use std::borrow::Cow;

/// Bytes in the largest unit of which there is one.
///
/// ```
/// use isobar_manager::format_bytes;
///
/// assert_eq!([format_bytes(17), format_bytes(3 << 20)], ["17 B", "3.0 MiB"]);
/// ```
#[must_use]
pub fn format_bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut size = count as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < units.len() {
        size /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} B"),
        _ => format!("{size:.1} {}", units[unit]),
    }
}

/// Largest number of characters of a value in a message.
const SHOWN: usize = 100;

/// Shortens a long value for a message to its beginning and its length.
pub(crate) fn shorten(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(SHOWN) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}… ({} bytes)", &text[..end], text.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut() {
        assert_eq!(shorten(&"é".repeat(SHOWN)), "é".repeat(SHOWN));
        assert_eq!(shorten(&"é".repeat(50_000)), format!("{}… (100000 bytes)", "é".repeat(SHOWN)));
    }
}
