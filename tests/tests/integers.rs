//! Each integer of the configuration, set to values that no run needs: the run succeeds, or one error names the key, soon and in
//! bounded memory.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::Duration;

use isobar_harness::{THREADS, output_within, workspace};
use isobar_tests::full;
use tempfile::tempdir;

use crate::domain::wave;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// Fields of two and of three dims, with times.
static PLANES: LazyLock<PathBuf> = LazyLock::new(|| wave("integers_planes", &[16, 16]));
static BOXES: LazyLock<PathBuf> = LazyLock::new(|| wave("integers_boxes", &[8, 4, 4]));

/// Values of the full form.
const VALUES: [i64; 7] = [0, -1, 1, i32::MAX as i64, 1 << 32, i64::MAX, 1_000_000_000];

/// Address space of a run, in KiB: little more than libtorch itself takes.
const MEMORY: u64 = 6 << 20;

/// Time after which a run counts as hanging.
const LONGEST: Duration = Duration::from_secs(120);

/// Small models by their names. Keys of other sections are set with the first.
const MODELS: [(&str, &str); 17] = [
    (
        "afno",
        "inp_shape = [64, 64]\nin_channels = 1\nout_channels = 1\nembed_dim = 16\ndepth = 1\nnum_blocks = 2\n\
         patch_size = [8, 8]",
    ),
    (
        "cnext_unet",
        "dim_in = 1\ndim_out = 1\nn_spatial_dims = 2\nspatial_resolution = [64, 64]\nstages = 2\ninit_features = 2",
    ),
    ("conv_net", "in_channels = 1\nout_channels = 1\nhidden_channels = 2\ndepth = 1"),
    (
        "distributed_afno",
        "inp_shape = [64, 64]\nin_channels = 1\nembed_dim = 16\ndepth = 1\nnum_blocks = 2\npatch_size = 8",
    ),
    ("flare", "functional_dim = 1\nout_dim = 1\nn_layers = 1\nn_hidden = 8\nn_head = 2\nslice_num = 4"),
    (
        "dit",
        "input_size = [64, 64]\nin_channels = 1\nout_channels = 1\nhidden_size = 16\ndepth = 1\nnum_heads = 2",
    ),
    (
        "fno",
        "in_channels = 1\nout_channels = 1\nlatent_channels = 4\nnum_fno_layers = 1\nnum_fno_modes = 4\n\
         decoder_layer_size = 4",
    ),
    ("fully_connected", "in_features = 1\nout_features = 1\nlayer_size = 8\nnum_layers = 1"),
    (
        "geo_transolver",
        "functional_dim = 1\nout_dim = 1\nn_layers = 1\nn_hidden = 8\nn_head = 2\nslice_num = 4",
    ),
    (
        "mod_afno",
        "inp_shape = [16, 16]\nin_channels = 1\nout_channels = 1\nembed_dim = 8\ndepth = 1\nnum_blocks = 2\n\
         patch_size = [4, 4]\nmod_dim = 4\n[model.embed_model]\nmax_time = 20.0\ndim = 4",
    ),
    (
        "pix2pix",
        "in_channels = 1\nout_channels = 1\ndimension = 2\nconv_layer_size = 2\nn_downsampling = 1\nn_upsampling = 1\n\
         n_blocks = 1",
    ),
    (
        "song_unet",
        "img_resolution = 64\nin_channels = 1\nout_channels = 1\nmodel_channels = 4\nchannel_mult = [1, 2]\nnum_blocks = 1\n\
         attn_resolutions = [32, 16]\nembedding_type = \"zero\"",
    ),
    (
        "sr_res_net",
        "in_channels = 1\nout_channels = 1\nscaling_factor = 2\nconv_layer_size = 4\nn_resid_blocks = 1",
    ),
    (
        "swin_rnn",
        "img_size = [1, 64, 64]\npatch_size = [1, 1, 1]\nin_chans = 1\nout_chans = 1\nembed_dim = 4\nnum_groups = 2\n\
         num_heads = 2\nwindow_size = 4",
    ),
    (
        "transolver",
        "functional_dim = 1\nout_dim = 1\nembedding_dim = 2\nstructured_shape = [64, 64]\nn_layers = 1\nn_hidden = 8\n\
         n_head = 2\nslice_num = 4",
    ),
    (
        "unet",
        "in_channels = 1\nout_channels = 1\ndimension = 2\nmodel_depth = 2\nnormalization = \"groupnorm\"\n\
         feature_map_channels = [4, 4, 4, 4]",
    ),
    (
        "vit",
        "inp_shape = [64, 64]\nin_channels = 1\nout_channels = 1\nembed_dim = 16\ndepth = 1\nnum_heads = 2",
    ),
];

/// An integer of the configuration, or a list of them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Key {
    section: String,
    /// Type that the section must have, for a key of one type only.
    kind: Option<String>,
    name: String,
    is_list: bool,
}

/// Reads the keys from the reference of the configuration, which is generated from its schema.
fn keys(reference: &str) -> Vec<Key> {
    let (mut section, mut kind, mut integer) = (String::new(), None, None);
    let mut keys = Vec::new();
    for line in reference.lines() {
        let text = line.trim_start_matches("# ");
        if let Some(name) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            // A section in a comment is one of the type that the keys before it belong to.
            if line == text {
                kind = None;
            }
            section = name.to_owned();
        } else if let Some(rest) = text.strip_prefix("With type = \"") {
            kind = rest.split('"').next().map(str::to_owned);
            section = section.split('.').next().unwrap_or_default().to_owned();
        } else if text.starts_with("(an integer") {
            integer = Some(false);
        } else if text.starts_with("(a list, each an integer") {
            integer = Some(true);
        } else if let (Some(is_list), Some((name, _))) = (integer, text.split_once(" =")) {
            keys.push(Key { section: section.clone(), kind: kind.clone(), name: name.to_owned(), is_list });
            integer = None;
        }
    }
    keys
}

impl Key {
    /// The setting with this value, in all entries of a list.
    fn set(&self, value: i64) -> String {
        let count = match self.name.as_str() {
            "feature_map_channels" => 4,
            "shape" => 1,
            _ => 2,
        };
        let text = if self.is_list { format!("{:?}", vec![value; count]) } else { value.to_string() };
        format!("{}.{}={text}", self.section, self.name)
    }

    /// A run of two steps in which the key counts.
    fn config(&self, output: &Path) -> String {
        let kind = self.kind.as_deref();
        let is_model = self.section.split('.').next() == Some("model");
        let (model, settings) =
            MODELS.into_iter().find(|(name, _)| is_model && Some(*name) == kind).unwrap_or(MODELS[0]);
        let data = match model {
            "mod_afno" => format!("path = {:?}\nformat = \"the_well\"\nfields = [\"height\"]", *PLANES),
            "sr_res_net" => format!("path = {:?}\nformat = \"the_well\"\nfields = [\"height\"]", *BOXES),
            _ => format!("path = {:?}", workspace().join("tests/data/darcy_excerpt.h5")),
        };
        let optimizer = kind.filter(|_| self.section == "optimizer").unwrap_or("adamw");
        let schedule = kind.filter(|_| self.section == "schedule").unwrap_or("cosine");
        let axis = if model == "distributed_afno" { "model" } else { "data" };
        let steps = if self.name == "max_steps" { "epochs = 1" } else { "epochs = 1000\nmax_steps = 2" };
        let output = output.display();
        format!(
            "[run]\nname = \"run\"\noutput = \"{output}\"\n[data]\n{data}\nvalidation_samples = 2\n\
             [train]\nbatch_size = 4\n{steps}\n[optimizer]\ntype = \"{optimizer}\"\n[schedule]\ntype = \"{schedule}\"\n\
             [distributed.mesh]\nshape = [-1]\nnames = [\"{axis}\"]\n[model]\ntype = \"{model}\"\n{settings}\n"
        )
    }

    /// Returns what is wrong with the end of a run with this value.
    fn problem(&self, value: i64) -> Option<String> {
        let set = self.set(value);
        let wrong = match self.run(&["--set", &set]) {
            None => "it does not end".to_owned(),
            Some(output) => wrong(&output)?,
        };
        Some(format!("{set} (of {:?}): {wrong}", self.kind))
    }

    /// Runs the key's configuration in limited memory; returns nothing where the run does not end.
    fn run(&self, args: &[&str]) -> Option<Output> {
        let folder = tempdir().unwrap();
        let config = folder.path().join("run.toml");
        fs::write(&config, self.config(folder.path())).unwrap();
        let limited = format!("ulimit -v {MEMORY}; exec \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &limited, "sh", ISOBAR, "train"]).arg(&config).args(args);
        command.env("NO_COLOR", "1").env(THREADS, "1");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ISOBAR_"))
        {
            command.env_remove(name);
        }
        output_within(&mut command, LONGEST).unwrap()
    }
}

/// Returns what is wrong with the end of a run: anything but success, or one error of the configuration.
fn wrong(output: &Output) -> Option<String> {
    let said = String::from_utf8_lossy(&output.stderr);
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    let fits = match output.status.code() {
        Some(0) => true,
        Some(2) => errors.len() == 1 && errors[0].len() < 1000,
        _ => false,
    };
    if fits && !said.contains("panicked") {
        return None;
    }
    let last: Vec<&str> = said.lines().rev().take(8).collect();
    Some(format!("{}\n{}", output.status, last.into_iter().rev().collect::<Vec<_>>().join("\n")))
}

/// A key set to an absurd value proves nothing where the configuration is wrong without it.
#[test]
fn the_models_train() {
    for (model, _) in MODELS {
        let (section, kind) = ("model".to_owned(), Some(model.to_owned()));
        let key = Key { section, kind, name: "depth".to_owned(), is_list: false };
        let output = key.run(&[]).unwrap();
        assert!(output.status.success(), "{model}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn absurd_integers_are_refused_or_harmless() {
    let mut command = Command::new(ISOBAR);
    let reference = output_within(command.args(["config", "reference"]), LONGEST).unwrap().unwrap();
    let keys = keys(&String::from_utf8(reference.stdout).unwrap());
    assert!(keys.len() > 50, "{keys:?}");
    for (name, is_list) in
        [("batch_size", false), ("inp_shape", true), ("num_fno_modes", false), ("port", false)]
    {
        assert!(keys.iter().any(|key| key.name == name && key.is_list == is_list), "{name}: {keys:?}");
    }
    // The short form takes one value of each key, another one of the next.
    let takes = |key: usize, value: usize| full() || key % 7 == value;
    let cases: Vec<(&Key, i64)> = keys
        .iter()
        .enumerate()
        .flat_map(|(at, key)| {
            (0..7).filter(move |value| takes(at, *value)).map(move |value| (key, VALUES[value]))
        })
        .collect();
    let (next, problems) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((key, value)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Some(problem) = key.problem(*value) {
                        problems.lock().unwrap().push(problem);
                    }
                }
            });
        }
    });
    let problems = problems.into_inner().unwrap();
    assert!(problems.is_empty(), "{} of {}\n{}", problems.len(), cases.len(), problems.join("\n\n"));
}
