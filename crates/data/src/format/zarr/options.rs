//! `[data.zarr]`.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::arrays::ArrayOptions;

/// Keys of `[data.zarr]`: those of named arrays, and one more.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct ZarrOptions {
    pub(super) arrays: ArrayOptions,
    pub(super) missing_chunks: MissingChunks,
}

/// Treatment of chunks that are not in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum MissingChunks {
    /// An error that names the chunk.
    #[default]
    Error,
    /// The array's fill value, as writers mean it that leave out chunks which hold nothing else.
    Fill,
}

/// Name of the key.
const MISSING: &str = "missing_chunks";

// By hand: serde cannot flatten a table that denies unknown keys.
impl<'de> Deserialize<'de> for ZarrOptions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut table = Map::deserialize(deserializer)?;
        let missing = table.remove(MISSING).map(MissingChunks::deserialize);
        let missing_chunks = missing.transpose().map_err(D::Error::custom)?.unwrap_or_default();
        let arrays = ArrayOptions::deserialize(Value::Object(table)).map_err(D::Error::custom)?;
        Ok(Self { arrays, missing_chunks })
    }
}

impl JsonSchema for ZarrOptions {
    fn schema_name() -> Cow<'static, str> {
        "ZarrOptions".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = ArrayOptions::json_schema(generator);
        let mut own = generator.subschema_for::<MissingChunks>();
        own.insert(
            "description".to_owned(),
            "Treatment of chunks that are not in the store: an error, or the array's fill value.".into(),
        );
        own.insert("default".to_owned(), serde_json::json!(MissingChunks::default()));
        if let Some(keys) = schema.get_mut("properties").and_then(Value::as_object_mut) {
            keys.insert(MISSING.to_owned(), own.into());
        }
        schema
    }
}
