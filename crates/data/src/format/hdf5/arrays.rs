//! Datasets of an HDF5 file as named arrays, with the attributes that NetCDF and CF define.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use hdf5_metno::Group;
use hdf5_metno::types::{FloatSize, IntSize, TypeDescriptor};

use crate::arrays::components;
use crate::arrays::{ArrayInfo, Arrays, Valid, Values};
use crate::attributes::TextAttributes;
use crate::content::UNITS;
use crate::dtype::NumberKind;
use crate::hdf5::attribute::Attributes;
use crate::hdf5::layout::{Node, read_window};
use crate::hdf5::plain::{AXES, CHANNELS, COMPONENTS, PERIODIC};
use crate::hdf5::stored::Stored;
use crate::{Error, Result};

/// Attribute of netCDF-4: numbers of the dimensions of a variable.
const COORDINATES: &str = "_Netcdf4Coordinates";
/// Attribute of netCDF-4: number of the dimension that a dataset stands for.
const DIMENSION: &str = "_Netcdf4Dimid";
/// Attribute of a dimension scale, and how its value begins in netCDF-4 for a dimension that has no coordinates.
const SCALE: &str = "NAME";
const NO_VARIABLE: &str = "This is a netCDF dimension but not a netCDF variable";

/// An HDF5 file of named arrays.
#[derive(Debug)]
pub(crate) struct Hdf5Arrays {
    path: PathBuf,
    root: Group,
    length: u64,
    names: Vec<String>,
    /// Names of netCDF-4's dimensions by number.
    dimensions: BTreeMap<usize, String>,
    /// Datasets that were read, by name: their chunks are checked once.
    opened: Mutex<BTreeMap<String, Opened>>,
    /// True if values that nobody wrote have NetCDF's fill values.
    is_netcdf: bool,
}

/// A dataset and the type of its values.
type Opened = Arc<(Stored, TypeDescriptor)>;

impl Hdf5Arrays {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let root = Node::open(path)?;
        let mut names = root.dataset_names()?;
        let mut empty = BTreeSet::new();
        let mut dimensions = BTreeMap::new();
        for name in &names {
            // Of a dataset that no run names nothing is checked but this attribute: it may be of any kind and place.
            let Ok(dataset) = root.group.dataset(name) else { continue };
            let attributes = Attributes::of_dataset(&root, &dataset, name);
            // Variables made before the coordinates have the number of their first dimension.
            if is_scale(&attributes)?
                && let Some(id) = optional(attributes.number(DIMENSION))?
            {
                dimensions.insert(id as usize, last(name).to_owned());
            }
            let scale = attributes.text(SCALE);
            if scale.is_ok_and(|text| text.starts_with(NO_VARIABLE)) {
                let _ = empty.insert(name.clone());
            }
        }
        names.retain(|name| !empty.contains(name));
        let (group, length) = (root.group.clone(), root.length);
        let opened = Mutex::default();
        Ok(Self { path: path.to_owned(), root: group, length, names, dimensions, opened, is_netcdf: false })
    }

    /// Says that this is a file of NetCDF-4, where values without a `_FillValue` have the fill value of their type.
    pub(crate) fn of_netcdf(self) -> Self {
        Self { is_netcdf: true, ..self }
    }

    /// An attribute of the root that is one number.
    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>> {
        optional(Attributes::of_group(&self.root()).number(name))
    }

    fn root(&self) -> Node<'_> {
        Node::root(&self.path, self.root.clone(), self.length)
    }

    /// The name without what users may write before it.
    fn known<'a>(&self, name: &'a str) -> Result<&'a str> {
        let name = name.trim_start_matches('/');
        if self.names.iter().any(|known| known == name) {
            return Ok(name);
        }
        let (path, found) = (self.path.clone(), self.names.clone());
        Err(Error::MissingDataset { path, dataset: name.to_owned(), found })
    }

    fn opened(&self, name: &str) -> Result<Opened> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = opened.get(name) {
            return Ok(Arc::clone(known));
        }
        let root = self.root();
        let dataset = root.dataset(name)?;
        let kind = root.kind(&dataset, name)?;
        let new = Arc::new((Stored::new(&self.path, dataset, name.to_owned()), kind));
        opened.insert(name.to_owned(), Arc::clone(&new));
        Ok(new)
    }

    /// Names of the axes: as a plain file stores them, or by netCDF's dimensions, or by HDF5's dimension scales and labels.
    fn axes(&self, attributes: &Attributes<'_>, name: &str, ndim: usize) -> Result<Option<Vec<String>>> {
        let complete = |axes: &Vec<String>| axes.len() == ndim && axes.iter().all(|axis| !axis.is_empty());
        if let Some(axes) = optional(attributes.texts(AXES))?.filter(complete) {
            return Ok(Some(axes));
        }
        if let Some(ids) = optional(attributes.numbers(COORDINATES))? {
            let named = ids.iter().map(|&id| self.dimensions.get(&(id as usize)).cloned());
            if let Some(axes) = named.collect::<Option<Vec<String>>>().filter(complete) {
                return Ok(Some(axes));
            }
        }
        if let Some(axes) = optional(attributes.dimension_scales(&self.root))?.filter(complete) {
            return Ok(Some(axes));
        }
        if let Some(axes) = optional(attributes.texts("DIMENSION_LABELS"))?.filter(complete) {
            return Ok(Some(axes));
        }
        Ok((ndim == 1 && is_scale(attributes)?).then(|| vec![last(name).to_owned()]))
    }
}

/// Returns whether a dataset is a dimension scale.
fn is_scale(attributes: &Attributes<'_>) -> Result<bool> {
    Ok(optional(attributes.text("CLASS"))?.is_some_and(|class| class == "DIMENSION_SCALE"))
}

/// A value, or nothing where the attribute is missing or of another kind.
fn optional<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Ok(value) => Ok(Some(value)),
        Err(Error::MissingAttribute { .. } | Error::Layout { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

impl Arrays for Hdf5Arrays {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    fn info(&self, name: &str) -> Result<ArrayInfo> {
        let (root, name) = (self.root(), self.known(name)?);
        let dataset = root.dataset(name)?;
        let attributes = Attributes::of_dataset(&root, &dataset, name);
        let shape = dataset.shape();
        let axes = self.axes(&attributes, name, shape.len())?;
        let number = |attribute: &str| optional(attributes.number(attribute));
        let numbers = |attribute: &str| optional(attributes.numbers(attribute));
        let kind = root.kind(&dataset, name).ok().as_ref().and_then(number_kind);
        let fill = match numbers("_FillValue")? {
            None if self.is_netcdf => kind.and_then(NumberKind::netcdf_fill).map(|fill| vec![fill]),
            fill => fill,
        };
        let missing = [fill, numbers("missing_value")?].into_iter().flatten().flatten().collect();
        let valid = Valid {
            range: numbers("valid_range")?,
            least: number("valid_min")?,
            greatest: number("valid_max")?,
        };
        let text = |attribute: &str| -> Result<Option<String>> {
            let text = optional(attributes.text(attribute))?.map(|text| plain_text(&text));
            Ok(text.filter(|text| !text.is_empty()))
        };
        let is_unsigned = text("_Unsigned")?.is_some_and(|text| text.eq_ignore_ascii_case("true"));
        Ok(ArrayInfo {
            axes,
            unit: text(UNITS)?,
            calendar: text("calendar")?,
            scale: number("scale_factor")?.unwrap_or(1.0),
            offset: number("add_offset")?.unwrap_or(0.0),
            periodic: optional(attributes.flag(PERIODIC))?.unwrap_or(false),
            channels: optional(attributes.flag(CHANNELS))?.unwrap_or(false),
            components: components(text(COMPONENTS)?.as_deref()),
            chunk: dataset.chunk(),
            // Texts that no reader needs: of other types they are left out.
            attributes: TextAttributes::of_variable(|name| Ok(attributes.text(name).ok()))?,
            ..ArrayInfo::of_shape(shape)
        }
        .with_cf(kind, missing, valid, is_unsigned))
    }

    fn attributes(&self) -> Result<TextAttributes> {
        let root = self.root();
        let attributes = Attributes::of_group(&root);
        TextAttributes::of_dataset(|name| Ok(attributes.text(name).ok()))
    }

    fn read(&self, name: &str, window: &[Range<usize>]) -> Result<Values> {
        let name = self.known(name)?;
        let opened = self.opened(name)?;
        let (stored, kind) = &*opened;
        if let Some(values) = stored.read(window)? {
            return Ok(values);
        }
        let path = &self.path;
        Ok(match kind {
            TypeDescriptor::Float(FloatSize::U8) => Values::F64(read_window(path, stored, name, window)?),
            TypeDescriptor::Float(_) => Values::F32(read_window(path, stored, name, window)?),
            TypeDescriptor::Boolean => {
                let values: Vec<i8> = read_window(path, stored, name, window)?;
                Values::F32(values.into_iter().map(f32::from).collect())
            }
            TypeDescriptor::Integer(IntSize::U1 | IntSize::U2)
            | TypeDescriptor::Unsigned(IntSize::U1 | IntSize::U2) => {
                let values: Vec<i32> = read_window(path, stored, name, window)?;
                Values::F32(values.into_iter().map(|value| value as f32).collect())
            }
            TypeDescriptor::Integer(_) => {
                let values: Vec<i64> = read_window(path, stored, name, window)?;
                Values::F64(values.into_iter().map(|value| value as f64).collect())
            }
            TypeDescriptor::Unsigned(_) => {
                let values: Vec<u64> = read_window(path, stored, name, window)?;
                Values::F64(values.into_iter().map(|value| value as f64).collect())
            }
            other => {
                return Err(self.root().misfit(
                    name,
                    format!("of dtype {other}"),
                    "real numbers or booleans",
                ));
            }
        })
    }
}

fn number_kind(kind: &TypeDescriptor) -> Option<NumberKind> {
    Some(match kind {
        TypeDescriptor::Integer(IntSize::U1) => NumberKind::I8,
        TypeDescriptor::Integer(IntSize::U2) => NumberKind::I16,
        TypeDescriptor::Integer(IntSize::U4) => NumberKind::I32,
        TypeDescriptor::Integer(IntSize::U8) => NumberKind::I64,
        TypeDescriptor::Unsigned(IntSize::U1) => NumberKind::U8,
        TypeDescriptor::Unsigned(IntSize::U2) => NumberKind::U16,
        TypeDescriptor::Unsigned(IntSize::U4) => NumberKind::U32,
        TypeDescriptor::Unsigned(IntSize::U8) => NumberKind::U64,
        TypeDescriptor::Float(FloatSize::U4) => NumberKind::F32,
        TypeDescriptor::Float(FloatSize::U8) => NumberKind::F64,
        _ => return None,
    })
}

/// A text without control characters, which would change the terminal that shows it.
fn plain_text(text: &str) -> String {
    let plain: String = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    plain.trim().to_owned()
}
