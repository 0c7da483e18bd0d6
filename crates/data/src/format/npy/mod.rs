//! NumPy's `.npy` and `.npz` files.
//!
//! The files hold no names of axes; the configuration gives them.

mod header;
mod npz;
mod writer;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use flate2::read::DeflateDecoder;

use self::header::Header;
use self::npz::{Member, members};
use crate::arrays::{ArrayDataset, ArrayInfo, ArrayOptions, Arrays, Values};
use crate::dataset::Dataset;
use crate::registry::{DataSource, Format};
use crate::runs::{read_runs, runs};
use crate::{Error, Result, register};

register!(Npy);

impl Format for Npy {
    const NAME: &'static str = "npy";
    const SUMMARY: &'static str = "NumPy arrays: a .npy file, a .npz file, or a folder of .npy files.";
    const EXTENSIONS: &'static [&'static str] = &["npy", "npz"];
    const TAKES_FOLDERS: bool = true;
    type Options = ArrayOptions;

    fn open(source: &DataSource<'_>, options: ArrayOptions) -> Result<Box<dyn Dataset>> {
        ArrayDataset::open(Box::new(Self::open(source.path())?), source, options)
    }
}

/// Arrays of NumPy's format.
#[derive(Debug)]
struct Npy {
    path: PathBuf,
    arrays: Vec<NpyArray>,
    /// Names of arrays that cannot be read, and why: others do not need them.
    refused: BTreeMap<String, String>,
}

/// Arrays by their names, and those that cannot be read.
type Opened = Vec<(String, Result<NpyArray>)>;

#[derive(Debug)]
struct NpyArray {
    name: String,
    file: File,
    header: Header,
    place: Place,
}

/// Place of an array's numbers.
#[derive(Debug)]
enum Place {
    /// From this byte of the file on.
    Plain(u64),
    /// Behind so many bytes of what deflate unpacks from here.
    Deflated { start: u64, length: u64, skip: u64 },
}

impl Npy {
    fn open(path: &Path) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::Missing { path: path.to_owned() },
            _ => Error::io(path, "look at it", error),
        })?;
        let opened = if metadata.is_dir() {
            folder(path)?
        } else {
            let file = isobar_files::open(path).map_err(|error| Error::io(path, "open it", error))?;
            let mut magic = [0; 6];
            let read = file.read_at(&mut magic, 0).map_err(|error| Error::io(path, "read it", error))?;
            match &magic[..read] {
                header::MAGIC => vec![(stem(path), plain(path, stem(path), file))],
                [b'P', b'K', ..] => archive(path, &file)?,
                _ => return Err(Error::NotNumpy { path: path.to_owned() }),
            }
        };
        let (mut arrays, mut refused, mut first) = (Vec::new(), BTreeMap::new(), None);
        for (name, array) in opened {
            match array {
                Ok(array) => arrays.push(array),
                Err(error) => {
                    let _ = refused.insert(name, error.to_string());
                    first.get_or_insert(error);
                }
            }
        }
        if let (Some(error), []) = (first, &arrays[..]) {
            return Err(error);
        }
        arrays.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { path: path.to_owned(), arrays, refused })
    }

    fn array(&self, name: &str) -> Result<&NpyArray> {
        if let Some(why) = self.refused.get(name) {
            return Err(Error::Invalid(why.clone()));
        }
        self.arrays.iter().find(|array| array.name == name).ok_or_else(|| Error::MissingDataset {
            path: self.path.clone(),
            dataset: name.to_owned(),
            found: self.names(),
        })
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
}

/// The `.npy` files of a folder, by their names without extension.
fn folder(path: &Path) -> Result<Opened> {
    let failed = |error| Error::io(path, "list it", error);
    let mut arrays = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let own = entry.map_err(failed)?.path();
        if own.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy")) {
            let file = isobar_files::open(&own).map_err(|error| Error::io(&own, "open it", error))?;
            arrays.push((stem(&own), plain(&own, stem(&own), file)));
        }
    }
    Ok(arrays)
}

fn plain(path: &Path, name: String, file: File) -> Result<NpyArray> {
    let length = file.metadata().map_err(|error| Error::io(path, "look at it", error))?.len();
    let (header, skip) = Header::read(&mut At { file: &file, offset: 0 }, path, &name)?;
    header.check_length(path, &name, length.saturating_sub(skip))?;
    Ok(NpyArray { name, file, header, place: Place::Plain(skip) })
}

/// The arrays of a `.npz` file.
fn archive(path: &Path, file: &File) -> Result<Opened> {
    let mut arrays = Vec::new();
    for member in members(path, file)? {
        let Some(name) = member.name.strip_suffix(".npy").map(str::to_owned) else { continue };
        arrays.push((name.clone(), packed(path, name, file, &member)));
    }
    Ok(arrays)
}

/// An array of a `.npz` file.
fn packed(path: &Path, name: String, file: &File, member: &Member) -> Result<NpyArray> {
    let &Member { start, packed, unpacked, deflated, .. } = member;
    let file = file.try_clone().map_err(|error| Error::io(path, "open it", error))?;
    let mut raw = At { file: &file, offset: start }.take(packed);
    let (header, skip) = match deflated {
        true => Header::read(&mut DeflateDecoder::new(raw), path, &name)?,
        false => Header::read(&mut raw, path, &name)?,
    };
    header.check_length(path, &name, unpacked.saturating_sub(skip))?;
    let place = match deflated {
        true => Place::Deflated { start, length: packed, skip },
        false => Place::Plain(start + skip),
    };
    Ok(NpyArray { name, file, header, place })
}

/// Reads a file from an offset on, without moving the position that others of the file share.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

impl Arrays for Npy {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        self.arrays.iter().map(|array| array.name.clone()).collect()
    }

    fn all_names(&self) -> Vec<String> {
        self.names().into_iter().chain(self.refused.keys().cloned()).collect()
    }

    fn info(&self, name: &str) -> Result<ArrayInfo> {
        Ok(ArrayInfo::of_shape(self.array(name)?.header.shape.clone()))
    }

    fn read(&self, name: &str, window: &[Range<usize>]) -> Result<Values> {
        let array = self.array(name)?;
        // A Fortran array is a C array with its axes reversed.
        let (shape, own): (Vec<usize>, Vec<Range<usize>>) = if array.header.fortran {
            (array.header.shape.iter().rev().copied().collect(), window.iter().rev().cloned().collect())
        } else {
            (array.header.shape.clone(), window.to_vec())
        };
        let bytes = array.bytes(&shape, &own).map_err(|error| {
            let action =
                if matches!(array.place, Place::Plain(_)) { "read it" } else { "unpack an array of it" };
            Error::io(&self.path, action, error)
        })?;
        let values = array.header.dtype.decode(&bytes);
        if !array.header.fortran || window.len() < 2 {
            return Ok(values);
        }
        let extents: Vec<usize> = window.iter().map(Range::len).collect();
        Ok(match values {
            Values::F32(values) => Values::F32(transposed(&values, &extents)),
            Values::F64(values) => Values::F64(transposed(&values, &extents)),
        })
    }
}

impl NpyArray {
    fn bytes(&self, shape: &[usize], window: &[Range<usize>]) -> std::io::Result<Vec<u8>> {
        let size = self.header.dtype.kind.size();
        let (start, packed, skip) = match self.place {
            Place::Plain(start) => return read_runs(&self.file, start, size, shape, window),
            Place::Deflated { start, length, skip } => (start, length, skip),
        };
        let runs = runs(shape, window);
        let length = runs.length * size;
        let mut bytes = vec![0; runs.starts.len() * length];
        let raw = At { file: &self.file, offset: start }.take(packed);
        let mut unpacked = DeflateDecoder::new(BufReader::with_capacity(1 << 16, raw));
        let mut at = 0;
        for (piece, first) in bytes.chunks_exact_mut(length).zip(&runs.starts) {
            let target = skip + first * size as u64;
            let gap =
                std::io::copy(&mut Read::by_ref(&mut unpacked).take(target - at), &mut std::io::sink())?;
            if gap < target - at {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            unpacked.read_exact(piece)?;
            at = target + piece.len() as u64;
        }
        Ok(bytes)
    }
}

/// Values in C order of a window that was read with its axes reversed.
fn transposed<T: Copy>(values: &[T], extents: &[usize]) -> Vec<T> {
    let mut strides = vec![1; extents.len()];
    for axis in 1..extents.len() {
        strides[axis] = strides[axis - 1] * extents[axis - 1];
    }
    let mut index = vec![0; extents.len()];
    let mut result = Vec::with_capacity(values.len());
    for _ in 0..values.len() {
        result.push(values[index.iter().zip(&strides).map(|(at, stride)| at * stride).sum::<usize>()]);
        for axis in (0..extents.len()).rev() {
            index[axis] += 1;
            if index[axis] < extents[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    result
}
