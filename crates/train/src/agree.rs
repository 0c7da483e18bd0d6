//! Steps that all ranks take together: all succeed, or all report the failure.

use isobar_collectives::Group;

use crate::error::{Error, Result};

/// Exchanges whether the step succeeded. Returns this rank's own error where it failed, and [`Error::OtherRank`] where
/// another did, so that no rank goes on to a collective that the failed one never joins.
pub(crate) fn agree<T>(group: &Group, mine: Result<T>) -> Result<T> {
    if group.size() == 1 {
        return mine;
    }
    let text = mine.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let all = group.all_gather_bytes(text.as_bytes())?;
    let value = mine?;
    match all.iter().position(|text| !text.is_empty()) {
        None => Ok(value),
        Some(rank) => Err(Error::OtherRank {
            rank,
            group: group.name().to_owned(),
            reason: String::from_utf8_lossy(&all[rank]).into_owned(),
        }),
    }
}
