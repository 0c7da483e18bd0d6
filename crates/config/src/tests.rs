use std::collections::BTreeMap;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::*;

mod numbers;

/// A run.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct Run {
    /// Name of the run.
    name: String,
    /// Training.
    train: Train,
    /// The model.
    model: Model,
    /// End of the run.
    stop: Stop,
    /// Weights of the losses, by name.
    weights: BTreeMap<String, f64>,
    /// Data sets.
    sets: Vec<Set>,
    /// Ranks.
    distributed: Distributed,
}

/// Ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Distributed {
    /// Transport between ranks.
    backend: Backend,
    /// Seconds that any wait for another rank may take.
    #[schemars(range(min = 0.1, max = 1e9))]
    timeout_s: f64,
    /// The mesh of all ranks.
    mesh: Mesh,
}

impl Default for Distributed {
    fn default() -> Self {
        Self { backend: Backend::Auto, timeout_s: 300.0, mesh: Mesh::default() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Backend {
    /// The transport of the launcher.
    Auto,
    /// MPI.
    Mpi,
    /// TCP.
    Gloo,
}

/// The mesh of all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Mesh {
    /// Ranks along each axis.
    shape: Vec<i64>,
    /// Names of the axes.
    names: Vec<String>,
}

impl Default for Mesh {
    fn default() -> Self {
        Self { shape: vec![-1], names: vec!["data".to_owned()] }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Train {
    /// Passes over the data.
    epochs: u32,
    /// Largest norm of the gradient.
    #[schemars(range(min = 0.0))]
    clip: Option<f64>,
    /// Learning rate.
    rate: f64,
    shuffle: bool,
    /// Crop.
    crop: [i64; 2],
}

impl Default for Train {
    fn default() -> Self {
        Self { epochs: 10, clip: None, rate: 1e-3, shuffle: true, crop: [64, 64] }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Model {
    /// Adaptive Fourier neural operator.
    Afno {
        /// Blocks, one after the other.
        #[serde(default = "four")]
        depth: u32,
    },
    /// Fourier neural operator.
    Fno {
        /// Modes kept along each dim.
        #[serde(default = "four")]
        modes: u32,
        /// Must be given.
        width: u32,
    },
}

fn four() -> u32 {
    4
}

impl Default for Model {
    fn default() -> Self {
        Self::Afno { depth: 4 }
    }
}

#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Stop {
    #[default]
    Never,
    After(f64),
    Below {
        error: f64,
    },
}

#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
struct Set {
    /// The file.
    path: String,
}

pub(crate) fn in_folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    folder
}

/// A run whose model was a table of another name.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Renamed {
    /// The model.
    #[schemars(extend("x-former-table" = "fno"))]
    model: Model,
}

#[test]
fn a_table_is_read_under_its_former_name() {
    let folder = in_folder(&[
        ("run.toml", "[fno]\nwidth = 3\n"),
        ("new.toml", "[model]\ntype = \"fno\"\nwidth = 5\n"),
        ("other.toml", "[model]\ntype = \"afno\"\n"),
    ]);
    let file = |name: &str| Sources::default().file(folder.path().join(name));
    let model = |sources: &Sources| load::<Renamed>(sources).map(|resolved| resolved.value.model);
    assert_eq!(model(&file("run.toml")).unwrap(), Model::Fno { modes: 4, width: 3 });
    assert_eq!(model(&file("run.toml").set("fno.modes=2")).unwrap(), Model::Fno { modes: 2, width: 3 });
    assert_eq!(model(&file("new.toml").set("fno.modes=2")).unwrap(), Model::Fno { modes: 2, width: 5 });
    let environment = Sources::default().environment([("ISOBAR_FNO__WIDTH", "7")].into_iter().collect());
    assert_eq!(model(&environment).unwrap(), Model::Fno { modes: 4, width: 7 });
    let resolved = load::<Renamed>(&file("run.toml")).unwrap();
    assert_eq!(
        resolved.origin("model.width"),
        Origin::File { path: folder.path().join("run.toml"), line: 2 }
    );
    assert!(!reference_toml::<Renamed>().unwrap().contains("[fno]"));
    let error = model(&file("run.toml").set("fno.widht=2")).unwrap_err().to_string();
    assert!(error.contains("model.widht") && error.contains("width"), "{error}");
    let error = model(&file("run.toml").set("fno.modes=2").set("model.modes=3")).unwrap_err().to_string();
    assert!(error.contains("and both are given") && error.contains("write `model`"), "{error}");
    let other = file("run.toml").set("model.type=afno");
    assert!(model(&other).is_ok(), "the layer above chooses");
    let error = model(&file("other.toml").set("fno.modes=2")).unwrap_err().to_string();
    assert!(error.contains("but model.type is \"afno\""), "{error}");
}

fn load_text(text: &str) -> Result<Resolved<Run>, ConfigError> {
    let folder = in_folder(&[("run.toml", text)]);
    load::<Run>(&Sources::default().file(folder.path().join("run.toml")))
}

/// The error's text with the temporary folder left out.
fn error_of(text: &str) -> String {
    let folder = in_folder(&[("run.toml", text)]);
    without(load::<Run>(&Sources::default().file(folder.path().join("run.toml"))), folder.path())
}

fn without(result: Result<Resolved<Run>, ConfigError>, folder: &Path) -> String {
    let text = result.unwrap_err().to_string();
    text.replace(&format!("{}/", folder.canonicalize().unwrap().display()), "")
        .replace(&format!("{}/", folder.display()), "")
}

fn set(assignments: &[&str]) -> Result<Run, String> {
    let sources = assignments.iter().fold(Sources::default(), |sources, text| sources.set(*text));
    load::<Run>(&sources).map(|resolved| resolved.value).map_err(|error| error.to_string())
}

fn variables(variables: &[(&str, &str)]) -> Result<Run, String> {
    let sources = Sources::default().environment(variables.iter().copied().collect());
    load::<Run>(&sources).map(|resolved| resolved.value).map_err(|error| error.to_string())
}

#[test]
fn layers_rank_in_order_and_tell_their_origin() {
    let folder = in_folder(&[
        ("run.toml", "include = [\"base/all.toml\"]\n[train]\nepochs = 2\nrate = 0.5\n"),
        ("base/all.toml", "include = [\"more.toml\"]\nname = \"base\"\n[train]\nepochs = 1\nclip = 1\n"),
        ("base/more.toml", "name = \"more\"\n[train]\nshuffle = false\n"),
    ]);
    let sources = Sources::default()
        .file(folder.path().join("run.toml"))
        .environment([("ISOBAR_TRAIN__RATE", "0.25"), ("ISOBAR_MODEL__DEPTH", "7")].into_iter().collect())
        .set("train.crop=[8, 16]")
        .set("model.depth=9");
    let resolved = load::<Run>(&sources).unwrap();

    assert_eq!(resolved.value.name, "base");
    let train = Train { epochs: 2, clip: Some(1.0), rate: 0.25, shuffle: false, crop: [8, 16] };
    assert_eq!(resolved.value.train, train);
    assert_eq!(resolved.value.model, Model::Afno { depth: 9 });
    assert_eq!(
        resolved.origin("train.epochs"),
        Origin::File { path: folder.path().join("run.toml"), line: 3 }
    );
    assert_eq!(
        resolved.origin("train.shuffle"),
        Origin::File { path: folder.path().join("base/more.toml"), line: 3 }
    );
    assert_eq!(resolved.origin("train.rate"), Origin::Environment("ISOBAR_TRAIN__RATE".to_owned()));
    assert_eq!(resolved.origin("model.depth"), Origin::CommandLine("model.depth".to_owned()));
    assert_eq!(resolved.origin("distributed.timeout_s"), Origin::Default);
}

#[test]
fn all_problems_are_shown_with_their_places() {
    insta::assert_snapshot!(error_of(
        "name = 3\nepochs = 4\n\n[train]\nepocs = 3\nrate = \"fast\"\ncrop = [1, 2.5]\n\n[distributed]\nbackend = \"glo\"\n"
    ), @r###"
`name` is the integer 3, expected a string
 --> run.toml:1:8
  |
1 | name = 3
  |        ^

unknown key `epochs`
 --> run.toml:2:1
  |
2 | epochs = 4
  | ^^^^^^
help: did you mean `train.epochs`?

unknown key `train.epocs`
 --> run.toml:5:1
  |
5 | epocs = 3
  | ^^^^^
help: did you mean `train.epochs`?

`train.rate` is the string "fast", expected a number
 --> run.toml:6:8
  |
6 | rate = "fast"
  |        ^^^^^^

`train.crop.1` is the number 2.5, expected an integer
 --> run.toml:7:12
  |
7 | crop = [1, 2.5]
  |            ^^^

`distributed.backend` is "glo", expected "auto" | "mpi" | "gloo"
  --> run.toml:10:11
   |
10 | backend = "glo"
   |           ^^^^^
help: did you mean "gloo"?
"###);
}

#[test]
fn syntax_errors_show_the_line() {
    insta::assert_snapshot!(error_of("[train]\nepochs = three\n"), @r###"
not TOML: invalid boolean, expected `true`
 --> run.toml:2:10
  |
2 | epochs = three
  |          ^^^^^
"###);
    insta::assert_snapshot!(error_of("name = \"a\"\nname = \"b\"\n"), @r###"
not TOML: duplicate key
 --> run.toml:2:1
  |
2 | name = "b"
  | ^^^^
"###);
    insta::assert_snapshot!(error_of("[train]\nepochs = 99999999999999999999\n"), @r###"
the integer does not fit 64 bits
 --> run.toml:2:10
  |
2 | epochs = 99999999999999999999
  |          ^^^^^^^^^^^^^^^^^^^^
"###);
}

#[test]
fn a_missing_file_and_a_circle_are_errors() {
    let missing = load::<Run>(&Sources::default().file("no/such.toml")).unwrap_err();
    insta::assert_snapshot!(missing, @"configuration file no/such.toml does not exist");

    let folder = in_folder(&[("run.toml", "include = [\"gone.toml\"]\n")]);
    let result = load::<Run>(&Sources::default().file(folder.path().join("run.toml")));
    insta::assert_snapshot!(without(result, folder.path()), @"configuration file gone.toml does not exist (included from run.toml)");

    let folder = in_folder(&[("a.toml", "include = [\"b.toml\"]\n"), ("b.toml", "include = [\"a.toml\"]\n")]);
    let result = load::<Run>(&Sources::default().file(folder.path().join("a.toml")));
    insta::assert_snapshot!(without(result, folder.path()), @"configuration files include each other in a circle: a.toml -> b.toml -> a.toml");

    insta::assert_snapshot!(error_of("include = \"b.toml\"\n"), @r###"
`include` must be a list of file names
 --> run.toml:1:11
  |
1 | include = "b.toml"
  |           ^^^^^^^^
help: write include = ["other.toml"]
"###);
}

#[test]
fn the_same_file_may_be_included_by_two() {
    let folder = in_folder(&[
        ("run.toml", "include = [\"a.toml\", \"b.toml\"]\n"),
        ("a.toml", "include = [\"c.toml\"]\nname = \"a\"\n"),
        ("b.toml", "include = [\"c.toml\"]\n[train]\nepochs = 5\n"),
        ("c.toml", "[train]\nepochs = 1\n"),
    ]);
    let value = load::<Run>(&Sources::default().file(folder.path().join("run.toml"))).unwrap().value;
    assert_eq!((value.name.as_str(), value.train.epochs), ("a", 5));
}

#[test]
fn a_variable_with_one_underscore_too_few_or_many_is_told_the_right_name() {
    insta::assert_snapshot!(
        variables(&[("ISOBAR_TRAIN_EPOCHS", "3"), ("ISOBAR__TRAIN__RATE_", "1")]).unwrap_err(),
        @r###"
unknown key `train_epochs`
--> environment variable ISOBAR_TRAIN_EPOCHS=3
help: did you mean ISOBAR_TRAIN__EPOCHS? Two underscores go between a table and its key

unknown key `_train`
--> environment variable ISOBAR__TRAIN__RATE_=1
help: did you mean ISOBAR_TRAIN__RATE? Two underscores go between a table and its key
"###
    );
}

#[test]
fn words_are_taken_for_keys() {
    let meant = |word: &str| meant_key::<Run>(word);
    for word in ["epochs", "train.epochs", "EPOCHS", "epoch"] {
        assert_eq!(meant(word).as_deref(), Some("train.epochs"), "{word}");
    }
    assert_eq!(meant("no-such-option"), None);
}

#[test]
fn variables_are_checked_like_files() {
    insta::assert_snapshot!(
        variables(&[("ISOBAR_TRAIN__EPOCS", "3"), ("ISOBAR_TRAIN__RATE", "fast"), ("ISOBAR_TRIAN__EPOCHS", "3")])
            .unwrap_err(),
        @r###"
unknown key `train.epocs`
--> environment variable ISOBAR_TRAIN__EPOCS=3
help: did you mean ISOBAR_TRAIN__EPOCHS?

`train.rate` is the string "fast", expected a number
--> environment variable ISOBAR_TRAIN__RATE=fast

unknown key `trian`
--> environment variable ISOBAR_TRIAN__EPOCHS=3
help: did you mean ISOBAR_TRAIN__EPOCHS?
"###
    );
}

#[test]
fn reserved_foreign_and_empty_variables_are_left_alone() {
    let run = variables(&[
        ("ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD", "SLURM"),
        ("PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD", "ENV"),
        ("ISOBAR_LAUNCH_ID", "5f1c"),
        ("ISOBAR_LAUNCH_ATTEMPT", "2"),
        ("ISOBAR_NAME", ""),
        ("PATH", "/bin"),
    ]);
    assert_eq!(run.unwrap(), Run::default());
}

#[test]
fn options_take_toml_and_bare_words() {
    let run = set(&[
        "name=darcy run",
        "train.shuffle=false",
        "train.rate=1",
        "weights={ l2 = 2 }",
        "sets=[{path='a'}]",
    ]);
    let run = run.unwrap();
    assert_eq!(run.name, "darcy run");
    assert!(!run.train.shuffle);
    assert_eq!(run.train.rate, 1.0);
    assert_eq!(run.weights, BTreeMap::from([("l2".to_owned(), 2.0)]));
    assert_eq!(run.sets, [Set { path: "a".to_owned() }]);
    // A string stays one where it looks like something else.
    assert_eq!(set(&["name=2024"]).unwrap().name, "2024");
    assert_eq!(set(&["name=true"]).unwrap().name, "true");
    assert_eq!(set(&["name=2026-01-02"]).unwrap().name, "2026-01-02");
    assert_eq!(set(&["train.epochs=1", "train.epochs=2"]).unwrap().train.epochs, 2);
}

#[test]
fn options_are_checked_like_files() {
    insta::assert_snapshot!(
        set(&["train.epochs=many", "train.shufle=true", "train", "train.crop=[1,", "a..b=1", "model=3"]).unwrap_err(),
        @r###"
`a..b` is not a key: a part of it is empty
--> command line --set a..b=1

`model` is the integer 3, expected a table
--> command line --set model=3

`train` has no `=`
--> command line --set train
help: write --set section.key=value

the value is not TOML: unclosed array, expected `]`
--> command line --set train.crop=[1,

`train.epochs` is the string "many", expected an integer of at least 0
--> command line --set train.epochs=many

unknown key `train.shufle`
--> command line --set train.shufle=true
help: did you mean `train.shuffle`?
"###
    );
}

#[test]
fn another_variant_drops_what_was_said_of_the_old_one() {
    let run = load_text("[model]\ntype = \"fno\"\nwidth = 8\n").unwrap().value;
    assert_eq!(run.model, Model::Fno { modes: 4, width: 8 });

    let folder = in_folder(&[("run.toml", "[model]\ntype = \"fno\"\nwidth = 8\n")]);
    let sources = Sources::default().file(folder.path().join("run.toml"));
    let run = load::<Run>(&sources.clone().set("model.modes=2")).unwrap().value;
    assert_eq!(run.model, Model::Fno { modes: 2, width: 8 });
    let run = load::<Run>(&sources.set("model.depth=2").set("model.type=afno")).unwrap().value;
    assert_eq!(run.model, Model::Afno { depth: 2 });

    assert_eq!(set(&["stop.after=3"]).unwrap().stop, Stop::After(3.0));
    let folder = in_folder(&[("run.toml", "[stop]\nafter = 3.0\n")]);
    let sources = Sources::default().file(folder.path().join("run.toml")).set("stop.below.error=0.1");
    assert_eq!(load::<Run>(&sources).unwrap().value.stop, Stop::Below { error: 0.1 });
}

#[test]
fn variants_are_checked() {
    insta::assert_snapshot!(error_of("[model]\ntype = \"afnoo\"\n"), @r###"
`model.type` is "afnoo", expected "afno" | "fno"
 --> run.toml:2:8
  |
2 | type = "afnoo"
  |        ^^^^^^^
help: did you mean "afno"?
"###);
    insta::assert_snapshot!(error_of("[model]\ndepht = 3\n"), @r###"
unknown key `model.depht`
 --> run.toml:2:1
  |
2 | depht = 3
  | ^^^^^
help: did you mean `model.depth`?
"###);
    insta::assert_snapshot!(error_of("[model]\ntype = \"fno\"\ndepth = 3\n"), @r###"
unknown key `model.depth`
 --> run.toml:3:1
  |
3 | depth = 3
  | ^^^^^
help: the keys here are type, modes, width
"###);
    insta::assert_snapshot!(error_of("[model]\ntype = \"fno\"\n"), @r###"
key `model.width` is missing
 --> run.toml:1:2
  |
1 | [model]
  |  ^^^^^
help: set it, as in --set model.width=VALUE
"###);
    insta::assert_snapshot!(error_of("[model]\ntype = 3\n"), @r###"
`model.type` is the integer 3, expected one of afno, fno
 --> run.toml:2:8
  |
2 | type = 3
  |        ^
"###);
    insta::assert_snapshot!(error_of("stop = \"nver\"\n"), @r###"
`stop` is "nver", expected "never"
 --> run.toml:1:8
  |
1 | stop = "nver"
  |        ^^^^^^
help: did you mean "never"?
"###);
    insta::assert_snapshot!(error_of("[[sets]]\npath = \"a\"\n[[sets]]\npth = \"b\"\n"), @r###"
unknown key `sets.1.pth`
 --> run.toml:4:1
  |
4 | pth = "b"
  | ^^^
help: did you mean `sets.1.path`?
"###);
}

#[test]
fn the_resolved_configuration_shows_origins_and_loads_again() {
    let folder = in_folder(&[(
        "run.toml",
        "name = \"a \\\"b\\\"\"\nsets = [{ path = \"x\" }]\n[weights]\n\"l 2\" = 1e300\n",
    )]);
    let sources = Sources::default()
        .file(folder.path().join("run.toml"))
        .environment([("ISOBAR_TRAIN__CLIP", "0.5")].into_iter().collect())
        .set("model.depth=2");
    let resolved = load::<Run>(&sources).unwrap();
    let text = resolved.to_toml_with_origins().unwrap();
    assert_eq!(load_text(&text).unwrap().value, resolved.value);
    let text = text.replace(&format!("{}/", folder.path().display()), "");
    insta::assert_snapshot!(text.split("\n[distributed]").next().unwrap(), @r###"
name = 'a "b"'  # run.toml:1
stop = "never"  # default
sets = [{ path = "x" }]  # run.toml:2

[train]
epochs = 10  # default
clip = 0.5  # ISOBAR_TRAIN__CLIP
rate = 0.001  # default
shuffle = true  # default
crop = [64, 64]  # default

[model]
type = "afno"  # default
depth = 2  # --set model.depth

[weights]
"l 2" = 1e300  # run.toml:4
"###);
}

/// A key that may be left out is not shown as one that must be given.
#[test]
fn only_required_keys_are_needed() {
    #[derive(Default, Serialize, Deserialize, JsonSchema)]
    struct Flags {
        /// Must be given.
        width: u32,
        /// Written only where it is true, so that its schema has no default.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        fast: bool,
    }
    #[derive(Default, Serialize, Deserialize, JsonSchema)]
    struct Of {
        flags: Vec<Flags>,
    }
    let text = reference_markdown::<Flags>().unwrap();
    assert!(text.contains("| `fast` | unset | Written"), "{text}");
    let text = reference_toml::<Of>().unwrap();
    assert!(text.contains("# (an integer of at least 0)\n# width ="), "{text}");
    assert!(text.contains("# (true or false, unset by default)\n# fast ="), "{text}");
}

#[test]
fn the_reference_names_every_key_and_loads_to_the_defaults() {
    let text = reference_toml::<Run>().unwrap();
    assert_eq!(load_text(&text).unwrap().value, Run::default());
    insta::assert_snapshot!(text, @r###"
# A run.

# Name of the run.
# (a string)
name = ""

# End of the run.
# ("never" or a table)
stop = "never"

# Training.
[train]
# Passes over the data.
# (an integer of at least 0)
epochs = 10

# Largest norm of the gradient.
# (a number of at least 0, unset by default)
# clip =

# Learning rate.
# (a number)
rate = 0.001

# (true or false)
shuffle = true

# Crop.
# (a list, each an integer)
crop = [64, 64]

# The model.
[model]
#   "afno": Adaptive Fourier neural operator.
#   "fno": Fourier neural operator.
type = "afno"

# Blocks, one after the other.
# (an integer of at least 0)
depth = 4

# With type = "fno":
#
# Modes kept along each dim.
# (an integer of at least 0)
# modes = 4
#
# Must be given.
# (an integer of at least 0)
# width =

# Weights of the losses, by name.
# (a table, empty by default)
[weights]

# Data sets.
# (a list of tables, empty by default)
# [[sets]]
# The file.
# (a string)
# path =

# Ranks.
[distributed]
# Transport between ranks.
# ("auto" | "mpi" | "gloo")
#   "auto": The transport of the launcher.
#   "mpi": MPI.
#   "gloo": TCP.
backend = "auto"

# Seconds that any wait for another rank may take.
# (a number from 0.1 to 1000000000)
timeout_s = 300.0

# The mesh of all ranks.
[distributed.mesh]
# Ranks along each axis.
# (a list, each an integer)
shape = [-1]

# Names of the axes.
# (a list, each a string)
names = ["data"]
"###);
}
