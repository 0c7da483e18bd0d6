//! The way of predictions from the ranks to the file that rank 0 writes.

use std::ops::Range;

use anyhow::Result;
use isobar_array::{Array, Local};
use isobar_collectives::Group;
use isobar_collectives::start::{recv, send};
use isobar_data::DatasetWriter;
use isobar_train::{BoxError, FieldLayout};
use tch::Tensor;

use crate::run::alike;

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
        for (rank, bytes) in alike(world, described)?.1.iter().enumerate() {
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
            let full = fields.whole()?;
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
}

/// Returns whether a writer of rank 0 takes windows, on all ranks. All ranks call.
pub(super) fn by_window(writer: Option<&dyn DatasetWriter>, world: &Group) -> Result<bool> {
    let takes = [u8::from(writer.is_some_and(DatasetWriter::takes_windows))];
    Ok(world.broadcast_bytes(&takes, 0)?.first() == Some(&1))
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
