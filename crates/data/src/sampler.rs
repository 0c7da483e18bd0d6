//! Order of the samples of an epoch, and the part of them that a rank takes.

use std::ops::Range;

use isobar_array::Generator;

use crate::{Error, Result};

/// The order of the samples of each epoch, cut into global batches.
///
/// The order depends on the seed and the epoch alone, so that 1 and N ranks train on the same global batches; each
/// rank takes its [`part`] of a batch. Nothing is communicated and nothing is remembered: a resumed run asks for the
/// epoch that it was in.
///
/// ```
/// use isobar_data::{Sampler, part};
///
/// let sampler = Sampler::new(10, 4, 42, true)?;
/// let batches = sampler.epoch(0);
/// assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 2]);
///
/// // Three ranks share the batch of 4 as 2, 1 and 1 samples.
/// let shares: Vec<_> = (0..3).map(|rank| part(&batches[0], rank, 3)).collect();
/// assert_eq!(shares.concat(), batches[0]);
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sampler {
    len: usize,
    global_batch: usize,
    seed: u64,
    shuffle: bool,
    drop_last: bool,
}

impl Sampler {
    /// Over samples `0..len` in batches of `global_batch`, counted over all ranks. Without `shuffle` every epoch goes
    /// through them in ascending order.
    ///
    /// # Errors
    /// If `len` or `global_batch` is 0.
    pub fn new(len: usize, global_batch: usize, seed: u64, shuffle: bool) -> Result<Self> {
        if len == 0 {
            return Err(Error::Invalid("a sampler needs at least one sample".to_owned()));
        }
        if global_batch == 0 {
            return Err(Error::Invalid("the global batch must hold at least one sample".to_owned()));
        }
        Ok(Self { len, global_batch, seed, shuffle, drop_last: false })
    }

    /// Drops a last batch that is not full, if `drop_last` is true. By default it is kept.
    #[must_use]
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Number of global batches in an epoch: 0 where the only batch is not full and left out.
    pub fn batches_per_epoch(&self) -> usize {
        if self.drop_last { self.len / self.global_batch } else { self.len.div_ceil(self.global_batch) }
    }

    /// The global batches of epoch number `epoch`. Each sample is in one batch at most, and in exactly one unless the
    /// last batch is left out.
    pub fn epoch(&self, epoch: u64) -> Vec<Vec<usize>> {
        let order = if self.shuffle { shuffled(self.len, self.seed, epoch) } else { (0..self.len).collect() };
        order.chunks(self.global_batch).take(self.batches_per_epoch()).map(<[usize]>::to_vec).collect()
    }
}

/// The contiguous part of a global batch that `rank` of `size` ranks takes: the first `batch.len() % size` ranks take
/// one sample more than the others. It is empty where there are fewer samples than ranks, and for a rank outside
/// `0..size`. The parts of all ranks, one after the other, are the batch.
pub fn part(batch: &[usize], rank: usize, size: usize) -> &[usize] {
    if rank >= size {
        return &[];
    }
    let (least, extra) = (batch.len() / size, batch.len() % size);
    let start = rank * least + rank.min(extra);
    &batch[start..start + least + usize::from(rank < extra)]
}

/// Splits samples `0..len` into the first `train` for training and the others for validation (which may be none).
///
/// ```
/// assert_eq!(isobar_data::split(256, 224)?, (0..224, 224..256));
/// # Ok::<(), isobar_data::Error>(())
/// ```
///
/// # Errors
/// If `train` is 0 or more than `len`.
pub fn split(len: usize, train: usize) -> Result<(Range<usize>, Range<usize>)> {
    if train == 0 || train > len {
        return Err(Error::Invalid(format!(
            "{train} training samples can't be taken from {len}: expected 1 to {len}"
        )));
    }
    Ok((0..train, train..len))
}

/// As [`split`], by the number of validation samples: they are the last `validation`.
///
/// ```
/// assert_eq!(isobar_data::split_validation(256, 32)?, (0..224, 224..256));
/// # Ok::<(), isobar_data::Error>(())
/// ```
///
/// # Errors
/// If fewer than one sample is left for training.
pub fn split_validation(len: usize, validation: usize) -> Result<(Range<usize>, Range<usize>)> {
    match len.checked_sub(validation) {
        Some(train) if train > 0 => split(len, train),
        _ => Err(Error::Invalid(format!(
            "{validation} validation samples of {len} leave none for training: expected fewer than {len}"
        ))),
    }
}

/// Epoch `e` is draw number `e` of a generator of its own.
fn shuffled(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let generator = Generator::resume(Generator::new(seed).fork("shuffle").seed(), epoch);
    generator.permutation(len).into_iter().map(|sample| sample as usize).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_sample_is_visited_once(len in 1_usize..300, batch in 1_usize..40, seed: u64, epoch: u64) {
            let sampler = Sampler::new(len, batch, seed, true).unwrap();
            let batches = sampler.epoch(epoch);
            prop_assert_eq!(batches.len(), sampler.batches_per_epoch());
            prop_assert!(batches[..batches.len() - 1].iter().all(|b| b.len() == batch));
            let mut all = batches.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..len).collect::<Vec<_>>());
        }

        #[test]
        fn drop_last_leaves_only_full_batches(len in 1_usize..300, batch in 1_usize..40, seed: u64) {
            let sampler = Sampler::new(len, batch, seed, true).unwrap();
            let kept = sampler.clone().drop_last(true).epoch(3);
            prop_assert_eq!(kept.len(), len / batch);
            prop_assert_eq!(&kept[..], &sampler.epoch(3)[..len / batch]);
        }

        #[test]
        fn ranks_share_a_batch_without_overlap_or_loss(len in 0_usize..50, size in 1_usize..12) {
            let batch: Vec<usize> = (100..100 + len).collect();
            let parts: Vec<_> = (0..size).map(|rank| part(&batch, rank, size)).collect();
            prop_assert_eq!(parts.concat(), batch.clone());
            let sizes = parts.iter().map(|p| p.len());
            prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
        }

        #[test]
        fn splits_are_a_partition(len in 1_usize..1000, at in 0_usize..1000) {
            let at = 1 + at % len;
            let (train, validation) = split(len, at).unwrap();
            prop_assert_eq!((train.start, train.end, validation.start, validation.end), (0, at, at, len));
            prop_assert_eq!(split_validation(len, len - at).unwrap(), (train, validation));
        }
    }

    #[test]
    fn epochs_and_seeds_have_their_own_orders_which_are_repeatable() {
        let order = |seed, epoch| Sampler::new(100, 100, seed, true).unwrap().epoch(epoch).concat();
        assert_eq!(order(1, 0), order(1, 0));
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_ne!(order(1, 0), (0..100).collect::<Vec<_>>());
        let plain = Sampler::new(100, 7, 1, false).unwrap();
        assert_eq!(plain.epoch(5).concat(), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn the_order_of_a_seed_never_changes() {
        // Runs are resumed in the middle of an epoch, by later versions too.
        assert_eq!(Sampler::new(8, 8, 42, true).unwrap().epoch(0).concat(), [1, 5, 7, 6, 0, 4, 3, 2]);
    }

    #[test]
    fn all_permutations_are_about_as_likely() {
        let mut counts = std::collections::BTreeMap::new();
        for epoch in 0..6000 {
            *counts.entry(Sampler::new(3, 3, 9, true).unwrap().epoch(epoch).concat()).or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|&count| count.abs_diff(1000) < 150), "{counts:?}");
    }

    #[test]
    fn senseless_arguments_are_refused() {
        let message = |result: Result<Sampler>| result.unwrap_err().to_string();
        assert_eq!(message(Sampler::new(0, 4, 0, true)), "a sampler needs at least one sample");
        assert_eq!(message(Sampler::new(4, 0, 0, true)), "the global batch must hold at least one sample");
        assert_eq!(
            split(4, 5).unwrap_err().to_string(),
            "5 training samples can't be taken from 4: expected 1 to 4"
        );
        assert!(split(4, 0).is_err());
        assert!(split_validation(4, 4).is_err() && split_validation(4, 5).is_err());
        assert!(part(&[1, 2], 2, 2).is_empty() && part(&[1, 2], 0, 0).is_empty());
    }
}
