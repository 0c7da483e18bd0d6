//! A snapshot of environment variables, so that what reads them is a pure function.

use std::collections::BTreeMap;

/// Environment variables by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The variables of this process; bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn from_process() -> Self {
        let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
        Self(std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect())
    }

    /// The value of a variable; one that is set but empty counts as unset, as launchers and shells leave such.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    /// Returns whether a variable is set and not empty.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// All variables, empty ones too, by name in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        Self(variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

/// Returns whether a variable describes a launch, a SLURM job or Isobar's configuration. A program that
/// starts ranks of its own removes such variables, so that the ranks know of no launcher above it.
///
/// ```
/// assert!(isobar_launch::concerns_ranks("SLURM_PROCID"));
/// assert!(isobar_launch::concerns_ranks("WORLD_SIZE"));
/// assert!(!isobar_launch::concerns_ranks("PATH"));
/// ```
#[must_use]
pub fn concerns_ranks(name: &str) -> bool {
    const PREFIXES: [&str; 8] =
        ["OMPI_", "PMIX_", "PMI_", "SLURM_", "MPI_LOCAL", "ISOBAR_", "PHYSICSNEMO_", "I_MPI_"];
    const NAMES: [&str; 7] = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MODEL_PARALLEL_SIZE",
    ];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}
