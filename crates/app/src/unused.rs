//! Keys that are set and have no effect in a run.

use isobar_data::Missing;
use isobar_models::ModelConfig;
use isobar_train::config::ScalarsAs;

use crate::config::Config;

/// Warnings about keys that have no effect on so many ranks, one line each. Keys that can only be a mistake are errors of
/// [`Config::check`].
pub(crate) fn unused(config: &Config, ranks: usize) -> Vec<String> {
    let Config { data, metrics, model, distributed, .. } = config;
    let alone = ranks == 1;
    let one_rank = "a run on one rank opens no connections; leave it out";
    let keys = [
        (
            "metrics.climatology",
            metrics.climatology.is_some() && !metrics.report.iter().any(|metric| metric.needs_climatology()),
            "no metric of metrics.report needs a climatology; --set 'metrics.report=[\"acc\"]', or leave it out",
        ),
        (
            "data.fill",
            data.fill != 0.0 && data.missing == Missing::Error,
            "data.missing is \"error\"; --set data.missing=fill, or leave it out",
        ),
        (
            "data.scalars_as",
            data.scalars_as != ScalarsAs::default() && data.scalars.is_empty(),
            "data.scalars names no variable; name some, or leave it out",
        ),
        (
            "train.weights.lead",
            config.train.weights.has_surplus_steps(data.train_steps.most()),
            "data.train_steps is smaller than its number of weights; leave the last ones out",
        ),
        ("distributed.addr", alone && distributed.addr.is_some(), one_rank),
        ("distributed.port", alone && distributed.port.is_some(), one_rank),
        ("distributed.interface", alone && distributed.interface.is_some(), one_rank),
    ];
    let found =
        keys.into_iter().filter(|(_, is_unused, _)| *is_unused).map(|(key, _, why)| (key.to_owned(), why));
    // A format that is not known is an error later.
    let tables = data.unread_tables().unwrap_or_default().into_iter();
    let tables =
        tables.map(|table| (table, "data of another format are read; set the key format, or leave it out"));
    let lines = found.chain(tables).map(|(key, why)| format!("{key} has no effect in this run: {why}"));
    lines.chain(unread(model)).collect()
}

/// One line for all keys that the model accepts and does not read.
fn unread(model: &ModelConfig) -> Option<String> {
    let keys: Vec<String> = model.unread().iter().map(|key| format!("model.{key}")).collect();
    let has = if keys.len() == 1 { "has" } else { "have" };
    (!keys.is_empty()).then(|| {
        format!(
            "{} {has} no effect: model.type = \"{}\" accepts such keys for configurations of the original model; leave them out",
            keys.join(", "),
            model.name()
        )
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::config::load;

    #[rstest]
    #[case::defaults(&[], 1, &[])]
    #[case::climatology(&["metrics.climatology=c.h5", "metrics.report=[\"rmse\"]"], 1, &["metrics.climatology"])]
    #[case::needed(&["metrics.climatology=c.h5", "metrics.report=[\"acc\"]"], 1, &[])]
    #[case::fill(&["data.fill=1.0"], 1, &["data.fill"])]
    #[case::filled(&["data.fill=1.0", "data.missing=fill"], 1, &[])]
    #[case::scalars(&["data.scalars_as=conditions"], 1, &["data.scalars_as"])]
    #[case::alone(
        &["distributed.interface=nope0", "distributed.addr=h", "distributed.port=1"],
        1,
        &["distributed.addr", "distributed.port", "distributed.interface"]
    )]
    #[case::tables(&["data.npy.cut=3"], 1, &["data.npy"])]
    #[case::lead(&["train.weights.lead=[1.0, 2.0]"], 1, &["train.weights.lead"])]
    #[case::ranks(&["distributed.interface=eth0"], 2, &[])]
    fn keys_without_effect_get_a_line_each(
        #[case] sets: &[&str],
        #[case] ranks: usize,
        #[case] keys: &[&str],
    ) {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let config = load(None, &sets).unwrap().value;
        let found = unused(&config, ranks);
        let named: Vec<&str> = found.iter().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(named, keys, "{found:?}");
    }

    #[test]
    fn keys_that_the_model_does_not_read_share_a_line() {
        let base = "{ type = \"song_unet\", img_resolution = 8, in_channels = 1, out_channels = 1";
        let found = |keys: &str| unused(&load(None, &[format!("model={base}{keys} }}")]).unwrap().value, 2);
        assert_eq!(found(", amp_mode = false"), [""; 0]);
        let line = |keys: &str| {
            format!(
                "{keys} no effect: model.type = \"song_unet\" accepts such keys for configurations of the original model; leave them \
                 out"
            )
        };
        assert_eq!(found(", amp_mode = true"), [line("model.amp_mode has")]);
        let both = ", amp_mode = true, use_apex_gn = true";
        assert_eq!(found(both), [line("model.use_apex_gn, model.amp_mode have")]);
    }
}
