//! Exchanges in pieces: while one travels, the one before it is transformed.

use std::cell::Cell;
use std::marker::PhantomData;

use tch::{Device, Tensor};

use super::plan::is_whole;
use crate::error::Result;
use crate::layout::Layout;
use crate::ops::torch;
use crate::tensor::{Pending, ShardTensor};

thread_local! {
    static PIECES: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Number of pieces on a GPU, which computes while NCCL moves bytes.
const PIECES_ON_GPU: usize = 4;

/// On a GPU a piece has at least so many bytes: below, what it costs to begin an exchange is more than what is saved.
const LEAST_BYTES: i64 = 1 << 20;

/// In how many pieces transforms of the calling thread exchange what they turn, while this lives. While a piece travels, the
/// one before it is transformed.
///
/// Without it: all at once on a CPU, where the exchange and the transform both need the processor, and the pieces must be put
/// together again; four pieces of at least 1 MiB on a GPU. All ranks of a mesh do the same. Guards nest; drop them in reverse
/// order.
///
/// ```
/// use isobar_collectives::threads;
/// use isobar_mesh::DeviceMesh;
/// use isobar_array::{FftNorm, Spectral};
/// use isobar_shard::{Placement, ShardTensor, TransformPieces};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
///     let whole = Tensor::arange(4 * 6 * 8, (Kind::Double, Device::Cpu)).view([4, 6, 8]);
///     let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(1)]).unwrap();
///     let at_once = x.rfft2([1, 2], FftNorm::Ortho).unwrap();
///     let _pieces = TransformPieces::new(2);
///     let in_pieces = x.rfft2([1, 2], FftNorm::Ortho).unwrap();
///     assert_eq!(in_pieces.local(), at_once.local());
/// });
/// ```
#[must_use = "the number holds while the guard lives"]
pub struct TransformPieces(Option<usize>, PhantomData<*const ()>);

impl TransformPieces {
    /// So many pieces, where a dim that takes no part has so many elements; 1 (or 0) for all at once.
    pub fn new(count: usize) -> Self {
        Self(PIECES.replace(Some(count)), PhantomData)
    }
}

impl Drop for TransformPieces {
    fn drop(&mut self) {
        PIECES.set(self.0);
    }
}

/// Split of a tensor into pieces.
pub(super) struct Pieces {
    dim: usize,
    /// Offsets of the pieces, and the end.
    bounds: Vec<i64>,
}

impl Pieces {
    /// Along the longest dim that is whole and takes no part in the turn to `after` and the transform of `dims`. Nothing where
    /// there is to be one piece. The same on all ranks.
    pub(super) fn new(x: &ShardTensor, after: &Layout, dims: &[usize]) -> Option<Self> {
        let before = x.layout();
        let free = |dim: &usize| !dims.contains(dim) && is_whole(before, *dim) && is_whole(after, *dim);
        let dim = (0..before.ndim()).filter(free).max_by_key(|&dim| before.shape()[dim])?;
        let extent = before.shape()[dim];
        let count = PIECES.get().map_or_else(|| by_default(x), |count| count as i64).min(extent);
        let bounds = (0..=count).map(|index| extent * index / count.max(1)).collect();
        (count > 1).then_some(Self { dim, bounds })
    }

    /// `x` in the layout `after`, then `transform` of the parts, which gives `result`.
    pub(super) fn transformed(
        &self,
        x: &ShardTensor,
        (after, result): (&Layout, &Layout),
        transform: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<ShardTensor> {
        let begin = |bounds: &[i64]| -> Result<Pending> {
            let piece = x.narrow(self.dim as i64, bounds[0], bounds[1] - bounds[0])?;
            let extent = piece.layout().dims()[self.dim].clone();
            piece.start_to_layout(&after.with_dim(self.dim, extent))
        };
        let mut rest = self.bounds.windows(2);
        let mut travelling = rest.next().map(begin).transpose()?;
        let mut done = Vec::with_capacity(self.bounds.len());
        while let Some(piece) = travelling.take() {
            let piece = piece.wait()?;
            travelling = rest.next().map(begin).transpose()?;
            done.push(transform(piece.local())?);
        }
        Ok(ShardTensor::new(torch("cat", Tensor::f_cat(&done, self.dim as i64))?, result.clone()))
    }
}

fn by_default(x: &ShardTensor) -> i64 {
    let most = match x.device() {
        Device::Cuda(_) => PIECES_ON_GPU as i64,
        _ => return 1,
    };
    let ranks: i64 = x.layout().mesh_shape().iter().map(|&ranks| ranks as i64).product();
    let bytes = x.layout().numel() * x.kind().elt_size_in_bytes() as i64 / ranks.max(1);
    most.min(bytes / LEAST_BYTES)
}
