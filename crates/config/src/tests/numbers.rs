//! Numbers out of their range, and those that are not finite.

use rstest::rstest;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{error_of, set, variables};
use crate::{Sources, load};

#[test]
fn values_out_of_range_and_lists_of_wrong_length_are_errors() {
    insta::assert_snapshot!(error_of("[train]\nepochs = -1\nclip = -0.5\ncrop = [1]\n"), @r###"
`train.epochs` is -1, expected an integer of at least 0
 --> run.toml:2:10
  |
2 | epochs = -1
  |          ^^

`train.clip` is -0.5, expected a number of at least 0
 --> run.toml:3:8
  |
3 | clip = -0.5
  |        ^^^^

`train.crop` has 1 items, expected 2
 --> run.toml:4:8
  |
4 | crop = [1]
  |        ^^^
"###);
}

/// Keys with a range, without one, in a table of any names, and in a list of tables.
#[rstest]
#[case::range("train.clip=inf", "`train.clip` is inf, expected a finite number of at least 0")]
#[case::interval(
    "distributed.timeout_s=-inf",
    "`distributed.timeout_s` is -inf, expected a finite number from 0.1 to 1000000000"
)]
#[case::any_number("train.rate=nan", "`train.rate` is NaN, expected a finite number")]
#[case::overflow("train.rate=1e400", "`train.rate` is inf, expected a finite number")]
#[case::table("weights={ a = inf }", "`weights.a` is inf, expected a finite number")]
#[case::unknown_key("sets=[{ path = \"x\", more = [1, nan] }]", "unknown key `sets.0.more`")]
#[case::integer("train.epochs=inf", "`train.epochs` is the number inf, expected an integer of at least 0")]
#[case::huge("distributed.timeout_s=1e300", "`distributed.timeout_s` is 1e300, expected a number from 0.1")]
fn numbers_are_finite(#[case] assignment: &str, #[case] words: &str) {
    let (key, value) = assignment.split_once('=').unwrap();
    let variable = format!("ISOBAR_{}", key.to_ascii_uppercase().replace('.', "__"));
    let errors = [
        set(&[assignment]).unwrap_err(),
        variables(&[(&variable, value)]).unwrap_err(),
        error_of(&format!("{key} = {value}\n")),
    ];
    for error in errors {
        assert!(error.starts_with(words), "{error}");
    }
    assert_eq!(set(&["name=inf"]).unwrap().name, "inf", "text is no number");
}

/// Values that no schema describes.
#[test]
fn numbers_of_any_table_are_finite() {
    #[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
    #[serde(default)]
    struct Free {
        terms: Vec<serde_json::Value>,
    }
    let load = |text: &str| load::<Free>(&Sources::default().set(text));
    let error = load("terms=[{ weight = 1 }, { weight = nan, of = [inf] }]").unwrap_err().to_string();
    for words in ["`terms.1.weight` is NaN, expected a finite number", "`terms.1.of.0` is inf, expected"] {
        assert!(error.contains(words), "{error}");
    }
    assert!(load("terms=[{ weight = 1.5, of = [\"inf\", 3] }]").is_ok());
}
