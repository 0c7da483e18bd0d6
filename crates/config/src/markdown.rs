//! The reference of a configuration as tables in Markdown.

use figment::value::{Dict, Value as FigmentValue};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::error::ConfigError;
use crate::render::{MAX_DEPTH, chosen, header, inline, join, leaf_words};
use crate::schema::{Schema, Shape, tag};
use crate::to_value;

/// Returns every key of `T` with its default and its meaning (the doc comments of the type), as Markdown: a heading and a table of
/// keys for each table of the configuration, and a table for each variant that the default does not choose.
///
/// # Errors
///
/// `T` does not serialise to a table of TOML values.
pub fn reference_markdown<T>() -> Result<String, ConfigError>
where
    T: Serialize + JsonSchema + Default,
{
    let schema = Schema::of::<T>();
    let default = to_value(&T::default())?;
    let mut page = Page { schema: &schema, out: String::new() };
    page.table(&[], schema.root(), default.as_dict());
    Ok(format!("{}\n", page.out.trim()))
}

struct Page<'a> {
    schema: &'a Schema,
    out: String,
}

impl<'a> Page<'a> {
    /// A heading and its keys; then those of the tables inside.
    fn section(&mut self, path: &[&str], node: &'a Value, value: Option<&FigmentValue>) {
        self.out.push_str(&format!("## `[{}]`\n\n", header(path)));
        if let Some(description) = self.schema.description(node) {
            self.out.push_str(&format!("{}\n\n", one_line(description)));
        }
        self.table(path, node, value.and_then(FigmentValue::as_dict));
    }

    fn table(&mut self, path: &[&str], node: &'a Value, dict: Option<&Dict>) {
        let shapes = self.schema.shapes(node);
        let tables: Vec<&Shape<'a>> = shapes.iter().filter(|shape| shape.is("object")).collect();
        let Some(chosen) = dict.and_then(|dict| chosen(&shapes, dict)).or(tables.first().copied()) else {
            return;
        };
        let Some(tag) = tag(&tables).filter(|_| tables.len() > 1) else {
            return self.keys(path, chosen, dict, None);
        };
        let meanings: Vec<_> =
            tables.iter().filter_map(|shape| Some((shape.constant(tag)?, shape.description))).collect();
        let value = chosen.constant(tag).unwrap_or_default();
        let row = row(&join(path, tag), &format!("`\"{value}\"`"), "", &meanings, "");
        self.keys(path, chosen, dict, Some((tag, row)));
        for shape in tables.iter().filter(|shape| shape.constant(tag) != chosen.constant(tag)) {
            self.variant(path, tag, shape);
        }
    }

    /// The keys of a table that the default does not choose.
    fn variant(&mut self, path: &[&str], tag: &str, shape: &Shape<'a>) {
        if shape.properties.len() > 1 {
            let value = shape.constant(tag).unwrap_or_default();
            self.out.push_str(&format!("With `{} = \"{value}\"`:\n\n", join(path, tag).join(".")));
            self.keys(path, shape, None, Some((tag, String::new())));
        }
    }

    /// The rows of a table, `first` above the others instead of the key that it names.
    fn keys(&mut self, path: &[&str], shape: &Shape<'a>, dict: Option<&Dict>, first: Option<(&str, String)>) {
        let (skipped, mut rows) = first.map_or((None, String::new()), |(key, row)| (Some(key), row));
        let (mut tables, mut names) = (Vec::new(), Vec::new());
        for (key, node) in shape.properties.iter().filter(|(key, _)| Some(*key) != skipped) {
            let default = node.get("default").and_then(|value| FigmentValue::serialize(value).ok());
            let value = dict.and_then(|dict| dict.get(*key).cloned()).or(default);
            // A table of free keys is a row.
            let has_keys = |shape: &Shape<'_>| !shape.properties.is_empty() || shape.items.is_some();
            let keyed = self.schema.shapes(node).iter().any(has_keys);
            if keyed && self.schema.is_table(node, value.as_ref()) {
                tables.push((join(path, key), *node, value));
            } else {
                let required = shape.required.contains(key);
                rows.push_str(&self.leaf(&join(path, key), node, value.as_ref(), required));
                names.push((join(path, key), *node));
            }
        }
        if !rows.is_empty() {
            self.out.push_str(&format!("| key | default | meaning |\n|---|---|---|\n{rows}\n"));
        }
        if path.len() >= MAX_DEPTH {
            return;
        }
        for (path, node) in names {
            let shapes = self.schema.shapes(node);
            let tables: Vec<&Shape<'a>> = shapes.iter().filter(|shape| shape.types == ["object"]).collect();
            let Some(tag) = tag(&tables) else { continue };
            tables.iter().for_each(|shape| self.variant(&path, tag, shape));
        }
        for (path, node, value) in tables {
            self.section(&path, node, value.as_ref());
        }
    }

    fn leaf(&self, path: &[&str], node: &'a Value, value: Option<&FigmentValue>, required: bool) -> String {
        let shapes = self.schema.shapes(node);
        let default = match value.and_then(inline) {
            Some(text) => format!("`{text}`"),
            None if required && !self.schema.nullable(node) => "needed".to_owned(),
            None => "unset".to_owned(),
        };
        let meanings: Vec<_> = shapes.iter().flat_map(|shape| shape.allowed.iter().copied()).collect();
        let described = meanings.iter().any(|(_, meaning)| meaning.is_some());
        let words = if described { String::new() } else { leaf_words(self.schema, node) };
        row(path, &default, self.schema.description(node).unwrap_or_default(), &meanings, &words)
    }
}

/// A row: the key, its default, what it means, what its values mean, and which values there are.
fn row(
    path: &[&str],
    default: &str,
    description: &str,
    meanings: &[(&str, Option<&str>)],
    words: &str,
) -> String {
    let meaning = |(value, meaning): &(&str, Option<&str>)| {
        Some(format!("`\"{value}\"`: {}", meaning.as_ref()?.trim_end_matches('.')))
    };
    let meanings: Vec<String> = meanings.iter().filter_map(meaning).collect();
    let meanings = if meanings.is_empty() { String::new() } else { format!("{}.", meanings.join("; ")) };
    let words = if words.is_empty() { String::new() } else { format!("({words})") };
    let parts = [description, &meanings, &words].map(one_line);
    let text: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    format!("| `{}` | {default} | {} |\n", path.join("."), text.join(" ").replace('|', "\\|"))
}

fn one_line(text: &str) -> String {
    text.lines().collect::<Vec<_>>().join(" ")
}
