//! Trajectories as The Well stores them.
//!
//! It depends on no other format and on no run.

mod field;
mod file;
mod meta;
mod names;
mod open;
mod writer;

use std::ops::Range;
use std::path::Path;

use tch::{Device, Kind, Tensor};

pub use self::field::WellField;
pub use self::file::WellFile;
pub use self::meta::{WellDim, WellMeta};
pub use self::writer::WellWriter;
use crate::area::area_weights;
use crate::attributes::TextAttributes;
use crate::calendar::TimeUnit;
use crate::content::{Content, TIME};
use crate::dataset::{
    Dataset, Window, check_window, choose, weighted_change_statistics, weighted_statistics,
};
use crate::dataset_writer::DatasetWriter;
use crate::grid::{DataVariable, Dim, PredictionMeta};
use crate::registry::{DataSource, Format, NoOptions};
use crate::writers::WriterFormat;
use crate::{Error, Result, Statistics, register, register_writer};

register!(Well);

impl Format for Well {
    const NAME: &'static str = "the_well";
    const SUMMARY: &'static str =
        "Trajectories as The Well stores them: the network maps a frame to the next.";
    const EXTENSIONS: &'static [&'static str] = &["h5", "hdf5"];
    type Options = NoOptions;

    fn open(source: &DataSource<'_>, _options: NoOptions) -> Result<Box<dyn Dataset>> {
        Ok(Box::new(Self::new(WellFile::open(source.path())?, source.variables())))
    }
}

/// A file of The Well's schema as a data set.
#[derive(Debug)]
struct Well {
    file: WellFile,
    dims: Vec<Dim>,
    time_unit: Option<TimeUnit>,
    variables: Vec<DataVariable>,
}

impl Well {
    /// Scalars are variables if `wanted` names them.
    fn new(file: WellFile, wanted: &[String]) -> Self {
        let dim = |(at, name): (usize, &String)| Dim {
            name: name.clone(),
            unit: file.coordinate_unit(name).map(str::to_owned),
            coordinates: file.coordinates(at).to_vec(),
            periodic: file.is_periodic(at),
        };
        let dims = file.spatial_dims().iter().enumerate().map(dim).collect();
        let variable = |field: &WellField| DataVariable {
            name: field.name().to_owned(),
            unit: field.unit().map(str::to_owned),
            channels: field.component_names(file.spatial_dims()),
            has_direction: field.order() > 0,
            title: None,
            uniform: false,
            is_static: field.is_constant(),
            levels: None,
            attributes: TextAttributes::default(),
        };
        let is_wanted = |field: &&WellField| wanted.iter().any(|name| name == field.name());
        let scalars = file.scalars().iter().filter(is_wanted);
        let scalars = scalars.map(|field| DataVariable { uniform: true, ..variable(field) });
        let variables = file.fields().iter().map(variable).chain(scalars).collect();
        let calendar = file.calendar().map(str::to_owned);
        let time_unit = file.coordinate_unit(TIME).map(|unit| TimeUnit { unit: unit.to_owned(), calendar });
        Self { file, dims, time_unit, variables }
    }
}

impl Dataset for Well {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn name(&self) -> String {
        self.file.name().to_owned()
    }

    fn samples(&self) -> usize {
        self.file.trajectories()
    }

    fn dims(&self) -> &[Dim] {
        &self.dims
    }

    fn times(&self) -> Option<&[f64]> {
        Some(self.file.times())
    }

    fn time_unit(&self) -> Option<&TimeUnit> {
        self.time_unit.as_ref()
    }

    fn variables(&self) -> &[DataVariable] {
        &self.variables
    }

    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        let read = |&sample: &usize| self.file.read(variables, sample, window.frames.clone(), &window.points);
        let parts = samples.iter().map(read).collect::<Result<Vec<Tensor>>>()?;
        if parts.is_empty() {
            check_window(self, window, samples)?;
            let channels: usize = choose(self, variables)?.iter().map(|chosen| chosen.channels.len()).sum();
            let points = window.points.iter().map(Range::len);
            let shape: Vec<i64> = [0, window.frames.len(), channels]
                .into_iter()
                .chain(points)
                .map(|extent| extent as i64)
                .collect();
            return Ok(Tensor::f_zeros(shape, (Kind::Float, Device::Cpu))?);
        }
        Ok(Tensor::f_stack(&parts, 0)?)
    }

    fn statistics(&self, variables: &[&str], samples: Range<usize>) -> Result<Vec<Option<Statistics>>> {
        if area_weights(&self.dims).is_some() {
            return weighted_statistics(self, variables, samples);
        }
        Ok(self.file.statistics(variables, samples)?.into_iter().map(Some).collect())
    }

    fn change_statistics(
        &self,
        variables: &[&str],
        samples: Range<usize>,
    ) -> Result<Vec<Option<Statistics>>> {
        if area_weights(&self.dims).is_some() {
            return weighted_change_statistics(self, variables, samples);
        }
        Ok(self.file.change_statistics(variables, samples)?.into_iter().map(Some).collect())
    }

    fn parameters(&self) -> Vec<(String, f64)> {
        self.file.meta().parameters
    }

    fn create(&self, path: &Path, meta: &PredictionMeta) -> Result<Box<dyn DatasetWriter>> {
        let mut well = self.file.meta();
        well.parameters.retain(|(name, _)| !meta.left_out.contains(name));
        well.name = meta.name.clone();
        well.trajectories = meta.samples;
        well.times = meta.times.clone();
        well.fields.retain(|(field, _)| meta.variables.contains(field));
        well.units.retain(|(field, _)| meta.variables.contains(field));
        let writer = WellWriter::create(path, &well)?;
        meta.attributes.iter().try_for_each(|(name, text)| writer.attribute(name, text))?;
        Ok(Box::new(writer))
    }
}

impl DatasetWriter for WellWriter {
    fn write(&mut self, variable: &str, sample: usize, first: usize, values: &Tensor) -> Result<()> {
        Self::write(self, variable, sample, first, values)
    }

    fn takes_windows(&self) -> bool {
        true
    }

    fn write_window(
        &mut self,
        variable: &str,
        sample: usize,
        first: usize,
        points: &[Range<usize>],
        values: &Tensor,
    ) -> Result<()> {
        Self::write_window(self, variable, sample, first, points, values)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Self::finish(*self)
    }
}

register_writer!(WellWriter);

impl WriterFormat for WellWriter {
    const NAME: &'static str = "the_well";
    const SUMMARY: &'static str = "HDF5 in The Well's schema, for trajectories.";

    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        content.storage.none(<Self as WriterFormat>::NAME)?;
        if content.meta.times.is_empty() {
            let problem =
                "samples without times cannot be written in The Well's schema; write hdf5 or netcdf";
            return Err(Error::Invalid(problem.to_owned()));
        }
        let descends = |dim: &&Dim| dim.coordinates.windows(2).any(|pair| pair[0] >= pair[1]);
        if let Some(dim) = content.dims.iter().find(descends) {
            return Err(Error::Invalid(format!(
                "the coordinates of `{}` do not ascend, as The Well's schema has them; write hdf5 or netcdf",
                dim.name
            )));
        }
        let dims = content.dims.len();
        let mut fields = Vec::new();
        for variable in &content.variables {
            let count = variable.channels.len();
            let lacks = match (&variable.levels, variable.uniform) {
                (Some(_), _) => Some("has levels"),
                (None, true) => Some("has no spatial dims"),
                (None, false) => None,
            };
            if let Some(lacks) = lacks {
                return Err(Error::Invalid(format!(
                    "`{}` {lacks}, which The Well's schema does not support; write hdf5, netcdf or zarr, or choose other variables \
                     (--variables)",
                    variable.name
                )));
            }
            let order = (0..3).find(|&order| dims.pow(order) == count).ok_or_else(|| {
                Error::Invalid(format!(
                    "`{}` has {count} channels, which are no scalar, vector or tensor of {dims} dims; write hdf5 or netcdf",
                    variable.name
                ))
            })?;
            fields.push((variable.name.clone(), order as usize));
        }
        let unit = |variable: &DataVariable| Some((variable.name.clone(), variable.unit.clone()?));
        let dim = |dim: &Dim| WellDim {
            name: dim.name.clone(),
            coordinates: dim.coordinates.clone(),
            periodic: dim.periodic,
        };
        let dim_units = content.dims.iter().filter_map(|dim| Some((dim.name.clone(), dim.unit.clone()?)));
        let time_unit = content.time_unit.iter().map(|unit| (TIME.to_owned(), unit.unit.clone()));
        let constants = content.variables.iter().filter(|variable| variable.is_static);
        let meta = WellMeta {
            name: content.meta.name.clone(),
            trajectories: content.meta.samples,
            times: content.meta.times.clone(),
            dims: content.dims.iter().map(dim).collect(),
            fields,
            units: content.variables.iter().filter_map(unit).collect(),
            coordinate_units: dim_units.chain(time_unit).collect(),
            calendar: content.time_unit.as_ref().and_then(|unit| unit.calendar.clone()),
            constants: constants.map(|variable| variable.name.clone()).collect(),
            parameters: content.parameters.clone(),
            ..WellMeta::default()
        };
        let writer = Self::create(path, &meta)?;
        content.meta.attributes.iter().try_for_each(|(name, text)| writer.attribute(name, text))?;
        Ok(Box::new(writer))
    }
}
