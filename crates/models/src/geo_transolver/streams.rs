//! Streams of points.

use isobar_array::Array;

use super::MODEL;
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::point_attention::{Form, Grid};

/// Points of one stream, as the batch gives them.
pub(super) struct Stream<A> {
    /// `[batch, points…, features]`
    pub(super) x: A,
    pub(super) form: Form,
    /// Local features of each point, which the network appends to the point's own features.
    pub(super) local: Option<A>,
    /// Number of the stream; `None` if it is the only one.
    at: Option<usize>,
}

impl<A: Array> Stream<A> {
    /// Reads streams with these numbers of features. Only the points of a single stream may be `fields`.
    pub(super) fn read(batch: &Batch<A>, features: &[i64], grid: &Grid) -> Result<Vec<Self>> {
        let several = features.len() > 1;
        let read = |(number, &features): (usize, &i64)| {
            let at = several.then_some(number);
            let name = array_name("local_embedding", at);
            let (x, form) = match batch.get(&name) {
                Some(points) => grid.points(points, features)?,
                None if several => grid.points(batch.require(MODEL, &name)?, features)?,
                None => grid.fields(batch.require(MODEL, Batch::<A>::FIELDS)?, features)?,
            };
            Ok(Self { x, form, local: None, at })
        };
        features.iter().enumerate().map(read).collect()
    }

    /// Returns the positions of the points, `[batch, points, 3]`.
    pub(super) fn positions<'a>(&self, batch: &'a Batch<A>) -> Result<&'a A> {
        let positions = batch.require(MODEL, &array_name("local_positions", self.at))?;
        let (shape, got) = (self.x.shape(), positions.shape());
        if got != [shape[0], shape[1], 3] {
            let want = format!("positions [{}, {}, 3] of the points", shape[0], shape[1]);
            return Err(Error::Input { model: MODEL, got, want });
        }
        Ok(positions)
    }

    /// Returns the name of the output array.
    pub(super) fn output(&self) -> String {
        array_name(Batch::<A>::FIELDS, self.at)
    }
}

/// Returns the name of a stream's array, with the stream's number if there are several.
fn array_name(name: &str, at: Option<usize>) -> String {
    at.map_or_else(|| name.to_owned(), |at| format!("{name}.{at}"))
}
