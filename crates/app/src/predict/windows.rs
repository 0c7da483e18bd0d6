//! The way of predictions from the ranks to those that write them.

use std::ops::Range;
use std::slice;

use anyhow::Result;
use isobar_collectives::Group;
use isobar_collectives::start::{recv, send};
use isobar_train::FieldLayout;
use tch::Tensor;

use crate::run::all_ok;

/// Most bytes of a box that is stored as one chunk.
const LARGEST: usize = 256 << 20;

/// Ranks whose windows form the fields of a round of samples. Of ranks that hold the same window of the same sample the first one
/// sends it; a rank without a sample or without points sends nothing.
pub(super) struct Windows<'a> {
    world: &'a Group,
    senders: Vec<Sender>,
}

/// A rank and the window that it holds of one sample.
struct Sender {
    rank: usize,
    /// Place of the sample in its round.
    sample: usize,
    points: Vec<Range<usize>>,
}

impl<'a> Windows<'a> {
    /// Finds the sample and the window of each rank in rounds of up to `samples` samples, of which a rank holds at most one: as many
    /// as ranks share, or fewer. A smaller round has the first of these samples. All ranks call.
    pub(super) fn new<L: FieldLayout>(
        layout: &L,
        own: &[Range<usize>],
        samples: usize,
        world: &'a Group,
    ) -> Result<Self> {
        let round: Vec<usize> = (0..samples).collect();
        let described = layout.own(&round).map_err(anyhow::Error::from).and_then(|samples| {
            let points = own.iter().all(|range| !range.is_empty());
            let held = samples.first().filter(|_| points).map(|sample| (sample, own));
            Ok((serde_json::to_vec(&held)?, ()))
        });
        let mut senders: Vec<Sender> = Vec::new();
        for (rank, bytes) in all_ok(world, described)?.1.iter().enumerate() {
            let held: Option<(usize, Vec<Range<usize>>)> = serde_json::from_slice(bytes)?;
            let Some((sample, points)) = held else { continue };
            if !senders.iter().any(|known| known.sample == sample && known.points == points) {
                senders.push(Sender { rank, sample, points });
            }
        }
        Ok(Self { world, senders })
    }

    /// Brings fields of a round's sample to rank 0, which hands them to `write` with their points: window by window where the file
    /// takes windows, so that no rank has a complete frame. `local` is this rank's window of its own samples of the round,
    /// `[sample, channel, spatial…]`. All ranks call, and agree on `by_window`.
    pub(super) fn bring(
        &self,
        (sample, local): (usize, &Tensor),
        by_window: bool,
        mut write: impl FnMut(&[Range<usize>], &Tensor) -> Result<()>,
    ) -> Result<()> {
        let grid: Vec<Range<usize>> = self.grid().into_iter().map(|extent| 0..extent).collect();
        let mut frame = None;
        for sender in self.senders_of(sample) {
            let points = &sender.points;
            let Some(values) = self.pass((sender.rank, 0), points, local, || Ok(local.shallow_clone()))?
            else {
                continue;
            };
            if by_window || *points == grid {
                write(points, &values)?;
                continue;
            }
            let all = match &frame {
                Some(all) => all,
                None => frame.insert(empty_like(&values, &grid)?),
            };
            cut(all, points.iter().cloned())?.f_copy_(&values)?;
        }
        frame.map_or(Ok(()), |frame| write(&grid, &frame))
    }

    /// Sends values of `points` from one rank to another, which gets them; to a rank itself, without communication. The two ranks
    /// call, others may.
    fn pass(
        &self,
        (from, to): (usize, usize),
        points: &[Range<usize>],
        like: &Tensor,
        values: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let rank = self.world.rank();
        if from == rank && to == rank {
            return Ok(Some(values()?));
        }
        if from == rank {
            send(&values()?, to, self.world)?.wait()?;
        }
        if to != rank {
            return Ok(None);
        }
        Ok(Some(recv(&empty_like(like, points)?, from, self.world)?.wait()?))
    }

    /// Ranks that hold a sample of a round, and their windows.
    fn senders_of(&self, sample: usize) -> impl Iterator<Item = &Sender> {
        self.senders.iter().filter(move |sender| sender.sample == sample)
    }

    /// Points of a frame along each dim.
    fn grid(&self) -> Vec<usize> {
        self.over_windows(|range| range.end)
    }

    /// Largest extent of a window along each dim.
    pub(super) fn extents(&self) -> Vec<usize> {
        self.over_windows(Range::len)
    }

    /// Largest of a number of the windows along each dim.
    fn over_windows(&self, number: impl Fn(&Range<usize>) -> usize) -> Vec<usize> {
        let all = self.senders.iter().map(|sender| sender.points.iter().map(&number).collect::<Vec<_>>());
        all.reduce(|one, other| one.into_iter().zip(other).map(|(one, other)| one.max(other)).collect())
            .unwrap_or_default()
    }

    /// Extents of the boxes to store, of so many channels: those of the windows, halved where a box is large.
    pub(super) fn chunk(&self, channels: usize) -> Vec<usize> {
        halved(self.extents(), channels.saturating_mul(size_of::<f32>()))
    }

    /// Brings fields of a round's sample to the ranks that write them: each box of the extents `tile`, counted from the first point,
    /// to the rank that has the most of its points. The others send that rank their part of it. `local` is as in
    /// [`bring`](Self::bring). All ranks call.
    pub(super) fn spread(
        &self,
        (sample, local): (usize, &Tensor),
        tile: &[usize],
        mut write: impl FnMut(&[Range<usize>], &Tensor) -> Result<()>,
    ) -> Result<()> {
        for sender in self.senders_of(sample) {
            for tile in tiles(&sender.points, tile) {
                let points = shared(&sender.points, &tile);
                let places = points.iter().zip(&sender.points);
                let places = places.map(|(range, own)| range.start - own.start..range.end - own.start);
                let part = || Ok(cut(local, places)?.f_contiguous()?);
                let owner = self.owner(sample, &tile);
                if let Some(values) = self.pass((sender.rank, owner), &points, local, part)? {
                    write(&points, &values)?;
                }
            }
        }
        Ok(())
    }

    /// The rank that writes a box of a sample: the first of those that have the most of its points.
    fn owner(&self, sample: usize, tile: &[Range<usize>]) -> usize {
        let mut owner = (0, 0);
        for sender in self.senders_of(sample) {
            let own = shared(&sender.points, tile).iter().map(Range::len).product();
            if own > owner.1 {
                owner = (sender.rank, own);
            }
        }
        owner.0
    }
}

/// Uninitialised values of one sample on these points, with the channels, dtype and device of `like`.
fn empty_like(like: &Tensor, points: &[Range<usize>]) -> Result<Tensor> {
    let channels = like.size().get(1).copied().unwrap_or(0);
    let shape: Vec<i64> =
        [1, channels].into_iter().chain(points.iter().map(|range| range.len() as i64)).collect();
    Ok(Tensor::f_empty(&shape[..], (like.kind(), like.device()))?)
}

/// A view of a box of the spatial dims of `[sample, channel, spatial…]`.
fn cut(fields: &Tensor, points: impl IntoIterator<Item = Range<usize>>) -> Result<Tensor> {
    let mut view = fields.shallow_clone();
    for (dim, range) in points.into_iter().enumerate() {
        view = view.f_narrow(dim as i64 + 2, range.start as i64, range.len() as i64)?;
    }
    Ok(view)
}

/// Halves the largest of the extents until a box of points of so many bytes has at most [`LARGEST`].
fn halved(mut extents: Vec<usize>, bytes: usize) -> Vec<usize> {
    while extents.iter().fold(bytes, |bytes, &extent| bytes.saturating_mul(extent)) > LARGEST {
        match extents.iter_mut().max().filter(|extent| **extent > 1) {
            Some(extent) => *extent = extent.div_ceil(2),
            None => break,
        }
    }
    extents
}

/// The boxes that a window touches.
fn tiles(window: &[Range<usize>], extents: &[usize]) -> Vec<Vec<Range<usize>>> {
    let mut all = vec![Vec::new()];
    for (range, &extent) in window.iter().zip(extents) {
        let extent = extent.max(1);
        let along = range.start / extent..range.end.div_ceil(extent);
        let with = |tile: &Vec<Range<usize>>| -> Vec<Vec<Range<usize>>> {
            along
                .clone()
                .map(|at| [&tile[..], slice::from_ref(&(at * extent..(at + 1) * extent))].concat())
                .collect()
        };
        all = all.iter().flat_map(with).collect();
    }
    all
}

/// Intersection of two boxes.
fn shared(one: &[Range<usize>], other: &[Range<usize>]) -> Vec<Range<usize>> {
    let of = |(one, other): (&Range<usize>, &Range<usize>)| {
        let start = one.start.max(other.start);
        start..one.end.min(other.end).max(start)
    };
    one.iter().zip(other).map(of).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use isobar_collectives::threads;
    use isobar_manager::DeviceMesh;
    use isobar_train::{DenseFields, ShardedFields};
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn large_boxes_are_halved() {
        assert_eq!(halved(vec![512, 1024, 1024], 4), [512, 512, 256]);
        assert_eq!(halved(vec![48, 96], 12), [48, 96]);
        assert_eq!(halved(vec![1, 1], LARGEST + 1), [1, 1]);
    }

    const CHANNELS: i64 = 2;

    /// A round of these samples, `[sample, channel, row, col]`, of different numbers.
    fn round(samples: usize, extents: &[usize]) -> Tensor {
        let shape = [samples as i64, CHANNELS, extents[0] as i64, extents[1] as i64];
        Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu)).view(shape)
    }

    /// A box of fields, `[sample, channel, row, col]`.
    fn window(fields: &Tensor, points: &[Range<usize>]) -> Tensor {
        cut(fields, points.iter().cloned()).unwrap()
    }

    /// Runs a body on thread ranks with rounds of as many samples as ranks share, and with smaller ones: the layout, this rank's
    /// windows of its own samples, and the samples.
    fn on_ranks<T: Send>(
        (shape, names): (&[i64], &[&str]),
        extents: &[usize],
        body: impl Fn(&Windows<'_>, &Tensor, usize) -> T + Sync,
    ) -> Vec<Vec<T>> {
        let ranks = shape.iter().product::<i64>() as usize;
        let found = threads::run(ranks, Duration::from_secs(60), |world| {
            let mesh = DeviceMesh::new(&world, shape, names).unwrap();
            let layout = ShardedFields::new(&mesh, extents).unwrap();
            let points = layout.window(extents).unwrap();
            let most = layout.sharing_ranks();
            let windows = Windows::new(&layout, &points, most, &world).unwrap();
            let of_round = |samples: usize| {
                let numbers: Vec<usize> = (0..samples).collect();
                let own = layout.own(&numbers).unwrap();
                let first = own.first().copied().unwrap_or_default() as i64;
                let own = round(samples, extents).narrow(0, first, own.len() as i64);
                body(&windows, &window(&own, &points).contiguous(), samples)
            };
            (1..=most).map(of_round).collect::<Vec<T>>()
        });
        let rounds = found[0].len();
        let mut found: Vec<_> = found.into_iter().map(Vec::into_iter).collect();
        (0..rounds).map(|_| found.iter_mut().map(|rank| rank.next().unwrap()).collect()).collect()
    }

    /// Extents that do not divide, ranks without points, and rounds in which one half of the ranks has no sample.
    #[rstest::rstest]
    #[case(&[2], &["domain"], &[5, 3])]
    #[case(&[3], &["domain"], &[7, 4])]
    #[case(&[4], &["domain"], &[3, 4])]
    #[case(&[2, 2], &["domain", "domain_y"], &[5, 3])]
    #[case(&[2, 2], &["data", "domain"], &[5, 3])]
    #[case(&[2, 2], &["model", "domain"], &[5, 3])]
    #[case(&[3], &["data"], &[5, 3])]
    fn windows_form_the_frames_and_rank_0_has_no_frame_in_between(
        #[case] shape: &[i64],
        #[case] names: &[&str],
        #[case] extents: &[usize],
        #[values(true, false)] by_window: bool,
    ) {
        let is_split = names.contains(&"domain");
        let rounds = on_ranks((shape, names), extents, |windows, local, samples| {
            let made = round(samples, extents).full_like(f64::NAN);
            let mut largest = 0;
            for sample in 0..samples {
                let write = |points: &[Range<usize>], values: &Tensor| {
                    largest = largest.max(values.numel());
                    window(&made.narrow(0, sample as i64, 1), points).copy_(values);
                    Ok(())
                };
                windows.bring((sample, local), by_window, write).unwrap();
            }
            (Vec::<f64>::try_from(made.flatten(0, -1)).unwrap(), largest)
        });
        for (at, ranks) in rounds.iter().enumerate() {
            let full = round(at + 1, extents);
            assert_eq!(
                ranks[0].0,
                Vec::<f64>::try_from(full.flatten(0, -1)).unwrap(),
                "of {} samples",
                at + 1
            );
            let frame = full.numel() / (at + 1);
            assert_eq!(ranks[0].1 == frame, !(is_split && by_window), "a complete frame on rank 0");
            assert!(ranks[1..].iter().all(|(_, largest)| *largest == 0), "only rank 0 writes");
        }
    }

    /// Each box of a sample goes whole to one rank that has the sample, and together they are the frame.
    #[rstest::rstest]
    #[case(&[2], &["domain"], &[5, 3], &[3, 3])]
    #[case(&[3], &["domain"], &[7, 4], &[2, 3])]
    #[case(&[4], &["domain"], &[3, 4], &[1, 4])]
    #[case(&[4], &["domain"], &[10, 4], &[3, 4])]
    #[case(&[2, 2], &["domain", "domain_y"], &[5, 3], &[2, 2])]
    #[case(&[2, 2], &["data", "domain"], &[5, 3], &[3, 3])]
    #[case(&[2], &["data"], &[5, 3], &[3, 3])]
    fn boxes_are_written_by_one_rank_each(
        #[case] shape: &[i64],
        #[case] names: &[&str],
        #[case] extents: &[usize],
        #[case] tile: &[usize],
    ) {
        let rounds = on_ranks((shape, names), extents, |windows, local, samples| {
            let mut written = Vec::new();
            for sample in 0..samples {
                let full = round(samples, extents).narrow(0, sample as i64, 1);
                let write = |points: &[Range<usize>], values: &Tensor| {
                    assert!(values.equal(&window(&full, points)));
                    for row in points[0].clone() {
                        written.extend(points[1].clone().map(|col| (sample, row, col)));
                    }
                    Ok(())
                };
                windows.spread((sample, local), tile, write).unwrap();
            }
            written
        });
        for (at, ranks) in rounds.iter().enumerate() {
            let mut all: Vec<(usize, usize, usize)> = ranks.iter().flatten().copied().collect();
            all.sort_unstable();
            let frames = (0..=at).flat_map(|sample| (0..extents[0]).map(move |row| (sample, row)));
            let frames = frames.flat_map(|(sample, row)| (0..extents[1]).map(move |col| (sample, row, col)));
            assert_eq!(all, frames.collect::<Vec<_>>(), "each point once");
            let tiles = |points: &Vec<(usize, usize, usize)>| -> BTreeSet<(usize, usize, usize)> {
                points.iter().map(|(sample, row, col)| (*sample, row / tile[0], col / tile[1])).collect()
            };
            let count: usize = ranks.iter().map(|points| tiles(points).len()).sum();
            let of_frame = extents[0].div_ceil(tile[0]) * extents[1].div_ceil(tile[1]);
            assert_eq!(count, (at + 1) * of_frame, "each box by one rank");
        }
        let largest = rounds.last().unwrap();
        assert!(largest.iter().filter(|points| !points.is_empty()).count() > 1, "several ranks write");
    }

    /// Each rank has complete fields: rank 0 writes its own, and nothing is sent.
    #[test]
    fn complete_fields_are_written_by_rank_0() {
        let calls = threads::run(2, Duration::from_secs(60), |world| {
            let windows = Windows::new(&DenseFields, &[0..2, 0..3], 1, &world).unwrap();
            let fields = Tensor::ones([1, 1, 2, 3], (Kind::Float, Device::Cpu));
            let mut calls = 0;
            for by_window in [true, false] {
                let write = |points: &[Range<usize>], values: &Tensor| {
                    calls += 1;
                    assert_eq!((points.to_vec(), values.size()), (vec![0..2, 0..3], vec![1, 1, 2, 3]));
                    Ok(())
                };
                windows.bring((0, &fields), by_window, write).unwrap();
            }
            calls
        });
        assert_eq!(calls, [2, 0]);
    }
}
