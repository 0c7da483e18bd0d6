//! Early detection of mistakes: warnings of `isobar train`, and configurations that are rejected before data
//! are read or memory is allocated.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use isobar_harness::{Exit, Launch, Outcome, workspace};
use rstest::rstest;
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// A run of one step on the excerpt of the data set, in `output`/run.
fn train(launch: Launch, config: &str, output: &Path, sets: &[&str]) -> Launch {
    let folder = format!("run.output={}", output.display());
    let first =
        ["run.name=run", "data.path=tests/data/darcy_excerpt.h5", "data.validation_samples=1", &folder];
    let more =
        ["train.epochs=1", "train.batch_size=4", "schedule.warmup_epochs=0.0", "distributed.timeout_s=60"];
    let sets = first.iter().chain(&more).chain(sets).flat_map(|set| ["--set", set]);
    let launch = launch.current_dir(workspace()).deadline(Duration::from_secs(100));
    launch.args(["train", config]).args(sets)
}

const SMALL: [&str; 4] =
    ["model.embed_dim=16", "model.depth=1", "model.num_blocks=2", "model.patch_size=[8, 8]"];

fn afno(ranks: usize, output: &Path, sets: &[&str]) -> Launch {
    let sets: Vec<&str> = SMALL.iter().chain(sets).copied().collect();
    train(Launch::plain(ranks, ISOBAR), "configs/darcy_afno.toml", output, &sets)
}

/// Warnings of all ranks.
fn warnings(outcome: &Outcome) -> Vec<String> {
    let lines = outcome.ranks.iter().flat_map(|rank| rank.stderr.lines());
    lines.filter(|line| line.contains("WARN")).map(str::to_owned).collect()
}

#[rstest]
#[case::warm_up(1, &["schedule.warmup_epochs=4.0"], "the warm-up of 4 epochs (schedule.warmup_epochs) is longer than the run of 1")]
#[case::batch(1, &["train.batch_size=500"], "train.batch_size is 500, but there are 7 training samples")]
#[case::ranks(2, &["train.batch_size=1", "train.max_steps=1"], "a batch has 1 samples (train.batch_size 1), but 2 ranks share them: 1 of them")]
#[case::split_ranks(
    2,
    &["train.batch_size=1", "train.max_steps=1", "distributed.mesh.shape=[2]", "distributed.mesh.names=[\"shard\"]"],
    "a batch has 1 samples (train.batch_size 1), but 2 ranks share them: 1 of them"
)]
#[case::micro_batches(2, &["train.accumulate=4"], "train.accumulate is 4, but a rank takes 2 samples of a batch at most: 2 of its")]
#[case::tokens(
    2,
    &["model.patch_size=[64, 8]", "distributed.mesh.shape=[2]", "distributed.mesh.names=[\"domain\"]"],
    "1 of the 2 ranks along the axis \"domain\" have no rows and compute nothing: there are 1 tokens along dim 0"
)]
fn a_mistake_is_warned_of_once(#[case] ranks: usize, #[case] sets: &[&str], #[case] words: &str) {
    let output = tempdir().unwrap();
    let outcome = afno(ranks, output.path(), sets).run().unwrap().expect_success();
    let found: Vec<String> = warnings(&outcome).into_iter().filter(|line| line.contains(words)).collect();
    assert_eq!(found.len(), 1, "{outcome}");
}

#[test]
fn a_resumed_run_says_what_is_new_and_when_nothing_is_left() {
    let output = tempdir().unwrap();
    let _ = afno(1, output.path(), &[]).run().unwrap().expect_success();
    let again =
        |sets: &[&str]| afno(1, output.path(), sets).arg("--resume=must").run().unwrap().expect_success();
    let said = again(&["train.epochs=2", "train.loss=mse", "optimizer.lr=0.5"]);
    let found = warnings(&said).join("\n");
    for words in ["was trained with", "this run has 0.5", "train.loss ", "this run has \"mse\""] {
        assert_eq!(found.matches(words).count(), 1, "{words}: {said}");
    }
    let said = again(&["train.epochs=2", "train.loss=mse", "optimizer.lr=0.5"]);
    let found = warnings(&said).join("\n");
    assert!(
        found.contains("this run is finished already") && found.contains("--set train.epochs=4"),
        "{said}"
    );
    assert!(!found.contains("was trained with"), "{said}");
}

/// Errors of the configuration are reported before data are read, a folder is created, or memory is
/// allocated; with the suggested setting, the run succeeds.
#[rstest]
#[case::rate("configs/darcy_afno.toml", &["optimizer.lr=-0.001"], "optimizer.lr is -0.001, expected a finite number above 0")]
#[case::modes("configs/darcy_fno.toml", &["model.num_fno_modes=100", "model.latent_channels=4"], "num_fno_modes is 100 along dim 0")]
#[case::channels("configs/darcy_fno.toml", &["data.positions=true", "model.latent_channels=4"], "the inputs of tests/data/darcy_excerpt.h5 have 1 channels")]
#[case::dimension("configs/darcy_fno.toml", &["model.dimension=4", "model.latent_channels=64"], "model.dimension is 4, but the fields of")]
#[case::shape("configs/darcy_afno.toml", &["model.inp_shape=[32, 32]", "model.embed_dim=16"], "model.inp_shape is [32, 32]")]
#[case::validation("configs/darcy_afno.toml", &["data.validation_samples=8"], "which leaves none for training")]
#[case::warm_up("configs/darcy_afno.toml", &["schedule.warmup_epochs=-1.0"], "schedule.warmup_epochs is -1")]
#[case::beta("configs/darcy_afno.toml", &["optimizer.beta2=1.5"], "optimizer.beta2 is 1.5")]
#[case::buckets("configs/darcy_afno.toml", &["data_parallel.bucket_mb=0.0"], "data_parallel.bucket_mb is 0")]
#[case::mesh("configs/darcy_afno.toml", &["distributed.mesh.names=[\"dat\"]"], "distributed.mesh has an axis \"dat\"")]
#[case::accumulate("configs/darcy_afno.toml", &["train.accumulate=9223372036854775807"], "expected 1 to 4")]
#[case::accumulate_2_32("configs/darcy_afno.toml", &["train.accumulate=4294967296"], "expected 1 to 4")]
fn a_wrong_configuration_names_the_setting_that_mends_it(
    #[case] config: &str,
    #[case] sets: &[&str],
    #[case] words: &str,
) {
    let output = tempdir().unwrap();
    let sets: Vec<&str> = match config {
        "configs/darcy_afno.toml" => SMALL.iter().chain(sets).copied().collect(),
        _ => sets.to_vec(),
    };
    let launch = || train(Launch::plain(1, ISOBAR), config, output.path(), &sets);
    let outcome = launch().run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    let said = &outcome.ranks[0].stderr;
    assert!(said.contains(words) && !said.contains("training starts"), "{outcome}");
    assert!(!output.path().join("run/config.toml").exists(), "{outcome}");
    let error = said.lines().find(|line| line.starts_with("error: ")).unwrap();
    let mends = error.split("--set ").skip(1).map(|mend| match mend.strip_prefix('\'') {
        Some(quoted) => quoted.split('\'').next().unwrap(),
        None => mend.split_whitespace().next().unwrap(),
    });
    let mended = mends.fold(launch(), |launch, mend| launch.args(["--set", mend]));
    let _ = mended.args(["--set", "train.max_steps=1"]).run().unwrap().expect_success();
}

/// Absurd sizes cost neither memory nor time, and the error gives the memory they would need.
#[rstest]
#[case::modes("configs/darcy_fno.toml", &["model.num_fno_modes=1000000000", "model.padding=2147483647"])]
#[case::padding("configs/darcy_fno.toml", &["model.padding=2147483647"])]
#[case::layers("configs/darcy_fno.toml", &["model.num_fno_layers=1000000000"])]
#[case::decoder("configs/darcy_fno.toml", &["model.decoder_layers=1000000000"])]
#[case::depth("configs/darcy_afno.toml", &["model.depth=1000000000"])]
#[case::narrow_and_deep("configs/darcy_afno.toml", &["model.depth=1000000000", "model.embed_dim=1", "model.num_blocks=1", "model.mlp_ratio=1.0"])]
#[case::connected("configs/darcy_afno.toml", &["model.type=fully_connected", "model.in_features=1", "model.out_features=1", "model.num_layers=1000000000"])]
#[case::distributed("configs/darcy_distributed_afno.toml", &["model.depth=1000000000", "distributed.mesh.shape=[-1]", "distributed.mesh.names=[\"model\"]"])]
fn what_no_machine_can_hold_is_refused(
    #[case] config: &str,
    #[case] sets: &[&str],
    #[values(1, 2)] ranks: usize,
) {
    let output = tempdir().unwrap();
    // Little more than libtorch itself takes: nothing of the network is made.
    let launch = Launch::plain(ranks, "sh").args(["-c", "ulimit -v 16000000; exec \"$@\"", "sh", ISOBAR]);
    let outcome = train(launch, config, output.path(), sets).run().unwrap();
    for rank in &outcome.ranks {
        assert!(!rank.stderr.contains("panicked"), "{outcome}");
    }
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    let said: Vec<&str> = outcome.ranks.iter().flat_map(|rank| rank.stderr.lines()).collect();
    let errors: Vec<&&str> =
        said.iter().filter(|line| line.contains("training the network, which has ")).collect();
    assert_eq!(errors.len(), 1, "{outcome}");
    assert!(errors[0].contains(" of memory") && errors[0].contains(" free"), "{outcome}");
}

/// Writes an array of samples `[sample, x, y]` of 24 GiB that take no place on the disk: all values are zero.
fn sparse(folder: &Path) -> std::io::Result<()> {
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1572864, 64, 64), }";
    let mut file = fs::File::create(folder.join("sparse.npy"))?;
    file.write_all(b"\x93NUMPY\x01\x00")?;
    file.write_all(&(header.len() as u16).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    file.set_len(10 + header.len() as u64 + (24 << 30))
}

/// Settings of a run on the array of [`sparse`].
fn of_sparse(folder: &Path) -> [String; 6] {
    [
        format!("data.path={}", folder.join("sparse.npy").display()),
        "data.format=npy".to_owned(),
        "data.npy.axes=[\"sample\", \"x\", \"y\"]".to_owned(),
        "data.npy.variables={ a = \"sparse\" }".to_owned(),
        "data.inputs=[\"a\"]".to_owned(),
        "data.targets=[\"a\"]".to_owned(),
    ]
}

/// Samples that memory cannot hold end all ranks before any is read; streamed, they are read.
#[rstest]
fn samples_that_memory_cannot_hold_are_refused(#[values(1, 2)] ranks: usize) {
    let output = tempdir().unwrap();
    sparse(output.path()).unwrap();
    let own = of_sparse(output.path());
    let sets: Vec<&str> = SMALL.iter().copied().chain(own.iter().map(String::as_str)).collect();
    // Inputs and targets take 48 GiB.
    let launch = Launch::plain(ranks, "sh").args(["-c", "ulimit -v 16000000; exec \"$@\"", "sh", ISOBAR]);
    let outcome = train(launch, "configs/darcy_afno.toml", output.path(), &sets).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    let said: Vec<&str> = outcome.ranks.iter().flat_map(|rank| rank.stderr.lines()).collect();
    let words = "keeping all samples in memory (data.cache = \"all\") needs ";
    let errors: Vec<&&str> = said.iter().filter(|line| line.contains(words)).collect();
    assert_eq!(errors.len(), 1, "{outcome}");
    assert!(errors[0].contains(" of memory") && errors[0].contains("--set data.cache=none"), "{outcome}");
}

/// Samples that memory can hold are kept, under a limit as well.
#[test]
fn samples_that_memory_can_hold_are_accepted() {
    let output = tempdir().unwrap();
    let launch = Launch::plain(2, "sh").args(["-c", "ulimit -v 16000000; exec \"$@\"", "sh", ISOBAR]);
    let sets: Vec<&str> = SMALL.iter().copied().chain(["data.cache=all"]).collect();
    let _ = train(launch, "configs/darcy_afno.toml", output.path(), &sets).run().unwrap().expect_success();
}

/// A signal to one rank ends all while statistics are read, after the portion under way.
#[test]
fn a_signal_before_the_first_step_ends_all_ranks_with_6() {
    let output = tempdir().unwrap();
    sparse(output.path()).unwrap();
    let own = of_sparse(output.path());
    let own = own.iter().map(String::as_str).chain(["data.cache=none"]);
    let sets: Vec<&str> = SMALL.iter().copied().chain(own).collect();
    // Once the run handles SIGINT (bit 1), SIGTERM is a request, too.
    let script = r#"
        if [ "${RANK:-0}" = 0 ]; then
            "$@" &
            until [ $((0x$(sed -n 's/SigCgt:[[:space:]]*//p' /proc/$!/status) & 2)) != 0 ]; do sleep 0.05; done
            kill -TERM $!; wait $!; echo code $?
        else
            "$@"; echo code $?
        fi"#;
    let launch = Launch::plain(2, "sh").args(["-c", script, "sh", ISOBAR]);
    let outcome = train(launch, "configs/darcy_afno.toml", output.path(), &sets).run().unwrap();
    for rank in &outcome.ranks {
        assert!(rank.stdout.contains("code 6\n"), "{outcome}");
    }
    let words = "told to stop while computing statistics of the training samples; no step was taken";
    assert!(outcome.ranks[0].stdout.contains(words), "{outcome}");
}

#[test]
fn long_values_are_cut() {
    let output = tempdir().unwrap();
    let long = format!("optimizer.type={}", "x".repeat(100_000));
    let outcome = afno(1, output.path(), &[&long]).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{}", outcome.ranks[0].stderr.len());
    let said = &outcome.ranks[0].stderr;
    assert!(said.len() < 2_000 && said.contains("xxx…"), "{} bytes", said.len());
}

/// More passes than a batch has samples are no passes, however many the configuration asks for.
#[test]
fn accumulation_over_a_huge_batch_costs_nothing() {
    let output = tempdir().unwrap();
    for count in ["4294967296", "9223372036854775807"] {
        let sets = [format!("train.batch_size={count}"), format!("train.accumulate={count}")];
        let run = format!("run.name=of_{count}");
        let outcome = afno(1, output.path(), &[&sets[0], &sets[1], &run]).run().unwrap().expect_success();
        assert!(!outcome.ranks[0].stderr.contains("panicked"), "{outcome}");
    }
}
