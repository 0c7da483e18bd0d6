//! Tiles: what each rank holds along a dim, cut into pieces that are computed one after the other.

use isobar_array::kernel::tile_boundaries;
use tch::Tensor;

use crate::error::Result;
use crate::layout::Dim;
use crate::ops::{refuse, resolve, rule};
use crate::tensor::{ShardTensor, same_mesh};

impl ShardTensor {
    /// Cuts what each rank holds along `dim` into `count` tiles of about equal extent, without communication. Each tile is split
    /// over the ranks as `dim` is, so that all ranks have work in every tile; which elements are in which tile depends on the
    /// layout. [`join_tiles`](Self::join_tiles) restores the order.
    ///
    /// ```
    /// use isobar_collectives::Group;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, ShardTensor};
    /// use tch::Tensor;
    ///
    /// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
    /// let x = ShardTensor::distribute(&Tensor::from_slice(&[1.0, 2.0, 3.0]), &mesh, &[Placement::Shard(0)])?;
    /// let tiles = x.tiles(0, 2)?;
    /// assert_eq!(tiles[1].local(), &Tensor::from_slice(&[2.0, 3.0]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A dim that does not exist, or a count below 1; of a partial tensor, the errors of its reduction.
    pub fn tiles(&self, dim: i64, count: usize) -> Result<Vec<Self>> {
        const OP: &str = "tiles";
        let at = resolve(OP, dim, self.ndim())?;
        let x = self.resolved()?;
        let whole = &x.layout().dims()[at];
        let shards = whole.sizes().into_iter().map(|size| Ok(tile_boundaries(size, count)?));
        let shards = shards.collect::<Result<Vec<_>>>()?;
        let own = tile_boundaries(x.local_shape()[at], count)?;
        let tile = |index: usize| {
            let sizes: Vec<i64> = shards.iter().map(|cuts| cuts[index + 1] - cuts[index]).collect();
            let layout = x.layout().with_dim(at, Dim::consecutive(whole.axes.clone(), &sizes));
            let length = own[index + 1] - own[index];
            x.viewed(OP, layout, |x| x.f_narrow(at as i64, own[index], length))
        };
        (0..count).map(tile).collect()
    }

    /// Joins tensors computed from the [tiles](Self::tiles) of `whole` along `dim`, whose other dims may differ from those of
    /// `whole`. Communicates nothing.
    ///
    /// # Errors
    ///
    /// No tensors, extents along `dim` other than those of the tiles, or layouts that differ.
    pub fn join_tiles(tiles: &[&Self], dim: i64, whole: &Self) -> Result<Self> {
        const OP: &str = "join_tiles";
        let [first, ..] = tiles else { return refuse(OP, "no tiles were given") };
        rule(OP, tiles, || {
            same_mesh(OP, tiles)?;
            let at = resolve(OP, dim, first.ndim())?;
            let target = whole.layout().dims()[resolve(OP, dim, whole.ndim())?].clone();
            let resolved: Vec<Self> = tiles.iter().map(|tile| tile.resolved()).collect::<Result<_>>()?;
            let sizes = target.sizes();
            let joined = |shard: usize| -> i64 {
                resolved.iter().filter_map(|tile| tile.layout().dims()[at].sizes().get(shard).copied()).sum()
            };
            let axes = resolved.iter().all(|tile| tile.layout().dims()[at].axes == target.axes);
            if !axes || (0..sizes.len()).any(|shard| joined(shard) != sizes[shard]) {
                let reason = format!("the tiles along dim {at} are not those of shards of {sizes:?}");
                return refuse(OP, reason);
            }
            let others = resolved[0].layout().with_dim(at, target.clone());
            if resolved.iter().any(|tile| tile.layout().with_dim(at, target.clone()) != others) {
                return refuse(OP, "the layouts of the tiles differ".to_owned());
            }
            Self::joined(OP, &resolved, others, |parts| Tensor::f_cat(parts, at as i64))
        })
    }
}
