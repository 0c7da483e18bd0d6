//! Tiles of points.

use isobar_array::Array;

use crate::error::Result;

/// Arrays `[batch, points…, …]` of the same points, cut into tiles along one dim.
pub(super) struct Tiles<A> {
    tiles: Vec<Vec<A>>,
    dim: i64,
    whole: A,
}

impl<A: Array> Tiles<A> {
    /// Cuts arrays with `dims` dims of points into at most `count` tiles, along the dim of which ranks hold the most.
    pub(super) fn new(arrays: &[A], dims: usize, count: usize) -> Result<Self> {
        let whole = arrays[0].shallow_clone();
        let shape = whole.shape();
        let held = |&dim: &usize| shape[dim] / whole.num_shards(&[dim]) as i64;
        let dim = (1..=dims).rev().max_by_key(held).unwrap_or(1);
        let count = count.min(held(&dim).max(1) as usize);
        if count <= 1 {
            let all = arrays.iter().map(A::shallow_clone).collect();
            return Ok(Self { tiles: vec![all], dim: dim as i64, whole });
        }
        let mut tiles: Vec<Vec<A>> = (0..count).map(|_| Vec::with_capacity(arrays.len())).collect();
        for array in arrays {
            for (tile, part) in tiles.iter_mut().zip(array.tiles(dim as i64, count)?) {
                tile.push(part);
            }
        }
        Ok(Self { tiles, dim: dim as i64, whole })
    }

    /// Folds the results of `f` for each tile.
    pub(super) fn fold(
        &self,
        f: impl Fn(&[A]) -> Result<A>,
        join: impl Fn(&A, &A) -> isobar_array::Result<A>,
    ) -> Result<A> {
        let mut result = f(&self.tiles[0])?;
        for tile in &self.tiles[1..] {
            result = join(&result, &f(tile)?)?;
        }
        Ok(result)
    }

    /// The array of all points from the results of `f` for each tile.
    pub(super) fn map(&self, f: impl Fn(&[A]) -> Result<A>) -> Result<A> {
        let mut results = self.tiles.iter().map(|tile| f(tile)).collect::<Result<Vec<A>>>()?;
        if results.len() == 1 {
            return Ok(results.remove(0));
        }
        Ok(A::join_tiles(&results.iter().collect::<Vec<_>>(), self.dim, &self.whole)?)
    }
}
