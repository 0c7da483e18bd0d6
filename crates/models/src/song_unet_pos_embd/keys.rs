//! Configuration tables in which further keys stand beside those of the network.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{DeserializeOwned, Error as _};
use serde_json::{Map, Value, json};

use crate::song_unet::SongUNetConfig;

/// Takes the keys of `K` out of a table.
pub(crate) fn take<K: JsonSchema + DeserializeOwned>(
    table: &mut Map<String, Value>,
) -> serde_json::Result<K> {
    let schema = schemars::schema_for!(K).to_value();
    let own = schema["properties"].as_object().into_iter().flat_map(Map::keys);
    let own: Map<String, Value> = own.filter_map(|key| table.remove_entry(key)).collect();
    serde_json::from_value(own.into())
}

/// Reads what remains of a table as the network's keys.
pub(crate) fn network(mut table: Map<String, Value>) -> serde_json::Result<SongUNetConfig> {
    for (key, default) in defaults() {
        table.entry(key).or_insert(default);
    }
    serde_json::from_value(table.into())
}

/// Joins the keys of several parts in one table.
pub(crate) fn joined(parts: impl IntoIterator<Item = Value>) -> serde_json::Result<Map<String, Value>> {
    let mut table = Map::new();
    for part in parts {
        match part {
            Value::Object(part) => table.extend(part),
            _ => return Err(serde_json::Error::custom("expected a table")),
        }
    }
    Ok(table)
}

/// Joins the network's schema, with its defaults beside positions, and those of the parts.
pub(crate) fn joined_schema(generator: &mut SchemaGenerator, parts: &[Schema]) -> Schema {
    let mut schema = SongUNetConfig::json_schema(generator).to_value();
    for (key, default) in defaults() {
        schema["properties"][key]["default"] = default;
    }
    for part in parts {
        let own = part.as_value();
        for list in ["properties", "required"] {
            match (&mut schema[list], &own[list]) {
                (Value::Object(all), Value::Object(own)) => {
                    all.extend(own.iter().map(|(key, value)| (key.clone(), value.clone())));
                }
                (Value::Array(all), Value::Array(own)) => all.extend(own.iter().cloned()),
                _ => {}
            }
        }
    }
    Schema::try_from(schema).unwrap_or_default()
}

/// Returns PhysicsNeMo's defaults for the networks with positions, where they differ from those of SongUNet alone.
fn defaults() -> [(&'static str, Value); 3] {
    [("channel_mult", json!([1, 2, 2, 2, 2])), ("attn_resolutions", json!([28])), ("dropout", json!(0.13))]
}
