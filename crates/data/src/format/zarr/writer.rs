//! Writes Zarr of version 3, with the conventions of CF and consolidated metadata.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tch::Tensor;
use zarrs::array::codec::{GzipCodec, ZstdCodec};
use zarrs::array::{
    Array, ArrayBuilder, ArrayBytes, ArrayToBytesCodecTraits as _, BytesToBytesCodecTraits, CodecOptions,
    data_type,
};

use super::codecs::LARGEST;
use crate::attributes::TITLE;
use crate::boxes::{copy, extents, indices, shared, touched};
use crate::content::{CHANNEL, Checked, Content, SAMPLE, StoredAxes, TIME, Texts, UNITS, of_times};
use crate::dataset_writer::DatasetWriter;
use crate::hdf5::plain::{CHANNELS, COMPONENTS, COORDINATES, PERIODIC};
use crate::unfinished::{Unfinished, check_absent};
use crate::writers::WriterFormat;
use crate::{Error, Result, register_writer};

/// Bytes of a chunk for which times are taken together, about.
const CHUNK: usize = 1 << 20;

/// Conventions of CF that the attributes follow.
const CONVENTIONS: &str = "CF-1.10";

/// A folder with an array for each variable, `[sample, time, channel, x, …]` without time for samples that have none and without
/// channel for scalars, and one for the coordinates of each axis. It takes its name once it is complete. Any rank may write any
/// window; a chunk is written when the last of its values comes, so each is to be one rank's.
struct ZarrWriter {
    /// The unfinished store.
    folder: PathBuf,
    /// Of the rank that made it: removes what is not finished.
    own: Option<Unfinished>,
    /// True if an earlier writer may have written chunks.
    resumes: bool,
    target: PathBuf,
    has_times: bool,
    dims: usize,
    /// True if NaN marks missing values.
    missing: bool,
    variables: Vec<Variable>,
    /// Chunks whose values are not complete, by variable and index.
    open: BTreeMap<(usize, Vec<usize>), Open>,
    root: Value,
}

struct Variable {
    name: String,
    axes: StoredAxes,
    shape: Vec<usize>,
    chunk: Vec<usize>,
    array: Array<()>,
}

/// A chunk of which some values are there.
struct Open {
    bytes: Vec<u8>,
    there: usize,
}

register_writer!(ZarrWriter);

impl WriterFormat for ZarrWriter {
    const NAME: &'static str = "zarr";
    const SUMMARY: &'static str = "Zarr of version 3 with the conventions of CF, each rank its own chunks.";
    const EXTENSIONS: &'static [&'static str] = &["zarr"];
    const BY_RANK: bool = true;

    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        check_absent(path)?;
        Ok(Box::new(Self::begin(path, content, Unfinished::new(path)?)?))
    }

    fn resume(path: &Path, content: &Content, plan: &str) -> Result<Option<Box<dyn DatasetWriter>>> {
        check_absent(path)?;
        let (folder, resumes) = Unfinished::of_plan(path, plan)?;
        let writer = Self::begin(path, content, folder)?;
        Ok(Some(Box::new(Self { resumes, ..writer })))
    }

    fn join(path: &Path, content: &Content, unfinished: &Path) -> Result<Box<dyn DatasetWriter>> {
        if !unfinished.is_dir() {
            let error = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(Error::io(
                unfinished,
                "find the store that rank 0 made, on a file system of all ranks",
                error,
            ));
        }
        Ok(Box::new(Self::plan(path, content, unfinished.to_owned())?))
    }
}

impl ZarrWriter {
    /// Writes what a store has before its values.
    fn begin(path: &Path, content: &Content, folder: Unfinished) -> Result<Self> {
        let mut writer = Self::plan(path, content, folder.path().to_owned())?;
        writer.own = Some(folder);
        writer.layout(content)?;
        Ok(writer)
    }

    fn plan(path: &Path, content: &Content, folder: PathBuf) -> Result<Self> {
        let Content { meta, dims, variables, storage, .. } = content;
        let mut made = Vec::new();
        for variable in variables {
            let name = &variable.name;
            let channel = content.channel_axis(variable).map(|axis| axis.name);
            let own = StoredAxes::new(content, variable);
            let (axes, shape) = (own.names(channel.as_deref().unwrap_or(CHANNEL), dims), own.shape());
            let axes: Vec<&str> = axes.iter().map(String::as_str).collect();
            let has_times = !meta.sample_times.is_empty();
            let taken = axes.contains(&name.as_str())
                || has_times && name == TIME
                || content.channel_axes().iter().any(|axis| axis.name == *name)
                || !is_name(name);
            if taken || made.iter().any(|known: &Variable| known.name == *name) {
                return Err(Error::Invalid(format!("{name:?} cannot be the name of an array in this store")));
            }
            let _ = storage.chunk(&axes, &shape)?;
            let given = |axis: &str| {
                let is_channel = channel.as_deref() == Some(axis);
                storage.chunks.get(if is_channel { CHANNEL } else { axis }).copied()
            };
            let mut chunk: Vec<usize> = axes
                .iter()
                .zip(&shape)
                .map(|(axis, &extent)| {
                    let default = if [SAMPLE, TIME].contains(axis) { 1 } else { extent };
                    given(axis).unwrap_or(default).clamp(1, extent.max(1))
                })
                .collect();
            let bytes = |chunk: &[usize]| {
                chunk.iter().fold(size_of::<f32>(), |bytes, extent| bytes.saturating_mul(*extent))
            };
            // The longest of the axes whose extent is not given is halved until readers take the chunk.
            while bytes(&chunk) > LARGEST {
                let free = chunk
                    .iter_mut()
                    .zip(&axes)
                    .filter(|(extent, axis)| **extent > 1 && given(axis).is_none());
                let Some(longest) = free.map(|(extent, _)| extent).max() else { break };
                *longest = longest.div_ceil(2);
            }
            if bytes(&chunk) > LARGEST {
                return Err(Error::Invalid(format!(
                    "the chunks of `{name}` are of shape {chunk:?}, expected at most {LARGEST} bytes; give smaller extents (--chunk \
                     NAME=EXTENT)"
                )));
            }
            if let (Some(at), None) = (axes.iter().position(|axis| *axis == TIME), given(TIME)) {
                let bytes = bytes(&chunk);
                chunk[at] = (CHUNK / bytes.max(1)).clamp(1, shape[at]);
            }
            let mut attributes = Map::new();
            let mut put = |name: &str, value: &str| drop(attributes.insert(name.to_owned(), value.into()));
            if let Some(unit) = &variable.unit {
                put(UNITS, unit);
            }
            variable.stored_attributes().for_each(|(name, text)| put(name, text));
            if channel.is_some() {
                put(COMPONENTS, &variable.channels.join(" "));
            }
            if has_times {
                put(COORDINATES, TIME);
            }
            let packing: Arc<dyn BytesToBytesCodecTraits> = match storage.deflate {
                Some(level) => Arc::new(
                    GzipCodec::new(u32::from(level)).map_err(|error| Error::Invalid(error.to_string()))?,
                ),
                None => Arc::new(ZstdCodec::new(3, false)),
            };
            let array = build(path, name, (&axes, &shape, &chunk), attributes, (false, Some(packing)))?;
            made.push(Variable { name: name.clone(), axes: own, shape, chunk, array });
        }
        let (own, open, root) = (None, BTreeMap::new(), Value::Null);
        Ok(Self {
            folder,
            own,
            resumes: false,
            target: path.to_owned(),
            missing: meta.missing,
            has_times: !meta.times.is_empty(),
            dims: dims.len(),
            variables: made,
            open,
            root,
        })
    }

    /// Writes metadata and coordinates.
    fn layout(&mut self, content: &Content) -> Result<()> {
        let Content { meta, dims, .. } = content;
        let mut nodes = Map::new();
        let along = |axis: &str, name: &str, values: &[f64], attributes| -> Result<Value> {
            let shape = [values.len()];
            let array = build(
                &self.target,
                name,
                (&[axis], &shape, &[values.len().max(1)]),
                attributes,
                (true, None),
            )?;
            if !values.is_empty() {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                self.put(array.chunk_key(&[0]).as_str(), &bytes)?;
            }
            self.describe(name, &array)
        };
        let line = |name: &str, values: &[f64], attributes| along(name, name, values, attributes);
        let json = |texts: Texts<'_>| -> Map<String, Value> {
            texts.into_iter().map(|(name, text)| (name.to_owned(), text.into())).collect()
        };
        for dim in dims {
            let mut attributes = json(dim.attributes());
            if dim.periodic {
                let _ = attributes.insert(PERIODIC.to_owned(), true.into());
            }
            let _ = nodes.insert(dim.name.clone(), line(&dim.name, &dim.coordinates, attributes)?);
        }
        let of_times = json(of_times(content.time_unit.as_ref(), self.has_times));
        if self.has_times {
            let _ = nodes.insert(TIME.to_owned(), line(TIME, &meta.times, of_times)?);
        } else if !meta.sample_times.is_empty() {
            let _ = nodes.insert(TIME.to_owned(), along(SAMPLE, TIME, &meta.sample_times, of_times)?);
        }
        let _ = nodes.insert(SAMPLE.to_owned(), line(SAMPLE, &meta.numbers(), Map::new())?);
        for axis in content.channel_axes() {
            let mut attributes = json(axis.attributes());
            let _ = attributes.insert(CHANNELS.to_owned(), true.into());
            let _ = nodes.insert(axis.name.clone(), line(&axis.name, &axis.values(), attributes)?);
        }
        for variable in &self.variables {
            let _ = nodes.insert(variable.name.clone(), self.describe(&variable.name, &variable.array)?);
        }
        let mut attributes = json(vec![("Conventions", CONVENTIONS), (TITLE, &meta.name)]);
        attributes.extend(meta.attributes.iter().map(|(name, text)| (name.clone(), text.as_str().into())));
        self.root = json!({
            "zarr_format": 3,
            "node_type": "group",
            "attributes": attributes,
            "consolidated_metadata": { "kind": "inline", "must_understand": false, "metadata": nodes },
        });
        Ok(())
    }

    /// Writes the metadata of an array.
    fn describe(&self, name: &str, array: &Array<()>) -> Result<Value> {
        let wrong = |error: serde_json::Error| Error::Invalid(error.to_string());
        let node = serde_json::to_value(array.metadata()).map_err(wrong)?;
        self.put(&format!("{name}/zarr.json"), &serde_json::to_vec_pretty(&node).map_err(wrong)?)?;
        Ok(node)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        let path = self.folder.join(key);
        let write = || -> std::io::Result<()> {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            // Under another name until it is complete: a writer that resumes takes what has its name.
            let mut partial = path.clone().into_os_string();
            partial.push(".partial");
            let mut file = File::create(&partial)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&partial, &path)
        };
        write().map_err(|error| Error::io(&self.target.join(key), "write it", error))
    }

    /// Writes a complete chunk.
    fn chunk(&self, variable: &Variable, index: &[usize], bytes: Vec<u8>) -> Result<()> {
        let shape: Option<Vec<NonZeroU64>> =
            variable.chunk.iter().map(|&extent| NonZeroU64::new(extent as u64)).collect();
        let shape = shape.unwrap_or_default();
        let array = &variable.array;
        let values = ArrayBytes::new_flen(bytes);
        let packed = array.codecs().encode(
            values,
            &shape,
            array.data_type(),
            array.fill_value(),
            &CodecOptions::default(),
        );
        let packed =
            packed.map_err(|error| Error::Invalid(format!("could not pack `{}`: {error}", variable.name)))?;
        self.put(key(variable, index).as_str(), &packed)
    }
}

/// Key of a chunk.
fn key(variable: &Variable, index: &[usize]) -> String {
    let index: Vec<u64> = index.iter().map(|&at| at as u64).collect();
    variable.array.chunk_key(&index).as_str().to_owned()
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(['.', '_'])
        && !name.contains(['/', '\\', '\0'])
        && name != "zarr.json"
}

/// An array of float32, or of float64 for coordinates.
fn build(
    path: &Path,
    name: &str,
    (axes, shape, chunk): (&[&str], &[usize], &[usize]),
    attributes: Map<String, Value>,
    (is_double, packing): (bool, Option<Arc<dyn BytesToBytesCodecTraits>>),
) -> Result<Array<()>> {
    let numbers = |extents: &[usize]| -> Vec<u64> { extents.iter().map(|&extent| extent as u64).collect() };
    let (shape, chunk) = (numbers(shape), numbers(chunk));
    let mut builder = match is_double {
        true => ArrayBuilder::new(shape, chunk, data_type::float64(), f64::NAN),
        false => ArrayBuilder::new(shape, chunk, data_type::float32(), f32::NAN),
    };
    let _ = builder.attributes(attributes).dimension_names(Some(axes.iter().copied()));
    let _ = builder.bytes_to_bytes_codecs(packing.into_iter().collect());
    let made = builder.build(Arc::new(()), &format!("/{name}"));
    made.map_err(|error| Error::Invalid(format!("{}: `{name}` cannot be described: {error}", path.display())))
}

impl DatasetWriter for ZarrWriter {
    fn write(&mut self, variable: &str, sample: usize, first: usize, values: &Tensor) -> Result<()> {
        let of = self.variables.iter().find(|known| known.name == variable);
        let all = of.map(|of| of.axes.all_points()).unwrap_or_default();
        self.write_window(variable, sample, first, &all, values)
    }

    fn takes_windows(&self) -> bool {
        true
    }

    fn unfinished(&self) -> Option<&Path> {
        Some(&self.folder)
    }

    fn is_resumable(&self) -> bool {
        self.own.as_ref().is_some_and(Unfinished::is_resumable)
    }

    fn tile(&self) -> Option<Vec<usize>> {
        let of = |variable: &Variable| {
            Some(variable.chunk[variable.chunk.len().checked_sub(self.dims)?..].to_vec())
        };
        self.variables.first().and_then(of)
    }

    fn write_window(
        &mut self,
        variable: &str,
        sample: usize,
        first: usize,
        points: &[Range<usize>],
        values: &Tensor,
    ) -> Result<()> {
        let Some(at) = self.variables.iter().position(|known| known.name == variable) else {
            let found = self.variables.iter().map(|variable| variable.name.clone()).collect();
            return Err(Error::MissingField { path: self.target.clone(), field: variable.to_owned(), found });
        };
        let of = &self.variables[at];
        let file = (self.target.as_path(), self.missing);
        let checked = of.axes.checked(file, variable, (sample, first), points, values)?;
        let Some(Checked { window, values, .. }) = checked else { return Ok(()) };
        // As the codec takes them: in this machine's order.
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let cut = extents(&window);
        for index in indices(&touched(&window, &of.chunk)) {
            let of = &self.variables[at];
            if self.resumes && self.folder.join(key(of, &index)).exists() {
                continue;
            }
            let (inside, outside) = shared(&window, &of.chunk, &index);
            let all = of.chunk.iter().product::<usize>();
            let of_array = index.iter().zip(&of.chunk).zip(&of.shape);
            let complete: usize =
                of_array.map(|((at, chunk), shape)| (shape - at * chunk).min(*chunk)).product();
            let new = || Open { bytes: f32::NAN.to_ne_bytes().repeat(all), there: 0 };
            let open = self.open.entry((at, index.clone())).or_insert_with(new);
            copy(size_of::<f32>(), (&bytes, &cut, &outside), (&mut open.bytes, &of.chunk, &inside));
            open.there = open.there.saturating_add(extents(&inside).iter().product());
            if open.there >= complete
                && let Some(open) = self.open.remove(&(at, index.clone()))
            {
                self.chunk(&self.variables[at], &index, open.bytes)?;
            }
        }
        Ok(())
    }

    fn is_written(&self, variable: &str, sample: usize, frames: Range<usize>) -> bool {
        let Some(of) = self.variables.iter().find(|known| known.name == variable) else { return false };
        let window = of.axes.window(sample, frames, &of.axes.all_points());
        self.resumes
            && indices(&touched(&window, &of.chunk)).all(|index| self.folder.join(key(of, &index)).exists())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let missing = |variable: &Variable, index: &[usize]| {
            let first: Vec<usize> = index.iter().zip(&variable.chunk).map(|(at, chunk)| at * chunk).collect();
            Err(Error::Invalid(format!(
                "the values of `{}` from index {first:?} on were not all written; add them first",
                variable.name
            )))
        };
        if let Some((at, index)) = self.open.keys().next() {
            return missing(&self.variables[*at], index);
        }
        if self.own.is_none() {
            return Ok(());
        }
        for variable in &self.variables {
            let whole: Vec<Range<usize>> = variable.shape.iter().map(|&extent| 0..extent).collect();
            let absent = |index: &Vec<usize>| !self.folder.join(key(variable, index)).exists();
            if let Some(index) = indices(&touched(&whole, &variable.chunk)).find(absent) {
                return missing(variable, &index);
            }
        }
        let root =
            serde_json::to_vec_pretty(&self.root).map_err(|error| Error::Invalid(error.to_string()))?;
        self.put("zarr.json", &root)?;
        self.own.map_or(Ok(()), Unfinished::finish)
    }
}
