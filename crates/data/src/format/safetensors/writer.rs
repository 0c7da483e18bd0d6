//! Writes a safetensors file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use isobar_files::NewFile;
use serde_json::{Map, Value, json};

use super::{AXES, CALENDAR, CHANNELS, COMPONENTS, METADATA, PERIODIC};
use crate::content::{CHANNEL, Content, SAMPLE, StoredAxes, TIME, UNITS, coordinate_arrays};
use crate::dataset_writer::DatasetWriter;
use crate::grid::DataVariable;
use crate::runs::RawArray;
use crate::window_writer::{WindowStore, WindowWriter};
use crate::writers::WriterFormat;
use crate::{Error, Result, register_writer};

/// A file with a float32 tensor for each variable, `[sample, time, channel, x, …]`. Samples without times have no time axis, scalars no
/// channel axis. Coordinates of dims, times and levels are float64 tensors. The header's metadata have `NAME.axes`, `NAME.units` and
/// others, which the reader knows. It takes its name once it is complete.
struct SafeTensorsFile(NewFile);

register_writer!(SafeTensorsFile);

impl WriterFormat for SafeTensorsFile {
    const NAME: &'static str = "safetensors";
    const SUMMARY: &'static str =
        "A .safetensors file: a tensor for each variable, with the names of its axes.";
    const EXTENSIONS: &'static [&'static str] = &["safetensors"];

    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        content.storage.none(Self::NAME)?;
        if let Some(dim) = content.dims.iter().find(|dim| dim.name.contains(char::is_whitespace)) {
            return Err(Error::Invalid(format!(
                "the name {:?} of a dim has blanks, which the metadata of a safetensors file cannot hold; write hdf5, netcdf or zarr",
                dim.name
            )));
        }
        let lines = coordinate_arrays(content);
        let (header, starts) = header(content, &lines)?;
        let failed = |error| Error::io(path, "write it", error);
        let mut new = NewFile::create(path).map_err(failed)?;
        let file = Arc::new(new.file().try_clone().map_err(failed)?);
        file.write_all_at(&header, 0).map_err(failed)?;
        let place = |at: usize| header.len() as u64 + starts[at];
        for (at, (_, values)) in lines.iter().enumerate() {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            file.write_all_at(&bytes, place(at)).map_err(failed)?;
        }
        // Tensors that are not written yet are zeros.
        file.set_len(place(starts.len() - 1)).map_err(failed)?;
        let tensor = |(at, variable): (usize, &DataVariable)| RawArray {
            file: Arc::clone(&file),
            start: place(lines.len() + at),
            shape: StoredAxes::new(content, variable).shape(),
        };
        let tensors = content.variables.iter().enumerate().map(tensor).collect();
        Ok(Box::new(WindowWriter::new(Self(new), path, content, tensors)))
    }
}

/// Returns the encoded header, and the byte offset of each tensor after it, followed by their total size. Coordinates come first, then
/// the variables.
fn header(content: &Content, lines: &[(String, Vec<f64>)]) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut entries = Map::new();
    let mut starts = vec![0];
    let mut add = |name: &str, dtype: &str, size: usize, shape: &[usize]| {
        let first = starts.last().copied().unwrap_or_default();
        let end = shape.iter().fold(size as u64, |bytes, &extent| bytes.saturating_mul(extent as u64));
        let end = end.saturating_add(first);
        starts.push(end);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [first, end] });
        let is_free = name != METADATA && entries.insert(name.to_owned(), entry).is_none();
        is_free.then_some(()).ok_or_else(|| taken(name))
    };
    for (name, values) in lines {
        add(name, "F64", size_of::<f64>(), &[values.len()])?;
    }
    for variable in &content.variables {
        // The reader takes these for coordinates.
        if [SAMPLE, TIME].contains(&variable.name.as_str()) {
            return Err(taken(&variable.name));
        }
        add(&variable.name, "F32", size_of::<f32>(), &StoredAxes::new(content, variable).shape())?;
    }
    let _ = entries.insert(METADATA.to_owned(), json!(metadata(content, lines)));
    let mut text = Value::Object(entries).to_string();
    // Tensors begin at a multiple of 8 bytes.
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    Ok((bytes, starts))
}

fn taken(name: &str) -> Error {
    Error::Invalid(format!(
        "the variable {name:?} has the name of coordinates or of the header's metadata; rename it, or choose other variables (--variables)"
    ))
}

/// Returns the attributes of the data set, and of each tensor the names of its axes, its unit and the rest that files of other formats
/// store.
fn metadata(content: &Content, lines: &[(String, Vec<f64>)]) -> BTreeMap<String, String> {
    let mut metadata: BTreeMap<String, String> = content.meta.attributes.iter().cloned().collect();
    let mut put = |name: &str, key: &str, text: &str| {
        let _ = metadata.insert(format!("{name}.{key}"), text.to_owned());
    };
    for (name, _) in lines {
        let of_samples = name == TIME && content.meta.times.is_empty();
        put(name, AXES, if of_samples { SAMPLE } else { name });
    }
    for dim in &content.dims {
        dim.unit.iter().for_each(|unit| put(&dim.name, UNITS, unit));
        if dim.periodic {
            put(&dim.name, PERIODIC, "true");
        }
    }
    for unit in content.time_unit.iter().filter(|_| lines.iter().any(|(name, _)| name == TIME)) {
        put(TIME, UNITS, &unit.unit);
        unit.calendar.iter().for_each(|calendar| put(TIME, CALENDAR, calendar));
    }
    for axis in content.channel_axes().iter().filter(|axis| axis.levels.is_some()) {
        put(&axis.name, CHANNELS, "true");
        axis.unit().iter().for_each(|unit| put(&axis.name, UNITS, unit));
    }
    for variable in &content.variables {
        let channel = content.channel_axis(variable).map_or_else(|| CHANNEL.to_owned(), |axis| axis.name);
        let channel = if variable.levels.is_some() { channel.as_str() } else { CHANNEL };
        let axes = StoredAxes::new(content, variable).names(channel, &content.dims);
        put(&variable.name, AXES, &axes.join(" "));
        variable.unit.iter().for_each(|unit| put(&variable.name, UNITS, unit));
        if variable.has_channel_axis() {
            put(&variable.name, COMPONENTS, &variable.channels.join(" "));
        }
    }
    metadata
}

impl WindowStore for SafeTensorsFile {
    type Handle = RawArray;

    fn write(
        &self,
        tensor: &RawArray,
        _variable: &str,
        window: &[Range<usize>],
        values: &[f32],
    ) -> Result<()> {
        tensor.write(window, values).map_err(|error| Error::io(self.0.target(), "write it", error))
    }

    fn finish(self, _tensors: Vec<RawArray>) -> Result<()> {
        let target = self.0.target().to_owned();
        self.0.finish().map_err(|error| Error::io(&target, "write it", error))
    }
}
