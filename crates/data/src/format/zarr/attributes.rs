//! Attributes of an array that CF, xarray and the format itself define.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use super::nodes::{Node, Version};
use crate::arrays::{ArrayInfo, Valid, components};
use crate::attributes::TextAttributes;
use crate::dtype::NumberKind;
use crate::hdf5::plain::{CHANNELS, COMPONENTS, PERIODIC};

/// Names of the axes, where the metadata have no place for them.
const DIMENSIONS: &str = "_ARRAY_DIMENSIONS";

/// Describes an array of this shape.
pub(super) fn describe(node: &Node, kind: NumberKind, shape: Vec<usize>) -> ArrayInfo {
    let own = &node.attributes;
    let ndim = shape.len();
    let named = node.array.get("dimension_names").and_then(|names| texts(names, ndim));
    let axes = named.or_else(|| own.get(DIMENSIONS).and_then(|names| texts(names, ndim)));
    // What xarray writes as version 2 has CF's fill value there.
    let of_array = (node.version == Version::V2 && own.contains_key(DIMENSIONS))
        .then(|| node.array.get("fill_value"))
        .flatten();
    let missing = [own.get("_FillValue"), own.get("missing_value"), of_array].into_iter().flatten();
    let missing = missing.flat_map(numbers).collect();
    let flag = |name: &str| own.get(name).and_then(Value::as_bool).unwrap_or(false);
    let number = |name: &str| own.get(name).and_then(|value| numbers(value).first().copied());
    let valid = Valid {
        range: own.get("valid_range").map(numbers),
        least: number("valid_min"),
        greatest: number("valid_max"),
    };
    let is_unsigned = text(own, "_Unsigned").is_some_and(|text| text.eq_ignore_ascii_case("true"));
    ArrayInfo {
        axes,
        unit: text(own, "units"),
        calendar: text(own, "calendar"),
        scale: number("scale_factor").unwrap_or(1.0),
        offset: number("add_offset").unwrap_or(0.0),
        periodic: flag(PERIODIC),
        channels: flag(CHANNELS),
        components: components(text(own, COMPONENTS).as_deref()),
        attributes: TextAttributes::of_variable(|name| Ok(long_text(own, name))).unwrap_or_default(),
        ..ArrayInfo::of_shape(shape)
    }
    .with_cf(Some(kind), missing, valid, is_unsigned)
}

/// The attributes of a store, from those of its root group.
pub(super) fn of_store(attributes: &Map<String, Value>) -> TextAttributes {
    TextAttributes::of_dataset(|name| Ok(long_text(attributes, name))).unwrap_or_default()
}

/// A text that may have several lines.
fn long_text(attributes: &Map<String, Value>, name: &str) -> Option<String> {
    attributes.get(name)?.as_str().map(str::to_owned)
}

fn texts(names: &Value, count: usize) -> Option<Vec<String>> {
    let names: Option<Vec<String>> =
        names.as_array()?.iter().map(|name| name.as_str().map(str::to_owned)).collect();
    names.filter(|names| names.len() == count && names.iter().all(|name| !name.is_empty()))
}

/// A text without control characters, which would change the terminal that shows it.
fn text(attributes: &Map<String, Value>, name: &str) -> Option<String> {
    let text = attributes.get(name)?.as_str()?;
    let plain: String = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    Some(plain.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Numbers of an attribute: one or several, as JSON has them, or as xarray writes fill values: in words or, of eight bytes, in
/// base64.
fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Number(number) => number.as_f64().into_iter().collect(),
        Value::Array(all) => all.iter().flat_map(numbers).collect(),
        Value::String(word) => match word.as_str() {
            "NaN" => vec![f64::NAN],
            "Infinity" => vec![f64::INFINITY],
            "-Infinity" => vec![f64::NEG_INFINITY],
            word => {
                let bytes = STANDARD.decode(word).ok().and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
                bytes.map(f64::from_le_bytes).into_iter().collect()
            }
        },
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fill_values_in_every_notation() {
        let of = |text: &str| numbers(&serde_json::from_str(text).unwrap());
        assert_eq!(of("-9999"), [-9999.0]);
        assert_eq!(of("[1, 2.5]"), [1.0, 2.5]);
        assert!(of("\"NaN\"")[0].is_nan() && of("\"AAAAAAAA+H8=\"")[0].is_nan());
        assert_eq!(of("\"-Infinity\""), [f64::NEG_INFINITY]);
        assert_eq!(of("\"AAAAAICHw8A=\""), [-9999.0]);
        assert!(of("\"no number\"").is_empty() && of("null").is_empty() && of("{}").is_empty());
    }
}
