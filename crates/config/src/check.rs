//! A layer against the schema, while places are known.

use isobar_registry::nearest;
use serde_json::Value;

use crate::error::Problem;
use crate::layer::{Kind, Layer, Node};
use crate::place::Place;
use crate::schema::{Schema, Shape, tag};
use crate::shorten::shorten;

/// The schema of any value.
static ANY: Value = Value::Bool(true);

/// Result of a check.
#[derive(Default)]
pub(crate) struct Checked {
    pub(crate) problems: Vec<Problem>,
    /// Tables for which the layer chose another variant than the layers below it.
    pub(crate) switched: Vec<Vec<String>>,
}

/// Checks a layer; text that stands where a string is expected becomes one, though it looks like a number or a boolean.
pub(crate) fn layer(schema: &Schema, below: &[Layer], layer: &mut Layer) -> Checked {
    let mut check = Check { schema, below, path: Vec::new(), found: Checked::default() };
    check.value(schema.root(), &mut layer.root);
    check.found
}

struct Check<'a> {
    schema: &'a Schema,
    below: &'a [Layer],
    path: Vec<String>,
    found: Checked,
}

impl<'a> Check<'a> {
    fn value(&mut self, schema: &'a Value, node: &mut Node) {
        let shapes = self.schema.shapes(schema);
        if !shapes.iter().any(|shape| fits(shape, &node.kind)) {
            match node.place.raw_value() {
                Some(raw) if shapes.iter().any(|shape| shape.is("string")) => {
                    node.kind = Kind::Text(raw.to_owned());
                }
                _ => return self.wrong_type(&shapes, node),
            }
        }
        let fitting: Vec<&Shape<'a>> = shapes.iter().filter(|shape| fits(shape, &node.kind)).collect();
        match &node.kind {
            Kind::Boolean(_) => {}
            Kind::Integer(value) => self.range(&fitting, *value as f64, node),
            Kind::Float(value) if !value.is_finite() => {
                let help =
                    self.schema.takes_null(schema).then(|| "leave the key out for no limit".to_owned());
                self.not_finite(&shapes, *value, &node.place, help);
            }
            Kind::Float(value) => self.range(&fitting, *value, node),
            Kind::Text(text) => self.text(&fitting, text, &node.place),
            Kind::List(_) => self.list(fitting[0], node),
            Kind::Table(_) => self.table(&fitting, node),
        }
    }

    fn wrong_type(&mut self, shapes: &[Shape<'a>], node: &Node) {
        let message = format!("`{}` is {}, expected {}", self.key(), words(&node.kind), alternatives(shapes));
        self.problem(message, &node.place, None);
    }

    /// Tables with a `type` are read through JSON, which has no such numbers.
    fn not_finite(&mut self, shapes: &[Shape<'a>], value: f64, place: &Place, help: Option<String>) {
        let expected = match shapes.iter().any(|shape| shape.types.is_empty()) {
            true => "a finite number".to_owned(),
            false => alternatives(shapes).replacen("a number", "a finite number", 1),
        };
        self.problem(format!("`{}` is {value}, expected {expected}", self.key()), place, help);
    }

    fn range(&mut self, shapes: &[&Shape<'a>], value: f64, node: &Node) {
        let within = |shape: &&Shape<'a>| {
            shape.minimum.is_none_or(|low| value >= low) && shape.maximum.is_none_or(|high| value <= high)
        };
        if !shapes.iter().any(within) {
            let message = format!("`{}` is {}, expected {}", self.key(), number(value), shapes[0].words());
            self.problem(message, &node.place, None);
        }
    }

    fn text(&mut self, shapes: &[&Shape<'a>], text: &str, place: &Place) {
        if shapes.iter().any(|shape| shape.allowed.is_empty()) {
            return;
        }
        let allowed: Vec<&str> =
            shapes.iter().flat_map(|shape| &shape.allowed).map(|(value, _)| *value).collect();
        if !allowed.contains(&text) {
            self.not_allowed(&self.key(), text, &allowed, place);
        }
    }

    fn not_allowed(&mut self, key: &str, text: &str, allowed: &[&str], place: &Place) {
        let help = nearest(text, allowed.iter().copied()).map(|name| format!("did you mean \"{name}\"?"));
        let quoted: Vec<_> = allowed.iter().map(|value| format!("\"{value}\"")).collect();
        let message = format!("`{key}` is \"{}\", expected {}", shorten(text), quoted.join(" | "));
        self.problem(message, place, help);
    }

    fn list(&mut self, shape: &Shape<'a>, node: &mut Node) {
        let key = self.key();
        let Kind::List(items) = &mut node.kind else { return };
        let (least, most) = shape.item_count;
        let count = items.len() as u64;
        if least.is_some_and(|least| count < least) || most.is_some_and(|most| count > most) {
            let expected = match (least, most) {
                (Some(least), Some(most)) if least == most => format!("{least}"),
                (Some(least), _) if count < least => format!("at least {least}"),
                (_, most) => format!("at most {}", most.unwrap_or_default()),
            };
            self.problem(format!("`{key}` has {count} items, expected {expected}"), &node.place, None);
        }
        let schema = shape.items.unwrap_or(&ANY);
        for (index, item) in items.iter_mut().enumerate() {
            self.path.push(index.to_string());
            self.value(schema, item);
            self.path.pop();
        }
    }

    fn table(&mut self, shapes: &[&Shape<'a>], node: &mut Node) {
        if let Some(shape) = self.variant(shapes, node) {
            self.keys(shape, node);
        }
    }

    /// The form of a table that its tag, or its keys, choose.
    fn variant<'s>(&mut self, shapes: &[&'s Shape<'a>], node: &Node) -> Option<&'s Shape<'a>> {
        let [_, _, ..] = shapes else { return shapes.first().copied() };
        if let Some(tag) = tag(shapes) {
            return self.tagged(tag, shapes, node);
        }
        let Kind::Table(entries) = &node.kind else { return None };
        let known =
            |shape: &&Shape<'a>| entries.iter().filter(|entry| shape.property(&entry.key).is_some()).count();
        let best = shapes.iter().copied().max_by_key(known)?;
        let one_key = |shape: &&Shape<'a>| shape.required.len() == 1 && shape.properties.len() == 1;
        if shapes.iter().all(one_key) && known(&best) == 1 {
            let lower = self.below.iter().rev().filter_map(|layer| layer.node(&self.path)).next();
            if lower.is_some_and(|lower| lower.get(best.required[0]).is_none()) {
                self.found.switched.push(self.path.clone());
            }
        }
        Some(best)
    }

    fn tagged<'s>(&mut self, tag: &str, shapes: &[&'s Shape<'a>], node: &Node) -> Option<&'s Shape<'a>> {
        let allowed: Vec<&str> = shapes.iter().filter_map(|shape| shape.constant(tag)).collect();
        let find = |value: &str| shapes.iter().copied().find(|shape| shape.constant(tag) == Some(value));
        let below = self.below.iter().rev().find_map(|layer| match &layer.node(&self.path)?.get(tag)?.kind {
            Kind::Text(text) => Some(text.clone()),
            _ => None,
        });
        let key = self.join(tag);
        match (node.get(tag), below) {
            (Some(Node { kind: Kind::Text(text), place }), below) => {
                let shape = find(text);
                if shape.is_none() {
                    self.not_allowed(&key, text, &allowed, place);
                } else if below.is_some_and(|below| below != *text) {
                    self.found.switched.push(self.path.clone());
                }
                shape
            }
            (Some(other), _) => {
                let message =
                    format!("`{key}` is {}, expected one of {}", words(&other.kind), allowed.join(", "));
                self.problem(message, &other.place, None);
                None
            }
            (None, Some(below)) => find(&below),
            (None, None) => {
                let message = format!("key `{key}` is missing, expected one of {}", allowed.join(", "));
                self.problem(message, &node.place, None);
                None
            }
        }
    }

    fn keys(&mut self, shape: &Shape<'a>, node: &mut Node) {
        let Kind::Table(entries) = &mut node.kind else { return };
        for entry in entries {
            let any = shape.types.is_empty().then_some(&ANY);
            let schema = shape.property(&entry.key).or(shape.additional).or(any);
            match schema {
                Some(schema) => {
                    self.path.push(entry.key.clone());
                    self.value(schema, &mut entry.value);
                    self.path.pop();
                }
                None => self.unknown(shape, &entry.key, &entry.key_place),
            }
        }
    }

    fn unknown(&mut self, shape: &Shape<'a>, key: &str, place: &Place) {
        if let Place::Variable { name, .. } = place
            && let Some(meant) = self.underscores(name)
        {
            let help = format!("did you mean {meant}? Two underscores go between a table and its key");
            return self.problem(format!("unknown key `{}`", self.join(key)), place, Some(help));
        }
        let near = nearest(key, shape.properties.iter().map(|(name, _)| *name)).map(|name| self.join(name));
        let wrong = self.join(key);
        let near =
            near.or_else(|| elsewhere(self.schema, self.schema.root(), key, 0)).filter(|name| *name != wrong);
        let help = near.map(|near| match place {
            Place::Variable { name, .. } => {
                let variable = |key: &str| key.to_ascii_uppercase().replace('.', "__");
                format!("did you mean {}?", name.replacen(&variable(&wrong), &variable(&near), 1))
            }
            Place::Default | Place::File { .. } | Place::Flag { .. } => format!("did you mean `{near}`?"),
        });
        let help = help.or_else(|| {
            let names: Vec<_> = shape.properties.iter().map(|(name, _)| *name).collect();
            (!names.is_empty()).then(|| format!("the keys here are {}", names.join(", ")))
        });
        self.problem(format!("unknown key `{}`", shorten(&wrong)), place, help);
    }

    /// Returns the variable of the key that another variable names up to the number of underscores.
    fn underscores(&self, variable: &str) -> Option<String> {
        let (prefix, plain) = (super::layer::PREFIX, |name: &str| name.replace(['.', '_'], ""));
        let name = variable.strip_prefix(prefix)?.to_ascii_lowercase();
        let key = keys(self.schema).into_iter().find(|key| plain(key) == plain(&name))?;
        Some(format!("{prefix}{}", key.to_ascii_uppercase().replace('.', "__")))
    }

    fn problem(&mut self, message: String, place: &Place, help: Option<String>) {
        self.found.problems.push(Problem { message, place: place.clone(), help });
    }

    fn key(&self) -> String {
        self.path.join(".")
    }

    fn join(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.key()) }
    }
}

/// Returns the full names of all keys and tables, a table's keys after those of its parents.
fn keys(schema: &Schema) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut level = vec![(String::new(), schema.root())];
    for _ in 0..DEEPEST_KEY {
        let mut next = Vec::new();
        for (prefix, node) in level {
            for (name, child) in schema.shapes(node).iter().flat_map(|shape| shape.properties.iter()) {
                let key = if prefix.is_empty() { (*name).to_owned() } else { format!("{prefix}.{name}") };
                if !found.contains(&key) {
                    found.push(key.clone());
                }
                next.push((key, *child));
            }
        }
        level = next;
    }
    found
}

/// Bounds the recursion for schemas that contain themselves.
const DEEPEST_KEY: usize = 5;

/// Returns the key that a word probably means: a full name, the last part of one, or a similar spelling.
pub(crate) fn meant(schema: &Schema, word: &str) -> Option<String> {
    let word = word.to_ascii_lowercase().replace('-', "_");
    let mut keys = keys(schema);
    let tables: Vec<String> =
        keys.iter().filter_map(|key| Some(key.rsplit_once('.')?.0.to_owned())).collect();
    keys.retain(|key| !tables.contains(key));
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    if let Some(key) = keys.iter().find(|key| **key == word || last(key) == word) {
        return Some(key.clone());
    }
    let names: Vec<String> = keys.iter().map(|key| last(key)).collect();
    let near = nearest(&word, names.iter().map(String::as_str))?;
    keys.iter().find(|key| last(key) == near).cloned()
}

/// The full name of a key that stands in another table.
fn elsewhere(schema: &Schema, node: &Value, key: &str, depth: usize) -> Option<String> {
    if depth > 6 {
        return None;
    }
    let shapes = schema.shapes(node);
    if depth > 0 && shapes.iter().any(|shape| shape.property(key).is_some()) {
        return Some(key.to_owned());
    }
    let properties = shapes.iter().flat_map(|shape| shape.properties.iter());
    properties
        .filter_map(|(name, child)| {
            elsewhere(schema, child, key, depth + 1).map(|rest| format!("{name}.{rest}"))
        })
        .next()
}

fn fits(shape: &Shape<'_>, kind: &Kind) -> bool {
    match kind {
        Kind::Boolean(_) => shape.is("boolean"),
        Kind::Integer(_) => shape.is("integer") || shape.is("number"),
        Kind::Float(_) => shape.is("number"),
        Kind::Text(_) => shape.is("string"),
        Kind::List(_) => shape.is("array"),
        Kind::Table(_) => shape.is("object"),
    }
}

/// The forms that a value may take, in words.
fn alternatives(shapes: &[Shape<'_>]) -> String {
    let mut words: Vec<_> = shapes.iter().map(Shape::words).collect();
    words.dedup();
    words.join(" or ")
}

/// A number as text of a few characters.
fn number(value: f64) -> String {
    if value.abs() < 1e19 { value.to_string() } else { format!("{value:e}") }
}

fn words(kind: &Kind) -> String {
    match kind {
        Kind::Boolean(value) => format!("{value}"),
        Kind::Integer(value) => format!("the integer {value}"),
        Kind::Float(value) => format!("the number {value:?}"),
        Kind::Text(text) => format!("the string {:?}", shorten(text)),
        Kind::List(_) => "a list".to_owned(),
        Kind::Table(_) => "a table".to_owned(),
    }
}
