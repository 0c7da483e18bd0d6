//! Datasets of PDEBench's layouts as arrays with named axes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use crate::arrays::{ArrayInfo, Arrays, Values};
use crate::format::hdf5::Hdf5Arrays;
use crate::{Error, Result};

/// Spatial dims, in the order of axes.
pub(super) const DIMS: [&str; 3] = ["x", "y", "z"];
/// Datasets of trajectories `[sample, time, x, …]`, by one of which the layout is known.
pub(super) const FIELDS: [&str; 6] = ["tensor", "density", "pressure", "Vx", "Vy", "Vz"];
/// Most numbers of a dataset of times.
const MOST_TIMES: usize = 1 << 24;

/// A file of PDEBench.
#[derive(Debug)]
pub(super) struct PdeBench {
    file: Hdf5Arrays,
    arrays: BTreeMap<String, (Place, ArrayInfo)>,
    /// Groups of samples, in their order.
    groups: Vec<String>,
}

/// Place of an array's numbers.
#[derive(Debug)]
enum Place {
    /// A dataset, whose first axis may be longer.
    Dataset(String),
    /// The first row of a dataset.
    FirstRow(String),
    /// The dataset of this name in the group of each sample.
    Groups(&'static str),
    /// A parameter of all samples.
    Number(f64),
}

impl PdeBench {
    /// Opens a file, with the parameters among the variables that are `wanted`.
    pub(super) fn open(path: &Path, wanted: &[String]) -> Result<Self> {
        let mut found = Self::of_layout(path)?;
        for name in wanted {
            if !found.arrays.contains_key(name)
                && let Some(number) = found.parameter(name)?
            {
                found.add(name, Place::Number(number), &[], ArrayInfo::of_shape(Vec::new()), "one number")?;
            }
        }
        Ok(found)
    }

    /// A parameter of the simulation: an attribute of the file, or in its name, as 0.01 in `1D_Burgers_Sols_Nu0.01.hdf5` is `nu`.
    fn parameter(&self, name: &str) -> Result<Option<f64>> {
        if let Some(number) = self.file.number(name)? {
            return Ok(Some(number));
        }
        let stem = self.file.path().file_stem().map(|stem| stem.to_string_lossy().to_lowercase());
        let name = name.to_lowercase();
        let number = |part: &str| part.strip_prefix(name.as_str())?.parse::<f64>().ok();
        let found = stem.iter().flat_map(|stem| stem.split('_')).find_map(number);
        Ok(found.filter(|number| number.is_finite()))
    }

    fn of_layout(path: &Path) -> Result<Self> {
        let file = Hdf5Arrays::open(path)?;
        let names = file.names();
        let has = |name: &str| names.iter().any(|own| own == name);
        let mut groups: Vec<String> = names
            .iter()
            .filter_map(|name| name.strip_suffix("/data"))
            .filter(|group| group.bytes().all(|letter| letter.is_ascii_digit()))
            .map(str::to_owned)
            .collect();
        groups.sort_by_key(|group| group.parse::<u64>().unwrap_or(u64::MAX));
        let found = Self { file, arrays: BTreeMap::new(), groups };
        if has("nu") && has("tensor") {
            return Err(Error::OtherLayout {
                path: path.to_owned(),
                found: "Darcy flow (--set data.format=darcy)",
                expected: "trajectories of PDEBench",
            });
        }
        if !found.groups.is_empty() {
            return found.of_groups();
        }
        if has("x-coordinate") && FIELDS.into_iter().any(has) {
            return found.of_fields();
        }
        if has("velocity") && has("t") {
            return found.of_flow();
        }
        Err(Error::OtherLayout {
            path: path.to_owned(),
            found: "another layout: it has neither `x-coordinate` with `tensor`, `density`, `pressure` or `Vx`, nor groups \
                    `0000`, … with `data`, nor `velocity` with `t`",
            expected: "trajectories of PDEBench",
        })
    }

    /// Adds an array with these axes; an error if it has not as many. Of the attributes it keeps the unit, the calendar and the names of
    /// channels, which Isobar writes.
    fn add(
        &mut self,
        name: &str,
        place: Place,
        axes: &[&str],
        info: ArrayInfo,
        expected: &str,
    ) -> Result<()> {
        let ArrayInfo { shape, unit, calendar, components, .. } = info;
        if shape.len() != axes.len() {
            return Err(self.misfit(name, format!("of shape {shape:?}"), expected));
        }
        let axes = axes.iter().map(|&axis| axis.to_owned()).collect();
        let info = ArrayInfo { axes: Some(axes), unit, calendar, components, ..ArrayInfo::of_shape(shape) };
        self.arrays.insert(name.to_owned(), (place, info));
        Ok(())
    }

    /// Advection, Burgers, reaction and diffusion in 1-D: `tensor`; compressible flow in 1 to 3 dims: a dataset for each variable.
    fn of_fields(mut self) -> Result<Self> {
        let mut frames = None;
        for name in FIELDS {
            if !self.file.names().iter().any(|own| own == name) {
                continue;
            }
            let info = self.file.info(name)?;
            let dims = info.shape.len().saturating_sub(2).clamp(1, DIMS.len());
            let axes = [&["sample", "time"], &DIMS[..dims]].concat();
            frames = info.shape.get(1).copied();
            let place = Place::Dataset(name.to_owned());
            self.add(name, place, &axes, info, "[sample, time, x, …] with 1 to 3 spatial dims")?;
        }
        self.add_points()?;
        // Times have one number more than there are frames.
        self.add_line("time", "t-coordinate", frames)?;
        Ok(self)
    }

    /// Reaction and diffusion in 2-D, diffusion and sorption, the radial dam break: a group for each sample.
    fn of_groups(mut self) -> Result<Self> {
        let path = |group: &str, name: &str| format!("{group}/{name}");
        let (first, last) = (self.groups[0].clone(), self.groups[self.groups.len() - 1].clone());
        let info = self.file.info(&path(&first, "data"))?;
        let shape = info.shape.clone();
        for group in &self.groups {
            let own = self.file.info(&path(group, "data"))?.shape;
            if own != shape {
                let expected = format!("{shape:?} as of `{}`", path(&first, "data"));
                return Err(self.misfit(&path(group, "data"), format!("of shape {own:?}"), expected));
            }
        }
        let dims = shape.len().saturating_sub(2).clamp(1, DIMS.len());
        let axes = [&["sample", "time"], &DIMS[..dims], &["channel"]].concat();
        let stacked = ArrayInfo { shape: [&[self.groups.len()], &shape[..]].concat(), ..info };
        self.add(
            "data",
            Place::Groups("data"),
            &axes,
            stacked,
            "[time, x, …, channel] with 1 to 3 spatial dims",
        )?;
        for dim in DIMS {
            self.add_line(dim, &path(&first, &format!("grid/{dim}")), None)?;
        }
        self.add_line("time", &path(&first, "grid/t"), shape.first().copied())?;
        let own = path(&last, "grid/t");
        if let Some((Place::Dataset(known), info)) = self.arrays.get("time") {
            let all = 0..info.shape[0];
            let times = |name: &str| -> Result<Vec<f64>> {
                Ok(self.file.read(name, std::slice::from_ref(&all))?.into_f64())
            };
            if self.file.info(&own)?.shape != self.file.info(known)?.shape || times(&own)? != times(known)? {
                return Err(self.misfit(&own, "of different times", format!("the times of `{known}`")));
            }
        }
        Ok(self)
    }

    /// Incompressible flow in 2-D: `velocity`, `particles` and the constant `force`; `t` has the times of each sample.
    fn of_flow(mut self) -> Result<Self> {
        let moving = ["sample", "time", "x", "y", "channel"];
        for (name, axes) in
            [("velocity", &moving[..]), ("particles", &moving), ("force", &["sample", "x", "y", "channel"])]
        {
            if self.file.names().iter().any(|own| own == name) {
                let info = self.file.info(name)?;
                let place = Place::Dataset(name.to_owned());
                self.add(name, place, axes, info, "[sample, time, x, y, channel]")?;
            }
        }
        // Files of PDEBench have no coordinates in this layout, those of Isobar do.
        self.add_points()?;
        let info = self.file.info("t")?;
        let shape = info.shape.clone();
        let &[samples, frames] = &shape[..] else {
            return Err(self.misfit("t", format!("of shape {shape:?}"), "[sample, time]"));
        };
        if samples.saturating_mul(frames) > MOST_TIMES || samples * frames == 0 {
            return Err(self.misfit("t", format!("of shape {shape:?}"), format!("1 to {MOST_TIMES} times")));
        }
        let times = self.file.read("t", &[0..samples, 0..frames])?.into_f64();
        if let Some(sample) = times.chunks(frames).position(|own| own != &times[..frames]) {
            return Err(self.misfit(
                "t",
                format!("of different times for sample {sample} than for sample 0"),
                "the same times for all",
            ));
        }
        let times = ArrayInfo { shape: vec![frames], ..info };
        self.add("time", Place::FirstRow("t".to_owned()), &["time"], times, "[sample, time]")?;
        Ok(self)
    }

    /// Adds the coordinates of points that the file has at its root.
    fn add_points(&mut self) -> Result<()> {
        DIMS.into_iter().try_for_each(|dim| self.add_line(dim, &format!("{dim}-coordinate"), None))
    }

    /// Adds coordinates, if the file has them; the first ones of those that are too many.
    fn add_line(&mut self, axis: &str, dataset: &str, count: Option<usize>) -> Result<()> {
        if !self.file.names().iter().any(|own| own == dataset) {
            return Ok(());
        }
        let info = self.file.info(dataset)?;
        let &[length] = &info.shape[..] else {
            return Err(self.misfit(dataset, format!("of shape {:?}", info.shape), "one axis"));
        };
        let length = match count {
            Some(count) if length < count => {
                return Err(self.misfit(dataset, format!("{length} times"), format!("at least {count}")));
            }
            Some(count) => count,
            None => length,
        };
        let info = ArrayInfo { shape: vec![length], ..info };
        self.add(axis, Place::Dataset(dataset.to_owned()), &[axis], info, "one axis")
    }

    fn misfit(&self, name: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        let path = self.file.path().to_owned();
        Error::Layout { path, name: name.to_owned(), found: found.into(), expected: expected.into() }
    }

    fn array(&self, name: &str) -> Result<&(Place, ArrayInfo)> {
        self.arrays.get(name).ok_or_else(|| Error::MissingDataset {
            path: self.file.path().to_owned(),
            dataset: name.to_owned(),
            found: self.names(),
        })
    }
}

impl Arrays for PdeBench {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn names(&self) -> Vec<String> {
        self.arrays.keys().cloned().collect()
    }

    fn info(&self, name: &str) -> Result<ArrayInfo> {
        Ok(self.array(name)?.1.clone())
    }

    fn read(&self, name: &str, window: &[Range<usize>]) -> Result<Values> {
        match &self.array(name)?.0 {
            Place::Number(number) => Ok(Values::F64(vec![*number])),
            Place::Dataset(path) => self.file.read(path, window),
            Place::FirstRow(path) => self.file.read(path, &[std::slice::from_ref(&(0..1)), window].concat()),
            Place::Groups(dataset) => {
                let Some((samples, own)) = window.split_first() else { return self.file.read(name, window) };
                let mut all = Vec::new();
                for group in self.groups.get(samples.clone()).unwrap_or_default() {
                    let path = format!("{group}/{dataset}");
                    match self.file.read(&path, own)? {
                        Values::F32(values) => all.extend(values),
                        Values::F64(values) => all.extend(values.into_iter().map(|value| value as f32)),
                    }
                }
                Ok(Values::F32(all))
            }
        }
    }
}
