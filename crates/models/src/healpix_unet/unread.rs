//! Keys of PhysicsNeMo's tables that have no effect here.

use serde_json::{Map, Value};

use super::HealpixUNetConfig;

/// Paths of the keys that are set and not read. `_recursive_` belongs to Hydra's form of a table, as `_target_` does, and does not
/// count.
pub(super) fn keys(config: &HealpixUNetConfig) -> Vec<String> {
    let mut found = Vec::new();
    if let Ok(Value::Object(table)) = serde_json::to_value(config) {
        collect("", &table, &mut found);
    }
    found.dedup();
    found
}

/// Adds the keys of the table `at` and of those in it.
fn collect(at: &str, table: &Map<String, Value>, found: &mut Vec<String>) {
    for (key, value) in table {
        let path = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
        match value {
            Value::Object(inner) => collect(&path, inner, found),
            Value::Array(list) => {
                list.iter().filter_map(Value::as_object).for_each(|inner| collect(&path, inner, found));
            }
            // Of a scalar: set, and not PhysicsNeMo's default.
            Value::Null | Value::Bool(false) => {}
            value if value.as_u64() != Some(0) && is_unread(at, key, table) => found.push(path),
            _ => {}
        }
    }
}

/// Returns whether a scalar of the table `at` has no effect.
fn is_unread(at: &str, key: &str, table: &Map<String, Value>) -> bool {
    let is = |class: &str| {
        let target = table.get("_target_").and_then(Value::as_str);
        target.and_then(|target| target.rsplit('.').next()).is_some_and(|name| name == class)
    };
    let makes_output = at.ends_with("output_layer");
    match key {
        "presteps" | "enable_nhwc" | "enable_healpixpad" | "inplace" | "coupler" => true,
        // Other arguments replace these.
        "in_channels" | "out_channels" | "dilation" => true,
        "latent_channels" => !makes_output,
        "n_layers" => !(makes_output && (is("BasicConvBlock") || is("Multi_SymmetricConvNeXtBlock"))),
        "upscale_factor" => is("BasicConvBlock"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_that_nothing_reads_are_named_once() {
        let table = json!({
            "encoder": {
                "conv_block": {
                    "_target_": "ConvNeXtBlock", "in_channels": 3, "latent_channels": 4, "upscale_factor": 2,
                    "enable_nhwc": false, "activation": { "_target_": "ReLU", "inplace": true }
                },
                "_recursive_": false
            },
            "decoder": {
                "conv_block": { "_target_": "physicsnemo.nn.BasicConvBlock", "upscale_factor": 2 },
                "output_layer": { "_target_": "BasicConvBlock", "latent_channels": 4, "n_layers": 2, "dilation": 1 },
                "recurrent_block": { "_target_": "ConvGRUBlock", "in_channels": 3, "enable_healpixpad": true }
            },
            "input_channels": 1, "output_channels": 1, "input_time_dim": 1, "output_time_dim": 1, "presteps": 0,
            "couplings": [
                { "coupler": "ConstantCoupler", "params": { "variables": ["sst"], "input_times": ["48h"] } },
                { "coupler": "ConstantCoupler", "params": { "variables": ["ws"], "input_times": ["48h"] } }
            ]
        });
        let mut config: HealpixUNetConfig = serde_json::from_value(table).unwrap();
        let mut found = keys(&config);
        found.sort();
        let expected = [
            "couplings.coupler",
            "decoder.conv_block.upscale_factor",
            "decoder.output_layer.dilation",
            "decoder.recurrent_block.enable_healpixpad",
            "decoder.recurrent_block.in_channels",
            "encoder.conv_block.activation.inplace",
            "encoder.conv_block.in_channels",
            "encoder.conv_block.latent_channels",
        ];
        assert_eq!(found, expected);
        config.presteps = 2;
        assert!(keys(&config).contains(&"presteps".to_owned()));
    }
}
