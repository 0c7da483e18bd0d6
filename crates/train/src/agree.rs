//! Steps that all ranks take together: all succeed, or all report the failure.

use isobar_collectives::Group;
use serde_json::Value;

use crate::difference::{Shown, differences};
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

/// Compares settings that all ranks must share, before any communication that depends on them. Every rank of the group calls, and
/// gets [`Error::SettingsDiffer`] with the first rank and the first key that differ from those of rank 0.
pub(crate) fn same_settings(group: &Group, own: &Value) -> Result<()> {
    if group.size() == 1 {
        return Ok(());
    }
    let failed = |error: serde_json::Error| Error::invalid("the settings of a rank", error, "JSON");
    let all = group.all_gather_bytes(&serde_json::to_vec(own).map_err(failed)?)?;
    let all = all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(failed));
    let all = all.collect::<Result<Vec<Value>>>()?;
    let first = |(rank, other)| Some((rank, differences(&all[0], other).into_iter().next()?));
    match all.iter().enumerate().find_map(first) {
        None => Ok(()),
        Some((rank, difference)) => Err(Error::SettingsDiffer {
            group: group.name().to_owned(),
            rank,
            expected: Shown(&difference.saved).to_string(),
            found: Shown(&difference.now).to_string(),
            key: difference.key,
        }),
    }
}
