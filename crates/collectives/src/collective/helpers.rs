//! Small tensor functions that go with the collectives.

use tch::Tensor;

use crate::collective::broadcast;
use crate::engine::group::Group;
use crate::error::{Error, Result};
use crate::local::reduce::ReduceOp;

/// Fill values of [`pad`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PadMode {
    /// Zeros.
    Zero,
    /// The conjugate of the entries before, mirrored: `x[n - i]*` at `n + …`, as the spectrum of a real signal goes on.
    Conjugate,
}

/// Pads `tensor` at the end of `dim` to the extent `size`.
///
/// With [`PadMode::Conjugate`], a half-spectrum of `n` entries is padded by the conjugates of its entries
/// `size - n, …, 2, 1`, in this order: entry `k` of the result is the conjugate of entry `size - k`. That is the full
/// spectrum of `size` entries of a real signal along that dim, where the other dims hold no frequencies.
///
/// # Errors
///
/// A dim out of range, a size below the extent, or one that takes more entries than there are to mirror.
///
/// ```
/// use isobar_collectives::{PadMode, pad};
/// use tch::{Kind, Tensor};
///
/// let x = Tensor::from_slice(&[1.0, 4.0, 2.0, 8.0]);
/// let half = x.fft_rfft(None, 0, "backward");
/// let full = pad(&half, 0, 4, PadMode::Conjugate)?;
/// assert!((full - x.fft_fft(None, 0, "backward")).abs().max().double_value(&[]) < 1e-12);
/// assert_eq!(pad(&x, 0, 5, PadMode::Zero)?.sum(Kind::Double), x.sum(Kind::Double));
/// # Ok::<(), isobar_collectives::Error>(())
/// ```
pub fn pad(tensor: &Tensor, dim: i64, size: i64, mode: PadMode) -> Result<Tensor> {
    let extent = extent("pad", tensor, dim)?;
    let more = size - extent;
    if more < 0 {
        return Err(refuse(
            "pad",
            format!("cannot pad extent {extent} to {size}, which is less; truncate does that"),
        ));
    }
    if more == 0 {
        return Ok(tensor.shallow_clone());
    }
    let filling = match mode {
        PadMode::Zero => {
            let mut shape = tensor.size();
            let dims = shape.len() as i64;
            shape[(if dim < 0 { dim + dims } else { dim }) as usize] = more;
            Tensor::f_zeros(shape, (tensor.kind(), tensor.device()))?
        }
        PadMode::Conjugate if more >= extent => {
            return Err(refuse(
                "pad",
                format!(
                    "{extent} entries of a half-spectrum cannot be mirrored to {size}; expected at most {}",
                    2 * extent - 1
                ),
            ));
        }
        PadMode::Conjugate => tensor.f_narrow(dim, 1, more)?.f_flip([dim])?.f_conj()?.f_resolve_conj()?,
    };
    Ok(Tensor::f_cat(&[tensor, &filling], dim)?)
}

/// The first `size` entries along `dim`.
///
/// # Errors
///
/// A dim out of range, or a size above the extent.
///
/// ```
/// use isobar_collectives::truncate;
/// use tch::Tensor;
///
/// let x = Tensor::from_slice(&[1.0, 2.0, 3.0]);
/// assert_eq!(truncate(&x, -1, 2)?, Tensor::from_slice(&[1.0, 2.0]));
/// assert!(truncate(&x, 0, 4).is_err());
/// # Ok::<(), isobar_collectives::Error>(())
/// ```
pub fn truncate(tensor: &Tensor, dim: i64, size: i64) -> Result<Tensor> {
    let extent = extent("truncate", tensor, dim)?;
    match (0..=extent).contains(&size) {
        true => Ok(tensor.f_narrow(dim, 0, size)?),
        false => Err(refuse("truncate", format!("cannot truncate extent {extent} to {size}; pad does that"))),
    }
}

/// The sum, or the mean, of the ranks' losses at rank `dst`; `None` at the others. Every rank calls.
///
/// # Errors
///
/// A loss of more than one element, a destination that is not in the group, or the errors of the exchange.
///
/// ```
/// use isobar_collectives::{reduce_loss, threads};
/// use tch::Tensor;
///
/// let losses = threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let loss = Tensor::from(0.5 + group.rank() as f64);
///     reduce_loss(&loss, 0, true, &group).unwrap()
/// });
/// assert_eq!(losses, [Some(1.0), None]);
/// ```
pub fn reduce_loss(loss: &Tensor, dst: usize, mean: bool, group: &Group) -> Result<Option<f64>> {
    if loss.numel() != 1 {
        return Err(group
            .call("reduce_loss")
            .refuse(format!("the loss has shape {:?}; expected one element", loss.size())));
    }
    let op = if mean { ReduceOp::Avg } else { ReduceOp::Sum };
    let loss = loss.detach().f_to_kind(tch::Kind::Double)?.f_view([1])?;
    let reduced = broadcast::start_reduce(&loss, op, dst, group)?.wait()?;
    match group.rank() == dst {
        true => Ok(Some(reduced.f_double_value(&[0])?)),
        false => Ok(None),
    }
}

fn extent(operation: &'static str, tensor: &Tensor, dim: i64) -> Result<i64> {
    let shape = tensor.size();
    let dims = shape.len() as i64;
    let at = if dim < 0 { dim + dims } else { dim };
    usize::try_from(at).ok().and_then(|d| shape.get(d)).copied().ok_or_else(|| {
        refuse(operation, format!("dim {dim} is out of range for a tensor of shape {shape:?}"))
    })
}

fn refuse(operation: &'static str, problem: String) -> Error {
    Error::Input { operation, problem }
}
