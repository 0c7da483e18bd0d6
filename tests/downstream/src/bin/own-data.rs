//! The command `isobar` with a data format of the program's own: `[data] format = "raw"`, plain float32 numbers.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use isobar::data::{
    ArrayDataset, ArrayInfo, ArrayOptions, Arrays, DataSource, Dataset, Error, Format, Result, Values,
};
use isobar::schemars::JsonSchema;
use isobar::serde::Deserialize;

/// A file of one array of little-endian float32 numbers in C order.
#[derive(Debug)]
struct Raw {
    path: PathBuf,
    file: File,
    shape: Vec<usize>,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(crate = "isobar::serde", deny_unknown_fields)]
#[schemars(crate = "isobar::schemars")]
struct RawOptions {
    /// Extent of each axis.
    shape: Vec<usize>,
    /// Names of the axes.
    axes: Vec<String>,
}

impl Format for Raw {
    const NAME: &'static str = "raw";
    const SUMMARY: &'static str = "Little-endian float32 numbers, and nothing else; the variable is `value`.";
    const EXTENSIONS: &'static [&'static str] = &["f32"];
    type Options = RawOptions;

    fn open(source: &DataSource<'_>, options: RawOptions) -> Result<Box<dyn Dataset>> {
        let path = source.path().to_owned();
        let failed = |error| Error::Io { path: path.clone(), action: "open it", source: error };
        let file = isobar::files::open(&path).map_err(failed)?;
        let (shape, found) = (options.shape, file.metadata().map_err(failed)?.len());
        let bytes = shape.iter().try_fold(4_u64, |bytes, &extent| bytes.checked_mul(extent as u64));
        if bytes != Some(found) {
            let (name, found) = ("value".to_owned(), format!("of {found} bytes"));
            return Err(Error::Layout {
                path,
                name,
                found,
                expected: format!("float32 numbers of shape {shape:?}"),
            });
        }
        if options.axes.len() != shape.len() {
            let (count, expected) = (options.axes.len(), shape.len());
            return Err(Error::Config(format!("data.raw.axes names {count} axes, expected {expected}")));
        }
        let axes = ArrayOptions { axes: options.axes, ..ArrayOptions::default() };
        ArrayDataset::open(Box::new(Self { path, file, shape }), source, axes)
    }
}

impl Arrays for Raw {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        vec!["value".to_owned()]
    }

    fn info(&self, _name: &str) -> Result<ArrayInfo> {
        Ok(ArrayInfo::of_shape(self.shape.clone()))
    }

    /// Reads the window row by row.
    fn read(&self, _name: &str, window: &[Range<usize>]) -> Result<Values> {
        let Some((last, leading)) = window.split_last() else { return Ok(Values::F32(Vec::new())) };
        let mut rows = vec![0_usize];
        for (range, extent) in leading.iter().zip(&self.shape) {
            rows = rows.iter().flat_map(|row| range.clone().map(move |at| row * extent + at)).collect();
        }
        let mut bytes = vec![0; 4 * last.len() * rows.len()];
        for (piece, row) in bytes.chunks_exact_mut(4 * last.len()).zip(rows) {
            let start = row * self.shape[leading.len()] + last.start;
            let failed = |error| Error::Io { path: self.path.clone(), action: "read it", source: error };
            self.file.read_exact_at(piece, 4 * start as u64).map_err(failed)?;
        }
        Ok(Values::F32(bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect()))
    }
}

fn main() -> std::process::ExitCode {
    isobar::App::new().dataset::<Raw>().main()
}
