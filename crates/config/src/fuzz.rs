//! Whatever stands in files, variables and options: a configuration or errors that can be shown, and never a panic, a crash
//! or a wait without end.

use proptest::prelude::*;

use super::tests::{Run, in_folder};
use super::*;

/// Loads, and shows what came of it: a configuration that reads back as itself, or errors.
fn load_and_show(sources: &Sources) {
    match load::<Run>(sources) {
        Ok(resolved) => {
            let text = resolved.to_toml_with_origins().unwrap();
            let folder = in_folder(&[("again.toml", &text)]);
            let again = load::<Run>(&Sources::default().file(folder.path().join("again.toml")));
            let again = again.unwrap_or_else(|error| panic!("{error}\n{text}")).value;
            // As text: a value may be a number that is not equal to itself.
            assert_eq!(format!("{again:?}"), format!("{:?}", resolved.value));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Pieces of which files are made that nearly are configurations.
fn piece() -> impl Strategy<Value = String> {
    let known = [
        "[train]\n",
        "[model]\n",
        "[[sets]]\n",
        "[distributed.mesh]\n",
        "[stop.below]\n",
        "train.epochs = ",
        "rate = ",
        "crop = ",
        "name = ",
        "type = ",
        "weights.a = ",
        "stop = ",
        "shape = ",
        "include = ",
        "width = ",
        "\"afno\"",
        "\"fno\"",
        "\"never\"",
        "{ after = 1 }",
        "[1, 2]",
        "[-1]",
        "1",
        "-1",
        "0.5",
        "nan",
        "inf",
        "-inf",
        "9223372036854775808",
        "0x1f",
        "1e400",
        "true",
        "1979-05-27T07:32:00Z",
        "\"ü\"",
        "'''",
        "\"\"\"",
        "\n",
        "\n",
        "\n",
        "=",
        ".",
        ",",
        "[",
        "]",
        "{",
        "}",
        "#",
        "\r",
        "\t",
        "\u{7f}",
        "\u{feff}",
    ];
    prop_oneof![6 => prop::sample::select(known.to_vec()).prop_map(str::to_owned), 1 => "\\PC{0,6}", 1 => any::<String>()]
}

fn text() -> impl Strategy<Value = String> {
    prop::collection::vec(piece(), 0..24).prop_map(|pieces| pieces.concat())
}

/// Every key, with its default.
fn reference() -> Vec<u8> {
    load::<Run>(&Sources::default()).unwrap().to_toml_with_origins().unwrap().into_bytes()
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in text()) {
        let folder = in_folder(&[("run.toml", &text)]);
        load_and_show(&Sources::default().file(folder.path().join("run.toml")));
    }

    #[test]
    fn no_changed_bytes_make_the_reader_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut: prop::sample::Index) {
        let mut bytes = reference();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(1 + cut.index(bytes.len()));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, bytes).unwrap();
        load_and_show(&Sources::default().file(path));
    }

    #[test]
    fn no_variable_and_no_option_make_it_panic(
        name in prop_oneof!["ISOBAR_[A-Z_.]{0,12}", prop::sample::select(vec!["ISOBAR_TRAIN__EPOCHS", "ISOBAR_MODEL", "ISOBAR_SETS", "ISOBAR_WEIGHTS__A", "ISOBAR_STOP"]).prop_map(str::to_owned)],
        key in prop_oneof!["[a-z.]{0,12}", prop::sample::select(vec!["train.rate", "model.type", "sets", "weights", "stop.below.error", "train.crop"]).prop_map(str::to_owned)],
        values in (text(), text()),
    ) {
        let environment: Environment = [(name, values.0)].into_iter().collect();
        load_and_show(&Sources::default().environment(environment).set(format!("{key}={}", values.1)).set(values.1));
    }
}

/// Deeply nested input, which would overflow the stack.
#[test]
fn what_is_nested_without_end_is_refused() {
    let deep = 100_000;
    let dotted = vec!["a"; deep].join(".");
    let variable = format!("ISOBAR_{}", vec!["A"; deep].join("__"));
    let (lists, tables) = (format!("sets={}", "[".repeat(deep)), format!("sets={}", "{a=".repeat(deep)));
    let whole = format!("sets={}{}", "[".repeat(deep), "]".repeat(deep));
    for set in [format!("{dotted}=1"), lists, tables, whole, format!("weights={{{dotted}=1}}")] {
        let error = load::<Run>(&Sources::default().set(set)).unwrap_err();
        assert!(!error.to_string().is_empty());
    }
    let environment: Environment = [(variable, "1")].into_iter().collect();
    let error = load::<Run>(&Sources::default().environment(environment)).unwrap_err().to_string();
    assert!(error.contains("a key of 100000 parts, expected at most 32"), "{}", &error[..200]);
    for text in [format!("{dotted} = 1"), format!("[{dotted}]"), format!("sets = {}", "[".repeat(deep))] {
        let folder = in_folder(&[("run.toml", &text)]);
        load::<Run>(&Sources::default().file(folder.path().join("run.toml"))).unwrap_err();
    }
}

/// Files of which each includes the next twice: 2³⁰ reads.
#[test]
fn files_that_are_included_ever_more_often_are_refused() {
    let files: Vec<(String, String)> = (0..30)
        .map(|i| (format!("{i}.toml"), format!("include = [\"{0}.toml\", \"{0}.toml\"]\n", i + 1)))
        .chain([("30.toml".to_owned(), String::new())])
        .collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (&**name, &**text)).collect();
    let folder = in_folder(&files);
    let error = load::<Run>(&Sources::default().file(folder.path().join("0.toml"))).unwrap_err().to_string();
    assert!(error.contains("more than 256 configuration files"), "{error}");
}

#[test]
fn a_file_without_end_is_refused() {
    let error = load::<Run>(&Sources::default().file("/dev/zero")).unwrap_err().to_string();
    assert!(error.contains("/dev/zero: it is a device, expected a regular file"), "{error}");
}
