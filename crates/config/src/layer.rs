//! A layer: a tree of values that each know their place.

use std::ops::Range;

use figment::value::{Dict, Map, Num, Value as FigmentValue};
use figment::{Metadata, Profile, Provider};
use isobar_launch::Environment;
use isobar_registry::TYPE;
use serde::Serialize;
use toml::de::DeValue;

use crate::error::{ConfigError, Problem};
use crate::place::Place;
use crate::{RESERVED_VARIABLES, to_value};

pub(crate) const PREFIX: &str = "ISOBAR_";

/// Tables within tables, at most: no configuration has nearly so many, and each costs stack.
const DEEPEST: usize = 32;

/// A value and its place.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) place: Place,
    pub(crate) kind: Kind,
}

/// Kind of a value.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Boolean(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Table(Vec<Entry>),
}

/// A key of a table and its value.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_place: Place,
    pub(crate) value: Node,
}

impl Node {
    pub(crate) fn get(&self, key: &str) -> Option<&Node> {
        match &self.kind {
            Kind::Table(entries) => entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value),
            _ => None,
        }
    }

    pub(crate) fn from_toml(
        value: &DeValue<'_>,
        place: &Place,
        within: &dyn Fn(Range<usize>) -> Place,
    ) -> Result<Self, Problem> {
        let problem = |message| Problem { message, place: place.clone(), help: None };
        let kind = match value {
            DeValue::Boolean(value) => Kind::Boolean(*value),
            DeValue::String(text) => Kind::Text(text.to_string()),
            DeValue::Datetime(date) => Kind::Text(date.to_string()),
            DeValue::Float(number) => match number.as_str().parse() {
                Ok(value) => Kind::Float(value),
                Err(_) => return Err(problem(format!("{} is not a number", number.as_str()))),
            },
            DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
                Ok(value) => Kind::Integer(value),
                Err(_) => return Err(problem("the integer does not fit 64 bits".to_owned())),
            },
            DeValue::Array(items) => Kind::List(
                items
                    .iter()
                    .map(|item| Self::from_toml(item.get_ref(), &within(item.span()), within))
                    .collect::<Result<_, _>>()?,
            ),
            DeValue::Table(table) => Kind::Table(entries(table, within)?),
        };
        Ok(Self { place: place.clone(), kind })
    }

    fn to_figment(&self) -> FigmentValue {
        match &self.kind {
            Kind::Boolean(value) => FigmentValue::from(*value),
            Kind::Integer(value) => FigmentValue::from(*value),
            Kind::Float(value) => FigmentValue::from(*value),
            Kind::Text(text) => FigmentValue::from(text.as_str()),
            Kind::List(items) => FigmentValue::from(items.iter().map(Self::to_figment).collect::<Vec<_>>()),
            Kind::Table(entries) => FigmentValue::from(to_dict(entries)),
        }
    }
}

/// The entries of a parsed TOML table.
pub(crate) fn entries(
    table: &toml::de::DeTable<'_>,
    within: &dyn Fn(Range<usize>) -> Place,
) -> Result<Vec<Entry>, Problem> {
    table
        .iter()
        .map(|(key, value)| {
            let key_place = within(key.span());
            // A table that dotted keys or headers opened has no text of its own.
            let place = if value.get_ref().is_table() { key_place.clone() } else { within(value.span()) };
            let value = Node::from_toml(value.get_ref(), &place, within)?;
            Ok(Entry { key: key.get_ref().to_string(), key_place, value })
        })
        .collect()
}

/// One layer of the configuration.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) root: Node,
}

impl Layer {
    pub(crate) fn new(entries: Vec<Entry>) -> Self {
        Self { root: Node { place: Place::Default, kind: Kind::Table(entries) } }
    }

    pub(crate) fn defaults<T: Serialize>(value: &T) -> Result<Self, ConfigError> {
        let root = from_figment(&to_value(value)?);
        match root {
            Some(root) if matches!(root.kind, Kind::Table(_)) => Ok(Self { root }),
            _ => Err(ConfigError::Serialize { message: "the root is no table".to_owned() }),
        }
    }

    pub(crate) fn node(&self, path: &[impl AsRef<str>]) -> Option<&Node> {
        path.iter().try_fold(&self.root, |node, key| node.get(key.as_ref()))
    }

    pub(crate) fn place(&self, path: &[&str]) -> Option<&Place> {
        self.node(path).map(|node| &node.place)
    }

    /// Removes what stands at a path.
    pub(crate) fn prune(&mut self, path: &[String]) {
        let Some((last, parents)) = path.split_last() else { return };
        let mut node = &mut self.root;
        for parent in parents {
            let Kind::Table(entries) = &mut node.kind else { return };
            let Some(entry) = entries.iter_mut().find(|entry| entry.key == *parent) else { return };
            node = &mut entry.value;
        }
        if let Kind::Table(entries) = &mut node.kind {
            entries.retain(|entry| entry.key != *last);
        }
    }

    /// Moves the entries of the table `former` into the table `present`, and sets its `type` to `former`. `chosen` is the type that the
    /// layers below name.
    pub(crate) fn rename_table(
        &mut self,
        (former, present): (&str, &str),
        chosen: Option<&str>,
    ) -> Result<(), Problem> {
        let beside = self.node(&[present]).is_some();
        let Kind::Table(tables) = &mut self.root.kind else { return Ok(()) };
        let moves = |entry: &Entry| entry.key == former && matches!(entry.value.kind, Kind::Table(_));
        let Some(index) = tables.iter().position(moves) else { return Ok(()) };
        let Entry { key, key_place: place, value } = tables.remove(index);
        let former_of =
            format!("`{former}` is the former name of `{present}` with {present}.type = \"{former}\"");
        let help = format!("write `{present}` in place of `{former}`");
        let (message, help) = match chosen {
            _ if beside => (format!("{former_of}, and both are given"), help),
            Some(other) if other != former => (
                format!("{former_of}, but {present}.type is \"{other}\""),
                format!("{help}, and {present}.type = \"{former}\" beside it"),
            ),
            _ => {
                self.insert(&[present, TYPE], Node { place, kind: Kind::Text(key) });
                let Kind::Table(entries) = value.kind else { return Ok(()) };
                entries.into_iter().for_each(|entry| self.insert(&[present, &entry.key], entry.value));
                return Ok(());
            }
        };
        Err(Problem { message, place, help: Some(help) })
    }

    /// The `type` that the layer names in a table.
    pub(crate) fn type_of(&self, table: &str) -> Option<&str> {
        match &self.node(&[table, TYPE])?.kind {
            Kind::Text(name) => Some(name),
            _ => None,
        }
    }

    /// Puts a value at a path, over one that an earlier assignment of the same layer put there.
    fn insert(&mut self, path: &[&str], value: Node) {
        let place = value.place.clone();
        let Some((last, parents)) = path.split_last() else { return };
        let mut node = &mut self.root;
        for parent in parents {
            node = child(node, parent, &place);
        }
        *child(node, last, &place) = value;
    }
}

impl Provider for &Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named("isobar configuration")
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let Kind::Table(entries) = &self.root.kind else { return Ok(Map::new()) };
        Ok(Map::from([(Profile::Default, to_dict(entries))]))
    }
}

/// The layer of `ISOBAR_*` variables.
pub(crate) fn environment(environment: &Environment, problems: &mut Vec<Problem>) -> Layer {
    let mut layer = Layer::new(Vec::new());
    for (name, raw) in environment.iter() {
        let ours = !RESERVED_VARIABLES.contains(&name) && !raw.trim().is_empty();
        let Some(key) = name.strip_prefix(PREFIX).filter(|_| ours) else { continue };
        let key = key.to_ascii_lowercase();
        let place = Place::Variable { name: name.to_owned(), raw: raw.to_owned() };
        assign(&mut layer, &key.split("__").collect::<Vec<_>>(), raw, place, problems);
    }
    layer
}

/// The layer of `--set` options.
pub(crate) fn command_line(sets: &[String], problems: &mut Vec<Problem>) -> Layer {
    let mut layer = Layer::new(Vec::new());
    for set in sets {
        let place = Place::Flag { raw: set.clone() };
        match set.split_once('=') {
            Some((key, raw)) => {
                let path: Vec<&str> = key.split('.').map(str::trim).collect();
                assign(&mut layer, &path, raw.trim(), place, problems);
            }
            None => problems.push(Problem {
                message: format!("`{set}` has no `=`"),
                place,
                help: Some("write --set section.key=value".to_owned()),
            }),
        }
    }
    layer
}

fn assign(layer: &mut Layer, path: &[&str], raw: &str, place: Place, problems: &mut Vec<Problem>) {
    if path.iter().any(|key| key.is_empty()) {
        let message = format!("`{}` is not a key: a part of it is empty", path.join("."));
        problems.push(Problem { message, place, help: None });
        return;
    }
    if path.len() > DEEPEST {
        let message = format!("a key of {} parts, expected at most {DEEPEST}", path.len());
        problems.push(Problem { message, place, help: None });
        return;
    }
    match parse_text(raw, &place) {
        Ok(value) => layer.insert(path, value),
        Err(problem) => problems.push(problem),
    }
}

/// TOML where the text is TOML, else a bare word; a text that starts as a list, table or string must be TOML.
fn parse_text(raw: &str, place: &Place) -> Result<Node, Problem> {
    match DeValue::parse(raw) {
        Ok(value) => Node::from_toml(value.get_ref(), place, &|_| place.clone()),
        Err(error) if raw.starts_with(['[', '{', '"', '\'']) => Err(Problem {
            message: format!("the value is not TOML: {}", error.message()),
            place: place.clone(),
            help: None,
        }),
        Err(_) => Ok(Node { place: place.clone(), kind: Kind::Text(raw.to_owned()) }),
    }
}

fn child<'a>(node: &'a mut Node, key: &str, place: &Place) -> &'a mut Node {
    if !matches!(node.kind, Kind::Table(_)) {
        node.kind = Kind::Table(Vec::new());
    }
    let Kind::Table(entries) = &mut node.kind else { unreachable!("made a table above") };
    let index = entries.iter().position(|entry| entry.key == key).unwrap_or_else(|| {
        let value = Node { place: place.clone(), kind: Kind::Table(Vec::new()) };
        entries.push(Entry { key: key.to_owned(), key_place: place.clone(), value });
        entries.len() - 1
    });
    &mut entries[index].value
}

fn to_dict(entries: &[Entry]) -> Dict {
    entries.iter().map(|entry| (entry.key.clone(), entry.value.to_figment())).collect()
}

/// None for an option that is unset.
fn from_figment(value: &FigmentValue) -> Option<Node> {
    let kind = match value {
        FigmentValue::String(_, text) => Kind::Text(text.clone()),
        FigmentValue::Char(_, c) => Kind::Text(c.to_string()),
        FigmentValue::Bool(_, value) => Kind::Boolean(*value),
        FigmentValue::Num(_, Num::F32(value)) => Kind::Float(f64::from(*value)),
        FigmentValue::Num(_, Num::F64(value)) => Kind::Float(*value),
        FigmentValue::Num(_, number) => Kind::Integer(integer(*number).unwrap_or(i64::MAX)),
        FigmentValue::Empty(..) => return None,
        FigmentValue::Array(_, items) => Kind::List(items.iter().filter_map(from_figment).collect()),
        FigmentValue::Dict(_, dict) => Kind::Table(
            dict.iter()
                .filter_map(|(key, value)| {
                    let value = from_figment(value)?;
                    Some(Entry { key: key.clone(), key_place: Place::Default, value })
                })
                .collect(),
        ),
    };
    Some(Node { place: Place::Default, kind })
}

/// A whole number; none beyond the range of TOML's.
pub(crate) fn integer(number: Num) -> Option<i64> {
    let signed = number.to_i128().and_then(|value| i64::try_from(value).ok());
    signed.or_else(|| number.to_u128().and_then(|value| i64::try_from(value).ok()))
}
