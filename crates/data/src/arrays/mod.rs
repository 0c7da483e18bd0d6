//! Data sets made of named arrays, such as files of plain HDF5, NumPy and Zarr: which array is which variable, and the
//! meaning of each axis.
//!
//! A format of named arrays implements [`Arrays`]; this module makes a [`Dataset`](crate::Dataset) of it. It knows no
//! format.

mod dataset;
mod layout;
mod options;

use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;

use crate::Result;
use crate::attributes::TextAttributes;
use crate::dtype::NumberKind;

pub use self::dataset::ArrayDataset;
pub use self::options::{ArrayOptions, VariableOptions, VariableTable};
pub use crate::dtype::Values;

/// A file or folder of named arrays.
pub trait Arrays: Debug + Send + Sync {
    /// Path of the file or folder, as given.
    fn path(&self) -> &Path;

    /// Names of the arrays of numbers, as [`Arrays::info`] takes them.
    fn names(&self) -> Vec<String>;

    /// Names of all arrays, those of other values than numbers included: reading these is an error that names their dtype.
    fn all_names(&self) -> Vec<String> {
        self.names()
    }

    /// Describes an array from its metadata.
    ///
    /// # Errors
    /// No array of that name, or one that this format cannot read: damaged, of another dtype, or larger than its file can
    /// hold.
    fn info(&self, name: &str) -> Result<ArrayInfo>;

    /// Attributes of CF of the file or folder.
    ///
    /// # Errors
    /// Data that cannot be read.
    fn attributes(&self) -> Result<TextAttributes> {
        Ok(TextAttributes::default())
    }

    /// Reads a window of an array, one range for each axis and none empty, in C order.
    ///
    /// # Errors
    /// Data that cannot be read.
    fn read(&self, name: &str, window: &[Range<usize>]) -> Result<Values>;
}

/// Metadata of an array.
#[derive(Clone, Debug, PartialEq)]
pub struct ArrayInfo {
    /// Extent of each axis.
    pub shape: Vec<usize>,
    /// Names of the axes, if the format stores them.
    pub axes: Option<Vec<String>>,
    /// Unit of the values.
    pub unit: Option<String>,
    /// Calendar of times, by CF's name.
    pub calendar: Option<String>,
    /// Values are what is stored times this, plus `offset`.
    pub scale: f64,
    /// See `scale`.
    pub offset: f64,
    /// Stored numbers that stand for missing values.
    pub missing: Vec<f64>,
    /// Least and greatest stored number that is valid; others stand for missing values.
    pub valid: Option<(f64, f64)>,
    /// Offset that is added to negative stored numbers, before all else: integers without sign that are stored with one.
    pub wrap: Option<f64>,
    /// True for the coordinates of a periodic dim, whose first point follows the last.
    pub periodic: bool,
    /// True for the coordinates of an axis of channels, such as levels.
    pub channels: bool,
    /// Names of the channels, if the format stores them; one without blanks for each.
    pub components: Vec<String>,
    /// Extent of its chunks along each axis, if it is stored in chunks.
    pub chunk: Option<Vec<usize>>,
    /// Attributes of CF, such as the standard name.
    pub attributes: TextAttributes,
}

impl ArrayInfo {
    /// An array of this shape, without names or attributes.
    pub fn of_shape(shape: Vec<usize>) -> Self {
        let (axes, unit, calendar, chunk) = (None, None, None, None);
        Self {
            shape,
            axes,
            unit,
            calendar,
            scale: 1.0,
            offset: 0.0,
            missing: Vec::new(),
            valid: None,
            wrap: None,
            periodic: false,
            channels: false,
            components: Vec::new(),
            chunk,
            attributes: TextAttributes::default(),
        }
    }
}

/// Names of channels in the text of an attribute.
pub(crate) fn components(text: Option<&str>) -> Vec<String> {
    text.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

impl ArrayInfo {
    /// Returns whether a stored number stands for a missing value.
    pub(crate) fn is_missing(&self, value: f64) -> bool {
        self.missing.contains(&value)
            || self.valid.is_some_and(|(least, greatest)| value < least || value > greatest)
    }

    /// Returns whether all stored values are finite and none means a missing value. Passes over blocks that fit the L1 cache,
    /// without branches, so that the compiler vectorises them.
    pub(crate) fn are_good(&self, values: &[f32]) -> bool {
        fn any(block: &[f32], is: impl Fn(f32) -> bool) -> bool {
            block.iter().fold(false, |any, &value| any | is(value))
        }
        values.chunks(4096).all(|block| {
            let is_missing = |&missing: &f64| any(block, |value| f64::from(value) == missing);
            !any(block, |value| !value.is_finite())
                && !self.missing.iter().any(is_missing)
                && !self.valid.is_some_and(|(least, greatest)| {
                    any(block, |value| (f64::from(value) < least) | (f64::from(value) > greatest))
                })
        })
    }

    /// Applies the attributes of CF and NetCDF to an array of this dtype: `missing` are fill values and what `missing_value`
    /// lists, `valid_range` has two numbers, and `is_unsigned` marks signed integers that store unsigned ones. Attributes are
    /// rounded to the array's dtype before comparison.
    pub(crate) fn with_cf(
        self,
        kind: Option<NumberKind>,
        missing: Vec<f64>,
        valid: Valid,
        is_unsigned: bool,
    ) -> Self {
        let bits = kind.and_then(NumberKind::signed_bits).filter(|_| is_unsigned);
        let wrap = bits.map(|bits| f64::from(bits).exp2());
        let plain = |value: f64| match wrap {
            Some(wrap) if value < 0.0 => value + wrap,
            _ => kind.map_or(value, |kind| kind.rounded(value)),
        };
        let Valid { range, least, greatest } = valid;
        let pair = match range.as_deref() {
            Some(&[least, greatest]) => (Some(least), Some(greatest)),
            _ => (least, greatest),
        };
        let valid = match pair {
            (None, None) => None,
            (least, greatest) => {
                Some((least.map_or(f64::NEG_INFINITY, plain), greatest.map_or(f64::INFINITY, plain)))
            }
        };
        // A number beyond the dtype stands for no value of it.
        let kept = |value: &f64| !value.is_nan() && (value.is_infinite() || plain(*value).is_finite());
        let missing = missing.into_iter().filter(kept).map(plain).collect();
        Self { missing, valid, wrap, ..self }
    }
}

/// The attributes `valid_range`, `valid_min` and `valid_max`.
#[derive(Debug, Default)]
pub(crate) struct Valid {
    pub(crate) range: Option<Vec<f64>>,
    pub(crate) least: Option<f64>,
    pub(crate) greatest: Option<f64>,
}
