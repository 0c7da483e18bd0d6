//! Steps that all ranks take together: all succeed, or all report the failure.

use isobar_collectives::Group;

use crate::error::{Error, Result};

/// First letter of a failed rank's message: whether its files are the cause.
const FILES: char = 'f';
const OTHER: char = 'o';

/// Exchanges whether the step succeeded. Returns this rank's own error where it failed, and [`Error::OtherRank`] where
/// another did, or [`Error::OtherRankFile`] where that could not read or write its files, so that no rank goes on to a
/// collective that the failed one never joins.
pub(crate) fn agree<T>(group: &Group, mine: Result<T>) -> Result<T> {
    if group.size() == 1 {
        return mine;
    }
    let word = |error: &Error| format!("{}{error}", if error.is_of_files() { FILES } else { OTHER });
    let text = mine.as_ref().err().map(word).unwrap_or_default();
    let all = group.all_gather_bytes(text.as_bytes())?;
    let value = mine?;
    let Some((rank, text)) = all.iter().enumerate().find(|(_, text)| !text.is_empty()) else {
        return Ok(value);
    };
    let text = String::from_utf8_lossy(text);
    let (group, reason) = (group.name().to_owned(), text[1..].to_owned());
    match text.starts_with(FILES) {
        true => Err(Error::OtherRankFile { rank, group, reason }),
        false => Err(Error::OtherRank { rank, group, reason }),
    }
}
