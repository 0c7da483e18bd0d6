//! Trajectories as PDEBench stores them (Takamoto et al., "PDEBench: An extensive benchmark for scientific machine learning", 2022),
//! in all its layouts but that of Darcy flow, which is the format `darcy`.
//!
//! It depends on no other format and on no run.

mod arrays;
mod writer;

use schemars::JsonSchema;
use serde::Deserialize;

use self::arrays::PdeBench;
use crate::Result;
use crate::arrays::{ArrayDataset, ArrayOptions};
use crate::dataset::Dataset;
use crate::register;
use crate::registry::{DataSource, Format};

register!(PdeBench);

/// Facts that files of PDEBench do not store.
#[derive(Debug, Clone, PartialEq, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PdeBenchOptions {
    /// Spatial dims whose first point follows the last: ["x"] for advection and Burgers' equation, ["x", "y"] for most flows in 2-D.
    periodic: Vec<String>,
    /// Number of steps of the segments into which each trajectory is split. The last frame of a segment is the first of the next;
    /// steps after the last complete segment are left out, with a warning.
    #[schemars(range(min = 1))]
    cut: Option<usize>,
}

impl Format for PdeBench {
    const NAME: &'static str = "pdebench";
    const SUMMARY: &'static str = "Trajectories of PDEBench: `tensor`, `density` and others, `velocity`, or a group with `data` for each sample.";
    const EXTENSIONS: &'static [&'static str] = &["h5", "hdf5"];
    type Options = PdeBenchOptions;

    fn open(source: &DataSource<'_>, options: PdeBenchOptions) -> Result<Box<dyn Dataset>> {
        source.check_extension()?;
        let PdeBenchOptions { periodic, cut } = options;
        let options = ArrayOptions { periodic, cut, ..ArrayOptions::default() };
        ArrayDataset::open(Box::new(Self::open(source.path(), source.variables())?), source, options)
    }
}
