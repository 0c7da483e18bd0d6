//! Samples as tensors.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::{DarcyFile, Error, Result};

/// Some samples: inputs and the targets that belong to them, both `[sample, 1, x, y]`.
#[derive(Debug)]
pub struct Batch {
    /// The coefficient, the network's input.
    pub nu: Tensor,
    /// The solution, what the network should predict.
    pub u: Tensor,
}

impl Batch {
    /// A second handle on the same tensors.
    pub fn shallow_clone(&self) -> Self {
        Self { nu: self.nu.shallow_clone(), u: self.u.shallow_clone() }
    }

    /// Samples, rows (x) and columns (y).
    ///
    /// # Errors
    /// When a field is not `[sample, channel, x, y]`, or the two differ in samples, rows or columns.
    pub fn sizes(&self) -> Result<(usize, usize, usize)> {
        let (nu, u) = (self.nu.size(), self.u.size());
        match (nu.as_slice(), u.as_slice()) {
            (&[samples, _, rows, cols], &[u_samples, _, u_rows, u_cols])
                if (samples, rows, cols) == (u_samples, u_rows, u_cols) =>
            {
                Ok((samples as usize, rows as usize, cols as usize))
            }
            _ => Err(Error::Invalid(format!(
                "a batch needs two fields [sample, channel, x, y] that differ in channels only, not {nu:?} and {u:?}"
            ))),
        }
    }

    /// The batch on a device, in a kind.
    ///
    /// # Errors
    /// When the device is missing or out of memory.
    pub fn to(&self, device: Device, kind: Kind) -> Result<Self> {
        let to = |tensor: &Tensor| tensor.f_to_device(device)?.f_to_kind(kind);
        Ok(Self { nu: to(&self.nu)?, u: to(&self.u)? })
    }
}

/// A part of a data set that fits in memory, loaded once.
///
/// ```
/// use isobar_data::{DarcyFile, InMemory, Sampler, part};
///
/// let file = DarcyFile::open("../../tests/data/darcy_excerpt.h5")?;
/// let train = InMemory::load(&file, 0..6)?;
/// let sampler = Sampler::new(train.len(), 4, 0, true)?;
/// let (rank, size) = (0, 1);
/// for batch in sampler.epoch(0) {
///     let local = train.batch(part(&batch, rank, size))?;
///     assert_eq!(local.u.size(), [batch.len() as i64, 1, 64, 64]);
/// }
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Debug)]
pub struct InMemory {
    samples: Batch,
    len: usize,
}

impl InMemory {
    /// Whole samples of a file, on the CPU.
    ///
    /// # Errors
    /// As [`DarcyFile::read`].
    pub fn load(file: &DarcyFile, samples: Range<usize>) -> Result<Self> {
        let samples: Vec<usize> = samples.collect();
        Self::new(file.read(&samples, 0..file.rows(), 0..file.cols())?)
    }

    /// From tensors, for data of another source or on another device.
    ///
    /// # Errors
    /// When the fields do not belong together ([`Batch::sizes`]).
    pub fn new(samples: Batch) -> Result<Self> {
        let (len, _, _) = samples.sizes()?;
        Ok(Self { samples, len })
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All samples.
    pub fn samples(&self) -> &Batch {
        &self.samples
    }

    /// The samples of these numbers, counted from the start of what was loaded, in the order asked for. An empty list
    /// gives tensors of no samples.
    ///
    /// # Errors
    /// When a number is out of range.
    pub fn batch(&self, samples: &[usize]) -> Result<Batch> {
        if let Some(sample) = samples.iter().find(|&&sample| sample >= self.len) {
            return Err(Error::OutOfRange {
                what: "sample".to_owned(),
                asked: sample.to_string(),
                available: self.len,
            });
        }
        let index: Vec<i64> = samples.iter().map(|&sample| sample as i64).collect();
        let index = Tensor::f_from_slice(&index)?;
        let select = |field: &Tensor| field.f_index_select(0, &index.f_to_device(field.device())?);
        Ok(Batch { nu: select(&self.samples.nu)?, u: select(&self.samples.u)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros(size: [i64; 4]) -> Tensor {
        Tensor::zeros(size, (Kind::Float, Device::Cpu))
    }

    #[test]
    fn samples_come_in_the_order_asked_for() {
        let nu = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([3, 1, 1, 2]);
        let data = InMemory::new(Batch { u: &nu + 100.0, nu }).unwrap();
        let batch = data.batch(&[2, 0, 2]).unwrap();
        assert_eq!(Vec::<f32>::try_from(batch.nu.flatten(0, -1)).unwrap(), [4.0, 5.0, 0.0, 1.0, 4.0, 5.0]);
        assert_eq!(
            Vec::<f32>::try_from(batch.u.select(1, 0).select(1, 0).select(1, 0)).unwrap(),
            [104.0, 100.0, 104.0]
        );
        assert_eq!(data.batch(&[]).unwrap().nu.size(), [0, 1, 1, 2]);
        assert_eq!(data.batch(&[0, 3]).unwrap_err().to_string(), "sample 3 is out of range: there are 3");
    }

    #[test]
    fn fields_that_do_not_belong_together_are_refused() {
        let error = InMemory::new(Batch { nu: zeros([2, 1, 4, 4]), u: zeros([3, 1, 4, 4]) }).unwrap_err();
        assert!(error.to_string().contains("[2, 1, 4, 4] and [3, 1, 4, 4]"), "{error}");
    }

    #[test]
    fn batches_change_kind() {
        let batch = Batch { nu: zeros([1, 1, 2, 2]), u: zeros([1, 2, 2, 2]) };
        assert_eq!(batch.to(Device::Cpu, Kind::Double).unwrap().u.kind(), Kind::Double);
    }
}
