//! NetCDF's classic formats: CDF-1, CDF-2 (64-bit offsets) and CDF-5 (64-bit data).
//!
//! By the specification in the NetCDF User's Guide, "File Format Specifications". All numbers are big-endian.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::arrays::{ArrayInfo, Arrays, Valid, Values};
use crate::attributes::TextAttributes;
use crate::dtype::{Dtype, NumberKind};
use crate::runs::read_runs;
use crate::{Error, Result};

/// Bytes of the longest header that is read.
const LONGEST: u64 = 64 << 20;
/// Longest list in a header: of dimensions, variables or attributes.
const MOST_ENTRIES: u64 = 1 << 16;
/// Most dims of a variable.
const MOST_DIMS: u64 = 64;

/// Tags of lists.
const DIMENSIONS: u32 = 10;
const VARIABLES: u32 = 11;
const ATTRIBUTES: u32 = 12;
/// Type of text.
const CHAR: u32 = 2;

/// A file of a classic format.
#[derive(Debug)]
pub(super) struct Classic {
    path: PathBuf,
    file: File,
    dimensions: Vec<(String, u64)>,
    attributes: Vec<(String, Attribute)>,
    variables: Vec<Variable>,
    /// Number of records, and bytes of each.
    records: u64,
    record: u64,
}

#[derive(Debug)]
struct Variable {
    name: String,
    dims: Vec<usize>,
    kind: NumberKind,
    begin: u64,
    attributes: Vec<(String, Attribute)>,
    /// True if its first dim is that of records.
    is_record: bool,
}

#[derive(Debug)]
enum Attribute {
    Text(String),
    Numbers(Vec<f64>),
}

impl Classic {
    /// Opens a file; `None` if it has not the magic bytes.
    pub(super) fn open(path: &Path, file: File) -> Result<Option<Self>> {
        let failed = |error| Error::io(path, "read it", error);
        let length = file.metadata().map_err(failed)?.len();
        let mut magic = [0; 4];
        let read = file.read_at(&mut magic, 0).map_err(failed)?;
        let version = match &magic[..read] {
            [b'C', b'D', b'F', version @ (1 | 2 | 5)] => *version,
            _ => return Ok(None),
        };
        let mut bytes = vec![0; length.min(LONGEST) as usize];
        file.read_exact_at(&mut bytes, 0).map_err(failed)?;
        let mut header = Header { bytes: &bytes, at: 4, version };
        let parsed = header.parse(length).ok_or_else(|| Error::Layout {
            path: path.to_owned(),
            name: "the header".to_owned(),
            found: "damaged or cut off".to_owned(),
            expected: "that of a classic NetCDF file; copy or download it again".to_owned(),
        })?;
        let (records, dimensions, attributes, variables) = parsed;
        let mut classic =
            Self { path: path.to_owned(), file, dimensions, attributes, variables, records, record: 0 };
        classic.check(length)?;
        Ok(Some(classic))
    }

    /// Computes the size of records, and rejects variables whose values are not all in the file.
    fn check(&mut self, length: u64) -> Result<()> {
        let misfit = |name: &str, found: String| Error::Layout {
            path: self.path.clone(),
            name: name.to_owned(),
            found,
            expected: "values in the file; copy or download it again".to_owned(),
        };
        let too_large = |name: &str| misfit(name, "larger than any file".to_owned());
        let of_records: Vec<&Variable> =
            self.variables.iter().filter(|variable| variable.is_record).collect();
        let mut record: u64 = 0;
        for variable in &of_records {
            let one = self.bytes_of(variable, 1).ok_or_else(|| too_large(&variable.name))?;
            // Records of a single variable are not padded.
            let padded = if of_records.len() == 1 { one } else { one.next_multiple_of(4) };
            record = record.checked_add(padded).ok_or_else(|| too_large(&variable.name))?;
        }
        for variable in &self.variables {
            let bytes = if variable.is_record {
                let last = self.records.saturating_sub(1).checked_mul(record);
                let one = self.bytes_of(variable, 1).filter(|_| self.records > 0);
                if self.records == 0 {
                    Some(0)
                } else {
                    last.zip(one).and_then(|(last, one)| last.checked_add(one))
                }
            } else {
                self.bytes_of(variable, 0)
            };
            let end = bytes.and_then(|bytes| variable.begin.checked_add(bytes));
            if end.is_none_or(|end| end > length) {
                let found = format!("of shape {:?} in a file of {length} bytes", self.shape(variable));
                return Err(misfit(&variable.name, found));
            }
        }
        self.record = record;
        Ok(())
    }

    /// Bytes of a variable's values; a variable with records has `records` of them.
    fn bytes_of(&self, variable: &Variable, records: u64) -> Option<u64> {
        let extents =
            variable.dims.iter().enumerate().map(|(at, &dim)| {
                if at == 0 && variable.is_record { records } else { self.dimensions[dim].1 }
            });
        extents.into_iter().try_fold(variable.kind.size() as u64, u64::checked_mul)
    }

    fn shape(&self, variable: &Variable) -> Vec<usize> {
        let extent = |(at, &dim): (usize, &usize)| {
            if at == 0 && variable.is_record {
                self.records as usize
            } else {
                self.dimensions[dim].1 as usize
            }
        };
        variable.dims.iter().enumerate().map(extent).collect()
    }

    fn variable(&self, name: &str) -> Result<&Variable> {
        self.variables.iter().find(|variable| variable.name == name).ok_or_else(|| Error::MissingDataset {
            path: self.path.clone(),
            dataset: name.to_owned(),
            found: self.names(),
        })
    }
}

impl Arrays for Classic {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        self.variables.iter().map(|variable| variable.name.clone()).collect()
    }

    fn info(&self, name: &str) -> Result<ArrayInfo> {
        let variable = self.variable(name)?;
        let attribute = |name: &str| {
            variable.attributes.iter().find(|(own, _)| own == name).map(|(_, attribute)| attribute)
        };
        let number = |name: &str| match attribute(name) {
            Some(Attribute::Numbers(numbers)) => numbers.first().copied(),
            _ => None,
        };
        let text = |name: &str| match attribute(name) {
            Some(Attribute::Text(text)) => Some(one_line(text)).filter(|text| !text.is_empty()),
            _ => None,
        };
        let numbers = |name: &str| match attribute(name) {
            Some(Attribute::Numbers(numbers)) => Some(numbers.clone()),
            _ => None,
        };
        let fill = numbers("_FillValue").or_else(|| variable.kind.netcdf_fill().map(|fill| vec![fill]));
        let missing = [fill, numbers("missing_value")].into_iter().flatten().flatten().collect();
        let valid = Valid {
            range: numbers("valid_range"),
            least: number("valid_min"),
            greatest: number("valid_max"),
        };
        let is_unsigned = text("_Unsigned").is_some_and(|text| text.eq_ignore_ascii_case("true"));
        Ok(ArrayInfo {
            axes: Some(variable.dims.iter().map(|&dim| self.dimensions[dim].0.clone()).collect()),
            unit: text("units"),
            calendar: text("calendar"),
            scale: number("scale_factor").unwrap_or(1.0),
            offset: number("add_offset").unwrap_or(0.0),
            attributes: TextAttributes::of_variable(|name| Ok(long_text(&variable.attributes, name)))?,
            ..ArrayInfo::of_shape(self.shape(variable))
        }
        .with_cf(Some(variable.kind), missing, valid, is_unsigned))
    }

    fn attributes(&self) -> Result<TextAttributes> {
        TextAttributes::of_dataset(|name| Ok(long_text(&self.attributes, name)))
    }

    fn read(&self, name: &str, window: &[Range<usize>]) -> Result<Values> {
        let variable = self.variable(name)?;
        let shape = self.shape(variable);
        let size = variable.kind.size();
        let failed = |error| Error::io(&self.path, "read it", error);
        let mut bytes = Vec::new();
        if variable.is_record {
            for at in window[0].clone() {
                let start = variable.begin + at as u64 * self.record;
                bytes.extend(read_runs(&self.file, start, size, &shape[1..], &window[1..]).map_err(failed)?);
            }
        } else {
            bytes = read_runs(&self.file, variable.begin, size, &shape, window).map_err(failed)?;
        }
        Ok(Dtype { kind: variable.kind, big_endian: true }.decode(&bytes))
    }
}

/// The text of an attribute, which may have several lines.
fn long_text(attributes: &[(String, Attribute)], name: &str) -> Option<String> {
    attributes.iter().find_map(|(own, attribute)| match attribute {
        Attribute::Text(text) if own == name => Some(text.clone()),
        _ => None,
    })
}

/// A text without control characters, which would change the terminal that shows it.
fn one_line(text: &str) -> String {
    let plain: String = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    plain.trim().to_owned()
}

/// Number of records, dimensions, attributes of the file, and variables of numbers.
type Parsed = (u64, Vec<(String, u64)>, Vec<(String, Attribute)>, Vec<Variable>);

/// A header that is being parsed; `None` is the answer wherever it is damaged.
struct Header<'a> {
    bytes: &'a [u8],
    at: usize,
    version: u8,
}

impl Header<'_> {
    fn parse(&mut self, length: u64) -> Option<Parsed> {
        let records = self.count()?;
        let streaming = records == if self.version == 5 { u64::MAX } else { u64::from(u32::MAX) };
        if streaming || records > length {
            return None;
        }
        let mut dimensions = Vec::new();
        for _ in 0..self.list(DIMENSIONS)? {
            dimensions.push((self.name()?, self.count()?));
        }
        let of_file = self.attributes()?;
        let mut variables = Vec::new();
        for _ in 0..self.list(VARIABLES)? {
            let name = self.name()?;
            let count = self.count().filter(|&count| count <= MOST_DIMS)?;
            let dims =
                (0..count).map(|_| self.count().map(|dim| dim as usize)).collect::<Option<Vec<_>>>()?;
            let attributes = self.attributes()?;
            let kind = self.u32()?;
            // The size of the values follows from the shape; writers cap this one.
            let _ = self.count()?;
            let begin = if self.version == 1 { u64::from(self.u32()?) } else { self.u64()? };
            if dims.iter().any(|&dim| dim >= dimensions.len()) {
                return None;
            }
            let is_record = dims.first().is_some_and(|&dim| dimensions[dim].1 == 0);
            if dims.iter().skip(1).any(|&dim| dimensions[dim].1 == 0) {
                return None;
            }
            if kind != CHAR {
                let kind = number_kind(kind)?;
                variables.push(Variable { name, dims, kind, begin, attributes, is_record });
            } else if is_record {
                // Text in records changes where the next record is.
                variables.push(Variable { name, dims, kind: NumberKind::U8, begin, attributes, is_record });
            }
        }
        Some((records, dimensions, of_file, variables))
    }

    /// Length of a list with this tag, or 0 of one that is absent.
    fn list(&mut self, tag: u32) -> Option<u64> {
        let found = self.u32()?;
        let count = self.count()?;
        (count == 0 && found == 0 || found == tag).then_some(count).filter(|&count| count <= MOST_ENTRIES)
    }

    fn attributes(&mut self) -> Option<Vec<(String, Attribute)>> {
        let mut attributes = Vec::new();
        for _ in 0..self.list(ATTRIBUTES)? {
            let name = self.name()?;
            let kind = self.u32()?;
            let count = self.count()?;
            if kind == CHAR {
                let text = String::from_utf8_lossy(self.padded(count)?).into_owned();
                attributes.push((name, Attribute::Text(text)));
            } else {
                let kind = number_kind(kind)?;
                let bytes = self.padded(count.checked_mul(kind.size() as u64)?)?;
                let numbers = Dtype { kind, big_endian: true }.decode(bytes).into_f64();
                attributes.push((name, Attribute::Numbers(numbers)));
            }
        }
        Some(attributes)
    }

    fn name(&mut self) -> Option<String> {
        let length = self.count()?;
        String::from_utf8(self.padded(length)?.to_vec()).ok()
    }

    /// Bytes with padding to a multiple of four behind them.
    fn padded(&mut self, length: u64) -> Option<&[u8]> {
        let length = usize::try_from(length).ok()?;
        let start = self.at;
        let end = start.checked_add(length)?;
        self.at = end.checked_next_multiple_of(4)?;
        self.bytes.get(start..end)
    }

    fn count(&mut self) -> Option<u64> {
        if self.version == 5 { self.u64() } else { self.u32().map(u64::from) }
    }

    fn u32(&mut self) -> Option<u32> {
        let bytes = self.bytes.get(self.at..self.at + 4)?;
        self.at += 4;
        Some(u32::from_be_bytes(bytes.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        let bytes = self.bytes.get(self.at..self.at + 8)?;
        self.at += 8;
        Some(u64::from_be_bytes(bytes.try_into().ok()?))
    }
}

fn number_kind(kind: u32) -> Option<NumberKind> {
    Some(match kind {
        1 => NumberKind::I8,
        3 => NumberKind::I16,
        4 => NumberKind::I32,
        5 => NumberKind::F32,
        6 => NumberKind::F64,
        7 => NumberKind::U8,
        8 => NumberKind::U16,
        9 => NumberKind::U32,
        10 => NumberKind::I64,
        11 => NumberKind::U64,
        _ => return None,
    })
}
