//! Windows with a halo, read from the data without communication.

use std::ops::Range;

use tch::Tensor;

use crate::dataset::{Dataset, Window, cat, check_window};
use crate::{Error, Result};

/// A rank's window and its halo: the rows around it that other ranks own. Each rank reads both from the data, without communication.
///
/// A halo goes around the ends of periodic dims and is clipped at the ends of others. A window without points has no halo.
///
/// ```
/// use isobar_data::{HaloWindow, WellDim, WellFile, WellMeta, WellWriter, Window};
/// use tch::{Device, Kind, Tensor};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("ring.h5");
/// let x = WellDim { name: "x".to_owned(), coordinates: vec![0.0, 0.25, 0.5, 0.75], periodic: true };
/// let times = vec![0.0, 1.0];
/// let meta = WellMeta { trajectories: 1, times, dims: vec![x], fields: vec![("u".to_owned(), 0)], ..WellMeta::default() };
/// let mut writer = WellWriter::create(&path, &meta)?;
/// writer.write("u", 0, 0, &Tensor::arange(8, (Kind::Float, Device::Cpu)).view([2, 1, 4]))?;
/// writer.finish()?;
///
/// let config = serde_json::json!({ "path": path, "format": "the_well", "fields": ["u"] });
/// let data = serde_json::from_value::<isobar_data::DataConfig>(config)?.open()?;
/// // The second of two ranks owns the points 2 and 3.
/// let window = HaloWindow::new(&*data, &Window { frames: 0..1, points: vec![2..4] }, &[1])?;
/// assert_eq!(Vec::<f32>::try_from(window.read(&*data, &[0], &["u"])?.flatten(0, -1))?, [1.0, 2.0, 3.0, 0.0]);
/// assert_eq!(window.inner(), [1..3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HaloWindow {
    frames: Range<usize>,
    dims: Vec<Rows>,
}

/// Rows of a dim.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rows {
    /// Rows to read, each once.
    runs: Vec<Range<usize>>,
    /// Index of each row among the rows read; `None` if no row repeats.
    order: Option<Vec<i64>>,
    /// Place of the window among all rows.
    inner: Range<usize>,
}

impl HaloWindow {
    /// Widens a window by `halo[dim]` rows on both sides of each spatial dim.
    ///
    /// # Errors
    /// A window that the data do not have, and another number of halo widths than spatial dims.
    pub fn new(data: &(impl Dataset + ?Sized), window: &Window, halo: &[usize]) -> Result<Self> {
        check_window(data, window, &[])?;
        if halo.len() != window.points.len() {
            return Err(Error::Invalid(format!(
                "halo widths {halo:?} were given for {} spatial dims, expected one for each",
                window.points.len()
            )));
        }
        let dims = data.dims().iter().zip(&window.points).zip(halo);
        let dims =
            dims.map(|((dim, points), &halo)| Rows::new(points, halo, dim.coordinates.len(), dim.periodic));
        Ok(Self { frames: window.frames.clone(), dims: dims.collect() })
    }

    /// Returns this window for other frames.
    pub(crate) fn at(&self, frames: Range<usize>) -> Self {
        Self { frames, ..self.clone() }
    }

    /// Number of rows along each spatial dim, halo included.
    pub fn extents(&self) -> Vec<usize> {
        self.dims.iter().map(Rows::count).collect()
    }

    /// Range of the window within the rows of each spatial dim; the other rows are halo.
    pub fn inner(&self) -> Vec<Range<usize>> {
        self.dims.iter().map(|rows| rows.inner.clone()).collect()
    }

    /// Reads window and halo, as [`Dataset::read`] does: `[sample, frame, channel, x, …]`. Each row of the data is read once.
    ///
    /// # Errors
    /// Those of [`Dataset::read`].
    pub fn read(
        &self,
        data: &(impl Dataset + ?Sized),
        samples: &[usize],
        variables: &[&str],
    ) -> Result<Tensor> {
        let values = self.read_runs(data, samples, variables, &mut Vec::new())?;
        let place = |values: Tensor, (dim, rows): (usize, &Rows)| match &rows.order {
            Some(order) => Ok(values.f_index_select(dim as i64 + FIRST, &Tensor::f_from_slice(order)?)?),
            None => Ok(values),
        };
        self.dims.iter().enumerate().try_fold(values, place)
    }

    /// Reads the dims that follow those in `points`, run by run, and concatenates the results.
    fn read_runs(
        &self,
        data: &(impl Dataset + ?Sized),
        samples: &[usize],
        variables: &[&str],
        points: &mut Vec<Range<usize>>,
    ) -> Result<Tensor> {
        let dim = points.len();
        let Some(rows) = self.dims.get(dim) else {
            let window = Window { frames: self.frames.clone(), points: points.clone() };
            return data.read(&window, samples, variables);
        };
        let mut parts = Vec::new();
        for run in &rows.runs {
            points.push(run.clone());
            parts.push(self.read_runs(data, samples, variables, points)?);
            let _ = points.pop();
        }
        cat(parts, dim as i64 + FIRST)
    }
}

/// Index of the first spatial dim in `[sample, frame, channel, x, …]`.
const FIRST: i64 = 3;

impl Rows {
    fn new(points: &Range<usize>, halo: usize, extent: usize, is_periodic: bool) -> Self {
        let own = points.len();
        if own == 0 {
            return Self { runs: vec![points.clone()], order: None, inner: 0..0 };
        }
        let end = points.end.saturating_add(halo);
        if !is_periodic {
            let first = points.start.saturating_sub(halo);
            let before = points.start - first;
            let runs = std::iter::once(first..end.min(extent)).collect();
            return Self { runs, order: None, inner: before..before + own };
        }
        let inner = halo..halo + own;
        if own.saturating_add(halo.saturating_mul(2)) > extent {
            // Some rows occur several times.
            let first = points.start as i64 - halo as i64;
            let order = (first..end as i64).map(|row| row.rem_euclid(extent as i64)).collect();
            return Self { runs: std::iter::once(0..extent).collect(), order: Some(order), inner };
        }
        let runs = match (points.start.checked_sub(halo), end.checked_sub(extent)) {
            (None, _) => vec![points.start + extent - halo..extent, 0..end],
            (Some(first), Some(over)) if over > 0 => vec![first..extent, 0..over],
            (Some(first), _) => std::iter::once(first..end).collect(),
        };
        Self { runs, order: None, inner }
    }

    fn count(&self) -> usize {
        self.order.as_ref().map_or_else(|| self.runs.iter().map(Range::len).sum(), Vec::len)
    }
}
