//! The folder of a run belongs to one run: nothing of another is lost by mistake, and two do not use it at once.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use isobar_collectives::{Group, threads};
use isobar_train::checkpoint::{Checkpoints, Contents, Keep, list};
use isobar_train::config::{CheckpointConfig, MetricsConfig, Resume, SaveMode, TrainConfig};
use isobar_train::metrics::MetricSink;
use isobar_train::{
    BoxError, Error, FitConfig, Parameter, Parameters, Ranks, RunFolder, Step, Summary, Task, fit,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DEADLINE: Duration = Duration::from_secs(240);

/// One parameter that goes to zero.
struct Shrink {
    params: Parameters,
    /// Called in each step with its number, from 0.
    in_step: Box<dyn Fn(u64) -> Result<(), BoxError>>,
    steps: std::cell::Cell<u64>,
}

impl Shrink {
    fn new(in_step: impl Fn(u64) -> Result<(), BoxError> + 'static) -> Self {
        let x = Tensor::ones([2, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let y = Tensor::ones([5], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let entries = vec![Parameter::replicated("x", &x), Parameter::replicated("y", &y)];
        Self {
            params: Parameters::new(entries).unwrap(),
            in_step: Box::new(in_step),
            steps: std::cell::Cell::new(0),
        }
    }
}

impl Task for Shrink {
    fn train_samples(&self) -> usize {
        8
    }

    fn validation_samples(&self) -> usize {
        0
    }

    fn loss(&self, _: Step<'_>, _: &[usize]) -> Result<Tensor, BoxError> {
        (self.in_step)(self.steps.replace(self.steps.get() + 1))?;
        let sums = self.params.iter().map(|one| one.tensor.square().sum(Kind::Float));
        Ok(sums.reduce(|a, b| a.f_add(&b).unwrap()).unwrap())
    }

    fn errors(&self, _: &[usize]) -> Result<Vec<Vec<isobar_train::VariableError>>, BoxError> {
        Ok(Vec::new())
    }
}

/// Three epochs of two steps, with a checkpoint each.
fn config(folder: &Path) -> FitConfig {
    FitConfig {
        folder: folder.to_owned(),
        train: TrainConfig { epochs: 3, batch_size: 4, ..Default::default() },
        checkpoint: CheckpointConfig { every_epochs: 1, keep: 0, ..Default::default() },
        metrics: MetricsConfig { every_steps: 1, ..Default::default() },
        resolved: "train.epochs = 3\n".to_owned(),
        ..Default::default()
    }
}

fn overwriting(folder: &Path) -> FitConfig {
    let mut config = config(folder);
    config.checkpoint.overwrite = true;
    config.resolved = "another = true\n".to_owned();
    config
}

fn run(world: &Group, config: &FitConfig, task: &Shrink) -> isobar_train::Result<Summary> {
    fit(task, &task.params, &[], &Ranks::data_parallel(world), config)
}

fn plain(config: &FitConfig) -> isobar_train::Result<Summary> {
    run(&Group::single(), config, &Shrink::new(|_| Ok(())))
}

/// Every file of a folder, but for the lock, and what it holds.
fn snapshot(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => {
                    files.push((path.strip_prefix(folder).unwrap().to_owned(), fs::read(&path).unwrap()))
                }
            }
        }
    }
    files.retain(|(path, _)| !path.ends_with("run.lock"));
    files.sort();
    files
}

fn steps(folder: &Path) -> Vec<u64> {
    list(folder).unwrap().iter().map(|one| one.found.as_ref().unwrap().step).collect()
}

#[rstest]
fn results_of_another_run_are_refused_on_all_ranks_and_stay(#[values(1, 2)] ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    plain(&config(folder.path())).unwrap();
    let before = snapshot(folder.path());
    let errors = threads::run(ranks, DEADLINE, |world| {
        run(&world, &config(folder.path()), &Shrink::new(|_| Ok(()))).unwrap_err()
    });
    for error in errors {
        assert!(matches!(&error, Error::HoldsResults { .. }), "{error}");
        let text = error.to_string();
        for word in ["checkpoints and metrics", "--resume", "run.name", "--overwrite"] {
            assert!(text.contains(word), "no {word} in {text}");
        }
    }
    assert!(snapshot(folder.path()) == before, "nothing is changed");
}

/// Results whose checkpoints are missing or unreadable are not those of a run that ended before its first one.
#[rstest]
#[case::no_manifests(
    |run: &Path| (2..=6).step_by(2).for_each(|step| fs::remove_file(manifest(run, step)).unwrap()),
    "parts of checkpoints without `manifest.json` and metrics"
)]
#[case::no_folder(|run: &Path| fs::rename(run.join("checkpoints"), run.join("elsewhere")).unwrap(), "holds metrics of")]
#[case::no_metrics_either(
    |run: &Path| {
        fs::remove_dir_all(run.join("tensorboard")).unwrap();
        ["metrics.csv", "metrics.jsonl"].iter().for_each(|name| fs::remove_file(run.join(name)).unwrap());
        (2..=6).step_by(2).for_each(|step| fs::remove_file(manifest(run, step)).unwrap());
    },
    "holds parts of checkpoints without `manifest.json` of"
)]
#[case::a_file(
    |run: &Path| {
        fs::rename(run.join("checkpoints"), run.join("elsewhere")).unwrap();
        fs::write(run.join("checkpoints"), "mine").unwrap();
    },
    "an entry `checkpoints` that is not a folder and metrics"
)]
fn results_without_a_complete_checkpoint_stay(
    #[case] lose: fn(&Path),
    #[case] found: &str,
    #[values(1, 2)] ranks: usize,
) {
    let folder = tempfile::tempdir().unwrap();
    plain(&config(folder.path())).unwrap();
    lose(folder.path());
    let before = snapshot(folder.path());
    for resume in [Resume::Never, Resume::Auto, Resume::Must] {
        let errors = threads::run(ranks, DEADLINE, |world| {
            let mut config = config(folder.path());
            config.checkpoint.resume = resume;
            run(&world, &config, &Shrink::new(|_| Ok(()))).unwrap_err()
        });
        for error in errors {
            assert!(matches!(&error, Error::NothingToResume { .. }), "{error}");
            let text = error.to_string();
            for word in [found, "run.name", "--overwrite"] {
                assert!(text.contains(word), "no {word} in {text}");
            }
            assert!(!text.contains("--resume"), "{text}");
        }
        assert!(snapshot(folder.path()) == before, "nothing is changed");
    }
    let replaced = plain(&overwriting(folder.path()));
    if folder.path().join("checkpoints").is_file() {
        let error = replaced.unwrap_err().to_string();
        assert!(error.contains("checkpoints is not a folder") && error.contains("move it away"), "{error}");
        assert!(snapshot(folder.path()) == before);
    } else {
        assert_eq!(replaced.unwrap().steps, 6);
    }
}

fn manifest(run: &Path, step: u64) -> PathBuf {
    run.join(format!("checkpoints/step_{step:08}/manifest.json"))
}

/// An overwrite takes what a run wrote, and nothing else in its folders.
#[test]
fn an_overwrite_leaves_files_of_others() {
    let folder = tempfile::tempdir().unwrap();
    plain(&config(folder.path())).unwrap();
    let mine = [
        "checkpoints/note.txt",
        "checkpoints/step_abc/note.txt",
        "checkpoints/step_9/note.txt",
        "tensorboard/note.txt",
    ];
    for name in mine {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "mine").unwrap();
    }
    let failing = Shrink::new(|step| if step == 1 { Err("the disk is gone".into()) } else { Ok(()) });
    let before = snapshot(folder.path());
    run(&Group::single(), &overwriting(folder.path()), &failing).unwrap_err();
    let kept = |(path, _): &(PathBuf, Vec<u8>)| !path.starts_with("unfinished");
    assert!(snapshot(folder.path()).into_iter().filter(kept).collect::<Vec<_>>() == before);
    let mut shorter = overwriting(folder.path());
    shorter.train.epochs = 1;
    plain(&shorter).unwrap();
    assert_eq!(steps(folder.path()), [2]);
    for name in mine {
        assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), "mine", "{name}");
    }
    assert!(!folder.path().join("earlier").exists());
}

/// Damaged records are not dropped silently; without the file the run begins a new one.
#[rstest]
#[case("metrics.jsonl")]
#[case("metrics.csv")]
fn damaged_metrics_are_named(#[case] name: &str) {
    let folder = tempfile::tempdir().unwrap();
    plain(&config(folder.path())).unwrap();
    let path = folder.path().join(name);
    fs::write(&path, [0xff, 0xfe, b'\n']).unwrap();
    let mut resumed = config(folder.path());
    resumed.checkpoint.resume = Resume::Must;
    resumed.train.epochs = 4;
    let error = plain(&resumed).unwrap_err();
    assert!(matches!(&error, Error::MetricsFile { .. }), "{error}");
    let text = error.to_string();
    for word in [path.to_str().unwrap(), "it is not UTF-8 text", "move it away", "run.name"] {
        assert!(text.contains(word), "no {word} in {text}");
    }
    fs::remove_file(path).unwrap();
    assert_eq!(plain(&resumed).unwrap().steps, 8);
}

/// The functions for your own training loops are as safe.
#[test]
fn the_parts_of_the_engine_remove_nothing_either() {
    let folder = tempfile::tempdir().unwrap();
    plain(&config(folder.path())).unwrap();
    let before = snapshot(folder.path());
    let metrics = MetricSink::open(folder.path(), &MetricsConfig::default(), &["loss"], None);
    assert!(matches!(metrics, Err(Error::HoldsResults { .. })), "{metrics:?}");
    let task = Shrink::new(|_| Ok(()));
    let mut contents = Contents { params: &task.params, buffers: &[], optimizer: None };
    let checkpoints = Checkpoints::new(&folder.path().join("checkpoints"), Keep::ALL, &Group::single());
    let resumed = checkpoints.resume(Resume::Never, &mut contents);
    assert!(matches!(resumed, Err(Error::HoldsResults { .. })));
    assert!(snapshot(folder.path()) == before);
}

/// A start that failed leaves logs, a configuration, and files without records: the next one needs no flag.
#[test]
fn a_first_start_that_failed_is_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let failing = Shrink::new(|_| Err("the disk is gone".into()));
    run(&Group::single(), &config(&path), &failing).unwrap_err();
    for name in ["logs", "flight", "checkpoints/step_00000004"] {
        fs::create_dir_all(path.join(name)).unwrap();
    }
    assert_eq!(plain(&config(&path)).unwrap().steps, 6);
}

/// The old results are there until the new run has a checkpoint, and then gone.
#[rstest]
fn an_overwrite_keeps_the_old_results_until_the_first_checkpoint(
    #[values(1, 2)] ranks: usize,
    #[values(SaveMode::Sync, SaveMode::Async)] mode: SaveMode,
) {
    let folder = tempfile::tempdir().unwrap();
    plain(&config(folder.path())).unwrap();
    let old = snapshot(folder.path());
    threads::run(ranks, DEADLINE, |world| {
        let path = folder.path().to_owned();
        let (first, old) = (world.rank() == 0, old.clone());
        let watching = Shrink::new(move |step| {
            if first && step < 2 {
                assert!(
                    snapshot(&path.join("earlier")).iter().filter(|file| old.contains(file)).count()
                        == old.len()
                );
                // Readers of the run find them.
                assert_eq!(steps(&path), [6, 4, 2]);
            }
            Ok(())
        });
        let mut config = overwriting(folder.path());
        config.train.epochs = 2;
        config.checkpoint.mode = mode;
        run(&world, &config, &watching).unwrap();
    });
    assert!(!folder.path().join("earlier").exists() && !folder.path().join("unfinished").exists());
    assert_eq!(steps(folder.path()), [4, 2]);
    let lines = fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap().lines().count();
    assert_eq!(lines, 4 + 2, "steps and epochs");
    assert_eq!(fs::read_to_string(folder.path().join("config.toml")).unwrap(), "another = true\n");
    assert_eq!(fs::read_dir(folder.path().join("tensorboard")).unwrap().count(), 1);
}

/// A new run that fails before its first checkpoint leaves the old one as it was, and its own metrics elsewhere.
#[rstest]
fn an_overwrite_that_fails_puts_the_old_results_back(#[values(1, 2)] ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    plain(&config(folder.path())).unwrap();
    let old = snapshot(folder.path());
    threads::run(ranks, DEADLINE, |world| {
        let failing = Shrink::new(|step| if step == 1 { Err("the disk is gone".into()) } else { Ok(()) });
        run(&world, &overwriting(folder.path()), &failing).unwrap_err();
    });
    let now = snapshot(folder.path());
    let kept = |(path, _): &&(PathBuf, Vec<u8>)| !path.starts_with("unfinished");
    assert!(now.iter().filter(kept).cloned().collect::<Vec<_>>() == old);
    let metrics = fs::read_to_string(folder.path().join("unfinished/metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), 1);
    let mut resumed = config(folder.path());
    resumed.checkpoint.resume = Resume::Must;
    resumed.train.epochs = 4;
    assert_eq!(plain(&resumed).unwrap().losses.len(), 2, "two steps more");
}

/// After a crash the next start puts things right: what matters is whether there was a checkpoint.
#[test]
fn an_overwrite_that_was_killed_is_recovered_from() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    plain(&config(&path)).unwrap();
    let old = snapshot(&path);
    // The folder as a killed process leaves it: copied in the midst of a step.
    let killed = folder.path().join("killed");
    let (from, to) = (path.clone(), killed.clone());
    let copying = Shrink::new(move |step| {
        if step == 1 {
            for (name, bytes) in snapshot(&from) {
                fs::create_dir_all(to.join(&name).parent().unwrap()).unwrap();
                fs::write(to.join(&name), bytes).unwrap();
            }
        }
        Ok(())
    });
    run(&Group::single(), &overwriting(&path), &copying).unwrap();
    assert!(killed.join("earlier").exists());
    assert_eq!(steps(&killed), [6, 4, 2], "read while nobody has put it right");
    assert!(matches!(plain(&config(&killed)), Err(Error::HoldsResults { .. })));
    let now: Vec<_> =
        snapshot(&killed).into_iter().filter(|(path, _)| !path.starts_with("unfinished")).collect();
    assert!(now == old);
}

#[test]
fn weights_to_start_from_may_be_in_the_folder_that_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let first = plain(&config(folder.path())).unwrap();
    let mut second = overwriting(folder.path());
    second.checkpoint.init = first.checkpoint.clone();
    let found = plain(&second).unwrap();
    assert!(found.losses[0] < *first.losses.last().unwrap(), "{:?} after {:?}", found.losses, first.losses);
    second.checkpoint.init = Some(folder.path().join("checkpoints/step_00000099"));
    let before = snapshot(folder.path());
    assert!(matches!(plain(&second), Err(Error::NoCheckpoint { .. })));
    assert!(snapshot(folder.path()) == before);
}

/// A run that resumes where it can, and died before its first checkpoint, starts again.
#[test]
fn a_run_without_a_checkpoint_starts_again_where_it_may_resume() {
    let folder = tempfile::tempdir().unwrap();
    let mut auto = config(folder.path());
    auto.checkpoint.resume = Resume::Auto;
    let failing = Shrink::new(|step| if step == 1 { Err("the disk is gone".into()) } else { Ok(()) });
    run(&Group::single(), &auto, &failing).unwrap_err();
    assert!(folder.path().join(".unsaved").exists());
    assert_eq!(plain(&auto).unwrap().losses.len(), 6);
    assert!(!folder.path().join(".unsaved").exists(), "it has a checkpoint");
    let metrics = fs::read_to_string(folder.path().join("metrics.csv")).unwrap();
    assert_eq!(metrics.lines().count(), 1 + 6 + 3, "{metrics}");
}

#[rstest]
fn two_runs_do_not_use_a_folder_at_once(#[values(1, 2)] ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let (began, begun) = mpsc::channel();
    let (ends, ended) = mpsc::channel::<()>();
    let first = std::thread::spawn(move || {
        let waiting = Shrink::new(move |step| {
            if step == 0 {
                began.send(()).unwrap();
                ended.recv().unwrap();
            }
            Ok(())
        });
        run(&Group::single(), &config(&path), &waiting).unwrap().steps
    });
    begun.recv_timeout(DEADLINE).unwrap();
    let clock = Instant::now();
    let errors = threads::run(ranks, DEADLINE, |world| {
        run(&world, &overwriting(folder.path()), &Shrink::new(|_| Ok(()))).unwrap_err()
    });
    assert!(clock.elapsed() < DEADLINE / 3);
    for error in errors {
        let Error::RunLocked { holder, .. } = &error else { panic!("{error}") };
        let words = format!("process {} on host ", std::process::id());
        assert!(holder.starts_with(&words) && holder.contains(" since 2"), "{holder}");
    }
    ends.send(()).unwrap();
    assert_eq!(first.join().unwrap(), 6);
    let mut resumed = config(folder.path());
    resumed.checkpoint.resume = Resume::Must;
    assert!(plain(&resumed).is_ok(), "the lock is free");
}

/// A folder that the caller has claimed is not claimed again.
#[test]
fn a_claimed_folder_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let claimed = RunFolder::claim(folder.path(), &Group::single(), Duration::ZERO).unwrap();
    assert!(matches!(plain(&config(folder.path())), Err(Error::RunLocked { .. })));
    let claimed = Some(std::sync::Arc::new(claimed));
    plain(&FitConfig { claimed: claimed.clone(), ..config(folder.path()) }).unwrap();
    assert!(matches!(plain(&config(folder.path())), Err(Error::RunLocked { .. })), "still the caller's");
}

#[rstest]
#[case::before_a_checkpoint(0)]
#[case::after_the_last_one_has_begun(5)]
fn a_folder_that_disappears_is_an_error_on_all_ranks(
    #[case] at: u64,
    #[values(1, 2)] ranks: usize,
    #[values(SaveMode::Sync, SaveMode::Async)] mode: SaveMode,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let errors = threads::run(ranks, DEADLINE, |world| {
        let (gone, first) = (path.clone(), world.rank() == 0);
        let removing = Shrink::new(move |step| {
            if first && step == at {
                // A checkpoint may be written meanwhile.
                while fs::remove_dir_all(&gone).is_err() {}
            }
            Ok(())
        });
        let mut config = config(&path);
        config.checkpoint.mode = mode;
        run(&world, &config, &removing).unwrap_err()
    });
    assert!(matches!(&errors[0], Error::FolderGone { .. }), "{}", errors[0]);
    for error in &errors[1..] {
        let told = matches!(error, Error::OtherRankFile { rank: 0, reason, .. } if reason.contains("was removed or replaced"));
        assert!(told, "{error}");
    }
}

/// A rank that cannot write its part, nor a note of it, as where its disk is full, is named at once with its reason.
#[rstest]
fn a_part_that_cannot_be_written_is_the_error_of_all_ranks(
    #[values(SaveMode::Sync, SaveMode::Async)] mode: SaveMode,
) {
    let folder = tempfile::tempdir().unwrap();
    // Folders in the place of files.
    for name in ["rank_00001.safetensors", "rank_00001.json/full"] {
        fs::create_dir_all(folder.path().join("checkpoints/step_00000002").join(name)).unwrap();
    }
    let clock = Instant::now();
    let errors = threads::run(2, Duration::from_secs(300), |world| {
        let mut config = config(folder.path());
        config.train.epochs = 1;
        config.checkpoint.mode = mode;
        run(&world, &config, &Shrink::new(|_| Ok(()))).unwrap_err()
    });
    assert!(clock.elapsed() < Duration::from_secs(100), "well before the deadline");
    for (rank, error) in errors.iter().enumerate() {
        let of_files = match error {
            Error::OtherRankFile { rank: 1, .. } => true,
            Error::Io { .. } => rank == 1,
            _ => false,
        };
        assert!(of_files, "{error}");
        let text = error.to_string();
        assert!(text.contains("rank_00001.safetensors") && text.contains("directory"), "{text}");
        assert!(!text.contains("share"), "{text}");
    }
}

/// Links in the place of a run's files are not followed where something is written or removed.
#[test]
fn links_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (path, elsewhere) = (folder.path().join("run"), folder.path().join("elsewhere"));
    for name in ["manifest.json", "rank_00000.safetensors", "config.toml", "metrics.jsonl"] {
        fs::create_dir_all(&elsewhere).unwrap();
        fs::write(elsewhere.join(name), "mine").unwrap();
    }
    let mine = snapshot(&elsewhere);
    let link = |to: &Path, at: PathBuf| {
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(to, at).unwrap();
    };
    // A step that is pruned, one that is overwritten with the rest, and files.
    let step = |number: u64| path.join(format!("checkpoints/step_{number:08}"));
    link(&elsewhere.join("config.toml"), path.join("config.toml"));
    let mut pruning = config(&path);
    pruning.checkpoint.keep = 1;
    pruning.checkpoint.keep_best = 0;
    pruning.checkpoint.resume = Resume::Auto;
    plain(&pruning).unwrap();
    link(&elsewhere, step(1));
    pruning.train.epochs = 4;
    plain(&pruning).unwrap();
    assert!(snapshot(&elsewhere) == mine);
    link(&elsewhere, step(7));
    plain(&overwriting(&path)).unwrap();
    assert!(snapshot(&elsewhere) == mine);
    assert!(!path.join("config.toml").is_symlink());
    // A step that is to be written.
    link(&elsewhere, step(8));
    pruning.train.epochs = 4;
    pruning.checkpoint.resume = Resume::Auto;
    let error = plain(&pruning).unwrap_err();
    assert!(snapshot(&elsewhere) == mine, "{error}");
}
