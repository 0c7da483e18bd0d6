//! Positions on a grid as channels.

use std::f64::consts::TAU;

use isobar_array::{Array, Unary};
use isobar_shard::{Init, Params, Placement};
use tch::Kind;

use super::config::{GridPositions, GridType};
use super::patches::Patches;
use crate::error::Result;

/// Channels of positions.
#[derive(Debug)]
pub(crate) struct Positions<A> {
    config: GridPositions,
    /// `[channel, height, width]`.
    trained: Option<A>,
}

impl<A: Array> Positions<A> {
    /// Takes the trained positions, if there are any, from `params`.
    pub(crate) fn new(
        config: &GridPositions,
        grid: [i64; 2],
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let trained = match config.trained() {
            0 => None,
            count => {
                let start = Init::Normal { mean: 0.0, std: 1.0 };
                let shape = [count as i64, grid[0], grid[1]];
                Some(params.param("pos_embd", &shape, start, Placement::Replicate)?)
            }
        };
        Ok(Self { config: config.clone(), trained })
    }

    pub(crate) fn channels(&self) -> i64 {
        self.config.n_grid_channels as i64
    }

    /// Computes the positions of the points of `x`, `[batch, channel, height, width]`; none without such channels.
    pub(crate) fn at_points(&self, x: &A, patches: &Patches<A>) -> Result<Option<A>> {
        if self.channels() == 0 {
            return Ok(None);
        }
        let each = match &self.trained {
            Some(table) => patches.pick(table)?.to_kind(x.kind())?,
            None => self.functions(x, patches)?.to_kind(x.kind())?,
        };
        Ok(Some(patches.for_samples(&each)?))
    }

    /// Computes functions of the positions, `[patch, channel, height, width]`, in double precision, and rounds them to single precision,
    /// in which PhysicsNeMo keeps them.
    fn functions(&self, x: &A, patches: &Patches<A>) -> Result<A> {
        let along = Along::of(x, patches)?;
        let [row, column] = [0, 1];
        let channels = match self.config.gridtype {
            GridType::Test => {
                let counted = |dim: usize| along.channel(&along.places[dim]);
                vec![counted(row)?, counted(column)?]
            }
            GridType::Linear => {
                let scaled = |dim: usize| -> Result<A> {
                    along.channel(&along.scaled(dim, 2.0 / along.last(dim))?.add_scalar(-1.0)?)
                };
                vec![scaled(column)?, scaled(row)?]
            }
            _ => {
                let angles = [column, row].map(|dim| along.scaled(dim, TAU / along.last(dim)));
                let [x, y] = angles;
                let (x, y) = (x?, y?);
                let mut waves = Vec::new();
                for frequency in self.frequencies() {
                    for function in [Unary::Sin, Unary::Cos] {
                        waves.push(along.channel(&x.mul_scalar(frequency)?.unary(function)?)?);
                        waves.push(along.channel(&y.mul_scalar(frequency)?.unary(function)?)?);
                    }
                }
                waves
            }
        };
        Ok(A::cat(&channels.iter().collect::<Vec<_>>(), 1)?)
    }

    fn frequencies(&self) -> Vec<f64> {
        let count = self.config.n_grid_channels / 4;
        let step = match self.config.gridtype {
            // The last exponent is the number of frequencies, not one less.
            GridType::Sinusoidal if count > 1 => count as f64 / (count - 1) as f64,
            _ => 1.0,
        };
        (0..count).map(|k| (k as f64 * step).exp2()).collect()
    }
}

/// Rows and columns of points in double precision, laid out as the points are.
struct Along<A> {
    grid: [i64; 2],
    /// `[patch, 1, height, width]`, or `[1, 1, height, 1]` and `[1, 1, 1, width]`.
    places: [A; 2],
    /// Zeros `[1, 1, height, width]` in single precision, if the places are lines.
    zeros: Option<A>,
}

impl<A: Array> Along<A> {
    fn of(x: &A, patches: &Patches<A>) -> Result<Self> {
        let grid = patches.grid;
        if let Some([rows, columns]) = &patches.points {
            let place = |index: &A| -> Result<A> { Ok(index.to_kind(Kind::Double)?.unsqueeze(1)?) };
            return Ok(Self { grid, places: [place(rows)?, place(columns)?], zeros: None });
        }
        // Reads the layout of `x`, not its values.
        let like = x.detach()?.narrow(1, 0, 1)?.to_kind(Kind::Double)?;
        let line = |dim: i64, last: i64| -> Result<A> {
            let shape = if dim == 2 { [1, 1, -1, 1] } else { [1, 1, 1, -1] };
            Ok(like.linspace_along(dim, 0.0, last as f64)?.reshape(&shape)?)
        };
        let places = [line(2, grid[0] - 1)?, line(3, grid[1] - 1)?];
        let zeros = line(2, 0)?.to_kind(Kind::Float)?.add(&line(3, 0)?.to_kind(Kind::Float)?)?;
        Ok(Self { grid, places, zeros: Some(zeros) })
    }

    /// The last row or column; 1 for a single one, whose place is 0.
    fn last(&self, dim: usize) -> f64 {
        (self.grid[dim] - 1).max(1) as f64
    }

    fn scaled(&self, dim: usize, factor: f64) -> Result<A> {
        Ok(self.places[dim].mul_scalar(factor)?)
    }

    /// Rounds the values at these places to single precision, and repeats a line of them over the grid.
    fn channel(&self, values: &A) -> Result<A> {
        let values = values.to_kind(Kind::Float)?;
        match &self.zeros {
            Some(zeros) => Ok(values.add(zeros)?),
            None => Ok(values),
        }
    }
}
