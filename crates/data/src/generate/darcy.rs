//! The Darcy data set.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::field::GaussianField;
use super::solver::DarcySolver;
use crate::format::darcy::{CHUNK, DarcyWriter};
use crate::{Error, Result};

/// Options of [`darcy`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DarcyOptions {
    /// Number of samples.
    pub samples: usize,
    /// Cells along each side of the square, at least 2.
    pub size: usize,
    /// Seed. Sample number i of a seed is the same however many samples are generated.
    pub seed: u64,
    /// Threads that solve; 0 takes as many as there are cores. The file does not depend on it.
    pub threads: usize,
}

impl Default for DarcyOptions {
    /// 256 samples on 64 × 64 cells.
    fn default() -> Self {
        Self { samples: 256, size: 64, seed: 0, threads: 0 }
    }
}

/// Generates a data set of Darcy flow, −∇·(a ∇u) = 1 on the unit square with u = 0 on its boundary, and writes it in
/// the layout that [`DarcyFile`](crate::DarcyFile) reads.
///
/// The coefficient a is 12 where a Gaussian random field N(0, (−Δ + 9)⁻²) with zero Neumann boundary is not negative,
/// else 3, as in Li et al. (ICLR 2021); u is solved by [`DarcySolver`] in float64; both are stored as float32. All
/// numbers are dimensionless. The paper solves at 421 points and keeps every so manyth; here the problem is solved at
/// the resolution asked for.
///
/// `progress` is called on the calling thread after each sample, with the number of samples that are ready. A file of the same name is replaced once the new one is whole. Call on one rank.
///
/// ```
/// use isobar_data::generate::{DarcyOptions, darcy};
/// use isobar_data::DarcyFile;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("darcy_16.h5");
/// let options = DarcyOptions { samples: 8, size: 16, seed: 1, ..DarcyOptions::default() };
/// let mut ready = 0;
/// darcy(&options, &path, |samples| ready = samples)?;
/// assert_eq!(ready, 8);
/// let statistics = DarcyFile::open(&path)?.statistics(0..8)?;
/// assert_eq!((statistics.nu.min, statistics.nu.max), (3.0, 12.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If there are no samples or fewer than 2 cells, the folder is missing, the disk is full, or memory is short.
pub fn darcy(options: &DarcyOptions, path: impl AsRef<Path>, mut progress: impl FnMut(usize)) -> Result<()> {
    let &DarcyOptions { samples, size, seed, .. } = options;
    if samples == 0 {
        return Err(Error::Invalid("at least one sample must be generated".to_owned()));
    }
    if size < 2 {
        return Err(Error::Invalid(format!(
            "a random field needs at least 2 x 2 cells, not {size} x {size}"
        )));
    }
    let mut writer = DarcyWriter::create(path, samples, size, SOURCE)?;
    let solver = DarcySolver::new(size)?;
    let field = GaussianField::new(size);
    let make = |sample: usize| make(&field, &solver, seed, sample as u64);

    let (mut nu, mut u) = (Vec::new(), Vec::new());
    let mut ready = 0;
    in_order(samples, threads(options), make, |sample| {
        let sample = sample?;
        nu.extend(sample.nu);
        u.extend(sample.u);
        ready += 1;
        // Whole chunks, so that each is compressed once.
        if ready % CHUNK == 0 || ready == samples {
            writer.append(&nu, &u)?;
            nu.clear();
            u.clear();
        }
        progress(ready);
        Ok(())
    })?;
    writer.finish()
}

const SOURCE: f64 = 1.0;
const HIGH: f64 = 12.0;
const LOW: f64 = 3.0;

struct Sample {
    nu: Vec<f32>,
    u: Vec<f32>,
}

fn make(field: &GaussianField, solver: &DarcySolver, seed: u64, sample: u64) -> Result<Sample> {
    let a: Vec<f64> =
        field.draw(seed, sample)?.into_iter().map(|value| if value >= 0.0 { HIGH } else { LOW }).collect();
    let u = solver.solve(&a, &vec![SOURCE; a.len()])?;
    let single = |values: Vec<f64>| values.into_iter().map(|value| value as f32).collect();
    Ok(Sample { nu: single(a), u: single(u) })
}

fn threads(options: &DarcyOptions) -> usize {
    match options.threads {
        0 => std::thread::available_parallelism().map_or(1, NonZero::get),
        threads => threads,
    }
}

/// Makes items `0..count` on some threads, and consumes them on this one in ascending order.
fn in_order<T: Send>(
    count: usize,
    threads: usize,
    make: impl Fn(usize) -> T + Sync,
    mut consume: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    // Bounded, so that the threads do not run far ahead of a slow disk.
    let (sender, receiver) = mpsc::sync_channel(threads);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(count) {
            let (sender, next, make) = (sender.clone(), &next, &make);
            scope.spawn(move || {
                loop {
                    let item = next.fetch_add(1, Ordering::Relaxed);
                    // Nobody listens any more once consuming has failed.
                    if item >= count || sender.send((item, make(item))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut early = BTreeMap::new();
        let mut due = 0;
        for (item, made) in receiver {
            early.insert(item, made);
            while let Some(made) = early.remove(&due) {
                consume(made)?;
                due += 1;
            }
        }
        Ok(())
    })
}
