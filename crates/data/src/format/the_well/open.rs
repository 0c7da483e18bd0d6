//! The layout of a file, checked when it is opened.

use std::path::Path;

use super::field::WellField;
use super::file::WellFile;
use super::names::{
    ASSOCIATED_DIMS, BC_TYPE, BOUNDARY_CONDITIONS, CALENDAR, DATASET_NAME, DIM_VARYING, DIMENSIONS,
    FIELD_NAMES, FIELDS, GRID_TYPE, PARAMETERS, PERIODIC, SAMPLE_VARYING, SCALARS, SPATIAL_DIMS,
    SPATIAL_DIMS_COUNT, TIME, TIME_VARYING, TRAJECTORIES, UNITS,
};
use crate::hdf5::attribute::Attributes;
use crate::hdf5::layout::{Hdf5Layout, Node, check_layout, shape_text};
use crate::registry::check_extension;
use crate::{Error, Result};

/// Name of the layout in errors.
const LAYOUT: &str = "The Well's schema";

inventory::submit! {
    Hdf5Layout {
        name: LAYOUT,
        recognise: |root| root.has(DIMENSIONS) && (root.has(FIELDS[0]) || root.has(FIELDS[1])),
    }
}

impl WellFile {
    /// Opens a file and checks its layout: that the attributes, groups and datasets are there, of the right dtype, with
    /// shapes that agree, and times and coordinates that are finite and ascending.
    ///
    /// # Errors
    /// If the file is missing, of another format, not HDF5,
    /// truncated, or of another layout; the error names the file, the dataset and the cause.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        check_extension(path.as_ref(), "the_well")?;
        open(path.as_ref())
    }
}

fn open(path: &Path) -> Result<WellFile> {
    let root = Node::open(path)?;
    check_layout(&root, LAYOUT)?;
    // The groups before the attributes: a file of something else lacks both, and groups say what it has.
    let dimensions = root.group(DIMENSIONS)?;
    let attributes = Attributes::of_group(&root);
    let name = attributes.text(DATASET_NAME)?;
    let grid_type = attributes.text(GRID_TYPE)?;
    let dims = attributes.count(SPATIAL_DIMS_COUNT, 1, 3)?;
    let trajectories = attributes.count(TRAJECTORIES, 1, usize::MAX)?;
    // Each has at least a value of its own, or they are all the same one.
    if trajectories as u64 > root.length.saturating_mul(8) {
        let found = format!("{trajectories} in a file of {} bytes", root.length);
        return Err(attributes.misfit(TRAJECTORIES, found, "no more than the file can hold"));
    }
    let parameters = parameters(&attributes)?;

    let spatial_dims = spatial_dims(&dimensions, dims)?;
    let times = constant_coordinates(&dimensions, TIME, &[SAMPLE_VARYING])?;
    let coordinates = spatial_dims
        .iter()
        .map(|dim| constant_coordinates(&dimensions, dim, &[SAMPLE_VARYING, TIME_VARYING]))
        .collect::<Result<Vec<_>>>()?;
    let mut coordinate_units = Vec::new();
    for name in spatial_dims.iter().map(String::as_str).chain([TIME]) {
        let own = attribute(&dimensions, name, UNITS)?;
        coordinate_units.extend(own.map(|unit| (name.to_owned(), unit)));
    }
    let calendar = attribute(&dimensions, TIME, CALENDAR)?;
    let grid: Vec<usize> = coordinates.iter().map(Vec::len).collect();
    let periodic = periodic(&root.group(BOUNDARY_CONDITIONS)?, &spatial_dims)?;

    let extents = [&[trajectories, times.len()], grid.as_slice()].concat();
    let mut fields = Vec::new();
    for (order, name) in FIELDS.iter().enumerate() {
        // Older files have no group of tensors.
        if order < 2 || root.has(name) {
            let group = root.group(name)?;
            for field in Attributes::of_group(&group).texts(FIELD_NAMES)? {
                fields.push(open_field(&group, field, Some(order), &extents)?);
            }
        }
    }
    if fields.is_empty() {
        return Err(root.misfit("t0_fields@field_names", "an empty list", "at least one field"));
    }
    let scalars = scalars(&root, &extents)?;
    let path = path.to_owned();
    Ok(WellFile {
        path,
        name,
        grid_type,
        trajectories,
        times,
        spatial_dims,
        coordinates,
        grid,
        periodic,
        coordinate_units,
        calendar,
        parameters,
        fields,
        scalars,
    })
}

/// Those that are numbers; others are of no use here, and no reason to refuse a file.
fn parameters(root: &Attributes<'_>) -> Result<Vec<(String, f64)>> {
    let mut parameters = Vec::new();
    for name in root.texts(PARAMETERS)? {
        match root.number(&name) {
            Ok(value) => parameters.push((name, value)),
            Err(Error::Layout { .. }) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(parameters)
}

fn spatial_dims(dimensions: &Node<'_>, dims: usize) -> Result<Vec<String>> {
    let attributes = Attributes::of_group(dimensions);
    let names = attributes.texts(SPATIAL_DIMS)?;
    let unique = names.iter().enumerate().all(|(at, name)| !names[..at].contains(name));
    if names.len() != dims || !unique {
        let expected = format!("{dims} different names to agree with `{SPATIAL_DIMS_COUNT}`");
        return Err(attributes.misfit(SPATIAL_DIMS, format!("{names:?}"), expected));
    }
    Ok(names)
}

fn constant_coordinates(dimensions: &Node<'_>, name: &str, flags: &[&str]) -> Result<Vec<f64>> {
    let dataset = dimensions.dataset(name)?;
    let attributes = Attributes::of_dataset(dimensions, &dataset, name);
    for flag in flags {
        if attributes.flag(flag)? {
            return Err(attributes.misfit(
                flag,
                "true",
                "false: varying coordinates are unsupported for now",
            ));
        }
    }
    dimensions.coordinates(name, None)
}

/// Returns which dims are periodic; a dim without boundary condition is not.
fn periodic(conditions: &Node<'_>, spatial_dims: &[String]) -> Result<Vec<bool>> {
    let mut periodic = vec![false; spatial_dims.len()];
    for name in conditions.members()? {
        let condition = conditions.group(&name)?;
        let attributes = Attributes::of_group(&condition);
        let kind = attributes.text(BC_TYPE)?;
        for dim in attributes.texts(ASSOCIATED_DIMS)? {
            let Some(at) = spatial_dims.iter().position(|name| *name == dim) else {
                let expected = format!("of {}", spatial_dims.join(", "));
                return Err(attributes.misfit(ASSOCIATED_DIMS, format!("`{dim}`"), expected));
            };
            periodic[at] |= kind.eq_ignore_ascii_case(PERIODIC);
        }
    }
    Ok(periodic)
}

/// Those that can be read; others, and a missing group, are no reason to refuse a file.
fn scalars(root: &Node<'_>, extents: &[usize]) -> Result<Vec<WellField>> {
    if !root.has(SCALARS) {
        return Ok(Vec::new());
    }
    let readable = |found: Result<WellField>| match found {
        Ok(field) => Some(Ok(field)),
        Err(Error::Layout { .. } | Error::MissingAttribute { .. } | Error::MissingDataset { .. }) => None,
        Err(error) => Some(Err(error)),
    };
    let Ok(group) = root.group(SCALARS) else { return Ok(Vec::new()) };
    let Ok(names) = Attributes::of_group(&group).texts(FIELD_NAMES) else { return Ok(Vec::new()) };
    names.into_iter().filter_map(|name| readable(open_field(&group, name, None, extents))).collect()
}

/// Opens a field of an order, or a scalar, which has no spatial dims.
fn open_field(group: &Node<'_>, name: String, order: Option<usize>, extents: &[usize]) -> Result<WellField> {
    let dataset = group.field(&name)?;
    let attributes = Attributes::of_dataset(group, &dataset.dataset, &name);
    let mut varying = vec![attributes.flag(SAMPLE_VARYING)?, attributes.flag(TIME_VARYING)?];
    let dims = extents.len() - 2;
    varying.extend(match order {
        Some(_) => attributes.flags(DIM_VARYING)?,
        None => vec![false; dims],
    });
    let order = order.unwrap_or(0);
    if varying.len() != extents.len() {
        let found = format!("{} booleans", varying.len() - 2);
        return Err(attributes.misfit(DIM_VARYING, found, format!("{dims}, one a spatial dim")));
    }
    let stored = extents.iter().zip(&varying).filter(|(_, varying)| **varying).map(|(&extent, _)| extent);
    let expected: Vec<usize> = stored.chain((0..order).map(|_| dims)).collect();
    let shape = dataset.dataset.shape();
    if shape != expected {
        let expected = format!("{} to agree with `{DIMENSIONS}` and `{TRAJECTORIES}`", shape_text(&expected));
        return Err(group.misfit(&name, shape_text(&shape), expected));
    }
    let place = group.full(&name);
    let unit = plain_text(&attributes, UNITS)?;
    Ok(WellField { name, order, components: dims.pow(order as u32), varying, unit, dataset, place })
}

/// Returns a text of coordinates.
fn attribute(dimensions: &Node<'_>, name: &str, attribute: &str) -> Result<Option<String>> {
    let dataset = dimensions.dataset(name)?;
    plain_text(&Attributes::of_dataset(dimensions, &dataset, name), attribute)
}

/// Returns a text without control characters; ignores an attribute that is no text.
fn plain_text(attributes: &Attributes<'_>, name: &str) -> Result<Option<String>> {
    match attributes.text(name) {
        Ok(text) => {
            let text: String =
                text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
            Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty()))
        }
        Err(Error::Layout { .. } | Error::MissingAttribute { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
