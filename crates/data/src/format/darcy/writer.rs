//! Writes Darcy flow in PDEBench's layout.

use std::path::Path;

use hdf5_metno::{Dataset, File};
use ndarray::{ArrayView3, ArrayView4, s};

use super::file::{BETA, NU, TENSOR, X, Y};
use crate::hdf5::atomic_file::AtomicFile;
use crate::hdf5::write_attribute;
use crate::{Error, Result};

/// Writes a data set that [`DarcyFile`](crate::DarcyFile) reads, some samples at a time.
///
/// The fields lie on the n × n cell centres of the unit square. `nu` is stored in chunks, shuffled and compressed by
/// gzip; `tensor` is contiguous. The file is written aside, in the same folder, and takes its name in
/// [`DarcyWriter::finish`], replacing what had it: nobody ever sees half a file, and one that is not finished leaves
/// nothing behind. The same samples give the same bytes.
///
/// ```
/// use isobar_data::{DarcyFile, DarcyWriter};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("mine.h5");
/// let mut writer = DarcyWriter::create(&path, 2, 3, 1.0)?;
/// for sample in 0..2 {
///     writer.append(&[12.0; 9], &[sample as f32; 9])?;
/// }
/// writer.finish()?;
/// assert_eq!(DarcyFile::open(&path)?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DarcyWriter {
    aside: AtomicFile,
    nu: Dataset,
    tensor: Dataset,
    samples: usize,
    size: usize,
    written: usize,
}

impl DarcyWriter {
    /// For `samples` samples on `size` × `size` cells, solved for the constant source `beta`.
    ///
    /// # Errors
    /// If `samples` or `size` is 0, `beta` is not finite, or the file can't be made: the folder is missing or
    /// read-only.
    pub fn create(path: impl AsRef<Path>, samples: usize, size: usize, beta: f64) -> Result<Self> {
        if samples == 0 || size == 0 || !beta.is_finite() {
            return Err(Error::Invalid(format!(
                "a Darcy file of {samples} samples on {size} x {size} cells with source {beta} can't be written: \
                 expected at least one sample and cell, and a finite source"
            )));
        }
        let aside = AtomicFile::create(path.as_ref())?;
        let (nu, tensor) = lay_out(aside.file(), samples, size, beta)
            .map_err(|error| Error::hdf5(aside.target(), "write its layout", error))?;
        Ok(Self { aside, nu, tensor, samples, size, written: 0 })
    }

    /// Path of the file, once it is finished.
    pub(super) fn target(&self) -> &Path {
        self.aside.target()
    }

    /// Writes an attribute of the file, for example the origin of its values. Readers of PDEBench's layout
    /// ignore it.
    ///
    /// # Errors
    /// If an attribute of that name exists, or the text has a zero byte.
    pub fn attribute(&self, name: &str, value: &str) -> Result<()> {
        write_attribute(&self.aside, name, value)
    }

    /// Puts the fields on other points than the cell centres of the unit square: coordinates of rows and of columns.
    ///
    /// # Errors
    /// Other numbers of coordinates than the fields have points, or a disk that is full.
    pub fn on_points(self, x: &[f64], y: &[f64]) -> Result<Self> {
        for (name, points) in [(X, x), (Y, y)] {
            if points.len() != self.size {
                return Err(Error::Invalid(format!(
                    "{name:?} has {} coordinates for {} points",
                    points.len(),
                    self.size
                )));
            }
            let points: Vec<f32> = points.iter().map(|&point| point as f32).collect();
            let written = self.aside.file().dataset(name).and_then(|dataset| dataset.write(&points));
            written.map_err(|error| Error::hdf5(self.aside.target(), "write coordinates", error))?;
        }
        Ok(self)
    }

    /// Adds one or more samples: both slices are `[sample, x, y]`, flattened.
    ///
    /// # Errors
    /// If the slices are not a whole number of samples, equally many, and no more than are left to write, or when
    /// the disk is full.
    pub fn append(&mut self, nu: &[f32], u: &[f32]) -> Result<()> {
        let n = self.size;
        let count = nu.len() / (n * n);
        let range = self.written..self.written + count;
        if nu.len() != u.len() || nu.len() != count * n * n || range.end > self.samples {
            return Err(Error::Invalid(format!(
                "{} coefficients and {} solution values were given where {} samples of {n} x {n} are left to write",
                nu.len(),
                u.len(),
                self.samples - self.written
            )));
        }
        let failed = |error: hdf5_metno::Error| Error::hdf5(self.aside.target(), "write samples", error);
        let shape = |error: ndarray::ShapeError| failed(error.into());
        let nu = ArrayView3::from_shape((count, n, n), nu).map_err(shape)?;
        let u = ArrayView4::from_shape((count, 1, n, n), u).map_err(shape)?;
        self.nu.write_slice(nu, s![range.clone(), .., ..]).map_err(failed)?;
        self.tensor.write_slice(u, s![range, .., .., ..]).map_err(failed)?;
        self.written += count;
        Ok(())
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// If samples are still missing, or the disk is full.
    pub fn finish(self) -> Result<()> {
        let Self { aside, nu, tensor, samples, written, .. } = self;
        if written != samples {
            return Err(Error::Invalid(format!(
                "{written} of {samples} samples were written; add the others first"
            )));
        }
        drop((nu, tensor));
        aside.finish()
    }
}

/// Samples in a chunk of `nu`.
pub(crate) const CHUNK: usize = 24;
/// gzip's own default: less gains nothing in time that the solver would not hide.
const GZIP_LEVEL: u8 = 6;

fn lay_out(file: &File, samples: usize, n: usize, beta: f64) -> hdf5_metno::Result<(Dataset, Dataset)> {
    // No times of creation: the same data is the same file.
    let plain = || file.new_dataset_builder().obj_track_times(false);
    let nu = plain()
        .empty::<f32>()
        .shape((samples, n, n))
        .chunk((CHUNK.min(samples), n, n))
        .shuffle()
        .deflate(GZIP_LEVEL)
        .create(NU)?;
    let tensor = plain().empty::<f32>().shape((samples, 1, n, n)).create(TENSOR)?;
    let centres: Vec<f32> = (0..n).map(|i| ((i as f64 + 0.5) / n as f64) as f32).collect();
    for name in [X, Y] {
        plain().with_data(&centres).create(name)?;
    }
    file.new_attr::<f64>().create(BETA)?.write_scalar(&beta)?;
    Ok((nu, tensor))
}
