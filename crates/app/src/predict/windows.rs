//! The way of predictions from the ranks to those that write them.

use std::ops::Range;
use std::slice;

use anyhow::Result;
use isobar_array::{Array, Local};
use isobar_collectives::Group;
use isobar_collectives::start::{recv, send};
use isobar_train::{BoxError, FieldLayout};
use tch::Tensor;

use crate::run::all_ok;

/// Most bytes of a box that is stored as one chunk.
const LARGEST: usize = 256 << 20;

/// Ranks whose windows form a field, and the window of each. A rank whose window another one has too is left out, as is one
/// without points.
pub(super) struct Windows<'a> {
    world: &'a Group,
    senders: Vec<(usize, Vec<Range<usize>>)>,
}

impl<'a> Windows<'a> {
    /// Finds the window of each rank, of the samples that are predicted one by one. All ranks call.
    pub(super) fn new<L: FieldLayout>(layout: &L, own: &[Range<usize>], world: &'a Group) -> Result<Self> {
        let described = layout.own(&[0]).map_err(anyhow::Error::from).and_then(|samples| {
            let points = own.iter().all(|range| !range.is_empty());
            let window = (!samples.is_empty() && points).then_some(own);
            Ok((serde_json::to_vec(&window)?, ()))
        });
        let mut senders: Vec<(usize, Vec<Range<usize>>)> = Vec::new();
        for (rank, bytes) in all_ok(world, described)?.1.iter().enumerate() {
            let window: Option<Vec<Range<usize>>> = serde_json::from_slice(bytes)?;
            match window {
                Some(window) if !senders.iter().any(|(_, known)| *known == window) => {
                    senders.push((rank, window))
                }
                _ => (),
            }
        }
        Ok(Self { world, senders })
    }

    /// Brings fields of one sample to rank 0, which hands them to `write` with their points: window by window where the file
    /// takes windows, so that no rank has a complete frame. All ranks call, and agree on `by_window`.
    pub(super) fn bring<L: FieldLayout>(
        &self,
        layout: &L,
        fields: &L::Array,
        by_window: bool,
        mut write: impl FnMut(&[Range<usize>], &Tensor) -> Result<()>,
    ) -> Result<()> {
        let rank = self.world.rank();
        if !by_window {
            let full = fields.full_tensor()?;
            let points: Vec<Range<usize>> =
                full.size().iter().skip(2).map(|&extent| 0..extent as usize).collect();
            return if rank == 0 { write(&points, &full) } else { Ok(()) };
        }
        let local = boxed(layout.local(fields))?;
        let channels = fields.shape().get(1).copied().unwrap_or(0);
        for (sender, points) in &self.senders {
            if *sender == 0 && rank == 0 {
                write(points, &local)?;
            } else if *sender == rank {
                send(&local, 0, self.world)?.wait()?;
            } else if rank == 0 {
                let extents = points.iter().map(|range| range.len() as i64);
                let shape: Vec<i64> = [1, channels].into_iter().chain(extents).collect();
                let like = Tensor::f_empty(&shape[..], (local.kind(), local.device()))?;
                write(points, &recv(&like, *sender, self.world)?.wait()?)?;
            }
        }
        Ok(())
    }

    /// Largest extent of a window along each dim.
    pub(super) fn extents(&self) -> Vec<usize> {
        let lengths = |window: &[Range<usize>]| -> Vec<usize> { window.iter().map(Range::len).collect() };
        let all = self.senders.iter().map(|(_, window)| lengths(window));
        all.reduce(|one, other| one.into_iter().zip(other).map(|(one, other)| one.max(other)).collect())
            .unwrap_or_default()
    }

    /// Extents of the boxes to store, of so many channels: those of the windows, halved where a box is large.
    pub(super) fn chunk(&self, channels: usize) -> Vec<usize> {
        halved(self.extents(), channels.saturating_mul(size_of::<f32>()))
    }

    /// Brings fields of one sample to the ranks that write them: each box of the extents `tile`, counted from the first point, to
    /// the rank that has the most of its points. The others send that rank what they have of it. All ranks call.
    pub(super) fn spread<L: FieldLayout>(
        &self,
        layout: &L,
        fields: &L::Array,
        tile: &[usize],
        mut write: impl FnMut(&[Range<usize>], &Tensor) -> Result<()>,
    ) -> Result<()> {
        let rank = self.world.rank();
        let local = boxed(layout.local(fields))?;
        let channels = fields.shape().get(1).copied().unwrap_or(0);
        for (sender, window) in &self.senders {
            for tile in tiles(window, tile) {
                let points = shared(window, &tile);
                let owner = self.owner(&tile);
                let part = || -> Result<Tensor> {
                    let mut part = local.shallow_clone();
                    for (dim, (range, own)) in points.iter().zip(window).enumerate() {
                        part = part.f_narrow(
                            dim as i64 + 2,
                            (range.start - own.start) as i64,
                            range.len() as i64,
                        )?;
                    }
                    Ok(part.f_contiguous()?)
                };
                if *sender == owner {
                    if owner == rank {
                        write(&points, &part()?)?;
                    }
                } else if *sender == rank {
                    send(&part()?, owner, self.world)?.wait()?;
                } else if owner == rank {
                    let extents = points.iter().map(|range| range.len() as i64);
                    let shape: Vec<i64> = [1, channels].into_iter().chain(extents).collect();
                    let like = Tensor::f_empty(&shape[..], (local.kind(), local.device()))?;
                    write(&points, &recv(&like, *sender, self.world)?.wait()?)?;
                }
            }
        }
        Ok(())
    }

    /// The rank that writes a box: the first of those that have the most of its points.
    fn owner(&self, tile: &[Range<usize>]) -> usize {
        let points = |window: &[Range<usize>]| shared(window, tile).iter().map(Range::len).product::<usize>();
        let mut owner = (0, 0);
        for (rank, window) in &self.senders {
            let own = points(window);
            if own > owner.1 {
                owner = (*rank, own);
            }
        }
        owner.0
    }
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

fn boxed<T>(result: Result<T, BoxError>) -> Result<T> {
    result.map_err(anyhow::Error::from_boxed)
}

#[cfg(test)]
mod tests {
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

    /// Extents that do not divide, ranks without points, and samples that one half of the ranks has.
    #[rstest::rstest]
    #[case(&[2], &["domain"], &[5, 3])]
    #[case(&[3], &["domain"], &[7, 4])]
    #[case(&[4], &["domain"], &[3, 4])]
    #[case(&[2, 2], &["domain", "domain_y"], &[5, 3])]
    #[case(&[2, 2], &["data", "domain"], &[5, 3])]
    #[case(&[2, 2], &["model", "domain"], &[5, 3])]
    fn windows_form_the_frame_and_none_is_all_of_it(
        #[case] shape: &[i64],
        #[case] names: &[&str],
        #[case] extents: &[usize],
    ) {
        let points: usize = extents.iter().product();
        let full = Tensor::arange(2 * points as i64, (Kind::Double, Device::Cpu));
        let full = full.view([1, 2, extents[0] as i64, extents[1] as i64]);
        let full = Vec::<f64>::try_from(full.flatten(0, -1)).unwrap();
        let ranks = shape.iter().product::<i64>() as usize;
        let found = threads::run(ranks, Duration::from_secs(60), |world| {
            let mesh = DeviceMesh::new(&world, shape, names).unwrap();
            let layout = ShardedFields::new(&mesh, extents).unwrap();
            let own = layout.window(extents).unwrap();
            let whole = Tensor::from_slice(&full).view([1, 2, extents[0] as i64, extents[1] as i64]);
            let samples = layout.own(&[0]).unwrap().len() as i64;
            let part = |at: &Range<usize>| (at.start as i64, at.len() as i64);
            let (rows, cols) = (part(&own[0]), part(&own[1]));
            let local = whole.narrow(0, 0, samples).narrow(2, rows.0, rows.1).narrow(3, cols.0, cols.1);
            let fields = layout.array(&local.contiguous(), 1).unwrap();
            let windows = Windows::new(&layout, &own, &world).unwrap();
            let made = Tensor::full(
                [1, 2, extents[0] as i64, extents[1] as i64],
                f64::NAN,
                (Kind::Double, Device::Cpu),
            );
            let mut largest = 0;
            windows
                .bring(&layout, &fields, true, |points, values| {
                    largest = largest.max(values.numel());
                    let (rows, cols) = (part(&points[0]), part(&points[1]));
                    made.narrow(2, rows.0, rows.1).narrow(3, cols.0, cols.1).copy_(values);
                    Ok(())
                })
                .unwrap();
            (Vec::<f64>::try_from(made.flatten(0, -1)).unwrap(), largest)
        });
        assert_eq!(found[0].0, full);
        assert!(found[0].1 < full.len(), "no complete frame on rank 0");
        assert!(found[1..].iter().all(|(_, largest)| *largest == 0), "only rank 0 writes");
    }

    /// Each box goes whole to one rank, and together they are the frame.
    #[rstest::rstest]
    #[case(&[2], &["domain"], &[5, 3], &[3, 3])]
    #[case(&[3], &["domain"], &[7, 4], &[2, 3])]
    #[case(&[4], &["domain"], &[3, 4], &[1, 4])]
    #[case(&[4], &["domain"], &[10, 4], &[3, 4])]
    #[case(&[2, 2], &["domain", "domain_y"], &[5, 3], &[2, 2])]
    #[case(&[2, 2], &["data", "domain"], &[5, 3], &[3, 3])]
    fn boxes_are_written_by_one_rank_each(
        #[case] shape: &[i64],
        #[case] names: &[&str],
        #[case] extents: &[usize],
        #[case] tile: &[usize],
    ) {
        let ranks = shape.iter().product::<i64>() as usize;
        let found = threads::run(ranks, Duration::from_secs(60), |world| {
            let mesh = DeviceMesh::new(&world, shape, names).unwrap();
            let layout = ShardedFields::new(&mesh, extents).unwrap();
            let own = layout.window(extents).unwrap();
            let points: usize = extents.iter().product();
            let whole = Tensor::arange(points as i64, (Kind::Double, Device::Cpu)).view([
                1,
                1,
                extents[0] as i64,
                extents[1] as i64,
            ]);
            let samples = layout.own(&[0]).unwrap().len() as i64;
            let part = |at: &Range<usize>| (at.start as i64, at.len() as i64);
            let (rows, cols) = (part(&own[0]), part(&own[1]));
            let local = whole.narrow(0, 0, samples).narrow(2, rows.0, rows.1).narrow(3, cols.0, cols.1);
            let fields = layout.array(&local.contiguous(), 1).unwrap();
            let windows = Windows::new(&layout, &own, &world).unwrap();
            let mut written = Vec::new();
            windows
                .spread(&layout, &fields, tile, |points, values| {
                    let (rows, cols) = (part(&points[0]), part(&points[1]));
                    assert!(values.equal(&whole.narrow(2, rows.0, rows.1).narrow(3, cols.0, cols.1)));
                    written.extend(
                        points[0].clone().flat_map(|row| points[1].clone().map(move |col| (row, col))),
                    );
                    Ok(())
                })
                .unwrap();
            written
        });
        let mut all: Vec<(usize, usize)> = found.iter().flatten().copied().collect();
        all.sort_unstable();
        let frame: Vec<_> =
            (0..extents[0]).flat_map(|row| (0..extents[1]).map(move |col| (row, col))).collect();
        assert_eq!(all, frame, "each point once");
        let tiles = |points: &Vec<(usize, usize)>| -> std::collections::BTreeSet<(usize, usize)> {
            points.iter().map(|(row, col)| (row / tile[0], col / tile[1])).collect()
        };
        let count: usize = found.iter().map(|points| tiles(points).len()).sum();
        assert_eq!(
            count,
            extents[0].div_ceil(tile[0]) * extents[1].div_ceil(tile[1]),
            "each box by one rank"
        );
        assert!(found.iter().filter(|points| !points.is_empty()).count() > 1, "several ranks write");
    }

    /// Each rank has complete fields: rank 0 writes its own, and nothing is sent.
    #[test]
    fn complete_fields_are_written_by_rank_0() {
        let calls = threads::run(2, Duration::from_secs(60), |world| {
            let windows = Windows::new(&DenseFields, &[0..2, 0..3], &world).unwrap();
            let fields = Tensor::ones([1, 1, 2, 3], (Kind::Float, Device::Cpu));
            let mut calls = 0;
            for by_window in [true, false] {
                let write = |points: &[Range<usize>], values: &Tensor| {
                    calls += 1;
                    assert_eq!((points.to_vec(), values.size()), (vec![0..2, 0..3], vec![1, 1, 2, 3]));
                    Ok(())
                };
                windows.bring(&DenseFields, &fields, by_window, write).unwrap();
            }
            calls
        });
        assert_eq!(calls, [2, 0]);
    }
}
