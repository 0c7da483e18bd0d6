//! Calls that all ranks must make alike.

use isobar_collectives::Group;

use crate::{Error, Result};

/// Checks that all ranks of a group describe a call in the same words, and returns the same verdict on all of them.
///
/// All ranks of the group call.
///
/// # Errors
///
/// [`Error::Disagreement`] where descriptions differ; a failed exchange.
pub fn agree(group: &Group, operation: &'static str, description: &str) -> Result<()> {
    let all = group.all_gather_bytes_for(operation, description.as_bytes())?;
    let mut said: Vec<(String, Vec<String>)> = Vec::new();
    for (rank, bytes) in all.iter().enumerate() {
        let text = match bytes.as_slice() {
            [] => "another call".to_owned(),
            bytes => String::from_utf8_lossy(bytes).into_owned(),
        };
        match said.iter_mut().find(|(known, _)| *known == text) {
            Some((_, ranks)) => ranks.push(rank.to_string()),
            None => said.push((text, vec![rank.to_string()])),
        }
    }
    if said.len() <= 1 {
        return Ok(());
    }
    let words = said.iter().map(|(text, ranks)| {
        let (noun, verb) = if ranks.len() == 1 { ("rank", "asks") } else { ("ranks", "ask") };
        format!("{noun} {} {verb} for {text}", ranks.join(", "))
    });
    Err(Error::Disagreement { operation, differences: words.collect::<Vec<_>>().join("; ") })
}
