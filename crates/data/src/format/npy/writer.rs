//! Writes a folder of `.npy` files.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use isobar_torch::memory;
use tch::{Device, Kind, Tensor};

use super::header::MAGIC;
use crate::content::{Content, StoredAxes, TIME};
use crate::dataset::DatasetWriter;
use crate::hdf5::layout::check_values;
use crate::runs::runs;
use crate::unfinished::{Unfinished, check_absent};
use crate::writers::WriterFormat;
use crate::{Error, Result, register_writer};

/// A folder with `VARIABLE.npy`, `[sample, time, channel, x, …]` without time for samples that have none and without channel for
/// scalars, and `DIM.npy`, `time.npy` and `LEVELS.npy` of coordinates. It takes its name once it is complete.
struct NpyWriter {
    folder: Unfinished,
    target: PathBuf,
    /// True if NaN marks missing values.
    missing: bool,
    variables: Vec<Variable>,
}

struct Variable {
    name: String,
    axes: StoredAxes,
    file: File,
    /// Offset of the first number, in bytes.
    start: u64,
    shape: Vec<usize>,
    /// Points of each channel that were written, by sample and frame.
    written: Vec<usize>,
}

register_writer!(NpyWriter);

impl WriterFormat for NpyWriter {
    const NAME: &'static str = "npy";
    const SUMMARY: &'static str = "A folder of NumPy arrays, VARIABLE.npy.";

    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        content.storage.none(Self::NAME)?;
        check_absent(path)?;
        let folder = Unfinished::new(path)?;
        let meta = &content.meta;
        let lines = content.dims.iter().map(|dim| (dim.name.as_str(), &dim.coordinates));
        let times = if meta.sample_times.is_empty() { &meta.times } else { &meta.sample_times };
        let times = (!times.is_empty()).then_some((TIME, times));
        let channel_axes = content.channel_axes();
        let levels = channel_axes.iter().filter_map(|axis| Some((axis.name.as_str(), &axis.levels?.values)));
        let mut taken = Vec::new();
        for (name, values) in lines.chain(times).chain(levels) {
            let (file, start) = create(folder.path(), name, "<f8", &[values.len()])?;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            file.write_all_at(&bytes, start).map_err(|error| Error::io(path, "write it", error))?;
            taken.push(name);
        }
        let mut variables = Vec::new();
        for variable in &content.variables {
            let name = variable.name.clone();
            if name.is_empty()
                || name.starts_with('.')
                || name.contains(['/', '\0'])
                || taken.contains(&name.as_str())
            {
                return Err(Error::Invalid(format!(
                    "{name:?} cannot be the name of a .npy file in this folder"
                )));
            }
            let axes = StoredAxes::new(content, variable);
            let shape = axes.shape();
            let (file, start) = create(folder.path(), &name, "<f4", &shape)?;
            let written = vec![0; axes.all_frames()];
            variables.push(Variable { name, axes, file, start, shape, written });
        }
        Ok(Box::new(Self { folder, target: path.to_owned(), missing: meta.missing, variables }))
    }
}

/// Creates an array whose values are still zero.
fn create(folder: &Path, name: &str, dtype: &str, shape: &[usize]) -> Result<(File, u64)> {
    let path = folder.join(format!("{name}.npy"));
    let failed = |error| Error::io(&path, "create it", error);
    let extents: String = shape.iter().map(|extent| format!("{extent}, ")).collect();
    let mut header =
        format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({}), }}", extents.trim_end());
    // Numbers begin at a multiple of 64 bytes.
    let before = MAGIC.len() + 4;
    let padding = (64 - (before + header.len() + 1) % 64) % 64;
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    let file = File::options().write(true).create_new(true).open(&path).map_err(failed)?;
    file.write_all_at(&bytes, 0).map_err(failed)?;
    Ok((file, bytes.len() as u64))
}

impl DatasetWriter for NpyWriter {
    fn write(&mut self, variable: &str, sample: usize, first: usize, values: &Tensor) -> Result<()> {
        let of = self.variables.iter().find(|known| known.name == variable);
        let all = of.map(|of| of.axes.all_points()).unwrap_or_default();
        self.write_window(variable, sample, first, &all, values)
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
        let found = || self.variables.iter().map(|variable| variable.name.clone()).collect();
        let Some(at) = self.variables.iter().position(|known| known.name == variable) else {
            return Err(Error::MissingField {
                path: self.target.clone(),
                field: variable.to_owned(),
                found: found(),
            });
        };
        let of = &mut self.variables[at];
        let frames = of.axes.check(variable, (sample, first), points, values)?;
        if values.numel() == 0 {
            return Ok(());
        }
        let window = of.axes.window(sample, frames.clone(), points);
        let stored = values.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        let stored: Vec<f32> = memory::to_vec(&stored)?;
        check_values(&self.target, variable, &window, &stored, self.missing)?;
        let bytes: Vec<u8> = stored.iter().flat_map(|value| value.to_le_bytes()).collect();
        let runs = runs(&of.shape, &window);
        for (piece, place) in bytes.chunks_exact(runs.length * size_of::<f32>()).zip(&runs.starts) {
            let place = of.start + place * size_of::<f32>() as u64;
            of.file.write_all_at(piece, place).map_err(|error| Error::io(&self.target, "write it", error))?;
        }
        let points: usize = points.iter().map(Range::len).product();
        let before = sample * of.axes.frame_count();
        let written = &mut of.written[before + frames.start..before + frames.end];
        written.iter_mut().for_each(|written| *written = written.saturating_add(points));
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        for variable in &self.variables {
            let (frames, points) = (variable.axes.frame_count(), variable.axes.grid().iter().product());
            if let Some(at) = variable.written.iter().position(|&written| written < points) {
                return Err(Error::Invalid(format!(
                    "frame {} of sample {} of `{}` was not written; add it first",
                    at % frames,
                    at / frames,
                    variable.name
                )));
            }
            variable.file.sync_all().map_err(|error| Error::io(&self.target, "write it", error))?;
        }
        self.folder.finish()
    }
}
