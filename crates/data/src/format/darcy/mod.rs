//! Darcy flow as PDEBench stores it.
//!
//! It depends on no other format and on no run.

mod file;
mod writer;

use std::ops::Range;
use std::path::Path;

use tch::{Device, Kind, Tensor};

use self::file::BETA;
pub use self::file::{DarcyFields, DarcyFile, DarcyStatistics};
pub(crate) use self::writer::CHUNK;
pub use self::writer::DarcyWriter;
use crate::content::Content;
use crate::dataset::{Dataset, Window, check_window, choose};
use crate::dataset_writer::DatasetWriter;
use crate::finite::check_finite;
use crate::grid::{DataVariable, Dim, PredictionMeta};
use crate::hdf5::plain::{self, Dialect};
use crate::registry::{DataSource, Format, NoOptions};
use crate::writers::WriterFormat;
use crate::{Error, Result, Statistics, register, register_writer};

register!(Darcy);

impl Format for Darcy {
    const NAME: &'static str = "darcy";
    const SUMMARY: &'static str =
        "Darcy flow as PDEBench stores it: the network maps the coefficient to the solution.";
    const EXTENSIONS: &'static [&'static str] = &["h5", "hdf5"];
    type Options = NoOptions;

    fn open(source: &DataSource<'_>, _options: NoOptions) -> Result<Box<dyn Dataset>> {
        source.without_time("Darcy flow")?;
        Ok(Box::new(Self::new(DarcyFile::open(source.path())?)))
    }
}

/// Name of the coefficient.
const COEFFICIENT: &str = "nu";
/// Name of the solution.
const SOLUTION: &str = "u";

/// A file of Darcy flow as a data set.
#[derive(Debug)]
struct Darcy {
    file: DarcyFile,
    dims: Vec<Dim>,
    variables: Vec<DataVariable>,
}

impl Darcy {
    fn new(file: DarcyFile) -> Self {
        let dim = |name: &str, points: &[f64]| Dim {
            name: name.to_owned(),
            unit: None,
            coordinates: points.to_vec(),
            periodic: false,
        };
        let dims = vec![dim("x", file.x()), dim("y", file.y())];
        let titled =
            |name, title: &str| DataVariable { title: Some(title.to_owned()), ..DataVariable::scalar(name) };
        let variables = vec![titled(COEFFICIENT, "coefficient a"), titled(SOLUTION, "solution u")];
        Self { file, dims, variables }
    }
}

impl Dataset for Darcy {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn samples(&self) -> usize {
        self.file.len()
    }

    fn dims(&self) -> &[Dim] {
        &self.dims
    }

    fn variables(&self) -> &[DataVariable] {
        &self.variables
    }

    fn default_pair(&self) -> Option<[&str; 2]> {
        Some([COEFFICIENT, SOLUTION])
    }

    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        let chosen = choose(self, variables)?;
        check_window(self, window, samples)?;
        let [rows, cols] = [window.points[0].clone(), window.points[1].clone()];
        if window.frames.is_empty() {
            let shape = [samples.len(), 0, chosen.len(), rows.len(), cols.len()].map(|extent| extent as i64);
            return Ok(Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?);
        }
        let read = |variable: &DataVariable| match variable.name.as_str() {
            COEFFICIENT => self.file.read_nu(samples, rows.clone(), cols.clone()),
            _ => self.file.read_u(samples, rows.clone(), cols.clone()),
        };
        let parts = chosen.iter().map(read).collect::<Result<Vec<Tensor>>>()?;
        Ok(Tensor::f_cat(&parts, 1)?.f_unsqueeze(1)?)
    }

    fn statistics(&self, variables: &[&str], samples: Range<usize>) -> Result<Vec<Option<Statistics>>> {
        let one = |variable: DataVariable| match variable.name.as_str() {
            COEFFICIENT => self.file.statistics_of_nu(samples.clone()),
            _ => self.file.statistics_of_u(samples.clone()),
        };
        choose(self, variables)?.into_iter().map(|variable| one(variable).map(Some)).collect()
    }

    fn parameters(&self) -> Vec<(String, f64)> {
        vec![(BETA.to_owned(), self.file.beta())]
    }

    /// In PDEBench's layout if that can hold the prediction: both fields on a square, for one source. Otherwise plain HDF5.
    fn create(&self, path: &Path, meta: &PredictionMeta) -> Result<Box<dyn DatasetWriter>> {
        let content = self.content(meta)?;
        match DarcyFormat::source_of(&content) {
            Ok(_) => DarcyFormat::create(path, &content),
            Err(_) => plain::create(path, &content, Dialect::Plain),
        }
    }
}

/// Both fields on a square, without time.
struct DarcyFormat;

register_writer!(DarcyFormat);

impl DarcyFormat {
    /// Returns the source β of content that the layout can hold.
    ///
    /// # Errors
    /// The reason that it cannot.
    fn source_of(content: &Content) -> Result<f64, String> {
        let both = [COEFFICIENT, SOLUTION];
        let mut names: Vec<&str> = content.variables.iter().map(|own| own.name.as_str()).collect();
        names.sort_unstable();
        if names != both {
            return Err(format!("the variables are {}", names.join(", ")));
        }
        let is_field = |own: &&DataVariable| !own.has_channel_axis() && !own.is_static && !own.uniform;
        if let Some(own) = content.variables.iter().find(|own| !is_field(own)) {
            return Err(format!("`{}` is not a scalar field that varies by sample", own.name));
        }
        if !content.meta.times.is_empty() {
            return Err("the samples have times".to_owned());
        }
        let extents: Vec<usize> = content.dims.iter().map(|dim| dim.coordinates.len()).collect();
        if extents.len() != 2 || extents[0] != extents[1] {
            return Err(format!("the grid has {extents:?} points"));
        }
        let source = content.parameters.iter().find(|(name, _)| name == BETA).map(|(_, beta)| *beta);
        source.ok_or_else(|| format!("the data set has no source `{BETA}`, or not one for all samples"))
    }
}

impl WriterFormat for DarcyFormat {
    const NAME: &'static str = "darcy";
    const SUMMARY: &'static str =
        "Darcy flow in PDEBench's HDF5 layout: `nu` and `u` of samples without time, on a square grid.";

    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        content.storage.none(Self::NAME)?;
        let beta = Self::source_of(content).map_err(|misfit| {
            Error::Invalid(format!(
                "{misfit}; PDEBench's layout of Darcy flow has the scalars `{COEFFICIENT}` and `{SOLUTION}` of samples without time on \
                 a square; write hdf5, netcdf or zarr, or choose other variables (--variables)"
            ))
        })?;
        if !content.meta.sample_times.is_empty() {
            tracing::warn!("the times of samples are not stored: PDEBench's layout of Darcy flow has none");
        }
        let [x, y] = [0, 1].map(|dim| &content.dims[dim].coordinates);
        let writer = DarcyWriter::create(path, content.meta.samples, x.len(), beta)?.on_points(x, y)?;
        content.meta.attributes.iter().try_for_each(|(name, text)| writer.attribute(name, text))?;
        Ok(Box::new(Writer { writer, pending: [None, None], sample: 0 }))
    }
}

/// Writes the two fields of a sample together, in any order.
struct Writer {
    writer: DarcyWriter,
    /// Coefficient and solution of the sample.
    pending: [Option<Vec<f32>>; 2],
    sample: usize,
}

impl Writer {
    fn flush(&mut self) -> Result<()> {
        match std::mem::take(&mut self.pending) {
            [Some(coefficient), Some(solution)] => self.writer.append(&coefficient, &solution),
            [coefficient, _] => {
                let missing = if coefficient.is_none() { COEFFICIENT } else { SOLUTION };
                Err(Error::Invalid(format!("`{missing}` of sample {} was not written", self.sample)))
            }
        }
    }
}

impl DatasetWriter for Writer {
    fn write(&mut self, variable: &str, sample: usize, first: usize, values: &Tensor) -> Result<()> {
        let place = [COEFFICIENT, SOLUTION].iter().position(|name| *name == variable);
        let Some(place) = place.filter(|_| first == 0) else {
            return Err(Error::Invalid(format!(
                "frame {first} of `{variable}` is written to a file of Darcy flow, expected frame 0 of `{COEFFICIENT}` or \
                 `{SOLUTION}`"
            )));
        };
        if sample == self.sample + 1 {
            self.flush()?;
            self.sample = sample;
        }
        if sample != self.sample {
            return Err(Error::Invalid(format!(
                "sample {sample} is written after sample {}, expected ascending order",
                self.sample
            )));
        }
        let shape = values.size();
        let values = values.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        let values: Vec<f32> = isobar_torch::memory::to_vec(&values)?;
        let points = shape.iter().skip(2).map(|&extent| 0..extent as usize);
        let window: Vec<Range<usize>> = std::iter::once(sample..sample + 1).chain(points).collect();
        check_finite(self.writer.target(), variable, &window, &values)?;
        self.pending[place] = Some(values);
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.flush()?;
        self.writer.finish()
    }
}
