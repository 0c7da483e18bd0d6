//! Paths of the test data.

use std::path::{Path, PathBuf};

/// Eight samples of the project's Darcy data set.
pub(crate) fn excerpt() -> PathBuf {
    root().join("tests/data/darcy_excerpt.h5")
}

/// A file of the larger data sets beside the project, where they are.
pub(crate) fn shared(name: &str) -> Option<PathBuf> {
    let path = root().join("../shared/data").join(name);
    path.exists().then_some(path)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
