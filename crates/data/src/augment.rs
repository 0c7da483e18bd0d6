//! Random symmetries of training samples.

use isobar_shard::Generator;
use isobar_shard::random::philox4x32;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::{Batch, Error, Result};

/// What is done at random to each training sample, the same to its input and its target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Augment {
    /// Nothing.
    #[default]
    None,
    /// One of the eight symmetries of the square (flips along x and y, transposition), each as likely. Right for
    /// equations that do not know left from right or x from y, such as Darcy flow with a constant source: the solution
    /// of the turned problem is the turned solution.
    Square,
}

impl Augment {
    /// The batch with each sample's symmetry applied. The symmetry is drawn from `seed`, `epoch` and the sample's
    /// number in the data set, so that it does not depend on which rank holds the sample.
    ///
    /// `samples` are the numbers of the batch's samples, in order.
    ///
    /// # Errors
    /// When `samples` are not as many as the batch has, or fields are not square where the symmetry needs it.
    pub fn apply(self, seed: u64, epoch: u64, samples: &[usize], batch: &Batch) -> Result<Batch> {
        let (count, rows, cols) = batch.sizes()?;
        if count != samples.len() {
            return Err(Error::Invalid(format!(
                "{} sample numbers were given for a batch of {count}",
                samples.len()
            )));
        }
        match self {
            Self::None => Ok(batch.shallow_clone()),
            Self::Square if rows != cols => Err(Error::Invalid(format!(
                "the symmetries of the square need square fields, not {rows} x {cols}"
            ))),
            Self::Square if count == 0 => Ok(batch.shallow_clone()),
            Self::Square => {
                let symmetries: Vec<u32> =
                    samples.iter().map(|&sample| symmetry(seed, epoch, sample as u64)).collect();
                Ok(Batch { nu: turn_each(&batch.nu, &symmetries)?, u: turn_each(&batch.u, &symmetries)? })
            }
        }
    }
}

/// One of 0..8.
fn symmetry(seed: u64, epoch: u64, sample: u64) -> u32 {
    let key = Generator::new(seed).fork("square").seed();
    let words = |number: u64| [number as u32, (number >> 32) as u32];
    let ([a, b], [c, d]) = (words(sample), words(epoch));
    philox4x32([a, b, c, d], words(key))[0] % 8
}

/// Applies symmetry `symmetries[i]` to sample i of `[sample, channel, x, y]`.
fn turn_each(field: &Tensor, symmetries: &[u32]) -> Result<Tensor> {
    let turned = (0..)
        .zip(symmetries)
        .map(|(sample, &symmetry)| turn(&field.f_narrow(0, sample, 1)?, symmetry))
        .collect::<Result<Vec<_>>>()?;
    Ok(Tensor::f_cat(&turned, 0)?)
}

/// Bit 0 flips x, bit 1 flips y, bit 2 swaps x and y afterwards: all eight symmetries, each once.
fn turn(field: &Tensor, symmetry: u32) -> Result<Tensor> {
    let flips: Vec<i64> =
        [-2, -1].into_iter().zip([1, 2]).filter(|(_, bit)| symmetry & bit != 0).map(|(dim, _)| dim).collect();
    let flipped = if flips.is_empty() { field.shallow_clone() } else { field.f_flip(flips)? };
    Ok(if symmetry & 4 != 0 { flipped.f_transpose(-2, -1)? } else { flipped })
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn batch(count: i64, rows: i64, cols: i64) -> Batch {
        let nu = Tensor::arange(count * rows * cols, (Kind::Float, Device::Cpu)).view([count, 1, rows, cols]);
        Batch { u: &nu * 10.0, nu }
    }

    #[test]
    fn the_eight_symmetries_are_all_different() {
        let square = batch(1, 3, 3).nu;
        let turned: Vec<Tensor> = (0..8).map(|symmetry| turn(&square, symmetry).unwrap()).collect();
        for (i, a) in turned.iter().enumerate() {
            assert!(turned[..i].iter().all(|b| a != b), "symmetry {i}");
        }
    }

    #[test]
    fn every_symmetry_occurs_and_input_and_target_turn_together() {
        let whole = batch(64, 3, 3);
        let samples: Vec<usize> = (0..64).collect();
        let turned = Augment::Square.apply(1, 2, &samples, &whole).unwrap();
        assert_eq!(turned.u, &turned.nu * 10.0);
        let used: std::collections::BTreeSet<u32> = (0..64)
            .flat_map(|sample| {
                let (was, is) = (whole.nu.narrow(0, sample, 1), turned.nu.narrow(0, sample, 1));
                (0..8).filter(move |&symmetry| turn(&was, symmetry).unwrap() == is)
            })
            .collect();
        assert_eq!(used.len(), 8);
        assert_ne!(Augment::Square.apply(1, 3, &samples, &whole).unwrap().nu, turned.nu);
    }

    #[test]
    fn a_sample_is_turned_the_same_on_any_number_of_ranks() {
        let whole = batch(7, 4, 4);
        let samples = [9, 3, 250, 4, 17, 8, 1];
        let expected = Augment::Square.apply(5, 1, &samples, &whole).unwrap();
        for size in 1..=8 {
            let mut start = 0;
            let parts: Vec<Tensor> = (0..size)
                .map(|rank| {
                    let mine = crate::part(&samples, rank, size);
                    let length = mine.len() as i64;
                    let local =
                        Batch { nu: whole.nu.narrow(0, start, length), u: whole.u.narrow(0, start, length) };
                    start += length;
                    Augment::Square.apply(5, 1, mine, &local).unwrap().nu
                })
                .collect();
            assert_eq!(Tensor::cat(&parts, 0), expected.nu, "{size} ranks");
        }
    }

    #[test]
    fn misfits_are_refused() {
        let error = Augment::Square.apply(0, 0, &[0], &batch(1, 2, 3)).unwrap_err();
        assert_eq!(error.to_string(), "the symmetries of the square need square fields, not 2 x 3");
        let error = Augment::None.apply(0, 0, &[0, 1], &batch(1, 2, 2)).unwrap_err();
        assert_eq!(error.to_string(), "2 sample numbers were given for a batch of 1");
    }
}
