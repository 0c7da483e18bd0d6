//! A value that is one of the registered types of a family.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::{Named, find, name_and_keys, schema_of, tagged};

/// Settings that a table of the configuration names by its key `type`; its other keys are the fields.
///
/// Keys, defaults and their meanings in `reference.toml` come from the type's schema and doc comments.
pub trait Registered:
    Clone + PartialEq + fmt::Debug + Serialize + DeserializeOwned + JsonSchema + Send + Sync + 'static
{
    /// Value of the key `type`.
    const NAME: &'static str;

    /// One sentence in `reference.toml`.
    const SUMMARY: &'static str;
}

/// A family of registered types, such as the optimizers.
pub trait Family: Sized + 'static {
    /// Singular noun in errors.
    const NOUN: &'static str;

    /// One sentence on the family.
    const SUMMARY: &'static str;

    /// True if a string, the name alone, stands for a table without other keys.
    const SHORT: bool = false;

    /// Name of the member, and its key, that a list stands for, if it stands for one.
    const LIST: Option<[&'static str; 2]> = None;

    /// Trait object through which all members are used.
    type Member: ?Sized + fmt::Debug + Send + Sync;

    /// Returns all members.
    fn entries() -> Vec<Entry<Self>>;

    /// Returns the default.
    fn standard() -> Choice<Self>;
}

/// A family of which `C` is a member.
pub trait Holds<C>: Family {
    /// Makes a member.
    fn hold(config: C) -> Arc<Self::Member>;
}

/// Entry of a family.
pub struct Entry<F: Family> {
    name: &'static str,
    summary: &'static str,
    type_name: fn() -> &'static str,
    schema: fn(&mut SchemaGenerator) -> Schema,
    read: fn(Value) -> serde_json::Result<Choice<F>>,
}

impl<F: Family> Entry<F> {
    /// Makes the entry of a type.
    pub const fn of<C: Registered>() -> Self
    where
        F: Holds<C>,
    {
        Self {
            name: C::NAME,
            summary: C::SUMMARY,
            type_name: std::any::type_name::<C>,
            schema: C::json_schema,
            read: |keys| Ok(Choice::from(serde_json::from_value::<C>(keys)?)),
        }
    }

    /// One sentence on the type.
    pub fn summary(&self) -> &'static str {
        self.summary
    }

    /// Schema of the table, with the key `type`.
    fn schema(&self, generator: &mut SchemaGenerator) -> Value {
        schema_of(self.name, Some(self.summary), self.schema, generator)
    }
}

impl<F: Family> Clone for Entry<F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Family> Copy for Entry<F> {}

impl<F: Family> fmt::Debug for Entry<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} {} ({})", F::NOUN, self.name, self.type_name())
    }
}

impl<F: Family> Named for Entry<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn type_name(&self) -> &'static str {
        (self.type_name)()
    }
}

/// A member of a family, as a table of the configuration names it: the key `type`, and the keys of its settings. Its methods are
/// those of [`Family::Member`].
///
/// ```
/// use std::sync::Arc;
///
/// use isobar_registry::{Choice, Entry, Family, Holds, Registered};
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
///
/// trait Shape: std::fmt::Debug + Send + Sync {
///     fn area(&self) -> f64;
/// }
///
/// struct Shapes;
///
/// impl Family for Shapes {
///     const NOUN: &'static str = "shape";
///     const SUMMARY: &'static str = "A shape.";
///     type Member = dyn Shape;
///     fn entries() -> Vec<Entry<Self>> {
///         vec![Entry::of::<Square>()]
///     }
///     fn standard() -> Choice<Self> {
///         Square { side: 1.0 }.into()
///     }
/// }
///
/// impl<C: Shape + Registered> Holds<C> for Shapes {
///     fn hold(config: C) -> Arc<dyn Shape> {
///         Arc::new(config)
///     }
/// }
///
/// /// Settings of a square.
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
/// struct Square {
///     /// Its side.
///     side: f64,
/// }
///
/// impl Registered for Square {
///     const NAME: &'static str = "square";
///     const SUMMARY: &'static str = "Four equal sides.";
/// }
///
/// impl Shape for Square {
///     fn area(&self) -> f64 {
///         self.side * self.side
///     }
/// }
///
/// let shape: Choice<Shapes> = serde_json::from_str(r#"{ "type": "square", "side": 3.0 }"#)?;
/// assert_eq!((shape.name(), shape.area()), ("square", 9.0));
/// assert_eq!(shape, Square { side: 3.0 }.into());
/// # Ok::<(), serde_json::Error>(())
/// ```
pub struct Choice<F: Family> {
    name: &'static str,
    table: Result<Map<String, Value>, String>,
    member: Arc<F::Member>,
}

impl<F: Family> Choice<F> {
    /// Value of the key `type`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Reads the member `name` from its other keys.
    fn named(name: &str, keys: Value) -> Result<Self, String> {
        let entry = find(F::NOUN, name, &F::entries())?;
        (entry.read)(keys).map_err(|error| error.to_string())
    }
}

impl<F: Holds<C>, C: Registered> From<C> for Choice<F> {
    fn from(config: C) -> Self {
        let table = serde_json::to_value(&config).and_then(|keys| tagged(C::NAME, keys));
        Self { name: C::NAME, table: table.map_err(|error| error.to_string()), member: F::hold(config) }
    }
}

impl<F: Family> Deref for Choice<F> {
    type Target = F::Member;

    fn deref(&self) -> &F::Member {
        &self.member
    }
}

impl<F: Family> Default for Choice<F> {
    fn default() -> Self {
        F::standard()
    }
}

impl<F: Family> Clone for Choice<F> {
    fn clone(&self) -> Self {
        Self { name: self.name, table: self.table.clone(), member: self.member.clone() }
    }
}

impl<F: Family> fmt::Debug for Choice<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.member.fmt(f)
    }
}

impl<F: Family> PartialEq for Choice<F> {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && matches!((&self.table, &other.table), (Ok(own), Ok(other)) if own == other)
    }
}

impl<F: Family> Serialize for Choice<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.table {
            Ok(table) if F::SHORT && table.len() == 1 => self.name.serialize(serializer),
            Ok(table) => table.serialize(serializer),
            Err(error) => Err(<S::Error as serde::ser::Error>::custom(error)),
        }
    }
}

impl<'de, F: Family> Deserialize<'de> for Choice<F> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (name, keys) = match (Value::deserialize(deserializer)?, F::LIST) {
            (Value::String(name), _) if F::SHORT => (name, json!({})),
            (Value::Array(items), Some([name, key])) => (name.to_owned(), json!({ key: items })),
            (table, _) => name_and_keys(table).map_err(D::Error::custom)?,
        };
        Self::named(&name, keys).map_err(D::Error::custom)
    }
}

impl<F: Family> JsonSchema for Choice<F> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("any_{}", F::NOUN).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let entries = F::entries();
        let mut forms = Vec::new();
        if F::SHORT {
            let name = |entry: &Entry<F>| json!({ "type": "string", "const": entry.name, "description": entry.summary });
            forms.extend(entries.iter().map(name));
        }
        let tables = entries.iter().map(|entry| entry.schema(generator));
        forms.extend(tables);
        if F::LIST.is_some() {
            forms.push(json!({ "type": "array" }));
        }
        json_schema!({ "description": F::SUMMARY, "oneOf": forms })
    }
}
