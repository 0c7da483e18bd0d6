//! Points as arrays: lists, grids, flattened grids and fields.

use isobar_array::Array;

use super::heads::{channels_last, channels_second};
use crate::error::{Checker, Error, Result};
use crate::fields::FieldSpec;

/// Form of an input array, which the output takes too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// `[batch, points…, features]`
    Points,
    /// `[batch, height · width …, features]` of a grid.
    Flat,
    /// `[batch, channel, extents…]`
    Fields,
}

/// Grid of the points, if they lie on one.
#[derive(Debug, Clone)]
pub(crate) struct Grid {
    model: &'static str,
    extents: Option<Vec<i64>>,
}

impl Grid {
    /// Checks `structured_shape`.
    pub(crate) fn new(model: &'static str, shape: Option<&[usize]>) -> Result<Self> {
        let check = Checker(model);
        let Some(shape) = shape else { return Ok(Self { model, extents: None }) };
        check.ensure(matches!(shape.len(), 2 | 3), || {
            format!("structured_shape is {shape:?}, expected two or three extents")
        })?;
        let extents = shape.iter().map(|&extent| check.extent("an extent of structured_shape", extent));
        Ok(Self { model, extents: Some(extents.collect::<Result<_>>()?) })
    }

    /// Number of dims of the grid.
    pub(crate) fn dims(&self) -> Option<usize> {
        self.extents.as_ref().map(Vec::len)
    }

    pub(crate) fn extents(&self) -> Option<&[i64]> {
        self.extents.as_deref()
    }

    /// Compares `structured_shape` with the fields of a data set.
    pub(crate) fn check(&self, shape: Option<&[usize]>, fields: &FieldSpec) -> Result<()> {
        match shape {
            Some(shape) => fields.check_extents(self.model, "structured_shape", shape),
            None => Checker(self.model).ensure(matches!(fields.extents.len(), 1..=3), || {
                format!("the fields of {} have {} dims, expected 1 to 3", fields.source, fields.extents.len())
            }),
        }
    }

    /// Brings an array of points, flattened or not, to `[batch, points…, features]`.
    pub(crate) fn points<A: Array>(&self, x: &A, features: i64) -> Result<(A, Form)> {
        let shape = x.shape();
        let (dims, last) = (shape.len(), shape.last().copied());
        let refuse = || {
            let points = match self.extents() {
                None => "points".to_owned(),
                Some(extents) => {
                    let listed: Vec<String> = extents.iter().map(i64::to_string).collect();
                    format!("{} or {}", listed.join(", "), self.count().unwrap_or(0))
                }
            };
            Error::Input {
                model: self.model,
                got: shape.clone(),
                want: format!("[batch, {points}, {features}]"),
            }
        };
        if dims < 3 || last != Some(features) {
            return Err(refuse());
        }
        match self.extents() {
            None if dims == 3 => Ok((x.shallow_clone(), Form::Points)),
            Some(extents) if shape[1..dims - 1] == *extents => Ok((x.shallow_clone(), Form::Points)),
            Some(extents) if dims == 3 && Some(shape[1]) == self.count() => {
                let grid = [&shape[..1], extents, &[features]].concat();
                Ok((x.reshape(&grid)?, Form::Flat))
            }
            _ => Err(refuse()),
        }
    }

    /// Brings fields `[batch, channel, extents…]` to `[batch, points…, features]`.
    pub(crate) fn fields<A: Array>(&self, x: &A, features: i64) -> Result<(A, Form)> {
        let shape = x.shape();
        let fits = match self.extents() {
            Some(extents) => shape.get(2..) == Some(extents),
            None => matches!(shape.len(), 3..=5),
        };
        if !fits || shape[1] != features {
            let extents = match self.extents() {
                Some(extents) => format!("{extents:?}"),
                None => "one to three extents".to_owned(),
            };
            let want = format!("[batch, {features}, {extents}]");
            return Err(Error::Input { model: self.model, got: shape, want });
        }
        Ok((channels_last(x)?, Form::Fields))
    }

    /// Brings outputs `[batch, points…, features]` to the form of the input.
    pub(crate) fn output<A: Array>(&self, y: &A, form: Form) -> Result<A> {
        let shape = y.shape();
        match form {
            Form::Points => Ok(y.shallow_clone()),
            Form::Flat => {
                let points = shape[1..shape.len() - 1].iter().product();
                Ok(y.reshape(&[shape[0], points, shape[shape.len() - 1]])?)
            }
            Form::Fields => Ok(channels_second(y)?.contiguous()?),
        }
    }

    /// Number of points of the grid.
    fn count(&self) -> Option<i64> {
        self.extents()?.iter().try_fold(1i64, |count, &extent| count.checked_mul(extent))
    }
}

/// Coordinates in [0, 1] along each dim of the points of `x` `[batch, points…, features]`, as an array `[batch, points…, dims]` laid
/// out as `x`.
pub(crate) fn coordinates<A: Array>(x: &A) -> Result<A> {
    let mut shape = x.shape();
    let last = shape.len() - 1;
    shape[last] = 1;
    let mut channels = Vec::with_capacity(last - 1);
    for dim in 1..last {
        let mut line = vec![1; last + 1];
        line[dim] = shape[dim];
        channels.push(x.linspace_along(dim as i64, 0.0, 1.0)?.reshape(&line)?.expand(&shape)?);
    }
    Ok(A::cat(&channels.iter().collect::<Vec<_>>(), -1)?)
}
