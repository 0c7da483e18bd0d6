//! Configurations written as TOML: resolved with origins, and as reference with meanings.

use figment::value::{Dict, Num, Value as FigmentValue};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::error::ConfigError;
use crate::layer::integer;
use crate::place::Origin;
use crate::schema::{Schema, Shape, tag};
use crate::to_value;

/// Deeper than any configuration; ends types that contain themselves.
pub(crate) const MAX_DEPTH: usize = 8;

/// A file with every key of `T`, its default and its meaning (the doc comments of the type), type and allowed values.
///
/// Options that are unset by default and the keys of variants that the default does not choose are commented out. The
/// file loads to `T::default()`.
///
/// # Errors
///
/// `T` does not serialise to a table of TOML values.
pub fn reference_toml<T>() -> Result<String, ConfigError>
where
    T: Serialize + JsonSchema + Default,
{
    let schema = Schema::of::<T>();
    let mut reference = Reference { schema: &schema, out: String::new(), commented: false };
    if let Some(description) = schema.description(schema.root()) {
        reference.doc(description);
        reference.out.push('\n');
    }
    let default = to_value(&T::default())?;
    reference.table(&[], schema.root(), default.as_dict());
    Ok(format!("{}\n", reference.out.trim_end()))
}

/// A value as TOML with the origin of each key behind it.
pub(crate) fn resolved_toml<T>(value: &T, origin: &dyn Fn(&str) -> Origin) -> Result<String, ConfigError>
where
    T: Serialize + JsonSchema,
{
    let schema = Schema::of::<T>();
    let value = to_value(value)?;
    let Some(dict) = value.as_dict() else {
        return Err(ConfigError::Serialize { message: "the root is no table".to_owned() });
    };
    let mut out = String::new();
    resolved_table(&mut out, &schema, schema.root(), &[], dict, origin);
    Ok(format!("{}\n", out.trim()))
}

fn resolved_table(
    out: &mut String,
    schema: &Schema,
    node: &Value,
    path: &[&str],
    dict: &Dict,
    origin: &dyn Fn(&str) -> Origin,
) {
    let shapes = schema.shapes(node);
    let order = chosen(&shapes, dict).map_or(&[][..], |shape| &shape.properties);
    let mut keys: Vec<&str> =
        order.iter().map(|(key, _)| *key).filter(|key| dict.contains_key(*key)).collect();
    keys.extend(dict.keys().map(String::as_str).filter(|key| order.iter().all(|(known, _)| known != key)));
    let (tables, leaves): (Vec<&str>, Vec<&str>) =
        keys.into_iter().partition(|key| matches!(dict.get(*key), Some(FigmentValue::Dict(..))));

    if !path.is_empty() && (!leaves.is_empty() || tables.is_empty()) {
        out.push_str(&format!("\n[{}]\n", header(path)));
    }
    for key in leaves {
        let full = join(path, key);
        match inline(&dict[key]) {
            Some(text) => out.push_str(&format!("{} = {text}  # {}\n", quote(key), origin(&full.join(".")))),
            None => out.push_str(&format!("# {} is unset\n", quote(key))),
        }
    }
    let any = Value::Bool(true);
    for key in tables {
        let Some(inner) = dict[key].as_dict() else { continue };
        let child = order.iter().find(|(known, _)| *known == key).map_or(&any, |(_, child)| *child);
        resolved_table(out, schema, child, &join(path, key), inner, origin);
    }
}

struct Reference<'a> {
    schema: &'a Schema,
    out: String,
    /// True if lines are written as comments, for keys that are unset by default.
    commented: bool,
}

impl<'a> Reference<'a> {
    fn table(&mut self, path: &[&str], node: &'a Value, dict: Option<&Dict>) {
        let shapes = self.schema.shapes(node);
        let objects: Vec<&Shape<'a>> = shapes.iter().filter(|shape| shape.is("object")).collect();
        let Some(chosen) = dict.and_then(|dict| chosen(&shapes, dict)).or(objects.first().copied()) else {
            return;
        };
        let Some(tag) = tag(&objects).filter(|_| objects.len() > 1) else {
            return self.keys(path, chosen, dict, None);
        };
        for shape in &objects {
            if let Some(value) = shape.constant(tag) {
                self.allowed_value(value, shape.description);
            }
        }
        let value = chosen.constant(tag).unwrap_or_default();
        self.line(&format!("{} = \"{value}\"", quote(tag)));
        self.out.push('\n');
        self.keys(path, chosen, dict, Some(tag));
        let others = objects.iter().filter(|shape| shape.constant(tag) != chosen.constant(tag));
        for shape in others.filter(|shape| shape.properties.len() > 1) {
            let value = shape.constant(tag).unwrap_or_default();
            self.out.push_str(&format!("# With {tag} = \"{value}\":\n#\n"));
            self.within_comment(|reference| reference.keys(path, shape, None, Some(tag)));
        }
    }

    fn keys(&mut self, path: &[&str], shape: &Shape<'a>, dict: Option<&Dict>, skip: Option<&str>) {
        let (mut tables, mut names) = (Vec::new(), Vec::new());
        for (key, node) in shape.properties.iter().filter(|(key, _)| Some(*key) != skip) {
            let default = node.get("default").and_then(|value| FigmentValue::serialize(value).ok());
            let value = dict.and_then(|dict| dict.get(*key).cloned()).or(default);
            if self.schema.is_table(node, value.as_ref()) {
                tables.push((*key, *node, value));
            } else {
                self.leaf(key, node, value.as_ref(), shape.required.contains(key));
                names.push((*key, *node));
            }
        }
        if path.len() >= MAX_DEPTH {
            return;
        }
        for (key, node) in names {
            self.instead_of_name(&join(path, key), node);
        }
        for (key, node, value) in tables {
            self.section(&join(path, key), node, value.as_ref());
        }
    }

    fn leaf(&mut self, key: &str, node: &'a Value, value: Option<&FigmentValue>, required: bool) {
        if let Some(description) = self.schema.description(node) {
            self.doc(description);
        }
        let shapes = self.schema.shapes(node);
        let mut words = leaf_words(self.schema, node);
        let text = value.and_then(inline);
        if text.is_none() && (self.schema.nullable(node) || !required) {
            words.push_str(", unset by default");
        }
        self.doc(&format!("({words})"));
        for (value, meaning) in shapes.iter().flat_map(|shape| &shape.allowed) {
            if meaning.is_some() {
                self.allowed_value(value, *meaning);
            }
        }
        match text {
            Some(text) => self.line(&format!("{} = {text}", quote(key))),
            None => self.out.push_str(&format!("# {} =\n", quote(key))),
        }
        self.out.push_str(if self.commented { "#\n" } else { "\n" });
    }

    /// The tables that may stand where a name does, commented out.
    fn instead_of_name(&mut self, path: &[&str], node: &'a Value) {
        let shapes = self.schema.shapes(node);
        let tables: Vec<&Shape<'a>> = shapes.iter().filter(|shape| shape.types == ["object"]).collect();
        let Some(tag) = tag(&tables) else { return };
        for shape in tables.iter().filter(|shape| shape.properties.len() > 1) {
            let value = shape.constant(tag).unwrap_or_default();
            self.out.push_str(&format!("# \"{value}\" with its settings:\n#\n"));
            self.within_comment(|reference| {
                reference.line(&format!("[{}]", header(path)));
                reference.line(&format!("{} = \"{value}\"", quote(tag)));
                reference.out.push_str("#\n");
                reference.keys(path, shape, None, Some(tag));
            });
        }
    }

    /// A table, or, commented out, one that is unset or one element of a list.
    fn section(&mut self, path: &[&str], node: &'a Value, value: Option<&FigmentValue>) {
        if let Some(description) = self.schema.description(node) {
            self.doc(description);
        }
        if let Some(dict) = value.and_then(FigmentValue::as_dict) {
            if dict.is_empty() {
                self.doc("(a table, empty by default)");
            }
            self.line(&format!("[{}]", header(path)));
            self.table(path, node, Some(dict));
            if dict.is_empty() {
                self.out.push('\n');
            }
            return;
        }
        let shapes = self.schema.shapes(node);
        let item = shapes.iter().find_map(|shape| shape.items);
        let note =
            if item.is_some() { "a list of tables, empty by default" } else { "a table, unset by default" };
        self.doc(&format!("({note})"));
        self.within_comment(|reference| match item {
            Some(item) => {
                reference.line(&format!("[[{}]]", header(path)));
                reference.table(path, item, None);
            }
            None => {
                reference.line(&format!("[{}]", header(path)));
                reference.table(path, node, None);
            }
        });
    }

    fn allowed_value(&mut self, value: &str, description: Option<&str>) {
        let description = description.unwrap_or_default().replace('\n', " ");
        self.doc(format!("  \"{value}\": {description}").trim_end_matches([' ', ':']));
    }

    fn doc(&mut self, text: &str) {
        for line in text.lines() {
            self.out.push_str(format!("# {line}").trim_end());
            self.out.push('\n');
        }
    }

    fn line(&mut self, text: &str) {
        self.out.push_str(if self.commented { "# " } else { "" });
        self.out.push_str(text);
        self.out.push('\n');
    }

    fn within_comment(&mut self, write: impl FnOnce(&mut Self)) {
        let before = std::mem::replace(&mut self.commented, true);
        write(self);
        self.commented = before;
        if !self.commented {
            while self.out.ends_with("#\n") {
                self.out.truncate(self.out.len() - 2);
            }
            self.out.push('\n');
        }
    }
}

/// The values of a key in words.
pub(crate) fn leaf_words(schema: &Schema, node: &Value) -> String {
    let of_one = |shape: &Shape<'_>| match shape.items {
        Some(item) => {
            let mut items: Vec<_> = schema.shapes(item).iter().map(Shape::words).collect();
            items.dedup();
            format!("a list, each {}", items.join(" or "))
        }
        None => shape.words(),
    };
    let mut forms: Vec<_> = schema.shapes(node).iter().map(of_one).collect();
    forms.dedup();
    // A name before the tables that it stands for.
    forms.sort_by_key(|words| words == "a table");
    forms.join(" or ")
}

/// The form that a table has: by its tag, else by its keys.
pub(crate) fn chosen<'s, 'a>(shapes: &'s [Shape<'a>], dict: &Dict) -> Option<&'s Shape<'a>> {
    let objects: Vec<&'s Shape<'a>> = shapes.iter().filter(|shape| shape.is("object")).collect();
    if let Some(tag) = tag(&objects) {
        let value = dict.get(tag).and_then(FigmentValue::as_str);
        return objects.into_iter().find(|shape| shape.constant(tag) == value);
    }
    let known = |shape: &&Shape<'a>| dict.keys().filter(|key| shape.property(key).is_some()).count();
    objects.into_iter().max_by_key(known)
}

/// A value on one line; none for what is unset.
pub(crate) fn inline(value: &FigmentValue) -> Option<String> {
    match value {
        FigmentValue::String(_, text) => Some(string(text)),
        FigmentValue::Char(_, c) => Some(string(&c.to_string())),
        FigmentValue::Bool(_, value) => Some(value.to_string()),
        FigmentValue::Num(_, number) => Some(match number {
            Num::F32(value) => float(format!("{value:?}")),
            Num::F64(value) => float(format!("{value:?}")),
            whole => integer(*whole).unwrap_or(i64::MAX).to_string(),
        }),
        FigmentValue::Empty(..) => None,
        FigmentValue::Array(_, items) => {
            Some(format!("[{}]", items.iter().filter_map(inline).collect::<Vec<_>>().join(", ")))
        }
        FigmentValue::Dict(_, dict) if dict.is_empty() => Some("{}".to_owned()),
        FigmentValue::Dict(_, dict) => {
            let entries =
                dict.iter().filter_map(|(key, value)| Some(format!("{} = {}", quote(key), inline(value)?)));
            Some(format!("{{ {} }}", entries.collect::<Vec<_>>().join(", ")))
        }
    }
}

fn float(text: String) -> String {
    if text == "NaN" { "nan".to_owned() } else { text }
}

fn string(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

fn quote(key: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !key.is_empty() && key.chars().all(bare) { key.to_owned() } else { string(key) }
}

pub(crate) fn header(path: &[&str]) -> String {
    path.iter().map(|key| quote(key)).collect::<Vec<_>>().join(".")
}

pub(crate) fn join<'s>(path: &[&'s str], key: &'s str) -> Vec<&'s str> {
    path.iter().copied().chain([key]).collect()
}
