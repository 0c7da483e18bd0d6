//! Errors of settings in the words of a program, which has no command line.

use crate::error::Error;

/// Says with which method of [`Trainer`](super::Trainer) a setting is made, in place of `--set key=value`.
pub(super) fn in_program(error: Error) -> Error {
    let Error::Invalid { what, found, expected } = error else { return error };
    let range = match expected.split_once("--set ") {
        Some((range, _)) => range.trim_end_matches("for instance ").trim_end_matches([' ', ';']).to_owned(),
        None => expected,
    };
    let expected = format!("{range}; set it with `Trainer::{}`", method(&what));
    Error::Invalid { what, found, expected }
}

/// The method for a configuration key.
fn method(key: &str) -> &'static str {
    let has =
        |prefix: &str| key.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let methods = [
        ("metrics.report", "report"),
        ("optimizer", "optimizer"),
        ("schedule", "schedule"),
        ("train.batch_size", "batch_size"),
        ("train.loss", "loss"),
        ("train.weights", "weights"),
    ];
    methods.into_iter().find(|(prefix, _)| has(prefix)).map_or("configure", |(_, method)| method)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trainer::FitConfig;

    #[test]
    fn settings_are_named_by_methods() {
        let text = |change: fn(&mut FitConfig)| {
            let mut config = FitConfig::default();
            change(&mut config);
            config.check().map_err(in_program).unwrap_err().to_string()
        };
        let batch = text(|config| config.train.batch_size = 0);
        assert_eq!(batch, "train.batch_size is 0, expected 1 or more; set it with `Trainer::batch_size`");
        let text = text(|config| config.train.average_decay = Some(2.0));
        assert_eq!(
            text,
            "train.average_decay is 2, expected a number in [0, 1); set it with `Trainer::configure`"
        );
    }
}
