//! The arrays of a store, from the metadata of its groups.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::store::{Span, Store};
use crate::{Error, Result};

/// Largest metadata that are read of one key, consolidated ones included.
const LONGEST: u64 = 64 << 20;
/// Largest number of groups and arrays that are looked at one by one.
const MOST_NODES: usize = 1 << 16;
/// Deepest group.
const DEEPEST: usize = 32;

/// Metadata of an array.
#[derive(Clone, Debug)]
pub(super) struct Node {
    /// Those of the array; of version 2 without attributes.
    pub(super) array: Value,
    pub(super) attributes: Map<String, Value>,
    pub(super) version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    V2,
    V3,
}

impl Node {
    /// Describes times of NumPy's dtype datetime64 as what is stored: integers, in a unit since 1970. Other arrays, and datetime64 in
    /// months or years, are unchanged.
    pub(super) fn with_integer_times(mut self) -> Self {
        let Some((order, count, unit)) = self.datetime() else { return self };
        let (unit, scale) = match unit.as_str() {
            "W" => ("weeks", 1.0),
            "D" => ("days", 1.0),
            "h" => ("hours", 1.0),
            "m" => ("minutes", 1.0),
            "s" => ("seconds", 1.0),
            "ms" => ("milliseconds", 1.0),
            "us" | "μs" => ("microseconds", 1.0),
            // CF has no nanoseconds.
            "ns" => ("microseconds", 1e-3),
            _ => return self,
        };
        let (key, dtype, not_a_time) = match self.version {
            Version::V2 => ("dtype", format!("{order}i8"), Value::Null),
            Version::V3 => ("data_type", "int64".to_owned(), i64::MIN.into()),
        };
        self.array[key] = dtype.into();
        if !self.array["fill_value"].is_i64() {
            self.array["fill_value"] = not_a_time;
        }
        let facts: [(&str, Value); 4] = [
            ("units", format!("{unit} since 1970-01-01").into()),
            ("calendar", "proleptic_gregorian".into()),
            ("scale_factor", (scale * count).into()),
            ("_FillValue", i64::MIN.into()),
        ];
        self.attributes.extend(facts.map(|(name, value)| (name.to_owned(), value)));
        self
    }

    /// Byte order, number of units and unit of the dtype datetime64.
    fn datetime(&self) -> Option<(char, f64, String)> {
        if self.version == Version::V3 {
            let dtype = self.array.get("data_type")?;
            let own = dtype.get("configuration").filter(|_| dtype["name"] == "numpy.datetime64")?;
            let count = own.get("scale_factor").and_then(Value::as_f64).unwrap_or(1.0);
            return Some(('<', count, own.get("unit")?.as_str()?.to_owned()));
        }
        let text = self.array.get("dtype")?.as_str()?;
        let order = text.chars().next().filter(|order| ['<', '>'].contains(order))?;
        let unit = text[1..].strip_prefix("M8[")?.strip_suffix(']')?;
        let digits = unit.len() - unit.trim_start_matches(|letter: char| letter.is_ascii_digit()).len();
        let count = if digits == 0 { 1.0 } else { unit[..digits].parse().ok()? };
        Some((order, count, unit[digits..].to_owned()))
    }
}

/// Reads the metadata of all arrays, by path, and the attributes of the root group. An array at the root has an empty path.
///
/// # Errors
/// No store, or metadata that cannot be read.
pub(super) fn nodes(path: &Path, store: &dyn Store) -> Result<(BTreeMap<String, Node>, Map<String, Value>)> {
    let reader = Reader { path, store };
    let mut found = BTreeMap::new();
    // Some stores answer 403 instead of 404 to callers without permission to list.
    let (root, denied) = match reader.json("zarr.json") {
        Err(error) if is_denied(&error) => (None, Some(error)),
        root => (root?, None),
    };
    if let Some(root) = root {
        let own = object(root.get("attributes"));
        let consolidated = root.get("consolidated_metadata").and_then(|all| all.get("metadata"));
        match consolidated.and_then(Value::as_object) {
            _ if is_array(&root) => reader.add(&mut found, "", v3(root))?,
            Some(all) => {
                for (name, node) in all.iter().filter(|(_, node)| is_array(node)) {
                    reader.add(&mut found, name, v3(node.clone()))?;
                }
            }
            None => reader.walk(&mut found)?,
        }
        return Ok((found, own));
    }
    let all = match (reader.json(".zmetadata"), denied) {
        (Ok(None), Some(denied)) => return Err(denied),
        (Err(error), Some(denied)) if is_denied(&error) => return Err(denied),
        (all, _) => all?,
    };
    if let Some(all) = all {
        let wrong = || reader.misfit(".zmetadata", "without the object `metadata`", "consolidated metadata");
        let all = all.get("metadata").and_then(Value::as_object).ok_or_else(wrong)?;
        for (key, array) in all {
            let name = match key.as_str() {
                ".zarray" => "",
                key => match key.strip_suffix("/.zarray") {
                    Some(name) => name,
                    None => continue,
                },
            };
            let attributes = object(all.get(&key.replace(".zarray", ".zattrs")));
            reader.add(&mut found, name, Node { array: array.clone(), attributes, version: Version::V2 })?;
        }
        return Ok((found, object(all.get(".zattrs"))));
    }
    let mut own = Map::new();
    if let Some(array) = reader.v2("")? {
        reader.add(&mut found, "", array)?;
    } else if reader.json(".zgroup")?.is_some() {
        reader.walk(&mut found)?;
        // Some stores answer 403 instead of 404 where there are none.
        own = object(reader.json(".zattrs").ok().flatten().as_ref());
    } else {
        let found = "neither zarr.json, .zmetadata, .zgroup nor .zarray";
        return Err(reader.misfit(
            "the store",
            format!("one with {found}"),
            "a store of Zarr version 2 or 3",
        ));
    }
    Ok((found, own))
}

/// The entries of an object; none of another value.
fn object(value: Option<&Value>) -> Map<String, Value> {
    value.and_then(Value::as_object).cloned().unwrap_or_default()
}

fn is_denied(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied)
}

fn is_array(node: &Value) -> bool {
    node.get("node_type").and_then(Value::as_str) == Some("array")
}

fn v3(array: Value) -> Node {
    let attributes = object(array.get("attributes"));
    Node { array, attributes, version: Version::V3 }
}

struct Reader<'a> {
    path: &'a Path,
    store: &'a dyn Store,
}

impl Reader<'_> {
    /// Reads the arrays of all groups, one by one.
    fn walk(&self, found: &mut BTreeMap<String, Node>) -> Result<()> {
        let mut left = MOST_NODES;
        let mut groups = vec![(String::new(), 0)];
        while let Some((group, depth)) = groups.pop() {
            let failed = |error| Error::io(&self.path.join(&group), "list it", error);
            for name in self.store.folders(&group).map_err(failed)? {
                let name = if group.is_empty() { name } else { format!("{group}/{name}") };
                left = left.checked_sub(1).ok_or_else(|| {
                    self.misfit(
                        "the store",
                        format!("one of more than {MOST_NODES} nodes"),
                        "consolidated metadata",
                    )
                })?;
                let own = self.json(&format!("{name}/zarr.json"))?;
                match own {
                    Some(node) if is_array(&node) => self.add(found, &name, v3(node))?,
                    None => match self.v2(&name)? {
                        Some(node) => self.add(found, &name, node)?,
                        None if depth < DEEPEST && self.json(&format!("{name}/.zgroup"))?.is_some() => {
                            groups.push((name, depth + 1));
                        }
                        None => (),
                    },
                    Some(_) if depth < DEEPEST => groups.push((name, depth + 1)),
                    Some(_) => (),
                }
            }
        }
        Ok(())
    }

    /// An array of version 2.
    fn v2(&self, name: &str) -> Result<Option<Node>> {
        let key = |own: &str| if name.is_empty() { own.to_owned() } else { format!("{name}/{own}") };
        let Some(array) = self.json(&key(".zarray"))? else { return Ok(None) };
        let attributes = object(self.json(&key(".zattrs"))?.as_ref());
        Ok(Some(Node { array, attributes, version: Version::V2 }))
    }

    fn add(&self, found: &mut BTreeMap<String, Node>, name: &str, node: Node) -> Result<()> {
        let plain = |part: &str| ![".", ".."].contains(&part) && !part.is_empty();
        let hidden = name.chars().any(|letter| letter.is_control() || letter == '\\');
        if !name.is_empty() && (hidden || !name.split('/').all(plain)) {
            let found = format!("that of an array named {name:?}");
            return Err(self.misfit("the metadata", found, "names in the store"));
        }
        found.insert(name.to_owned(), node);
        Ok(())
    }

    /// The JSON of a key; `None` if there is no such key.
    fn json(&self, key: &str) -> Result<Option<Value>> {
        let failed = |error| Error::io(&self.path.join(key), "read it", error);
        let Some(bytes) = self.store.read(key, Span::All(LONGEST)).map_err(failed)? else { return Ok(None) };
        let strict = serde_json::from_slice(&bytes);
        let value = strict.or_else(|error| serde_json::from_slice(&quoted(&bytes)).map_err(|_| error));
        let wrong =
            |error: serde_json::Error| self.misfit(key, format!("no JSON: {error}"), "metadata of Zarr");
        value.map(Some).map_err(wrong)
    }

    fn misfit(&self, name: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        let (path, name) = (self.path.to_owned(), name.to_owned());
        Error::Layout { path, name, found: found.into(), expected: expected.into() }
    }
}

/// JSON as Python writes it, with `NaN`, `Infinity` and `-Infinity` as texts.
fn quoted(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let (mut at, mut in_text) = (0, false);
    while let Some(&byte) = bytes.get(at) {
        let rest = &bytes[at..];
        let word = [&b"NaN"[..], b"Infinity", b"-Infinity"].into_iter().find(|word| rest.starts_with(word));
        match (word, byte) {
            (Some(word), _) if !in_text => {
                out.push(b'"');
                out.extend(word);
                out.push(b'"');
                at += word.len();
                continue;
            }
            (_, b'\\') if in_text => {
                out.push(byte);
                at += 1;
                out.extend(bytes.get(at));
            }
            (_, b'"') => {
                in_text = !in_text;
                out.push(byte);
            }
            _ => out.push(byte),
        }
        at += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_python_are_texts() {
        let made = quoted(br#"{"a": NaN, "b": [-Infinity, Infinity, 1], "NaN\" NaN": "x NaN"}"#);
        let value: Value = serde_json::from_slice(&made).unwrap();
        let expected = r#"{"a": "NaN", "b": ["-Infinity", "Infinity", 1], "NaN\" NaN": "x NaN"}"#;
        assert_eq!(value, serde_json::from_str::<Value>(expected).unwrap());
    }
}
