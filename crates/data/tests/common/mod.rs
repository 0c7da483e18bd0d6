//! Paths of the test data, and sums over the globe.

pub(crate) mod s3;
pub(crate) mod server;
mod signature;

use std::path::{Path, PathBuf};

use isobar_data::{Dataset, area_weights};
use tch::{Kind, Tensor};

/// Eight samples of the project's Darcy data set.
pub(crate) fn excerpt() -> PathBuf {
    root().join("tests/data/darcy_excerpt.h5")
}

/// A file of the larger data sets beside the project, where they are; else notes that the test skips what needs it.
pub(crate) fn shared(name: &str) -> Option<PathBuf> {
    let path = root().join("../shared/data").join(name);
    if !path.exists() {
        isobar_harness::skip(&format!("no {} here", path.display()));
        return None;
    }
    Some(path)
}

/// Mean and deviation of values `[…, latitude, longitude]` by cell area, without those that are NaN; without latitudes, all count alike.
pub(crate) fn weighted_moments(data: &dyn Dataset, values: &Tensor) -> [f64; 2] {
    let (dim, weights) = area_weights(data.dims()).unwrap_or((0, vec![1.0]));
    assert_eq!(dim, 0);
    let values = values.to_kind(Kind::Double);
    let known = values.isnan().logical_not();
    let weights = (Tensor::from_slice(&weights).view([-1, 1]) * &known).to_kind(Kind::Double);
    let (values, total) = (values.nan_to_num(0.0, None, None), weights.sum(Kind::Double));
    let mean = (&values * &weights).sum(Kind::Double) / &total;
    let variance = ((&values - &mean).square() * &weights).sum(Kind::Double) / total;
    [mean, variance.sqrt()].map(|of| of.double_value(&[]))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
