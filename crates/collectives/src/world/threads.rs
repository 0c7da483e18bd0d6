//! Ranks that are threads of one process, for tests and simulation. CPU tensors only: libtorch has one engine thread a
//! CUDA device for the whole process, so two ranks whose backward passes wait for each other there would lock.

use std::time::Duration;

use crate::backend::threads::Threads;
use crate::engine::group::Group;

/// Runs `body` on `ranks` threads, each with its own [`Group`] of all of them, and gives back what they returned, in
/// rank order.
///
/// # Panics
///
/// Panics if a rank's body panics, with the same payload, once all other ranks have ended (their waits fail).
///
/// ```
/// use std::time::Duration;
/// use isobar_collectives::{ReduceOp, all_reduce, threads};
/// use tch::Tensor;
///
/// let sums = threads::run(3, Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[group.rank() as f64]);
///     all_reduce(&x, ReduceOp::Sum, &group).unwrap().double_value(&[0])
/// });
/// assert_eq!(sums, [3.0, 3.0, 3.0]);
/// ```
pub fn run<T: Send>(ranks: usize, deadline: Duration, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = world(ranks, deadline);
    let body = &body;
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                scope.spawn(move || {
                    let watch = group.clone();
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(group)));
                    if result.is_err() {
                        watch.leave("its thread panicked");
                    }
                    result
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(Err)).collect()
    });
    results
        .into_iter()
        .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        .collect()
}

/// One group of `ranks` for each of as many threads; the caller starts the threads.
pub fn world(ranks: usize, deadline: Duration) -> Vec<Group> {
    let threads = Threads::connect(ranks).into_iter().enumerate();
    threads.map(|(rank, backend)| Group::world(Box::new(backend), rank, ranks, deadline)).collect()
}
