//! Comparison of the samples that ranks have read, each by itself.

use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;

use isobar_data::InMemory;
use serde::{Deserialize, Serialize};
use tch::{Device, TchError, Tensor};

use crate::error::{Context, Result};

/// A rank's samples as other ranks compare them: a description, its window, and a digest of the values in their order.
///
/// ```
/// use isobar_data::InMemory;
/// use isobar_train::SampleFingerprint;
/// use tch::Tensor;
///
/// let samples = |values: [f32; 4]| {
///     let field = Tensor::f_from_slice(&values)?.f_view([2, 1, 2])?;
///     SampleFingerprint::new("2 samples".into(), &[0..2], &[&InMemory::pairs(field.shallow_clone(), field)?])
///         .map_err(isobar_train::BoxError::from)
/// };
/// let all = [samples([1.0, 2.0, 3.0, 4.0])?, samples([3.0, 4.0, 1.0, 2.0])?];
/// let (rank, other, difference) = SampleFingerprint::difference(&all).ok_or("none found")?;
/// assert_eq!((rank, other, difference.as_str()), (0, 1, "2 samples on both, but of other values"));
/// # Ok::<(), isobar_train::BoxError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleFingerprint {
    description: String,
    window: Vec<Range<usize>>,
    digest: u64,
}

impl SampleFingerprint {
    /// Computes the fingerprint of a rank's window of samples. Does not communicate.
    ///
    /// # Errors
    ///
    /// libtorch cannot copy the values to the host.
    pub fn new(description: String, window: &[Range<usize>], data: &[&InMemory]) -> Result<Self> {
        let mut hasher = DefaultHasher::new();
        for field in data.iter().flat_map(|data| [data.inputs(), data.targets()]) {
            write(&mut hasher, field).context(|| "a digest of the samples".to_owned())?;
        }
        Ok(Self { description, window: window.to_vec(), digest: hasher.finish() })
    }

    /// Makes a fingerprint of values that are the same for all ranks, such as a digest of the data set. Does not communicate.
    pub fn of_digest(description: String, digest: u64) -> Self {
        Self { description, window: Vec::new(), digest }
    }

    /// Returns the first two ranks whose samples differ, and the difference in words: the same on every rank. Ranks with other
    /// windows have other values, so only their descriptions are compared.
    pub fn difference(all: &[Self]) -> Option<(usize, usize, String)> {
        let pairs = (0..all.len()).flat_map(|other| (0..other).map(move |rank| (rank, other)));
        let (rank, other) = { pairs }.find(|&(rank, other)| !all[rank].agrees_with(&all[other]))?;
        let (first, second) = (&all[rank].description, &all[other].description);
        let words = match first == second {
            true => format!("{first} on both, but of other values"),
            false => format!("{first} on the first, {second} on the second"),
        };
        Some((rank, other, words))
    }

    fn agrees_with(&self, other: &Self) -> bool {
        other.description == self.description && (other.window != self.window || other.digest == self.digest)
    }
}

/// Hashes the values, a sample at a time.
fn write(hasher: &mut DefaultHasher, field: &Tensor) -> std::result::Result<(), TchError> {
    for row in 0..field.size().first().copied().unwrap_or(0) {
        let row = field.f_select(0, row)?.f_to_device(Device::Cpu)?.f_contiguous()?;
        let mut bytes = vec![0; row.numel() * row.kind().elt_size_in_bytes()];
        row.f_copy_data_u8(&mut bytes, row.numel())?;
        hasher.write(&bytes);
    }
    Ok(())
}
