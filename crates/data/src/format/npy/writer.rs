//! Writes a folder of `.npy` files.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::header::MAGIC;
use crate::content::{Content, SAMPLE, StoredAxes, TIME, coordinate_arrays};
use crate::dataset_writer::DatasetWriter;
use crate::grid::DataVariable;
use crate::runs::RawArray;
use crate::unfinished::{Unfinished, check_absent};
use crate::window_writer::{WindowStore, WindowWriter};
use crate::writers::WriterFormat;
use crate::{Error, Result, register_writer};

/// A folder with `VARIABLE.npy`, `[sample, time, channel, x, …]` without time for samples that have none and without channel for
/// scalars, and `DIM.npy`, `time.npy` and `LEVELS.npy` of coordinates. It takes its name once it is complete.
struct NpyFolder(Unfinished);

register_writer!(NpyFolder);

impl WriterFormat for NpyFolder {
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
        let array = |variable: &DataVariable| {
            let name = &variable.name;
            let is_taken = taken.contains(name) || [SAMPLE, TIME].contains(&name.as_str());
            if is_taken || name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
                return Err(Error::Invalid(format!(
                    "{name:?} cannot be the name of a .npy file in this folder"
                )));
            }
            create(folder.path(), name, "<f4", StoredAxes::new(content, variable).shape())
        };
        let arrays = content.variables.iter().map(array).collect::<Result<Vec<RawArray>>>()?;
        Ok(Box::new(WindowWriter::new(Self(folder), path, content, arrays)))
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

impl WindowStore for NpyFolder {
    type Handle = RawArray;

    fn write(
        &self,
        array: &RawArray,
        _variable: &str,
        window: &[Range<usize>],
        values: &[f32],
    ) -> Result<()> {
        array.write(window, values).map_err(|error| Error::io(self.0.target(), "write it", error))
    }

    fn finish(self, arrays: Vec<RawArray>) -> Result<()> {
        for array in arrays {
            array.file.sync_all().map_err(|error| Error::io(self.0.target(), "write it", error))?;
        }
        self.0.finish()
    }
}
