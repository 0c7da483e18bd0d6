//! Numbers formatted for people.

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
