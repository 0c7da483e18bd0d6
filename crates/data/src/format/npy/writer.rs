//! Writes a folder of `.npy` files.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use tch::Tensor;

use super::header::MAGIC;
use crate::content::{Content, SAMPLE, StoredAxes, TIME, Written, coordinate_arrays};
use crate::dataset::DatasetWriter;
use crate::runs::RawArray;
use crate::unfinished::{Unfinished, check_absent};
use crate::writers::WriterFormat;
use crate::{Error, Result, register_writer};

/// A folder with `VARIABLE.npy`, `[sample, time, channel, x, …]` without time for samples that have none and without channel for
/// scalars, and `DIM.npy`, `time.npy` and `LEVELS.npy` of coordinates. It takes its name once it is complete.
struct NpyWriter {
    folder: Unfinished,
    arrays: Written<RawArray>,
}

register_writer!(NpyWriter);

impl WriterFormat for NpyWriter {
    const NAME: &'static str = "npy";
    const SUMMARY: &'static str = "A folder of NumPy arrays, VARIABLE.npy.";

    fn create(path: &Path, content: &Content) -> Result<Box<dyn DatasetWriter>> {
        content.storage.none(Self::NAME)?;
        check_absent(path)?;
        let folder = Unfinished::new(path)?;
        let mut taken = Vec::new();
        for (name, values) in coordinate_arrays(content) {
            let line = create(folder.path(), &name, "<f8", vec![values.len()])?;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            line.file.write_all_at(&bytes, line.start).map_err(|error| Error::io(path, "write it", error))?;
            taken.push(name);
        }
        let mut arrays = Written::new(path, content);
        for variable in &content.variables {
            let name = &variable.name;
            let is_taken = taken.contains(name) || [SAMPLE, TIME].contains(&name.as_str());
            if is_taken || name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
                return Err(Error::Invalid(format!(
                    "{name:?} cannot be the name of a .npy file in this folder"
                )));
            }
            let shape = StoredAxes::new(content, variable).shape();
            arrays.add(content, variable, create(folder.path(), name, "<f4", shape)?);
        }
        Ok(Box::new(Self { folder, arrays }))
    }
}

/// Creates an array whose values are still zero.
fn create(folder: &Path, name: &str, dtype: &str, shape: Vec<usize>) -> Result<RawArray> {
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
    Ok(RawArray { file: Arc::new(file), start: bytes.len() as u64, shape })
}

impl DatasetWriter for NpyWriter {
    fn write(&mut self, variable: &str, sample: usize, first: usize, values: &Tensor) -> Result<()> {
        let all = self.arrays.points(variable);
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
        let target = self.arrays.target().to_owned();
        self.arrays.write(variable, (sample, first), points, values, |array, window, stored| {
            array.write(window, stored).map_err(|error| Error::io(&target, "write it", error))
        })
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { folder, arrays } = *self;
        let target = arrays.target().to_owned();
        for array in arrays.finish()? {
            array.file.sync_all().map_err(|error| Error::io(&target, "write it", error))?;
        }
        folder.finish()
    }
}
