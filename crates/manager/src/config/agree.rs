//! Check that all ranks have the same configuration.

use std::collections::BTreeMap;

use isobar_collectives::Group;
use isobar_config::{ConfigError, Resolved};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// So many differing keys of a rank are told.
const TOLD: usize = 5;

/// Checks that all ranks of `group` have the same values as its first rank. Keys and tables in `own`, such as
/// `"distributed"`, each rank may set for itself.
///
/// Every rank of the group calls; all get the same verdict.
///
/// # Errors
///
/// [`Error::ConfigurationsDiffer`], with the ranks, keys and values.
///
/// ```
/// use isobar_manager::config::{self, LogConfig, Sources};
///
/// let resolved = config::load::<LogConfig>(&Sources::default())?;
/// config::agree(&resolved, &isobar_collectives::Group::single(), &[])?;
/// # Ok::<(), isobar_manager::Error>(())
/// ```
pub fn agree<T: Serialize + JsonSchema>(resolved: &Resolved<T>, group: &Group, own: &[&str]) -> Result<()> {
    let values = resolved.values(own)?;
    let first = group.broadcast_bytes(&to_json(&values)?, 0)?;
    let first: BTreeMap<String, String> = from_json(&first)?;
    let differing: Vec<String> = values
        .keys()
        .chain(first.keys().filter(|key| !values.contains_key(*key)))
        .filter(|key| values.get(*key) != first.get(*key))
        .map(|key| format!("{key} is {} where rank 0 has {}", shown(&values, key), shown(&first, key)))
        .collect();
    let mut differences = Vec::new();
    for (rank, theirs) in group.all_gather_bytes(&to_json(&differing)?)?.iter().enumerate() {
        let theirs: Vec<String> = from_json(theirs)?;
        if !theirs.is_empty() {
            let more = theirs.len().saturating_sub(TOLD);
            let rest = if more == 0 { String::new() } else { format!(" and {more} more") };
            differences.push(format!("on rank {rank} {}{rest}", theirs[..theirs.len() - more].join(", ")));
        }
    }
    match differences.is_empty() {
        true => Ok(()),
        false => Err(Error::ConfigurationsDiffer { differences: differences.join("; ") }),
    }
}

fn shown<'a>(values: &'a BTreeMap<String, String>, key: &str) -> &'a str {
    values.get(key).map_or("unset", String::as_str)
}

fn to_json(value: &impl Serialize) -> Result<Vec<u8>, ConfigError> {
    serde_json::to_vec(value).map_err(|error| ConfigError::Serialize { message: error.to_string() })
}

fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ConfigError> {
    serde_json::from_slice(bytes).map_err(|error| ConfigError::Serialize { message: error.to_string() })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use isobar_collectives::threads;
    use schemars::JsonSchema;
    use serde::Deserialize;

    use super::*;
    use crate::config::{self, Sources};

    #[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Run {
        seed: u64,
        path: Option<String>,
        inner: Inner,
    }

    #[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Inner {
        rate: f64,
    }

    /// The verdict of each rank, of which each sets other keys.
    fn verdicts(sets: [&'static [&'static str]; 3], own: &'static [&'static str]) -> Vec<String> {
        threads::run(3, Duration::from_secs(30), move |group| {
            let sources =
                sets[group.rank()].iter().fold(Sources::default(), |sources, set| sources.set(*set));
            let resolved = config::load::<Run>(&sources).unwrap();
            agree(&resolved, &group, own).map_or_else(|error| error.to_string(), |()| String::new())
        })
    }

    #[test]
    fn differences_are_named_on_all_ranks() {
        let verdicts = verdicts([&["seed=1"], &["seed=1", "path=a"], &["inner.rate=0.5"]], &[]);
        let want = "configurations differ: on rank 1 path is \"a\" where rank 0 has unset; on rank 2 inner.rate is 0.5 \
                    where rank 0 has 0.0, seed is 0 where rank 0 has 1; give all ranks the same files, environment and \
                    --set options";
        assert_eq!(verdicts, [want; 3]);
    }

    #[test]
    fn own_keys_may_differ() {
        let verdicts = verdicts([&["path=a"], &["path=b", "inner.rate=0.5"], &[]], &["path", "inner"]);
        assert_eq!(verdicts, [""; 3]);
    }
}
