//! Darcy flow in PDEBench's HDF5 layout.

use std::ops::Range;
use std::path::{Path, PathBuf};

use isobar_torch::memory::from_vec;
use tch::Tensor;

use crate::boxes::check_range;
use crate::hdf5::attribute::Attributes;
use crate::hdf5::layout::{self, Node, shape_text};
use crate::hdf5::stored::Stored;
use crate::registry::check_extension;
use crate::stats::Accumulator;
use crate::{Error, InMemory, Result, Statistics};

/// A data set of 2-D Darcy flow, −∇·(a ∇u) = β on the unit square with u = 0 on its boundary, in one HDF5 file.
///
/// The layout is PDEBench's (Takamoto et al. 2022), all numbers dimensionless:
///
/// | name | shape | dtype | is |
/// |---|---|---|---|
/// | `nu` | `[sample, x, y]` | float32 | the coefficient a |
/// | `tensor` | `[sample, 1, x, y]` | float32 | the solution u; the 1 is PDEBench's time axis |
/// | `x-coordinate`, `y-coordinate` | `[x]`, `[y]` | float | the points of the grid, ascending |
/// | `beta` | root attribute | number | the constant source β |
///
/// Values may be contiguous or in chunks of at most 1 GiB, packed by shuffle, gzip and Fletcher32. They must be in the
/// file itself: external storage, virtual datasets and links to other files are refused. [`DarcyFile::open`] checks the whole layout; values are checked when they are read. The file stays open and
/// is only read, so any number of ranks may share it. Nothing here is collective: each rank reads what it needs.
///
/// ```
/// use isobar_data::{DarcyFile, Normalizer, split};
///
/// let file = DarcyFile::open("../../tests/data/darcy_excerpt.h5")?;
/// let (train, _validation) = split(file.len(), 6)?;
/// let statistics = file.statistics(train)?;
/// let normalizer = Normalizer::from_statistics(&statistics.u)?;
///
/// // The upper half of two samples: only these bytes are read.
/// let window = file.read(&[4, 1], 0..32, 0..64)?;
/// assert_eq!(window.u.size(), [2, 1, 32, 64]);
/// let scaled = normalizer.encode(&window.u)?;
/// assert_eq!(scaled.size(), window.u.size());
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Debug)]
pub struct DarcyFile {
    path: PathBuf,
    nu: Stored,
    tensor: Stored,
    samples: usize,
    x: Vec<f64>,
    y: Vec<f64>,
    beta: f64,
}

/// Some samples of Darcy flow, both `[sample, 1, x, y]`.
#[derive(Debug)]
pub struct DarcyFields {
    /// The coefficient.
    pub nu: Tensor,
    /// The solution.
    pub u: Tensor,
}

/// Statistics of the two fields of a Darcy data set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DarcyStatistics {
    /// Of the coefficient.
    pub nu: Statistics,
    /// Of the solution.
    pub u: Statistics,
}

impl DarcyFile {
    /// Opens a file and checks its layout: that the datasets and the attribute are there, of the right dtype, with
    /// shapes that agree, and coordinates that are finite and ascending.
    ///
    /// # Errors
    /// If the file is missing, of another format, not HDF5,
    /// truncated, or of another layout; the error names the file, the dataset and the cause.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        check_extension(path, "darcy")?;
        let root = Node::open(path)?;
        layout::check_layout(&root, LAYOUT)?;
        let nu = root.field(NU)?;
        let shape = nu.dataset.shape();
        let &[samples, rows, cols] = shape.as_slice() else {
            return Err(root.misfit(NU, shape_text(&shape), "of shape [sample, x, y]"));
        };
        if shape.contains(&0) {
            return Err(root.misfit(NU, shape_text(&shape), "at least one sample, row and column"));
        }
        let tensor = root.field(TENSOR)?;
        let expected = [samples, 1, rows, cols];
        if tensor.dataset.shape() != expected {
            let expected = format!("{} to agree with `{NU}`", shape_text(&expected));
            return Err(root.misfit(TENSOR, shape_text(&tensor.dataset.shape()), expected));
        }
        let x = root.coordinates(X, Some((rows, NU)))?;
        let y = root.coordinates(Y, Some((cols, NU)))?;
        let beta = Attributes::of_group(&root).number(BETA)?;
        Ok(Self { path: path.to_owned(), nu, tensor, samples, x, y, beta })
    }

    /// The path as given to [`DarcyFile::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of samples, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a file without samples is refused")]
    pub fn len(&self) -> usize {
        self.samples
    }

    /// Points along x, the second-to-last dim of the fields.
    pub fn rows(&self) -> usize {
        self.x.len()
    }

    /// Points along y, the last dim of the fields.
    pub fn cols(&self) -> usize {
        self.y.len()
    }

    /// Coordinates of the points along x.
    pub fn x(&self) -> &[f64] {
        &self.x
    }

    /// Coordinates of the points along y.
    pub fn y(&self) -> &[f64] {
        &self.y
    }

    /// The constant source term.
    pub fn beta(&self) -> f64 {
        self.beta
    }

    /// Reads a window of some samples, in the order asked for, as float32 on the CPU: both fields are
    /// `[samples, 1, rows, cols]`. No other part of the file is read, but for the rest of compressed chunks that the
    /// window touches. Any of the three may be empty, as a rank's part may be.
    ///
    /// # Errors
    /// If an index is out of range, the file can't be read, or a value in the window is not finite; the error names
    /// the dataset and the index of the first such value.
    pub fn read(&self, samples: &[usize], rows: Range<usize>, cols: Range<usize>) -> Result<DarcyFields> {
        Ok(DarcyFields {
            nu: self.read_nu(samples, rows.clone(), cols.clone())?,
            u: self.read_u(samples, rows, cols)?,
        })
    }

    /// Reads the coefficient alone, like [`DarcyFile::read`].
    pub(super) fn read_nu(
        &self,
        samples: &[usize],
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Tensor> {
        self.read_field(&self.nu, NU, &self.window(samples, rows, cols)?)
    }

    /// Reads the solution alone, like [`DarcyFile::read`].
    pub(super) fn read_u(&self, samples: &[usize], rows: Range<usize>, cols: Range<usize>) -> Result<Tensor> {
        self.read_field(&self.tensor, TENSOR, &self.window(samples, rows, cols)?)
    }

    fn window<'a>(&self, samples: &'a [usize], rows: Range<usize>, cols: Range<usize>) -> Result<Window<'a>> {
        if let Some(sample) = samples.iter().find(|&&sample| sample >= self.samples) {
            return Err(Error::OutOfRange {
                what: "sample".to_owned(),
                asked: sample.to_string(),
                available: self.samples,
            });
        }
        check_range("row range", &rows, self.rows())?;
        check_range("column range", &cols, self.cols())?;
        Ok(Window { samples, rows, cols })
    }

    /// Statistics of both fields over a range of samples, in float64, reading a few samples at a time. Over `0..len`
    /// it is also a check of the whole file.
    ///
    /// # Errors
    /// As [`DarcyFile::read`], and when the range is empty.
    pub fn statistics(&self, samples: Range<usize>) -> Result<DarcyStatistics> {
        Ok(DarcyStatistics { nu: self.statistics_of_nu(samples.clone())?, u: self.statistics_of_u(samples)? })
    }

    /// Computes statistics of the coefficient alone, like [`DarcyFile::statistics`].
    pub(super) fn statistics_of_nu(&self, samples: Range<usize>) -> Result<Statistics> {
        self.field_statistics(&self.nu, NU, samples)
    }

    /// Computes statistics of the solution alone, like [`DarcyFile::statistics`].
    pub(super) fn statistics_of_u(&self, samples: Range<usize>) -> Result<Statistics> {
        self.field_statistics(&self.tensor, TENSOR, samples)
    }

    fn field_statistics(
        &self,
        dataset: &Stored,
        name: &'static str,
        samples: Range<usize>,
    ) -> Result<Statistics> {
        check_range("sample range", &samples, self.samples)?;
        // Whole chunks at a time, so that none is decompressed twice.
        let step = dataset.chunk().map_or(STATISTICS_SAMPLES, |chunk| chunk[0]);
        let step = layout::portion(step, self.rows() * self.cols() * size_of::<f32>());
        let mut accumulator = Accumulator::default();
        let mut start = samples.start;
        while start < samples.end {
            let end = ((start / step + 1) * step).min(samples.end);
            let values = self.read_slab(dataset, name, start..end, 0..self.rows(), 0..self.cols())?;
            accumulator.push(values.iter().map(|&value| f64::from(value)));
            start = end;
        }
        accumulator.finish()
    }

    fn read_field(&self, dataset: &Stored, name: &'static str, window: &Window<'_>) -> Result<Tensor> {
        let (rows, cols) = (window.rows.len(), window.cols.len());
        let area = rows * cols;
        let mut values = vec![0.0; window.samples.len() * area];
        if !values.is_empty() {
            for run in runs(window.samples) {
                let slab =
                    self.read_slab(dataset, name, run.samples, window.rows.clone(), window.cols.clone())?;
                for (from, &to) in slab.chunks_exact(area).zip(&run.positions) {
                    values[to * area..(to + 1) * area].copy_from_slice(from);
                }
            }
        }
        Ok(from_vec(values, &[window.samples.len() as i64, 1, rows as i64, cols as i64])?)
    }

    /// The finite values of consecutive samples in the order of `[sample, x, y]`.
    fn read_slab(
        &self,
        dataset: &Stored,
        name: &'static str,
        samples: Range<usize>,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<f32>> {
        if dataset.dataset.ndim() == 4 {
            layout::read_finite(&self.path, dataset, name, &[samples, 0..1, rows, cols])
        } else {
            layout::read_finite(&self.path, dataset, name, &[samples, rows, cols])
        }
    }
}

/// Name of the layout in errors.
const LAYOUT: &str = "PDEBench's Darcy layout";

inventory::submit! {
    layout::Hdf5Layout { name: LAYOUT, recognise: |root| root.has(NU) && root.has(TENSOR) }
}

pub(crate) const NU: &str = "nu";
pub(crate) const TENSOR: &str = "tensor";
pub(crate) const X: &str = "x-coordinate";
pub(crate) const Y: &str = "y-coordinate";
pub(crate) const BETA: &str = "beta";

/// Samples read at a time for statistics of a dataset that is not chunked.
const STATISTICS_SAMPLES: usize = 16;

struct Window<'a> {
    samples: &'a [usize],
    rows: Range<usize>,
    cols: Range<usize>,
}

/// Consecutive samples, read at once, and where each goes in the result.
struct Run {
    samples: Range<usize>,
    positions: Vec<usize>,
}

/// The samples in ascending order, joined where they are consecutive: few reads, and a compressed chunk is not left
/// before all that is needed of it is read. A sample that is asked for twice is read twice.
fn runs(samples: &[usize]) -> Vec<Run> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|&position| samples[position]);
    let mut runs: Vec<Run> = Vec::new();
    for position in order {
        let sample = samples[position];
        match runs.last_mut() {
            Some(run) if run.samples.end == sample => {
                run.samples.end += 1;
                run.positions.push(position);
            }
            _ => runs.push(Run { samples: sample..sample + 1, positions: vec![position] }),
        }
    }
    runs
}

impl InMemory {
    /// Reads complete samples of Darcy flow to the CPU: pairs of coefficient and solution.
    ///
    /// # Errors
    /// Those of [`DarcyFile::read`].
    pub fn load(file: &DarcyFile, samples: Range<usize>) -> Result<Self> {
        let samples: Vec<usize> = samples.collect();
        let DarcyFields { nu, u } = file.read(&samples, 0..file.rows(), 0..file.cols())?;
        Self::pairs(nu, u)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_samples_are_read_at_once_and_put_where_asked() {
        let got: Vec<_> =
            runs(&[5, 2, 9, 4, 3, 9]).into_iter().map(|run| (run.samples, run.positions)).collect();
        assert_eq!(got, [(2..6, vec![1, 4, 3, 0]), (9..10, vec![2]), (9..10, vec![5])]);
        assert!(runs(&[]).is_empty());
    }
}
