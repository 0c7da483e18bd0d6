//! `data.cache` and `data.host_memory`: what of a data set a rank keeps in memory, and how much of it.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Result};

/// Samples that a rank keeps in memory. Results do not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cache {
    /// None: batches are read in the background when they are needed, in every epoch again.
    None,
    /// This rank's windows that were read, as far as `host_memory` allows; the others are read in every epoch again.
    Window,
    /// All: this rank's windows of all samples are read at the start, whatever `host_memory` says.
    #[default]
    All,
}

/// A number of bytes, written as `"512MiB"`, `"2 GB"` or a plain number.
///
/// ```
/// use isobar_data::HostMemory;
///
/// let memory: HostMemory = "512MiB".parse()?;
/// assert_eq!((memory.bytes(), memory.to_string()), (512 << 20, "512MiB".to_owned()));
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostMemory(u64);

/// Units, the largest binary ones first: a size is written in the first that divides it.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

/// Description of a size in messages.
const EXPECTED: &str = "a number of bytes such as \"512MiB\" or \"2GiB\"";

impl HostMemory {
    /// Makes a size of a number of bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Returns the smallest size in whole mebibytes that holds this one, for a setting that is suggested.
    #[must_use]
    pub const fn rounded_up(self) -> Self {
        Self(self.0.div_ceil(1 << 20).saturating_mul(1 << 20))
    }
}

impl Default for HostMemory {
    fn default() -> Self {
        Self(1 << 30)
    }
}

impl fmt::Display for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let divides = |size: u64| self.0 > 0 && self.0.is_multiple_of(size);
        let (unit, size) = UNITS.into_iter().find(|(_, size)| divides(*size)).unwrap_or(("B", 1));
        write!(f, "{}{unit}", self.0 / size)
    }
}

impl FromStr for HostMemory {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = text.get(digits.len()..).unwrap_or_default();
        let size = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, size)| *size);
        let size = if unit.is_empty() { Some(1) } else { size };
        let count = digits.trim().parse::<u64>().ok();
        let bytes = size.zip(count).and_then(|(size, count)| count.checked_mul(size));
        bytes.map(Self).ok_or_else(|| Error::Config(format!("{text:?} is not a size: expected {EXPECTED}")))
    }
}

impl Serialize for HostMemory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for HostMemory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Size)
    }
}

struct Size;

impl Visitor<'_> for Size {
    type Value = HostMemory;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<HostMemory, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<HostMemory, E> {
        Ok(HostMemory(bytes))
    }

    fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<HostMemory, E> {
        u64::try_from(bytes)
            .map(HostMemory)
            .map_err(|_| E::custom(format!("{bytes} is not a size: expected {EXPECTED}")))
    }
}

impl JsonSchema for HostMemory {
    fn schema_name() -> Cow<'static, str> {
        "HostMemory".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string" })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("512MiB", 512 << 20, "512MiB")]
    #[case(" 2 gib ", 2 << 30, "2GiB")]
    #[case("3000000", 3_000_000, "3MB")]
    #[case("1025", 1025, "1025B")]
    #[case("0", 0, "0B")]
    fn sizes_are_read_and_written(#[case] text: &str, #[case] bytes: u64, #[case] written: &str) {
        let size: HostMemory = text.parse().unwrap();
        assert_eq!((size.bytes(), size.to_string().as_str()), (bytes, written));
        assert_eq!(size.to_string().parse::<HostMemory>().unwrap(), size);
        assert_eq!(serde_json::from_value::<HostMemory>(bytes.into()).unwrap(), size);
    }

    #[rstest]
    #[case("")]
    #[case("much")]
    #[case("1.5GiB")]
    #[case("-1")]
    #[case("99999999TiB")]
    fn what_is_no_size_is_refused(#[case] text: &str) {
        let error = text.parse::<HostMemory>().unwrap_err().to_string();
        assert!(error.contains("such as \"512MiB\""), "{error}");
        assert!(serde_json::from_value::<HostMemory>(text.into()).is_err());
        assert!(serde_json::from_value::<HostMemory>((-1).into()).is_err());
    }
}
