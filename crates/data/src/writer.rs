//! Writes Darcy flow in PDEBench's layout.

use std::path::{Path, PathBuf};

use hdf5_metno::{Dataset, File};
use ndarray::{ArrayView3, ArrayView4, s};
use tempfile::TempPath;

use crate::darcy::{BETA, NU, TENSOR, X, Y};
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
    target: PathBuf,
    aside: TempPath,
    file: File,
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
    /// When `samples` or `size` is 0, `beta` is not finite, or the file can't be made: the folder is missing or
    /// read-only.
    pub fn create(path: impl AsRef<Path>, samples: usize, size: usize, beta: f64) -> Result<Self> {
        let target = path.as_ref().to_owned();
        if samples == 0 || size == 0 || !beta.is_finite() {
            return Err(Error::Invalid(format!(
                "a Darcy file of {samples} samples on {size} x {size} cells with source {beta} can't be written: \
                 expected at least one sample and cell, and a finite source"
            )));
        }
        let aside = reserve(&target)?;
        let file = File::create(&aside).map_err(|error| Error::hdf5(&target, "create it", error))?;
        let (nu, tensor) = lay_out(&file, samples, size, beta)
            .map_err(|error| Error::hdf5(&target, "write its layout", error))?;
        Ok(Self { target, aside, file, nu, tensor, samples, size, written: 0 })
    }

    /// Adds one or more samples: both slices are `[sample, x, y]`, flattened.
    ///
    /// # Errors
    /// When the slices are not a whole number of samples, equally many, and no more than are left to write, or when
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
        let failed = |error: hdf5_metno::Error| Error::hdf5(&self.target, "write samples", error);
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
    /// When samples are still missing, or the disk is full.
    pub fn finish(self) -> Result<()> {
        let Self { target, aside, file, nu, tensor, samples, written, .. } = self;
        if written != samples {
            return Err(Error::Invalid(format!(
                "{written} of {samples} samples were written; add the others first"
            )));
        }
        drop((nu, tensor));
        file.close().map_err(|error| Error::hdf5(&target, "write it", error))?;
        std::fs::File::open(&aside)
            .and_then(|file| file.sync_all())
            .map_err(|error| Error::io(&target, "write it to disk", error))?;
        aside
            .persist(&target)
            .map_err(|error| Error::io(&target, "put the new file in its place", error.error))
    }
}

/// Samples in a chunk of `nu`.
pub(crate) const CHUNK: usize = 24;
/// gzip's own default: less gains nothing in time that the solver would not hide.
const GZIP_LEVEL: u8 = 6;

/// An empty file beside the target, removed when dropped.
fn reserve(target: &Path) -> Result<TempPath> {
    let Some(name) = target.file_name() else {
        return Err(Error::io(target, "create it", std::io::ErrorKind::IsADirectory.into()));
    };
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        return Err(Error::Missing { path: folder.to_owned() });
    }
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".partial");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // What any new file has, less the umask: data sets are shared.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let file = builder.tempfile_in(folder).map_err(|error| Error::io(target, "create it", error))?;
    Ok(file.into_temp_path())
}

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
