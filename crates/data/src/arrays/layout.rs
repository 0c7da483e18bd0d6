//! The layout of a data set of named arrays, checked when it is opened.

use std::collections::BTreeSet;
use std::iter::once;
use std::ops::Range;

use super::{ArrayInfo, ArrayOptions, Arrays};
use crate::calendar::TimeUnit;
use crate::grid::{DataVariable, Dim, Levels, degrees_of};
use crate::registry::DataSource;
use crate::{Error, Result};

/// Largest number of points along one dim or of times: more than any grid has.
const MOST_POINTS: usize = 1 << 24;
/// Most channels of a variable, each of which has a name.
const MOST_CHANNELS: usize = 1 << 16;

/// An array that is a variable.
#[derive(Debug)]
pub(super) struct Variable {
    pub(super) path: String,
    pub(super) info: ArrayInfo,
    /// The role of each stored axis.
    pub(super) roles: Vec<Role>,
    /// Stored channels to read, in runs of consecutive ones; `0..1` without an axis of channels.
    pub(super) channels: Vec<Range<usize>>,
}

/// Meaning of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Sample,
    Time,
    Channel,
    /// A spatial dim, by number.
    Space(usize),
}

#[derive(Debug)]
pub(super) struct Layout {
    pub(super) variables: Vec<Variable>,
    pub(super) described: Vec<DataVariable>,
    pub(super) dims: Vec<Dim>,
    /// Stored samples.
    pub(super) samples: usize,
    /// Stored times.
    pub(super) times: Option<Vec<f64>>,
    /// Stored time of each sample, of samples without frames.
    pub(super) sample_times: Option<Vec<f64>>,
    /// Unit and calendar of the times.
    pub(super) time_unit: Option<TimeUnit>,
}

/// Finds out a layout: of the variables that a run names.
pub(super) struct Reader<'a> {
    pub(super) arrays: &'a dyn Arrays,
    pub(super) options: &'a ArrayOptions,
    /// Its format need not have all options.
    pub(super) source: &'a DataSource<'a>,
    /// Name of the options' table in messages.
    pub(super) table: String,
}

/// A variable that was found: its name, the path of its array, metadata, and names of the axes.
type Opened<'a> = (&'a String, String, ArrayInfo, Vec<String>);

/// Channels of a variable: stored ones in runs of consecutive ones, their names, and their coordinates.
type Channels = (Vec<Range<usize>>, Vec<String>, Option<Levels>);

/// The time of each sample, and their unit and calendar.
type SampleTimes = (Vec<f64>, Option<TimeUnit>);

impl Reader<'_> {
    /// Finds the layout of the variables of these names. `frames` are those of the file's trajectories, if the variables need not have
    /// an axis of times themselves.
    pub(super) fn layout(&self, wanted: &[String], levels: &[f64], frames: Option<usize>) -> Result<Layout> {
        if wanted.is_empty() {
            return Err(Error::Config(format!(
                "data.fields (or data.inputs and data.targets) names no field; {} has {:?}; --set 'data.fields={:?}'",
                self.arrays.path().display(),
                self.known(),
                self.likely()
            )));
        }
        let mut opened: Vec<Opened<'_>> = Vec::new();
        for name in wanted {
            if !opened.iter().any(|(known, ..)| *known == name) {
                let (path, info, axes) = self.variable(name)?;
                opened.push((name, path, info, axes));
            }
        }
        let channel_axes = self.channel_axes(&opened);
        let dims = self.dims(&channel_axes, &opened)?;
        let samples = self.extent(&self.options.sample, &opened)?;
        let frames = self.extent(&self.options.time, &opened)?.or(frames.filter(|_| samples.is_none()));
        let first = opened[0].1.clone();
        let times = frames.map(|frames| self.times(&first, frames)).transpose()?;
        let sample_times = match samples.filter(|_| times.is_none()) {
            Some(samples) => self.sample_times(&opened, samples)?,
            None => None,
        };
        let ((times, unit), (sample_times, sample_unit)) = (times.unzip(), sample_times.unzip());
        let time_unit = unit.or(sample_unit).flatten();
        let (mut variables, mut described) = (Vec::new(), Vec::new());
        for (name, path, info, axes) in opened {
            let roles: Vec<Role> = axes.iter().map(|axis| self.role(axis, &channel_axes, &dims)).collect();
            let mut along = roles.iter().zip(&axes).zip(&info.shape);
            let channel = along.find(|((role, _), _)| **role == Role::Channel);
            let (channels, names, levels) = match channel.map(|((_, axis), &count)| (axis.as_str(), count)) {
                Some(axis) if !levels.is_empty() => self.chosen_levels(name, &path, axis, levels)?,
                Some(axis) => self.all_levels(name, (&path, &info), axis)?,
                None => (once(0..1).collect(), vec![name.clone()], None),
            };
            let unit = self.options.variables.get(name).and_then(|own| own.unit()).map(str::to_owned);
            let is_spatial = |role: &Role| matches!(role, Role::Space(_));
            described.push(DataVariable {
                uniform: !roles.iter().any(is_spatial),
                is_static: (samples.is_some() || frames.is_some())
                    && !roles.iter().any(|role| matches!(role, Role::Sample | Role::Time)),
                name: name.clone(),
                unit: unit.or_else(|| info.unit.clone()),
                // They may be components of a vector: nothing says that they are not.
                has_direction: names.len() > 1,
                channels: names,
                title: None,
                levels,
                attributes: info.attributes.clone(),
            });
            variables.push(Variable { path, info, roles, channels });
        }
        let samples = samples.unwrap_or(1);
        Ok(Layout { variables, described, dims, samples, times, sample_times, time_unit })
    }

    /// Names of variables: those in the options, and all other arrays.
    fn known(&self) -> Vec<String> {
        let own = &self.options.variables;
        own.keys()
            .cloned()
            .chain(self.arrays.names().into_iter().filter(|name| !own.contains_key(name)))
            .collect()
    }

    /// Names of the arrays with the most axes: variables rather than coordinates, which have the name of their only axis.
    pub(super) fn likely(&self) -> Vec<String> {
        let is_coordinate = |name: &String| {
            let axes = self.arrays.info(name).ok().and_then(|info| info.axes);
            axes.is_some_and(|axes| matches!(&axes[..], [axis] if axis == name))
        };
        let (coordinates, mut names): (Vec<String>, _) =
            self.arrays.names().into_iter().partition(is_coordinate);
        if names.is_empty() {
            names = coordinates;
        }
        let axes = |name: &String| self.arrays.info(name).map_or(0, |info| info.shape.len());
        let axes: Vec<usize> = names.iter().map(axes).collect();
        let most = axes.iter().max();
        names.into_iter().zip(&axes).filter(|(_, axes)| Some(*axes) == most).map(|(name, _)| name).collect()
    }

    /// Names of the arrays on the grid of those with the most axes, and texts about the others that are no coordinates.
    pub(super) fn on_grid(&self) -> (Vec<String>, Vec<String>) {
        let (mut names, mut left_out) = (self.likely(), Vec::new());
        // Name, extent and role of each axis.
        let open = |name: &String| -> Result<Vec<(String, usize, Role)>> {
            let (path, info, axes) = self.variable(name)?;
            let opened = [(name, path, info, axes)];
            let channel_axes = self.channel_axes(&opened);
            let [(_, _, info, axes)] = opened;
            let described = |(axis, extent): (String, usize)| {
                let role = self.role(&axis, &channel_axes, &[]);
                (axis, extent, role)
            };
            Ok(axes.into_iter().zip(info.shape).map(described).collect())
        };
        let spatial = |name: &String| -> Option<BTreeSet<String>> {
            let axes = open(name).ok()?.into_iter();
            Some(axes.filter(|(_, _, role)| matches!(role, Role::Space(_))).map(|(axis, ..)| axis).collect())
        };
        // Keeps only arrays on the grid that most of them have, or else on the one with the most points.
        let points =
            |name: &String| self.arrays.info(name).map_or(0, |info| info.shape.iter().product::<usize>());
        let all: Vec<_> = names.iter().filter_map(|name| Some((spatial(name)?, points(name)))).collect();
        let count = |axes: &BTreeSet<String>| all.iter().filter(|(own, _)| own == axes).count();
        let common =
            all.iter().rev().max_by_key(|(axes, points)| (count(axes), *points)).map(|(axes, _)| axes);
        names.retain(|name| spatial(name).is_none_or(|axes| Some(&axes) == common));
        let grid: Vec<_> = names.iter().filter_map(|name| open(name).ok()).flatten().collect();
        for name in self.arrays.names() {
            let is_coordinate = self.options.coordinates.values().any(|path| *path == name)
                || grid.iter().any(|(axis, ..)| name == *axis || name.ends_with(&format!("/{axis}")))
                || [&self.options.sample, &self.options.time].contains(&&name);
            if names.contains(&name) || is_coordinate {
                continue;
            }
            let axes = match (open(&name), self.arrays.info(&name)) {
                (Ok(axes), _) => axes,
                (Err(_), Ok(info)) => {
                    left_out.push(format!("{name} {:?}", info.shape));
                    continue;
                }
                (Err(error), Err(_)) => {
                    left_out.push(format!("{name} ({error})"));
                    continue;
                }
            };
            let is_space = |role: Role| matches!(role, Role::Space(_));
            let agrees =
                axes.iter().all(|(axis, extent, role)| match grid.iter().find(|(known, ..)| known == axis) {
                    _ if *role == Role::Channel => true,
                    Some((_, known, _)) => known == extent,
                    None => !is_space(*role),
                });
            let has = |axis: &str| axes.iter().any(|(own, ..)| own == axis);
            if agrees && grid.iter().all(|(axis, _, role)| !is_space(*role) || has(axis)) {
                names.push(name);
            } else {
                let axes: Vec<&str> = axes.iter().map(|(axis, ..)| axis.as_str()).collect();
                left_out.push(format!("{name} [{}]", axes.join(", ")));
            }
        }
        (names, left_out)
    }

    /// Frames of the file's trajectories, if the arrays with the most axes have times.
    pub(super) fn frames(&self) -> Option<usize> {
        let of = |name: &String| {
            let (_, info, axes) = self.variable(name).ok()?;
            axes.iter()
                .zip(&info.shape)
                .find(|(axis, _)| **axis == self.options.time)
                .map(|(_, &extent)| extent)
        };
        self.likely().iter().find_map(of)
    }

    /// The array of a variable, and the names of its axes.
    fn variable(&self, name: &str) -> Result<(String, ArrayInfo, Vec<String>)> {
        let own = self.options.variables.get(name);
        let path = own.map_or(name, |own| own.path()).to_owned();
        if own.is_none() && !self.arrays.all_names().contains(&path) {
            let file = self.arrays.path().to_owned();
            let found = self.known();
            return Err(Error::MissingField { path: file, field: name.to_owned(), found });
        }
        let info = self.arrays.info(&path)?;
        if info.shape.contains(&0) {
            return Err(self.misfit(&path, shape(&info.shape), "at least one value"));
        }
        let ndim = info.shape.len();
        let given = own.and_then(|own| own.axes()).map(<[String]>::to_vec);
        let general = Some(self.options.axes.clone()).filter(|axes| !axes.is_empty());
        let stored = info.axes.clone();
        // A single number has no axes to name.
        let axes = if ndim == 0 { Some(Vec::new()) } else { given.or(stored).or(general) };
        match axes {
            Some(axes) if axes.len() == ndim => {
                let unique = axes.iter().enumerate().all(|(at, axis)| !axes[..at].contains(axis));
                if unique {
                    return Ok((path, info, axes));
                }
                Err(self.misfit(&path, format!("along the axes {axes:?}"), "axes of different names"))
            }
            Some(axes) => Err(Error::Config(format!(
                "{}: `{path}` is {}, but its axes are {axes:?}; name {ndim} axes{}",
                self.arrays.path().display(),
                shape(&info.shape),
                match &self.table {
                    table if self.source.has_option("variables") =>
                        format!(" in {table}.variables.{name} = {{ path = \"{path}\", axes = […] }}"),
                    table if self.source.has_option("axes") => format!(" in {table}.axes"),
                    _ => String::new(),
                }
            ))),
            None => Err(Error::Config(format!(
                "{}: the axes of `{path}`, {}, have no names; {}",
                self.arrays.path().display(),
                shape(&info.shape),
                match self.source.has_option("axes") {
                    true =>
                        format!("name them, for example --set '{}.axes={:?}'", self.table, example_axes(ndim)),
                    false => "the format must name them (`ArrayInfo::axes`)".to_owned(),
                }
            ))),
        }
    }

    /// Names of the axes of channels: that of the options, and those whose coordinates say so.
    fn channel_axes(&self, opened: &[Opened<'_>]) -> Vec<String> {
        let mut known =
            [&self.options.sample, &self.options.time, &self.options.channel].map(String::clone).to_vec();
        let mut channels = vec![self.options.channel.clone()];
        for (_, path, info, axes) in opened {
            for (axis, &extent) in axes.iter().zip(&info.shape) {
                if known.contains(axis) {
                    continue;
                }
                known.push(axis.clone());
                let coordinates = self.coordinate(path, axis, extent).ok().flatten();
                channels.extend(coordinates.filter(|(_, info)| info.channels).map(|_| axis.clone()));
            }
        }
        channels
    }

    /// The axes that are no spatial dims, for an error.
    fn other_axes(&self) -> String {
        let ArrayOptions { sample, time, channel, .. } = self.options;
        match &self.table {
            table if self.source.has_option("sample") => format!(
                "say which axes are samples, times and channels with {table}.sample, {table}.time and {table}.channel"
            ),
            _ => format!("name the axes of samples, times and channels {sample:?}, {time:?} and {channel:?}"),
        }
    }

    fn role(&self, axis: &str, channel_axes: &[String], dims: &[Dim]) -> Role {
        match axis {
            _ if axis == self.options.sample => Role::Sample,
            _ if axis == self.options.time => Role::Time,
            _ if channel_axes.iter().any(|own| own == axis) => Role::Channel,
            _ => Role::Space(dims.iter().position(|dim| dim.name == axis).unwrap_or(0)),
        }
    }

    /// The spatial dims of all variables.
    fn dims(&self, channel_axes: &[String], all: &[Opened<'_>]) -> Result<Vec<Dim>> {
        let is_spatial = |axis: &String| self.role(axis, channel_axes, &[]) == Role::Space(0);
        let first = &all[0].1;
        let mut found: Vec<(&str, usize, &str)> = Vec::new();
        let mut all_numbers = true;
        for (_, path, info, axes) in all {
            all_numbers &= info.shape.is_empty();
            for (axis, &extent) in axes.iter().zip(&info.shape).filter(|(axis, _)| is_spatial(axis)) {
                match found.iter().find(|(known, ..)| known == axis) {
                    None => found.push((axis, extent, path)),
                    Some((_, known, other)) if *known != extent => {
                        let expected = format!("{known} to agree with `{other}`");
                        return Err(self.misfit(path, format!("of {extent} points along {axis}"), expected));
                    }
                    Some(_) => (),
                }
            }
        }
        let has_all =
            |(_, _, _, axes): &Opened<'_>| found.iter().all(|(axis, ..)| axes.iter().any(|own| own == axis));
        if !all_numbers && !all.iter().any(has_all) {
            let grids = all.iter().map(|(name, _, _, axes)| {
                let axes: Vec<&str> =
                    axes.iter().filter(|axis| is_spatial(axis)).map(String::as_str).collect();
                format!("`{name}` has {axes:?}")
            });
            return Err(Error::Config(format!(
                "{}: the variables are on different grids: {}; name variables of one grid",
                self.arrays.path().display(),
                grids.collect::<Vec<_>>().join(", ")
            )));
        }
        if all_numbers {
            return Err(self.misfit(
                first,
                "a single number, of shape []",
                "an array with 1 to 3 spatial dims",
            ));
        }
        if !(1..=3).contains(&found.len()) {
            let names: Vec<&str> = found.iter().map(|(axis, ..)| *axis).collect();
            return Err(Error::Config(format!(
                "{}: the variables have the spatial dims {names:?}, expected 1 to 3; {}",
                self.arrays.path().display(),
                self.other_axes()
            )));
        }
        let unknown = |name: &&String| !found.iter().any(|(axis, ..)| axis == *name);
        if let Some(name) = self.options.periodic.iter().find(unknown) {
            let names: Vec<&str> = found.iter().map(|(axis, ..)| *axis).collect();
            return Err(Error::Config(format!(
                "{}.periodic names {name:?}, expected of the spatial dims {names:?}",
                self.table
            )));
        }
        found.into_iter().map(|(axis, extent, _)| self.dim(first, axis, extent)).collect()
    }

    fn dim(&self, beside: &str, name: &str, extent: usize) -> Result<Dim> {
        let asked = self.options.periodic.iter().any(|periodic| periodic == name);
        let Some((path, info)) = self.coordinate(beside, name, extent)? else {
            let coordinates = self.numbered(beside, name, extent)?;
            return Ok(Dim { name: name.to_owned(), unit: None, coordinates, periodic: asked });
        };
        let coordinates = self.line(&path, &info)?;
        let ascending = coordinates.windows(2).all(|pair| pair[0] < pair[1]);
        let descending = coordinates.windows(2).all(|pair| pair[0] > pair[1]);
        if !ascending && !descending {
            let found = "neither ascending nor descending";
            return Err(self.misfit(&path, found, "coordinates in one order, all different"));
        }
        let east = info.unit.as_deref().is_some_and(|unit| degrees_of(unit, "east") == Some(true));
        let periodic = asked || info.periodic || (east && goes_around(&coordinates));
        Ok(Dim { name: name.to_owned(), unit: info.unit, coordinates, periodic })
    }

    /// Coordinates 0, 1, 2, … of an axis that has none in the file, whose extent costs the file nothing.
    fn numbered(&self, beside: &str, axis: &str, extent: usize) -> Result<Vec<f64>> {
        if extent > MOST_POINTS {
            let found = format!("{extent} points along `{axis}`");
            return Err(self.misfit(beside, found, format!("at most {MOST_POINTS}")));
        }
        Ok((0..extent).map(|point| point as f64).collect())
    }

    /// The time axis that the options name, or, if none has the default name, the only axis whose coordinates have a unit since a date.
    pub(super) fn time_axis(&self, variables: &[String]) -> String {
        if self.options.time != ArrayOptions::default().time {
            return self.options.time.clone();
        }
        let mut found = BTreeSet::new();
        // What cannot be read is an error later.
        for (path, info, axes) in variables.iter().filter_map(|name| self.variable(name).ok()) {
            if axes.contains(&self.options.time) {
                return self.options.time.clone();
            }
            let ArrayOptions { sample, channel, .. } = self.options;
            let is_time = |(axis, extent): &(&String, &usize)| {
                if [sample, channel].contains(axis) {
                    return false;
                }
                let coordinate = self.coordinate(&path, axis, **extent).ok().flatten();
                coordinate.and_then(|(_, info)| info.unit).is_some_and(|unit| unit.contains(" since "))
            };
            found.extend(axes.iter().zip(&info.shape).filter(is_time).map(|(axis, _)| axis.clone()));
        }
        match (found.len(), found.pop_first()) {
            (1, Some(axis)) => axis,
            _ => self.options.time.clone(),
        }
    }

    /// The array of an axis's coordinates: as named in the options, or of the axis's name, in the group of a variable or the nearest one
    /// above.
    fn coordinate(&self, beside: &str, axis: &str, extent: usize) -> Result<Option<(String, ArrayInfo)>> {
        let own = self.options.variables.get(axis);
        let unit = own.and_then(|own| own.unit());
        let found = self.coordinate_array(beside, axis, own.map(|own| own.path()), extent)?;
        Ok(found.map(|(path, info)| {
            let unit = unit.map(str::to_owned).or(info.unit);
            (path, ArrayInfo { unit, ..info })
        }))
    }

    fn coordinate_array(
        &self,
        beside: &str,
        axis: &str,
        own: Option<&str>,
        extent: usize,
    ) -> Result<Option<(String, ArrayInfo)>> {
        if let Some(path) = self.options.coordinates.get(axis) {
            let info = self.arrays.info(path)?;
            if info.shape != [extent] {
                let expected = format!("{} to agree with the axis `{axis}`", shape(&[extent]));
                return Err(self.misfit(path, shape(&info.shape), expected));
            }
            return Ok(Some((path.clone(), info)));
        }
        if let Some(path) = own {
            let info = self.arrays.info(path)?;
            if info.shape == [extent] {
                return Ok(Some((path.to_owned(), info)));
            }
            // A field may have the name of a spatial dim. Times are never a field.
            if axis == self.options.time {
                let expected = format!("{} to agree with the axis `{axis}`", shape(&[extent]));
                return Err(self.misfit(path, shape(&info.shape), expected));
            }
        }
        // Coordinates of another dtype, such as names of stations, leave numbers; times of another dtype are an error.
        let names = if axis == self.options.time { self.arrays.all_names() } else { self.arrays.names() };
        for path in nearest(beside, axis).filter(|path| names.contains(path)) {
            let info = self.arrays.info(&path)?;
            if info.shape == [extent] {
                return Ok(Some((path, info)));
            }
        }
        Ok(None)
    }

    fn times(&self, beside: &str, frames: usize) -> Result<(Vec<f64>, Option<TimeUnit>)> {
        let Some((path, info)) = self.coordinate(beside, &self.options.time, frames)? else {
            return Ok((self.numbered(beside, &self.options.time, frames)?, None));
        };
        let times = self.line(&path, &info)?;
        match times.windows(2).position(|pair| pair[0] >= pair[1]) {
            None => {
                let unit = info.unit.map(|unit| TimeUnit { unit, calendar: info.calendar });
                Ok((times, unit))
            }
            Some(at) => {
                let found = format!("{} at index {at} and {} at the next", times[at], times[at + 1]);
                Err(self.misfit(&path, found, "ascending"))
            }
        }
    }

    /// Reads the time of each sample: the array of the time axis's coordinates whose only axis is that of samples. `None` without one, or
    /// if it is itself one of the variables. Times that cannot be used are left out, with a warning.
    fn sample_times(&self, opened: &[Opened<'_>], samples: usize) -> Result<Option<SampleTimes>> {
        match self.stored_sample_times(opened, samples) {
            Err(error) if !matches!(error, Error::Io { .. }) => {
                tracing::warn!("the times of samples are not used: {error}");
                Ok(None)
            }
            times => times,
        }
    }

    fn stored_sample_times(&self, opened: &[Opened<'_>], samples: usize) -> Result<Option<SampleTimes>> {
        let ArrayOptions { sample, time, variables, coordinates, .. } = self.options;
        let own = variables.get(time);
        let named = coordinates.get(time).map(String::as_str).or_else(|| own.map(|own| own.path()));
        let known = self.arrays.names();
        let paths = named.map(str::to_owned).into_iter().chain(nearest(&opened[0].1, time));
        for path in paths.filter(|path| known.contains(path)) {
            let info = self.arrays.info(&path)?;
            let of_variable = own.filter(|own| own.path() == path);
            let given = of_variable.and_then(|own| own.axes()).map(<[String]>::to_vec);
            let is_along_samples =
                given.or_else(|| info.axes.clone()).is_some_and(|axes| axes == [sample.as_str()]);
            if info.shape != [samples] || !is_along_samples {
                continue;
            }
            if opened.iter().any(|(_, chosen, ..)| *chosen == path) {
                return Ok(None);
            }
            let times = self.line(&path, &info)?;
            let unit = of_variable.and_then(|own| own.unit()).map(str::to_owned).or(info.unit);
            return Ok(Some((times, unit.map(|unit| TimeUnit { unit, calendar: info.calendar }))));
        }
        Ok(None)
    }

    /// The stored channels of some levels along an axis, in the order requested.
    fn chosen_levels(
        &self,
        name: &str,
        path: &str,
        (axis, count): (&str, usize),
        wanted: &[f64],
    ) -> Result<Channels> {
        let file = self.arrays.path().display();
        let Some((levels, info)) = self.coordinate(path, axis, count)? else {
            return Err(Error::Config(format!(
                "data.levels is {wanted:?}, but {file} has no coordinates of the axis `{axis}` of `{path}`; {}--set \
                 'data.levels=[]'",
                match self.source.has_option("coordinates") {
                    true => format!("name their array in {}.coordinates, or ", self.table),
                    false => String::new(),
                }
            )));
        };
        let levels = self.line(&levels, &info)?;
        let (mut runs, mut values): (Vec<Range<usize>>, Vec<f64>) = Default::default();
        for level in wanted {
            let near = |own: &f64| (own - level).abs() <= 1e-6 * level.abs().max(1e-6);
            let Some(at) = levels.iter().position(near) else {
                return Err(Error::Config(format!(
                    "data.levels has {level}, but the levels of `{path}` in {file} are {levels:?}{}",
                    info.unit.map(|unit| format!(" {unit}")).unwrap_or_default()
                )));
            };
            values.push(levels[at]);
            match runs.last_mut() {
                Some(run) if run.end == at => run.end += 1,
                _ => runs.push(at..at + 1),
            }
        }
        let levels = Levels { name: axis.to_owned(), unit: info.unit, values };
        Ok((runs, wanted.iter().map(|level| format!("{name}_{level}")).collect(), Some(levels)))
    }

    /// All stored channels along an axis, named by their coordinates, such as pressure levels, or by their numbers.
    fn all_levels(
        &self,
        name: &str,
        (path, info): (&str, &ArrayInfo),
        (axis, count): (&str, usize),
    ) -> Result<Channels> {
        if count > MOST_CHANNELS {
            let file = self.arrays.path().display();
            return Err(Error::Invalid(format!(
                "`{path}` in {file} has {count} channels, expected at most {MOST_CHANNELS}"
            )));
        }
        let found = self.coordinate(path, axis, count).ok().flatten();
        let levels = found.and_then(|(path, info)| {
            let values = self.line(&path, &info).ok()?;
            Some(Levels { name: axis.to_owned(), unit: info.unit, values })
        });
        // Numbers from 0 or 1 on without a unit, such as those of components, give the order only.
        let are_numbers = |values: &[f64], first: f64| {
            values.iter().zip(0..).all(|(&value, at)| value == first + f64::from(at))
        };
        let levels = levels.filter(|Levels { unit, values, .. }| {
            unit.is_some() || !(are_numbers(values, 0.0) || are_numbers(values, 1.0))
        });
        let names = match &levels {
            _ if count == 1 => vec![name.to_owned()],
            Some(levels) => levels.values.iter().map(|level| format!("{name}_{level}")).collect(),
            None if info.components.len() == count => info.components.clone(),
            None => (0..count).map(|channel| format!("{name}_{channel}")).collect(),
        };
        Ok((once(0..count).collect(), names, levels))
    }

    /// A list of finite coordinates.
    fn line(&self, path: &str, info: &ArrayInfo) -> Result<Vec<f64>> {
        let points = info.shape[0];
        if points > MOST_POINTS {
            return Err(self.misfit(path, shape(&info.shape), format!("at most {MOST_POINTS} points")));
        }
        let values = self.arrays.read(path, std::slice::from_ref(&(0..points)))?.into_f64();
        let values: Vec<f64> = values.into_iter().map(|value| value * info.scale + info.offset).collect();
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => {
                let (file, value) = (self.arrays.path().to_owned(), values[at]);
                Err(Error::NotFinite { path: file, dataset: path.to_owned(), index: vec![at], value })
            }
        }
    }

    /// The extent along an axis, the same for all variables that have it.
    fn extent(&self, axis: &str, all: &[Opened<'_>]) -> Result<Option<usize>> {
        let mut known: Option<(usize, &str)> = None;
        for (_, path, info, axes) in all {
            let Some(at) = axes.iter().position(|name| name == axis) else { continue };
            let extent = info.shape[at];
            match known {
                Some((other, of)) if other != extent => {
                    let expected = format!("{other} to agree with `{of}`");
                    return Err(self.misfit(path, format!("of {extent} along {axis}"), expected));
                }
                _ => known = Some((extent, path)),
            }
        }
        Ok(known.map(|(extent, _)| extent))
    }

    fn misfit(&self, name: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        let path = self.arrays.path().to_owned();
        Error::Layout { path, name: name.to_owned(), found: found.into(), expected: expected.into() }
    }
}

/// Paths of the axis's name in the groups from that of a variable to the root.
fn nearest(beside: &str, axis: &str) -> impl Iterator<Item = String> {
    let groups = beside.rmatch_indices('/').map(|(at, _)| &beside[..at]);
    groups.map(move |group| format!("{group}/{axis}")).chain([axis.to_owned()])
}

/// Returns whether longitudes go around the globe: a step after the last comes the first again.
fn goes_around(longitudes: &[f64]) -> bool {
    let [first, .., last] = longitudes else { return false };
    let step = (last - first) / (longitudes.len() - 1) as f64;
    ((last + step - first).abs() - 360.0).abs() < 0.01 * step.abs()
}

/// Names of so many axes, for an error.
fn example_axes(ndim: usize) -> Vec<&'static str> {
    let [samples, dims] = [&["sample", "time"][..], &["x", "y", "z"]];
    let spatial = ndim.saturating_sub(samples.len()).clamp(ndim.min(2), dims.len());
    let leading = &samples[..ndim.saturating_sub(spatial).min(samples.len())];
    [leading, &dims[..spatial]].concat()
}

fn shape(extents: &[usize]) -> String {
    format!("of shape {extents:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_of_axes() {
        assert_eq!(example_axes(2), ["x", "y"]);
        assert_eq!(example_axes(3), ["sample", "x", "y"]);
        assert_eq!(example_axes(4), ["sample", "time", "x", "y"]);
        assert_eq!(example_axes(5), ["sample", "time", "x", "y", "z"]);
    }

    #[test]
    fn longitudes_around_the_globe_are_periodic() {
        let line = |first: f64, step: f64, count: u32| -> Vec<f64> {
            (0..count).map(|at| first + step * f64::from(at)).collect()
        };
        assert!(goes_around(&line(0.0, 3.75, 96)));
        assert!(goes_around(&line(-180.0, 1.0, 360)));
        assert!(goes_around(&line(179.5, -1.0, 360)));
        assert!(!goes_around(&line(0.0, 3.75, 95)), "a gap");
        assert!(!goes_around(&line(0.0, 1.0, 361)), "the first point twice");
        assert!(!goes_around(&[0.0]));
    }
}
