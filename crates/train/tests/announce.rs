//! Samples that the engine announces, so that they can be read ahead.

use std::cell::RefCell;
use std::collections::VecDeque;

use isobar_collectives::threads;
use isobar_train::config::Resume;
use isobar_train::{BoxError, Coming, Ranks, Step, Task, VariableError, fit};
use rstest::rstest;
use tch::Tensor;

use crate::fit::{DEADLINE, Square, config};

/// A task that checks that the engine asks for what it announced, in that order.
struct Announced {
    square: Square,
    /// Batches of training of this epoch and the next, and of validation.
    coming: RefCell<[VecDeque<Vec<usize>>; 3]>,
}

impl Announced {
    fn new() -> Self {
        Self { square: Square::new(), coming: RefCell::default() }
    }

    fn next(&self, kind: usize, samples: &[usize]) {
        assert_eq!(self.coming.borrow_mut()[kind].pop_front().as_deref(), Some(samples));
    }

    fn left(&self) -> [usize; 3] {
        self.coming.borrow().each_ref().map(VecDeque::len)
    }
}

impl Task for Announced {
    fn train_samples(&self) -> usize {
        self.square.train_samples()
    }

    fn validation_samples(&self) -> usize {
        self.square.validation_samples()
    }

    fn loss(&self, step: Step<'_>, samples: &[usize]) -> Result<Tensor, BoxError> {
        self.next(0, samples);
        self.square.loss(step, samples)
    }

    fn errors(&self, samples: &[usize]) -> Result<Vec<Vec<VariableError>>, BoxError> {
        self.next(2, samples);
        self.square.errors(samples)
    }

    fn announce(&self, coming: Coming, batches: &[&[usize]]) {
        let batches: VecDeque<Vec<usize>> = batches.iter().map(|batch| batch.to_vec()).collect();
        let [train, next, validation] = &mut *self.coming.borrow_mut();
        match coming {
            Coming::Train(0) => *train = batches,
            Coming::Train(_) => {
                assert!(train.is_empty(), "all of the last epoch was asked for");
                let expected = std::mem::take(next);
                assert!(expected.is_empty() || expected == batches, "as announced in the last epoch");
                *train = batches;
            }
            Coming::NextEpoch(_) => *next = batches,
            Coming::Validation => *validation = batches,
            Coming::Rollouts => assert!(batches.is_empty()),
        }
    }
}

/// Announced are an epoch, its validation and the next epoch, as far as the run goes; nothing else is asked for.
#[rstest]
#[case::whole(None, 1)]
#[case::stopped_and_resumed(Some(5), 2)]
#[case::stopped_after_an_epoch(Some(6), 1)]
fn all_that_is_asked_for_is_announced(
    #[case] stop: Option<usize>,
    #[case] accumulate: usize,
    #[values(1, 2)] ranks: usize,
) {
    let folder = tempfile::tempdir().unwrap();
    let run = |stop: Option<usize>, resume: Resume| {
        threads::run(ranks, DEADLINE, |world| {
            let mut config = config(folder.path());
            config.train.max_steps = stop.map(|stop| stop as u64);
            config.train.accumulate = accumulate;
            config.train.validate_every = 2;
            config.checkpoint.resume = resume;
            config.checkpoint.every_steps = 1;
            let task = Announced::new();
            let summary =
                fit(&task, &task.square.params, &[], &Ranks::data_parallel(&world), &config).unwrap();
            assert_eq!(task.left(), [0, 0, 0], "nothing else is announced");
            summary.steps
        })
    };
    if let Some(stop) = stop {
        assert_eq!(run(Some(stop), Resume::Never), vec![stop as u64; ranks]);
    }
    let resume = if stop.is_some() { Resume::Must } else { Resume::Never };
    assert_eq!(run(None, resume), vec![12; ranks]);
}
