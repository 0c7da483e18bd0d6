//! Checks of what an HDF5 file holds, shared by the readers. Whatever is wrong becomes one error that names the file, the
//! dataset and the cause.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use hdf5_metno::types::{FloatSize, TypeDescriptor};
use hdf5_metno::{Dataset, File, Group, H5Type, Hyperslab, LocationType, SliceOrIndex};
use ndarray::IxDyn;

use super::{isolation, whole};
use crate::dtype::Values;
use crate::finite::check_finite;
use crate::hdf5::storage::{self, DEFLATED, LARGEST_CHUNK, misfit};
use crate::hdf5::stored::Stored;
use crate::{Error, Result};

/// A group of an open file. Names in errors are paths from the root, such as `t0_fields/vorticity`.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    pub(crate) path: &'a Path,
    pub(crate) group: Group,
    name: String,
    /// Bytes of the file.
    pub(crate) length: u64,
}

impl<'a> Node<'a> {
    /// The root of a file that is there, HDF5 and whole.
    pub(crate) fn open(path: &'a Path) -> Result<Self> {
        isolation::check(path, whole::check(path)?)?;
        Self::open_directly(path)
    }

    /// Opens a file in this process without a helper, even if that crashes the library.
    pub(super) fn open_directly(path: &'a Path) -> Result<Self> {
        let length = whole::check(path)?;
        // The default of HDF5 2.0. With that of 1.10, 1 MiB, each window of a larger chunk decompresses the chunk again.
        let mut options = File::with_options();
        let _ = options.with_fapl(|access| access.chunk_cache(8191, 8 << 20, 0.75));
        let group = options
            .open(path)
            .and_then(|file| file.group("/"))
            .map_err(|error| Error::hdf5(path, "open it", error))?;
        storage::check_links(path, &group)?;
        Ok(Self { path, group, name: String::new(), length })
    }

    /// The root of a file that was opened before.
    pub(crate) fn root(path: &'a Path, group: Group, length: u64) -> Self {
        Self { path, group, name: String::new(), length }
    }

    /// Paths of all datasets below the group, in order.
    pub(crate) fn dataset_names(&self) -> Result<Vec<String>> {
        Ok(self.members_below()?.1)
    }

    /// Paths of all groups and of all datasets below the group, each in order.
    pub(super) fn members_below(&self) -> Result<(Vec<String>, Vec<String>)> {
        let failed = |error| Error::hdf5(self.path, "list its datasets", error);
        let (mut below, mut names) = (Vec::new(), Vec::new());
        let mut seen = HashSet::new();
        let mut groups = vec![(String::new(), self.group.clone())];
        while let Some((prefix, group)) = groups.pop() {
            for link in group.member_names().map_err(failed)? {
                // A soft link may lead nowhere.
                let Ok(info) = group.loc_info_by_name(&link) else { continue };
                let full = format!("{prefix}{link}");
                match info.loc_type {
                    LocationType::Dataset => names.push(full),
                    LocationType::Group if seen.insert(format!("{:?}", info.token)) => {
                        groups.push((format!("{full}/"), group.group(&link).map_err(failed)?));
                        below.push(full);
                    }
                    _ => (),
                }
            }
        }
        below.sort();
        names.sort();
        Ok((below, names))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.group.link_exists(name)
    }

    pub(crate) fn members(&self) -> Result<Vec<String>> {
        let action = if self.name.is_empty() {
            "list its datasets".to_owned()
        } else {
            format!("list the datasets of `{}`", self.name)
        };
        self.group.member_names().map_err(|error| Error::hdf5(self.path, action, error))
    }

    pub(crate) fn group(&self, name: &str) -> Result<Self> {
        let full = self.full(name);
        if !self.has(name) {
            return Err(Error::MissingGroup {
                path: self.path.to_owned(),
                group: full,
                found: self.members()?,
            });
        }
        let group = self
            .group
            .group(name)
            .map_err(|error| Error::hdf5(self.path, format!("open group `{full}`"), error))?;
        Ok(Self { path: self.path, group, name: full, length: self.length })
    }

    pub(crate) fn dataset(&self, name: &str) -> Result<Dataset> {
        let full = self.full(name);
        if !self.has(name) {
            return Err(Error::MissingDataset {
                path: self.path.to_owned(),
                dataset: full,
                found: self.members()?,
            });
        }
        let dataset = self
            .group
            .dataset(name)
            .map_err(|error| Error::hdf5(self.path, format!("open dataset `{full}`"), error))?;
        storage::check_place(self.path, &dataset, &full)?;
        self.check_size(&dataset, name)?;
        Ok(dataset)
    }

    /// Refuses a dataset that claims more values than the file can hold, before anybody takes memory for them.
    fn check_size(&self, dataset: &Dataset, name: &str) -> Result<()> {
        let kind = dataset.dtype().map_err(|error| {
            Error::hdf5(self.path, format!("read the dtype of dataset `{}`", self.full(name)), error)
        })?;
        let shape = dataset.shape();
        let chunk = dataset.chunk();
        let most = match &chunk {
            Some(_) => self.length.saturating_mul(DEFLATED),
            None => self.length,
        };
        // A chunk is unpacked whole.
        for extents in [Some(&shape), chunk.as_ref()].into_iter().flatten() {
            let bytes = extents
                .iter()
                .try_fold(kind.size() as u64, |bytes, &extent| bytes.checked_mul(extent as u64));
            if bytes.is_none_or(|bytes| bytes > most) {
                let found = format!("{} in a file of {} bytes", shape_text(extents), self.length);
                return Err(self.misfit(name, found, "no more values than the file can hold"));
            }
        }
        let unpacked = |chunk: &Vec<usize>| chunk.iter().product::<usize>() as u64 * kind.size() as u64;
        match chunk.as_ref().map(unpacked).filter(|&bytes| bytes > LARGEST_CHUNK) {
            None => Ok(()),
            Some(bytes) => {
                let expected =
                    format!("chunks of at most {LARGEST_CHUNK} bytes; repack the file (h5repack -l)");
                Err(self.misfit(name, format!("in chunks of {bytes} bytes"), expected))
            }
        }
    }

    /// A dataset of float32, of either byte order.
    pub(crate) fn field(&self, name: &str) -> Result<Stored> {
        let dataset = self.dataset(name)?;
        match self.kind(&dataset, name)? {
            TypeDescriptor::Float(FloatSize::U4) => Ok(Stored::new(self.path, dataset, self.full(name))),
            other => Err(self.misfit(name, format!("of dtype {other}"), "float32")),
        }
    }

    /// Coordinates: a list of finite, ascending floating-point numbers, as many as another dataset has points along it
    /// if that is given.
    pub(crate) fn coordinates(&self, name: &str, agree: Option<(usize, &str)>) -> Result<Vec<f64>> {
        let dataset = self.dataset(name)?;
        let shape = dataset.shape();
        match agree {
            Some((len, other)) if shape != [len] => {
                let expected = format!("{} to agree with `{other}`", shape_text(&[len]));
                return Err(self.misfit(name, shape_text(&shape), expected));
            }
            None if shape.len() != 1 || shape.contains(&0) => {
                return Err(self.misfit(name, shape_text(&shape), "a list of at least one point"));
            }
            _ if shape[0] > MOST_POINTS => {
                let expected = format!("at most {MOST_POINTS} points");
                return Err(self.misfit(name, shape_text(&shape), expected));
            }
            _ => (),
        }
        let kind = self.kind(&dataset, name)?;
        if !matches!(kind, TypeDescriptor::Float(_)) {
            return Err(self.misfit(name, format!("of dtype {kind}"), "floating-point numbers"));
        }
        let stored = Stored::new(self.path, dataset, self.full(name));
        let points = 0..shape[0];
        let window = std::slice::from_ref(&points);
        let values = match stored.read(window)? {
            Some(values) => values.into_f64(),
            None => read_window(self.path, &stored, &self.full(name), window)?,
        };
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let (path, value) = (self.path.to_owned(), values[at]);
            return Err(Error::NotFinite { path, dataset: self.full(name), index: vec![at], value });
        }
        if let Some(at) = values.windows(2).position(|pair| pair[0] >= pair[1]) {
            let found = format!("{} at index {at} and {} at the next", values[at], values[at + 1]);
            return Err(self.misfit(name, found, "ascending"));
        }
        Ok(values)
    }

    /// Returns the name of a member in errors.
    pub(crate) fn full(&self, name: &str) -> String {
        if self.name.is_empty() { name.to_owned() } else { format!("{}/{name}", self.name) }
    }

    /// The group's own name, empty for the root.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn misfit(&self, name: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        misfit(self.path, self.full(name), found, expected)
    }

    pub(crate) fn kind(&self, dataset: &Dataset, name: &str) -> Result<TypeDescriptor> {
        dataset.dtype().and_then(|kind| kind.to_descriptor()).map_err(|error| {
            Error::hdf5(self.path, format!("read the dtype of dataset `{}`", self.full(name)), error)
        })
    }
}

/// Largest number of points along one dim: more than any grid has.
const MOST_POINTS: usize = 1 << 24;

pub(crate) fn shape_text(shape: &[usize]) -> String {
    format!("of shape {shape:?}")
}

/// Returns the number of steps along an axis to read at a time, so that no chunk is decompressed twice unless
/// that would take too much memory. `step_bytes` is the size of one step.
pub(crate) fn portion(chunk: usize, step_bytes: usize) -> usize {
    chunk.min(PORTION / step_bytes.max(1)).max(1)
}

/// Largest number of bytes that are read at a time for statistics, unless one step has more.
const PORTION: usize = 256 << 20;

/// The values of a window, one range a dim of the dataset, in the dataset's order; all finite.
pub(crate) fn read_finite(
    path: &Path,
    stored: &Stored,
    name: &str,
    window: &[Range<usize>],
) -> Result<Vec<f32>> {
    if window.iter().any(Range::is_empty) {
        return Ok(Vec::new());
    }
    let values = match stored.read(window)? {
        Some(Values::F32(values)) => values,
        _ => read_window(path, stored, name, window)?,
    };
    check_finite(path, name, window, &values)?;
    Ok(values)
}

/// The values of a window with no empty range, in the dataset's order, as the library reads them.
pub(crate) fn read_window<T: H5Type>(
    path: &Path,
    stored: &Stored,
    name: &str,
    window: &[Range<usize>],
) -> Result<Vec<T>> {
    stored.check(window)?;
    let dataset = &stored.dataset;
    let values = if window.is_empty() {
        dataset.read_raw::<T>()
    } else {
        dataset.read_slice::<T, _, IxDyn>(hyperslab(window)).map(|values| values.into_raw_vec_and_offset().0)
    };
    values.map_err(|error| Error::hdf5(path, format!("read dataset `{name}`"), error))
}

pub(crate) fn hyperslab(window: &[Range<usize>]) -> Hyperslab {
    window.iter().cloned().map(SliceOrIndex::from).collect::<Vec<_>>().into()
}

/// A layout of HDF5 files that a format reads, registered beside the format.
pub(crate) struct Hdf5Layout {
    /// Name in errors.
    pub(crate) name: &'static str,
    /// Returns whether a file has it, from the names at its root.
    pub(crate) recognise: fn(&Node<'_>) -> bool,
}

inventory::collect!(Hdf5Layout);

/// Rejects a file of another registered layout, with the name of both.
pub(crate) fn check_layout(root: &Node<'_>, expected: &'static str) -> Result<()> {
    let others = inventory::iter::<Hdf5Layout>.into_iter().filter(|layout| layout.name != expected);
    match others.into_iter().find(|layout| (layout.recognise)(root)) {
        Some(other) => {
            let path = root.path.to_owned();
            Err(Error::OtherLayout { path, found: other.name, expected })
        }
        None => Ok(()),
    }
}
