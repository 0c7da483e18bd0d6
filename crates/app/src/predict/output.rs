//! The file or folder that predictions are written to, by rank 0 or by all ranks.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Result;
use isobar_collectives::Group;
use isobar_data::DatasetWriter;
use isobar_train::FieldLayout;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::windows::Windows;
use crate::run::alike;

/// A writer on each rank that writes, and the way of values to it.
pub(super) struct Output {
    writer: Option<Box<dyn DatasetWriter>>,
    way: Way,
}

/// State of rank 0's writer, as the other ranks learn it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Way {
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
            created.and_then(|writer| Ok((serde_json::to_vec(&Self::way(writer.as_deref()))?, writer)));
        let (mut writer, told) = alike(world, told)?;
        let way: Way = serde_json::from_slice(&told[0])?;
        if let Way::Tiles(_, unfinished) = &way {
            let joined = if world.rank() == 0 { Ok(writer) } else { join(unfinished).map(Some) };
            writer = alike(world, joined.map(|writer| (Vec::new(), writer)))?.0;
        }
        Ok(Self { writer, way })
    }

    /// The way of values to rank 0's writer.
    fn way(writer: Option<&dyn DatasetWriter>) -> Way {
        match writer {
            Some(writer) => match (writer.tile(), writer.unfinished()) {
                (Some(tile), Some(unfinished)) => Way::Tiles(tile, unfinished.to_owned()),
                _ if writer.takes_windows() => Way::Windows,
                _ => Way::Frames,
            },
            None => Way::Frames,
        }
    }

    /// Brings fields of one sample to the ranks that write them, which hand them to `write` with their points. All ranks call.
    pub(super) fn put<L: FieldLayout>(
        &mut self,
        windows: &Windows<'_>,
        (layout, fields): (&L, &L::Array),
        mut write: impl FnMut(&mut dyn DatasetWriter, &[Range<usize>], &Tensor) -> Result<()>,
    ) -> Result<()> {
        let writer = &mut self.writer;
        let write = |points: &[Range<usize>], values: &Tensor| match writer {
            Some(writer) => write(&mut **writer, points, values),
            None => Ok(()),
        };
        match &self.way {
            Way::Tiles(tile, _) => windows.spread(layout, fields, tile, write),
            way => windows.bring(layout, fields, *way == Way::Windows, write),
        }
    }

    /// Puts the data set in its place, once all ranks have written. All ranks call.
    pub(super) fn finish(self, world: &Group) -> Result<()> {
        let (first, others) = if world.rank() == 0 { (self.writer, None) } else { (None, self.writer) };
        for writer in [others, first] {
            let finished = writer.map_or(Ok(()), DatasetWriter::finish);
            alike(world, finished.map(|()| (Vec::new(), ())).map_err(anyhow::Error::from))?;
        }
        Ok(())
    }
}
