//! Points of patches on a grid.

use isobar_array::{Array, Comparison, Unary};
use tch::Kind;

use crate::batch::Batch;
use crate::error::{Error, Result};

/// Name of the array of a batch with the points of patches.
pub(crate) const GLOBAL_INDEX: &str = Batch::<()>::GLOBAL_INDEX;

/// Points of the fields of a batch on the grid of a model.
#[derive(Debug)]
pub(crate) struct Patches<A> {
    /// Height and width of the grid.
    pub(crate) grid: [i64; 2],
    /// Number of samples, each of which has all patches.
    pub(crate) samples: i64,
    /// Rows and columns, each `[patch, height, width]` (`Int64`); none for the whole grid.
    pub(crate) points: Option<[A; 2]>,
}

impl<A: Array> Patches<A> {
    /// Reads the points of `x` `[batch, channel, height, width]` from a batch: all of the grid without `global_index`.
    pub(crate) fn of(model: &'static str, grid: [i64; 2], x: &A, others: &Batch<A>) -> Result<Self> {
        let shape = x.shape();
        let refuse = |got: Vec<i64>, want: String| Err(Error::Input { model, got, want });
        let Some(index) = others.get(GLOBAL_INDEX) else {
            return match shape[2..] == grid {
                true => Ok(Self { grid, samples: shape[0], points: None }),
                false => {
                    let [height, width] = grid;
                    refuse(
                        shape,
                        format!(
                            "fields of {height} × {width} points, or the array \"{GLOBAL_INDEX}\" with the points of patches"
                        ),
                    )
                }
            };
        };
        let got = index.shape();
        let fits = got.len() == 4 && got[0] > 0 && got[1] == 2 && got[2..] == shape[2..];
        if !fits || shape[0] % got[0] != 0 {
            let want = format!(
                "[patch, 2, {}, {}] for {GLOBAL_INDEX}, with a number of patches that divides {}",
                shape[2], shape[3], shape[0]
            );
            return refuse(got, want);
        }
        let index = index.detach()?.to_kind(Kind::Int64)?;
        let points = Some([index.select(1, 0)?, index.select(1, 1)?]);
        Ok(Self { grid, samples: shape[0] / got[0], points })
    }

    /// Picks the points of all patches from `fields` `[field, height, width]` on the grid: `[patch, field, height, width]`, or
    /// `[1, field, …]` for the whole grid. Points of the grid that other ranks hold are fetched from them.
    pub(crate) fn pick(&self, fields: &A) -> Result<A> {
        let Some(points) = &self.points else { return Ok(fields.unsqueeze(0)?) };
        let points = self.numbers(points)?;
        let (count, shape) = (fields.extent(0)?, points.shape());
        // The rows first: so points that are split in rows remain so when they are flattened.
        let points = points.permute(&[1, 2, 0])?.reshape(&[-1])?;
        let picked = fields.reshape(&[count, self.grid[0] * self.grid[1]])?.index_select(1, &points)?;
        Ok(picked.reshape(&[count, shape[1], shape[2], shape[0]])?.permute(&[3, 0, 1, 2])?)
    }

    /// Returns the numbers of points on the grid, row by row (`Int64`); −1, which `index_select` refuses, for those outside.
    fn numbers(&self, points: &[A; 2]) -> Result<A> {
        // In double precision, which is exact: libtorch multiplies integers by a number in single precision.
        let [rows, columns] = [points[0].to_kind(Kind::Double)?, points[1].to_kind(Kind::Double)?];
        let mut numbers = rows.mul_scalar(self.grid[1] as f64)?.add(&columns)?;
        for (places, extent) in [rows, columns].iter().zip(self.grid) {
            let inside = places.unary(Unary::Clamp { min: 0.0, max: (extent - 1) as f64 })?;
            numbers = numbers.masked_fill(&places.compare(Comparison::Ne, &inside)?, -1.0)?;
        }
        Ok(numbers.to_kind(Kind::Int64)?)
    }

    /// Repeats `[patch, …]` for every sample: `[sample · patch, …]`.
    pub(crate) fn for_samples(&self, patches: &A) -> Result<A> {
        let shape = patches.shape();
        let each = [&[self.samples], &shape[..]].concat();
        let all = [&[self.samples * shape[0]], &shape[1..]].concat();
        Ok(patches.unsqueeze(0)?.expand(&each)?.reshape(&all)?)
    }
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::Patches;

    /// Single precision cannot tell numbers above 2²⁴ apart.
    #[test]
    fn points_of_large_grids_have_exact_numbers() {
        let rows = [4499i64, 4499, 3728, 0, 0, 4500, 1, -1];
        let columns = [4500i64, 4499, 4387, 4500, 4501, 0, -1, 4500];
        let points = [Tensor::from_slice(&rows), Tensor::from_slice(&columns)];
        let patches = Patches { grid: [4500, 4501], samples: 1, points: None };
        let numbers = patches.numbers(&points).unwrap();
        let want = [4499i64 * 4501 + 4500, 4499 * 4501 + 4499, 3728 * 4501 + 4387, 4500, -1, -1, -1, -1];
        assert_eq!(numbers, Tensor::from_slice(&want));
    }
}
