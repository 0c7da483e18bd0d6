//! Meshes of a run's ranks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Ranks along each axis, the last axis fastest; written `4` or `2x2`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Mesh(Vec<usize>);

/// More ranks than this on one machine are a slip of the pen.
const MAX_RANKS: usize = 256;

impl Mesh {
    /// One axis of `ranks` ranks.
    pub(crate) fn line(ranks: usize) -> Self {
        Self(vec![ranks])
    }

    /// Ranks along each axis.
    pub(crate) fn axes(&self) -> &[usize] {
        &self.0
    }

    /// Number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.0.iter().product()
    }

    /// Returns the coordinates of `rank`.
    pub(crate) fn coordinates(&self, rank: usize) -> Vec<usize> {
        let mut left = rank;
        let mut coordinates: Vec<usize> = self
            .0
            .iter()
            .rev()
            .map(|&extent| {
                let at = left % extent;
                left /= extent;
                at
            })
            .collect();
        coordinates.reverse();
        coordinates
    }
}

impl FromStr for Mesh {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no arrangement of ranks; expected a number such as 4, or 2x2");
        let axes = text.split('x').map(|axis| axis.parse().map_err(|_| wrong()));
        let axes: Vec<usize> = axes.collect::<Result<_, _>>()?;
        match axes.iter().try_fold(1_usize, |ranks, &axis| ranks.checked_mul(axis)) {
            Some(1..=MAX_RANKS) => Ok(Self(axes)),
            Some(0) => Err(wrong()),
            _ => Err(format!("`{text}` are more than {MAX_RANKS} ranks")),
        }
    }
}

impl TryFrom<String> for Mesh {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Mesh> for String {
    fn from(mesh: Mesh) -> Self {
        mesh.to_string()
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&axes.join("x"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_count_the_last_axis_fastest() {
        let mesh: Mesh = "2x3".parse().unwrap();
        assert_eq!(
            (0..6).map(|rank| mesh.coordinates(rank)).collect::<Vec<_>>(),
            [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
        );
        assert_eq!(mesh.to_string(), "2x3");
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "x", "0", "2x", "-1", "two", "2x0", "9999999999x9999999999"] {
            assert!(text.parse::<Mesh>().is_err(), "{text}");
        }
    }
}
