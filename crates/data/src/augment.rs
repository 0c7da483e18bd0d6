//! Random symmetries of training samples.

use isobar_array::{Array, Generator, random::philox4x32};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Random augmentation of each training sample, the same for its input and target.
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

/// A symmetry of the square.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Symmetry(u8);

impl Augment {
    /// `fields` `[sample, channel, spatial…]` with each sample's symmetry applied. The symmetry is drawn from `seed`, `epoch` and
    /// the sample's number in the data set, so that it does not depend on which rank holds the sample: fields of the same
    /// samples turn alike. What is split over ranks stays split as it was.
    ///
    /// `samples` are the numbers of the samples, in order.
    ///
    /// # Errors
    /// If `samples` are not as many as the fields have, the symmetry needs squares `[sample, channel, x, y]` and the fields are
    /// none, or an exchange fails.
    pub fn apply<A: Array>(self, seed: u64, epoch: u64, samples: &[usize], fields: &A) -> Result<A> {
        let shape = fields.shape();
        let count = shape.first().copied().unwrap_or(0);
        if count as usize != samples.len() {
            return Err(Error::Invalid(format!(
                "{} sample numbers were given for a batch of {count}",
                samples.len()
            )));
        }
        if self == Self::None {
            return Ok(fields.shallow_clone());
        }
        let &[_, _, rows, cols] = shape.as_slice() else {
            return Err(Error::Invalid(format!(
                "the symmetries of the square need fields [sample, channel, x, y], not {shape:?}"
            )));
        };
        if rows != cols {
            return Err(Error::Invalid(format!(
                "the symmetries of the square need square fields, not {rows} x {cols}"
            )));
        }
        if count == 0 {
            return Ok(fields.shallow_clone());
        }
        let turned = (0..).zip(samples).map(|(at, &sample)| {
            let own = fields.narrow(0, at, 1)?;
            Symmetry::drawn(seed, epoch, sample as u64).turn(&own)?.redistribute_like(&own)
        });
        let turned = turned.collect::<isobar_array::Result<Vec<_>>>()?;
        Ok(A::cat(&turned.iter().collect::<Vec<_>>(), 0)?)
    }
}

impl Symmetry {
    fn drawn(seed: u64, epoch: u64, sample: u64) -> Self {
        let key = Generator::new(seed).fork("square").seed();
        let words = |number: u64| [number as u32, (number >> 32) as u32];
        let ([a, b], [c, d]) = (words(sample), words(epoch));
        Self((philox4x32([a, b, c, d], words(key))[0] % 8) as u8)
    }

    /// Bit 0 flips x, bit 1 flips y, bit 2 swaps x and y afterwards: all eight symmetries, each once.
    fn turn<A: Array>(self, field: &A) -> isobar_array::Result<A> {
        let flips: Vec<i64> = [-2, -1]
            .into_iter()
            .zip([1, 2])
            .filter(|(_, bit)| self.0 & bit != 0)
            .map(|(dim, _)| dim)
            .collect();
        let flipped = if flips.is_empty() { field.shallow_clone() } else { field.flip(&flips)? };
        if self.0 & 4 != 0 { flipped.transpose(-2, -1) } else { Ok(flipped) }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    fn fields(count: i64, rows: i64, cols: i64) -> Tensor {
        Tensor::arange(count * rows * cols, (Kind::Float, Device::Cpu)).view([count, 1, rows, cols])
    }

    #[test]
    fn the_eight_symmetries_are_all_different() {
        let square = fields(1, 3, 3);
        let turned: Vec<Tensor> = (0..8).map(|symmetry| Symmetry(symmetry).turn(&square).unwrap()).collect();
        for (i, a) in turned.iter().enumerate() {
            assert!(turned[..i].iter().all(|b| a != b), "symmetry {i}");
        }
    }

    #[test]
    fn every_symmetry_occurs_and_input_and_target_turn_together() {
        let input = fields(64, 3, 3);
        let samples: Vec<usize> = (0..64).collect();
        let turned = Augment::Square.apply(1, 2, &samples, &input).unwrap();
        assert_eq!(Augment::Square.apply(1, 2, &samples, &(&input * 10.0)).unwrap(), &turned * 10.0);
        let used: std::collections::BTreeSet<Symmetry> = (0..64)
            .flat_map(|sample| {
                let (was, is) = (input.narrow(0, sample, 1), turned.narrow(0, sample, 1));
                (0..8).map(Symmetry).filter(move |symmetry| symmetry.turn(&was).unwrap() == is)
            })
            .collect();
        assert_eq!(used.len(), 8);
        assert_ne!(Augment::Square.apply(1, 3, &samples, &input).unwrap(), turned);
    }

    #[test]
    fn a_sample_is_turned_the_same_on_any_number_of_ranks() {
        let whole = fields(7, 4, 4);
        let samples = [9, 3, 250, 4, 17, 8, 1];
        let expected = Augment::Square.apply(5, 1, &samples, &whole).unwrap();
        for size in 1..=8 {
            let mut start = 0;
            let parts: Vec<Tensor> = (0..size)
                .map(|rank| {
                    let mine = crate::part(&samples, rank, size);
                    let length = mine.len() as i64;
                    let local = whole.narrow(0, start, length);
                    start += length;
                    Augment::Square.apply(5, 1, mine, &local).unwrap()
                })
                .collect();
            assert_eq!(Tensor::cat(&parts, 0), expected, "{size} ranks");
        }
    }

    #[test]
    fn misfits_are_refused() {
        let error = Augment::Square.apply(0, 0, &[0], &fields(1, 2, 3)).unwrap_err();
        assert_eq!(error.to_string(), "the symmetries of the square need square fields, not 2 x 3");
        let volumes = fields(1, 4, 2).view([1, 1, 2, 2, 2]);
        assert_eq!(Augment::None.apply(0, 0, &[0], &volumes).unwrap(), volumes);
        let error = Augment::Square.apply(0, 0, &[0], &volumes).unwrap_err();
        assert!(error.to_string().ends_with("[sample, channel, x, y], not [1, 1, 2, 2, 2]"), "{error}");
        let error = Augment::None.apply(0, 0, &[0, 1], &fields(1, 2, 2)).unwrap_err();
        assert_eq!(error.to_string(), "2 sample numbers were given for a batch of 1");
    }
}
