//! The part of JSON Schema that schemars writes, read as a list of alternatives.

use figment::value::Value as FigmentValue;
use schemars::JsonSchema;
use serde_json::Value;

/// Property of a key's schema with the former name of its table.
const FORMER: &str = "x-former-table";

/// The schema of a configuration type.
pub(crate) struct Schema {
    root: Value,
}

/// One of the forms that a value may take.
#[derive(Clone, Default)]
pub(crate) struct Shape<'a> {
    /// JSON types; empty is any.
    pub(crate) types: Vec<&'a str>,
    /// Strings allowed, with their meanings; empty is any.
    pub(crate) allowed: Vec<(&'a str, Option<&'a str>)>,
    /// Keys of a table in the order of their declaration.
    pub(crate) properties: Vec<(&'a str, &'a Value)>,
    pub(crate) required: Vec<&'a str>,
    /// The schema of keys that are not listed.
    pub(crate) additional: Option<&'a Value>,
    pub(crate) items: Option<&'a Value>,
    pub(crate) item_count: (Option<u64>, Option<u64>),
    pub(crate) minimum: Option<f64>,
    pub(crate) maximum: Option<f64>,
    pub(crate) description: Option<&'a str>,
}

impl Schema {
    pub(crate) fn of<T: JsonSchema>() -> Self {
        Self { root: schemars::schema_for!(T).to_value() }
    }

    pub(crate) fn root(&self) -> &Value {
        &self.root
    }

    /// Former names of the tables of the root, each with its present name: the property `x-former-table` of a key's schema.
    pub(crate) fn former_tables(&self) -> Vec<(&str, &str)> {
        let properties = self.root.get("properties").and_then(Value::as_object);
        let former = properties.into_iter().flatten();
        former.filter_map(|(key, schema)| Some((schema.get(FORMER)?.as_str()?, key.as_str()))).collect()
    }

    /// Returns whether a key may be unset.
    pub(crate) fn takes_null(&self, schema: &Value) -> bool {
        self.expand(schema).iter().any(|shape| shape.types.contains(&"null"))
    }

    /// The forms that a schema allows, unset options left out, plain strings with a fixed list made one form.
    pub(crate) fn shapes<'a>(&'a self, schema: &'a Value) -> Vec<Shape<'a>> {
        let mut strings: Option<Shape<'a>> = None;
        let mut shapes = Vec::new();
        for mut shape in self.expand(schema) {
            if shape.types == ["null"] {
                continue;
            }
            shape.types.retain(|kind| *kind != "null");
            if shape.types == ["string"] && !shape.allowed.is_empty() {
                match &mut strings {
                    Some(strings) => strings.allowed.append(&mut shape.allowed),
                    None => strings = Some(shape),
                }
            } else {
                shapes.push(shape);
            }
        }
        shapes.extend(strings);
        shapes
    }

    /// Returns whether a schema also allows the option to be unset.
    pub(crate) fn nullable(&self, schema: &Value) -> bool {
        self.expand(schema).iter().any(|shape| shape.types.contains(&"null"))
    }

    /// The first description on the way through references.
    pub(crate) fn description<'a>(&'a self, schema: &'a Value) -> Option<&'a str> {
        let own = schema.get("description").and_then(Value::as_str);
        own.or_else(|| self.description(self.target(schema)?))
    }

    /// Returns whether a key is written as a table of its own.
    pub(crate) fn is_table(&self, node: &Value, value: Option<&FigmentValue>) -> bool {
        let objects = |node| {
            let shapes = self.shapes(node);
            !shapes.is_empty() && shapes.iter().all(|shape| shape.types == ["object"])
        };
        match value {
            Some(FigmentValue::Dict(..)) => true,
            Some(FigmentValue::Array(_, items)) if items.is_empty() => {
                self.shapes(node).iter().filter_map(|shape| shape.items).any(objects)
            }
            None | Some(FigmentValue::Empty(..)) => objects(node),
            Some(_) => false,
        }
    }

    fn expand<'a>(&'a self, schema: &'a Value) -> Vec<Shape<'a>> {
        let mut shapes = vec![Shape::own(schema)];
        if let Some(target) = self.target(schema) {
            shapes = product(&shapes, &self.expand(target));
        }
        for part in list(schema, "allOf") {
            shapes = product(&shapes, &self.expand(part));
        }
        for key in ["oneOf", "anyOf"] {
            let alternatives: Vec<_> = list(schema, key).iter().flat_map(|part| self.expand(part)).collect();
            if !alternatives.is_empty() {
                shapes = product(&shapes, &alternatives);
            }
        }
        shapes
    }

    fn target<'a>(&'a self, schema: &'a Value) -> Option<&'a Value> {
        let reference = schema.get("$ref")?.as_str()?;
        self.root.pointer(reference.strip_prefix('#')?)
    }
}

impl<'a> Shape<'a> {
    fn own(schema: &'a Value) -> Self {
        let text = |key| schema.get(key).and_then(Value::as_str);
        let description = text("description");
        let types = match schema.get("type") {
            Some(Value::String(kind)) => vec![kind.as_str()],
            _ => list(schema, "type").iter().filter_map(Value::as_str).collect(),
        };
        let mut allowed: Vec<_> =
            list(schema, "enum").iter().filter_map(Value::as_str).map(|value| (value, None)).collect();
        allowed.extend(text("const").map(|value| (value, description)));
        let properties = schema.get("properties").and_then(Value::as_object);
        Self {
            types,
            allowed,
            properties: properties.map_or_else(Vec::new, |keys| {
                keys.iter().map(|(key, value)| (key.as_str(), value)).collect()
            }),
            required: list(schema, "required").iter().filter_map(Value::as_str).collect(),
            additional: schema.get("additionalProperties").filter(|schema| **schema != Value::Bool(false)),
            items: schema.get("items"),
            item_count: (
                schema.get("minItems").and_then(Value::as_u64),
                schema.get("maxItems").and_then(Value::as_u64),
            ),
            minimum: schema.get("minimum").and_then(Value::as_f64),
            maximum: schema.get("maximum").and_then(Value::as_f64),
            description,
        }
    }

    fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        if both.types.is_empty() {
            both.types.clone_from(&other.types);
        }
        both.allowed.extend(&other.allowed);
        both.properties.extend(&other.properties);
        both.required.extend(&other.required);
        both.additional = both.additional.or(other.additional);
        both.items = both.items.or(other.items);
        both.item_count =
            (both.item_count.0.or(other.item_count.0), both.item_count.1.or(other.item_count.1));
        both.minimum = both.minimum.or(other.minimum);
        both.maximum = both.maximum.or(other.maximum);
        both.description = other.description.or(both.description);
        both
    }

    pub(crate) fn property(&self, key: &str) -> Option<&'a Value> {
        self.properties.iter().find(|(name, _)| *name == key).map(|(_, schema)| *schema)
    }

    pub(crate) fn is(&self, kind: &str) -> bool {
        self.types.is_empty() || self.types.contains(&kind)
    }

    /// The fixed string that a key of this form must hold.
    pub(crate) fn constant(&self, key: &str) -> Option<&'a str> {
        self.property(key)?.get("const")?.as_str()
    }

    /// Describes values of this form in words.
    pub(crate) fn words(&self) -> String {
        if !self.allowed.is_empty() {
            let allowed: Vec<_> = self.allowed.iter().map(|(value, _)| format!("\"{value}\"")).collect();
            return allowed.join(" | ");
        }
        if self.types.is_empty() {
            return "any value".to_owned();
        }
        let word = |kind: &&str| match *kind {
            "integer" => format!("an integer{}", self.range()),
            "number" => format!("a number{}", self.range()),
            "boolean" => "true or false".to_owned(),
            "string" => "a string".to_owned(),
            "array" => "a list".to_owned(),
            "object" => "a table".to_owned(),
            other => other.to_owned(),
        };
        self.types.iter().map(word).collect::<Vec<_>>().join(" or ")
    }

    fn range(&self) -> String {
        // The bounds of the wide integer types say nothing to a reader.
        let maximum = self.maximum.filter(|bound| *bound < 4e9);
        match (self.minimum.filter(|bound| *bound > -2e9), maximum) {
            (Some(low), Some(high)) => format!(" from {low} to {high}"),
            (Some(low), None) => format!(" of at least {low}"),
            (None, Some(high)) => format!(" of at most {high}"),
            (None, None) => String::new(),
        }
    }
}

/// The key that tells the forms of a tagged enum apart.
pub(crate) fn tag<'a>(shapes: &[&Shape<'a>]) -> Option<&'a str> {
    let first = shapes.first()?;
    let keys = first.properties.iter().map(|(key, _)| *key);
    keys.into_iter().find(|key| shapes.iter().all(|shape| shape.constant(key).is_some()))
}

fn product<'a>(left: &[Shape<'a>], right: &[Shape<'a>]) -> Vec<Shape<'a>> {
    left.iter().flat_map(|a| right.iter().map(|b| a.and(b))).collect()
}

fn list<'a>(schema: &'a Value, key: &str) -> &'a [Value] {
    schema.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}
