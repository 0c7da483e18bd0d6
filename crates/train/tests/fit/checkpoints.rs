//! Runs that resume, and the checkpoints that they leave.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use isobar_collectives::{Group, threads};
use isobar_train::checkpoint::{
    CheckpointSelector, Checkpoints, Contents, Keep, export, read_run_state, verify,
};
use isobar_train::config::{CheckpointConfig, Resume, SaveMode};
use isobar_train::optim::LionConfig;
use isobar_train::{BoxError, Error, FitConfig, Ranks, Signals, Step, Stop, Task, VariableError, fit};
use rstest::rstest;
use tch::Tensor;

use super::{DEADLINE, Square, config, read, run};

#[rstest]
#[case::between_epochs(6, 0)]
#[case::within_an_epoch(4, 2)]
fn a_resumed_run_repeats_bitwise(
    #[case] stop: u64,
    #[case] every_steps: u64,
    #[values(1, 2)] ranks: usize,
    #[values(SaveMode::Sync, SaveMode::Async)] mode: SaveMode,
) {
    let [whole, resumed] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let expected = threads::run(ranks, DEADLINE, |world| run(&world, &config(whole.path())).unwrap());

    let mut first = config(resumed.path());
    first.train.max_steps = Some(stop);
    first.checkpoint.every_steps = every_steps;
    first.checkpoint.mode = mode;
    threads::run(ranks, DEADLINE, |world| run(&world, &first).unwrap());
    let mut second = config(resumed.path());
    second.checkpoint.resume = Resume::Must;
    let found = threads::run(ranks, DEADLINE, |world| run(&world, &second).unwrap());

    assert_eq!(found[0].losses, expected[0].losses[stop as usize..]);
    assert_eq!(found[0].validation_error, expected[0].validation_error);
    assert_eq!(found[0].best_error, expected[0].best_error);
    let model = |folder: &Path| {
        let out = folder.join("model.safetensors");
        export(&folder.join("checkpoints/step_00000012"), &out).unwrap();
        std::fs::read(out).unwrap()
    };
    assert!(model(resumed.path()) == model(whole.path()), "the same parameters");
    let losses = |folder: &Path| {
        let lines = read(folder, "metrics.csv");
        lines.lines().map(|line| line.split(',').take(5).collect::<Vec<_>>().join(",")).collect::<Vec<_>>()
    };
    // A run that ends within an epoch records its validation there.
    let (mut found, within) = (losses(resumed.path()), format!("{stop},1,,,"));
    if every_steps > 0 {
        found.retain(|line| *line != within);
    }
    assert_eq!(found, losses(whole.path()), "no record is missing or twice");
}

/// The checkpoint of the last step and the records have the validation after it, whatever other checkpoints are due.
#[rstest]
fn the_validation_at_the_end_of_a_run_is_saved_and_recorded(
    #[values(0, 2, 3)] every_steps: u64,
    #[values((4, 1), (3, 1), (6, 2))] (steps, epochs): (u64, u64),
) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.train.max_steps = Some(steps);
    config.train.validate_every = 4;
    config.checkpoint.every_steps = every_steps;
    let summary = run(&Group::single(), &config).unwrap();
    assert!(summary.validation_error.is_some());
    let state = read_run_state(&folder.path().join(format!("checkpoints/step_{steps:08}"))).unwrap();
    assert_eq!((state.step, state.epoch, state.validation_error), (steps, epochs, summary.validation_error));
    let records = read(folder.path(), "metrics.jsonl");
    let last: serde_json::Value = serde_json::from_str(records.lines().last().unwrap()).unwrap();
    assert_eq!(
        (last["step"].as_u64(), last["validation_error"].as_f64()),
        (Some(steps), summary.validation_error)
    );
}

#[test]
fn resuming_needs_a_checkpoint_of_the_same_steps() {
    let folder = tempfile::tempdir().unwrap();
    let mut must = config(folder.path());
    must.checkpoint.resume = Resume::Must;
    assert!(matches!(run(&Group::single(), &must), Err(Error::NoCheckpoint { .. })));
    must.checkpoint.resume = Resume::Auto;
    must.train.max_steps = Some(2);
    assert_eq!(run(&Group::single(), &must).unwrap().steps, 2);
    let refused = |changed: FitConfig, words: &str| {
        let error = run(&Group::single(), &changed).unwrap_err();
        assert!(
            matches!(error, Error::CheckpointUnfit { .. }) && error.to_string().contains(words),
            "{error}"
        );
    };
    refused(FitConfig { seed: 4, ..must.clone() }, "trained with seed 3, this run has 4");
    let identity = serde_json::json!({"model": {"depth": 4, "type": "afno"}});
    let both = FitConfig { seed: 4, identity, ..must.clone() };
    refused(
        both,
        r#"seed 3, this run has 4; with identity unset, this run has {"model":{"depth":4,"type":"afno"}}; give"#,
    );
    let mut batch = must.clone();
    batch.train.batch_size = 5;
    refused(batch, "trained with train.batch_size 10, this run has 5");
    let mut task = Square::new();
    task.samples = 24;
    let error = fit(&task, &task.params, &[], &Ranks::data_parallel(&Group::single()), &must).unwrap_err();
    assert!(error.to_string().contains("a number of training samples of 23, this run has 24"), "{error}");
}

fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("checkpoints")).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_another_run_was_is_told_key_by_key() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.identity = serde_json::json!({"data": {"fields": ["u"]}, "model": {"depth": 4, "type": "fno"}});
    config.train.max_steps = Some(1);
    run(&Group::single(), &config).unwrap();
    config.checkpoint.resume = Resume::Auto;
    run(&Group::single(), &config).unwrap();
    config.identity =
        serde_json::json!({"data": {"fields": ["v"]}, "model": {"depth": 6, "type": "fno", "modes": 8}});
    let error = run(&Group::single(), &config).unwrap_err().to_string();
    let (_, reason) = error.split_once("it was trained with ").unwrap();
    let expected = r#"data.fields ["u"], this run has ["v"]; with model.depth 4, this run has 6; with model.modes unset, this run has 8; give"#;
    assert!(reason.starts_with(expected), "{reason}");
}

/// One rank that is asked is enough, and the run goes on later as if nothing had been.
#[rstest]
#[case::stop(false, Stop::Requested)]
#[case::requeue(true, Stop::Requeue)]
fn a_run_that_is_told_to_stop_leaves_a_checkpoint(
    #[case] requeue: bool,
    #[case] expected: Stop,
    #[values(1, 5)] at: u64,
    #[values(SaveMode::Sync, SaveMode::Async)] mode: SaveMode,
) {
    let [whole, told] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let whole = threads::run(2, DEADLINE, |world| run(&world, &config(whole.path())).unwrap());
    let mut config = config(told.path());
    config.checkpoint.mode = mode;
    let first = threads::run(2, DEADLINE, |world| {
        let signals = Signals::default().requeue(requeue);
        let asked = signals.clone();
        let asks = move || if requeue { asked.ask_to_save() } else { asked.ask_to_stop() };
        let task = if world.rank() == 1 { Square::asking(at, asks) } else { Square::new() };
        let config = FitConfig { signals, ..config.clone() };
        fit(&task, &task.params, &[], &Ranks::data_parallel(&world), &config).unwrap()
    });
    for summary in &first {
        assert_eq!((summary.steps, summary.stopped), (at + 1, Some(expected)));
    }
    config.checkpoint.resume = Resume::Must;
    let rest = threads::run(2, DEADLINE, |world| run(&world, &config).unwrap());
    assert_eq!([&first[0].losses[..], &rest[0].losses[..]].concat(), whole[0].losses);
    assert_eq!(rest[0].validation_error, whole[0].validation_error);
    assert_eq!(rest[0].stopped, None);
}

#[test]
fn a_checkpoint_that_is_asked_for_is_written_and_the_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.checkpoint = CheckpointConfig { every_epochs: 0, keep: 0, keep_best: 0, ..Default::default() };
    config.signals = Signals::default();
    let asked = config.signals.clone();
    let task = Square::asking(4, move || asked.ask_to_save());
    let summary = fit(&task, &task.params, &[], &Ranks::data_parallel(&Group::single()), &config).unwrap();
    assert_eq!((summary.steps, summary.stopped), (12, None));
    assert_eq!(checkpoints(folder.path()), ["step_00000005", "step_00000012"]);
}

#[test]
fn the_clock_and_the_count_of_steps_ask_for_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.checkpoint = CheckpointConfig {
        every_epochs: 0,
        every_steps: 6, // the last step of an epoch each time
        keep: 0,
        keep_best: 0,
        overwrite: true,
        ..Default::default()
    };
    run(&Group::single(), &config).unwrap();
    assert_eq!(checkpoints(folder.path()), ["step_00000006", "step_00000012"]);
    config.checkpoint.every_steps = 0;
    config.checkpoint.every_minutes = 1e-9;
    run(&Group::single(), &config).unwrap();
    assert_eq!(checkpoints(folder.path()).len(), 12);
    config.checkpoint.every_minutes = -1.0;
    assert!(matches!(run(&Group::single(), &config), Err(Error::Invalid { .. })));
}

/// A torn newest checkpoint is passed over: the run goes on from the one before, and writes the torn one anew.
#[test]
fn a_run_goes_on_from_the_newest_whole_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    let expected = run(&Group::single(), &config).unwrap();
    let torn = folder.path().join("checkpoints/step_00000012");
    std::fs::write(torn.join("rank_00000.safetensors"), "torn").unwrap();
    config.checkpoint.resume = Resume::Auto;
    let found = run(&Group::single(), &config).unwrap();
    assert_eq!(found.losses, expected.losses[9..]);
    verify(&torn).unwrap();
}

/// The error names the checkpoint, and the ways out.
#[test]
fn state_of_another_optimizer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.train.max_steps = Some(2);
    run(&Group::single(), &config).unwrap();
    config.checkpoint.resume = Resume::Auto;
    config.optimizer = LionConfig::default().into();
    let error = run(&Group::single(), &config).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::CheckpointUnfit { .. }), "{text}");
    for words in
        ["step_00000002 is refused: its optimizer state", "--set optimizer.type=", "--set checkpoint.init="]
    {
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn weights_to_start_from() {
    let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let trained = run(&Group::single(), &config(first.path())).unwrap();
    let file = first.path().join("weights.safetensors");
    export(first.path(), &file).unwrap();
    let start = |init: PathBuf| {
        let mut config = config(second.path());
        config.train.max_steps = Some(0);
        config.checkpoint.init = Some(init);
        run(&Group::single(), &config)
    };
    for init in [first.path().to_owned(), trained.checkpoint.unwrap(), file.clone()] {
        let summary = start(init).unwrap();
        assert_eq!((summary.steps, summary.validation_error), (0, trained.validation_error));
    }
    let none = start(first.path().join("none")).unwrap_err();
    let text = none.to_string();
    assert!(matches!(none, Error::NoCheckpoint { key: Some("checkpoint.init"), .. }), "{text}");
    assert!(
        text.contains("none, which does not exist") && text.contains("--set checkpoint.init=runs/NAME"),
        "{text}"
    );
    std::fs::write(&file, "weights").unwrap();
    assert!(matches!(start(file), Err(Error::Checkpoint { .. })));
}

/// A path that means another file on one host, alike but for its numbers.
#[test]
fn weights_that_differ_between_ranks_are_found_out() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let files = [7, 8].map(|seed| {
        let folder = &folders[seed as usize - 7];
        let config = FitConfig { seed, ..config(folder.path()) };
        run(&Group::single(), &config).unwrap();
        let file = folder.path().join("weights.safetensors");
        export(folder.path(), &file).unwrap();
        file
    });
    let folder = tempfile::tempdir().unwrap();
    let errors = threads::run(3, DEADLINE, |world| {
        let mut config = config(folder.path());
        config.checkpoint.init = Some(files[usize::from(world.rank() == 1)].clone());
        run(&world, &config).unwrap_err()
    });
    for error in errors {
        assert!(matches!(&error, Error::CheckpointsDiffer { rank: 1, .. }), "{error}");
    }
    // Copies will do.
    std::fs::copy(&files[0], &files[1]).unwrap();
    let alike = threads::run(3, DEADLINE, |world| {
        let mut config = config(folder.path());
        config.train.max_steps = Some(1);
        config.checkpoint.init = Some(files[usize::from(world.rank() == 1)].clone());
        run(&world, &config).unwrap().losses
    });
    assert!(alike.iter().all(|losses| *losses == alike[0]), "{alike:?}");
}

/// A network with running statistics, which differ between ranks that get other samples.
struct Normed {
    square: Square,
    buffers: Vec<(String, Tensor)>,
    rank: usize,
    /// Statistics with which samples were validated, and the number of samples.
    validated: RefCell<Vec<(Vec<f64>, usize)>>,
}

impl Normed {
    fn new(rank: usize) -> Self {
        let buffer = |at: usize| (format!("norm{at}.running_mean"), Tensor::from_slice(&[0.0]));
        Self {
            square: Square::new(),
            buffers: (0..4).map(buffer).collect(),
            rank,
            validated: RefCell::default(),
        }
    }

    fn statistics(&self) -> Vec<f64> {
        self.buffers.iter().map(|(_, tensor)| tensor.double_value(&[0])).collect()
    }
}

impl Task for Normed {
    fn train_samples(&self) -> usize {
        self.square.train_samples()
    }

    fn validation_samples(&self) -> usize {
        self.square.validation_samples()
    }

    fn loss(&self, step: Step<'_>, samples: &[usize]) -> Result<Tensor, BoxError> {
        for (_, tensor) in &self.buffers {
            let _ = tensor.shallow_clone().f_add_scalar_(1.0 + self.rank as f64)?;
        }
        self.square.loss(step, samples)
    }

    fn errors(&self, samples: &[usize]) -> Result<Vec<Vec<VariableError>>, BoxError> {
        self.validated.borrow_mut().push((self.statistics(), samples.len()));
        self.square.errors(samples)
    }
}

/// All ranks validate with the running statistics of rank 0, and write these, whoever writes which.
#[test]
fn validation_and_checkpoints_have_the_buffers_of_the_first_rank() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.checkpoint.every_steps = 2;
    let validated = threads::run(3, DEADLINE, |world| {
        let task = Normed::new(world.rank());
        let ranks = Ranks::data_parallel(&world);
        fit(&task, &task.square.params, &task.buffers, &ranks, &config).unwrap();
        task.validated.into_inner()
    });
    for of_rank in &validated {
        let statistics: Vec<&Vec<f64>> = of_rank.iter().map(|(statistics, _)| statistics).collect();
        assert_eq!(statistics, [3.0, 6.0, 9.0, 12.0].map(|steps| vec![steps; 4]).iter().collect::<Vec<_>>());
    }
    let steps = |step: u64| {
        let task = Normed::new(0);
        let path = folder.path().join(format!("checkpoints/step_{step:08}"));
        let mut contents = Contents { params: &task.square.params, buffers: &task.buffers, optimizer: None };
        Checkpoints::new(&folder.path().join("checkpoints"), Keep::ALL, &Group::single())
            .load(&CheckpointSelector::At(path), &mut contents)
            .unwrap();
        task.statistics()
    };
    for step in [10, 12] {
        assert_eq!(steps(step), [step as f64; 4]);
    }
}

/// A validation takes no more samples at once than a micro-batch of training has.
#[test]
fn accumulation_divides_validation() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.train.accumulate = 4;
    let task = Normed::new(0);
    fit(&task, &task.square.params, &task.buffers, &Ranks::data_parallel(&Group::single()), &config).unwrap();
    let counts: Vec<usize> = task.validated.borrow().iter().map(|(_, samples)| *samples).collect();
    assert_eq!(counts, [3, 2].repeat(4));
}
