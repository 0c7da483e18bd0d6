//! The file or folder that predictions are written to, by rank 0 or by all ranks.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Result;
use isobar_collectives::Group;
use isobar_data::DatasetWriter;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::divergence::NotFinite;
use super::windows::Windows;
use crate::run::all_ok;

/// A writer on each rank that writes, and the route of values to it.
pub(super) struct Output {
    writer: Option<Box<dyn DatasetWriter>>,
    route: Route,
    /// The first error of this rank's writer, which then writes no more.
    failed: Option<anyhow::Error>,
}

/// State of rank 0's writer, as the other ranks learn it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Route {
    /// Rank 0 writes complete frames.
    Frames,
    /// Rank 0 writes the windows of all ranks.
    Windows,
    /// Ranks write their own boxes of these extents, into what rank 0 made.
    Tiles(Vec<usize>, PathBuf),
}

impl Output {
    /// Creates the data set on rank 0, and lets the other ranks join it if they write, too. All ranks call.
    pub(super) fn open(
        world: &Group,
        create: impl FnOnce() -> Result<Option<Box<dyn DatasetWriter>>>,
        join: impl FnOnce(&Path) -> Result<Box<dyn DatasetWriter>>,
    ) -> Result<Self> {
        let created = if world.rank() == 0 { create() } else { Ok(None) };
        let told =
            created.and_then(|writer| Ok((serde_json::to_vec(&Self::route(writer.as_deref()))?, writer)));
        let (mut writer, told) = all_ok(world, told)?;
        let route: Route = serde_json::from_slice(&told[0])?;
        if let Route::Tiles(_, unfinished) = &route {
            let joined = if world.rank() == 0 { Ok(writer) } else { join(unfinished).map(Some) };
            writer = all_ok(world, joined.map(|writer| (Vec::new(), writer)))?.0;
        }
        Ok(Self { writer, route, failed: None })
    }

    /// The route of values to rank 0's writer.
    fn route(writer: Option<&dyn DatasetWriter>) -> Route {
        match writer {
            Some(writer) => match (writer.tile(), writer.unfinished()) {
                (Some(tile), Some(unfinished)) => Route::Tiles(tile, unfinished.to_owned()),
                _ if writer.takes_windows() => Route::Windows,
                _ => Route::Frames,
            },
            None => Route::Frames,
        }
    }

    /// Returns whether the file takes complete frames only. The same on all ranks.
    pub(super) fn takes_frames(&self) -> bool {
        self.route == Route::Frames
    }

    /// Brings fields of a round's sample to the ranks that write them, which hand them to `write` with their points;
    /// [`check`](Self::check) tells all ranks of an error of one. `local` is this rank's window of its own samples of the round. All
    /// ranks call.
    pub(super) fn put(
        &mut self,
        windows: &Windows<'_>,
        (sample, local): (usize, &Tensor),
        mut write: impl FnMut(&mut dyn DatasetWriter, &[Range<usize>], &Tensor) -> Result<()>,
    ) -> Result<()> {
        let (writer, failed) = (&mut self.writer, &mut self.failed);
        let write = |points: &[Range<usize>], values: &Tensor| {
            if let (Some(writer), None) = (writer.as_mut(), &*failed) {
                *failed = write(&mut **writer, points, values).err();
            }
            Ok(())
        };
        match &self.route {
            Route::Tiles(tile, _) => windows.spread((sample, local), tile, write),
            route => windows.bring((sample, local), *route == Route::Windows, write),
        }
    }

    /// Fails on all ranks if one could not write, so that none still writes when rank 0 removes the unfinished file; shares the
    /// values that each rank `found`. All ranks call, after each step.
    pub(super) fn check(&mut self, world: &Group, found: &[NotFinite]) -> Result<Checked> {
        let failed = self.failed.take();
        let refuses = failed.as_ref().is_some_and(refuses_nan);
        let failed = failed.filter(|_| !refuses).map_or(Ok(()), Err);
        let told = failed.and_then(|()| Ok((serde_json::to_vec(&(refuses, found))?, ())));
        let mut all = Checked::default();
        for told in all_ok(world, told)?.1 {
            let (refuses, found): (bool, Vec<NotFinite>) = serde_json::from_slice(&told)?;
            all.refuses_nan |= refuses;
            all.found.extend(found);
        }
        Ok(all)
    }

    /// Puts the data set in its place, once all ranks have written. All ranks call.
    pub(super) fn finish(self, world: &Group) -> Result<()> {
        let (first, others) = if world.rank() == 0 { (self.writer, None) } else { (None, self.writer) };
        for writer in [others, first] {
            let finished = writer.map_or(Ok(()), DatasetWriter::finish);
            all_ok(world, finished.map(|()| (Vec::new(), ())).map_err(anyhow::Error::from))?;
        }
        Ok(())
    }
}

/// State of a step after all ranks have written it, the same on all ranks.
#[derive(Debug, Default)]
pub(super) struct Checked {
    /// True if a rank had NaN to write and the file cannot hold it.
    pub(super) refuses_nan: bool,
    /// Values that are not finite.
    pub(super) found: Vec<NotFinite>,
}

/// Returns whether a writer rejected values that are not finite.
fn refuses_nan(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(isobar_data::Error::NotFinite { .. }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use isobar_collectives::threads;

    use super::*;

    /// All ranks get the error of one that cannot write, and the values that one found.
    #[test]
    fn a_rank_that_cannot_write_ends_all() {
        let _ = threads::run(3, Duration::from_secs(60), |world| {
            let mut output = Output { writer: None, route: Route::Frames, failed: None };
            let found = NotFinite { sample: 2, step: 3, channel: 0 };
            let own = if world.rank() == 2 { std::slice::from_ref(&found) } else { &[] };
            let checked = output.check(&world, own).unwrap();
            assert!(!checked.refuses_nan && checked.found == [found]);
            let (path, dataset, index) = ("out".into(), "u".to_owned(), Vec::new());
            let refused = isobar_data::Error::NotFinite { path, dataset, index, value: f64::NAN };
            output.failed = (world.rank() == 1).then(|| refused.into());
            assert!(output.check(&world, &[]).unwrap().refuses_nan);
            output.failed = (world.rank() == 1).then(|| anyhow::anyhow!("the disk is full"));
            let error = output.check(&world, &[]).unwrap_err();
            assert!(format!("{error:#}").contains("the disk is full"), "{error:#}");
        });
    }
}
