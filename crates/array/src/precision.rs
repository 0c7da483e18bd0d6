//! Mixed precision: what computes in 16 bits, and what does not.
//!
//! libtorch's autocast is a state of the thread, in which libtorch casts what its products are given. Within an operator of
//! sharded tensors it is off, so that the dtypes of what ranks exchange and of their results, empty parts included, follow from
//! those of the global tensors: the products cast their local operands themselves, and all else computes in what it is given.

use std::cell::Cell;
use std::marker::PhantomData;

use isobar_torch::guard::{Autocast, autocast_kind};
use tch::{Device, Kind, TchError, Tensor};

use crate::error::{Error, Result};

thread_local! {
    /// The kind of products, within an operator.
    static INSIDE: Cell<Option<Kind>> = const { Cell::new(None) };
}

/// While it lives, libtorch casts nothing on its own.
pub struct Inside {
    before: Option<Kind>,
    _off: Autocast,
    _not_send: PhantomData<*const ()>,
}

impl Inside {
    /// Enters an operator; `None` where libtorch's autocast is off, as it is within one that has been entered.
    ///
    /// # Errors
    ///
    /// libtorch cannot turn autocast off on the device.
    pub fn enter(device: Device) -> Result<Option<Self>> {
        let Some(kind) = autocast_kind(device) else { return Ok(None) };
        let off = Autocast::off(device)?;
        Ok(Some(Self { before: INSIDE.replace(Some(kind)), _off: off, _not_send: PhantomData }))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(self.before);
    }
}

/// The kind of 16 bits in which products compute, where mixed precision is on.
fn product_kind(device: Device) -> Option<Kind> {
    INSIDE.get().or_else(|| autocast_kind(device))
}

/// The dtype in which a product takes an operand: 16 bits, where mixed precision is on and the operand has no more than single
/// precision.
pub fn lowered_kind(kind: Kind, device: Device) -> Kind {
    match (product_kind(device), kind) {
        (Some(product), Kind::Float | Kind::Half | Kind::BFloat16) => product,
        _ => kind,
    }
}

/// Converts an operand of a product to [`lowered_kind`].
///
/// # Errors
///
/// libtorch refuses the conversion.
pub fn lowered(tensor: &Tensor) -> Result<Tensor, TchError> {
    tensor.f_to_kind(lowered_kind(tensor.kind(), tensor.device()))
}

/// The dtype in which statistics of a tensor are taken: at least single precision, where mixed precision is on.
pub fn full_kind(kind: Kind, device: Device) -> Kind {
    match (product_kind(device), kind) {
        (Some(_), Kind::Half | Kind::BFloat16) => Kind::Float,
        _ => kind,
    }
}

/// Converts an operand of a norm to [`full_kind`].
///
/// # Errors
///
/// libtorch refuses the conversion.
pub fn full(tensor: &Tensor) -> Result<Tensor, TchError> {
    tensor.f_to_kind(full_kind(tensor.kind(), tensor.device()))
}

/// Casts an optional parameter of a norm as [`full`] does.
///
/// # Errors
///
/// libtorch refuses the conversion.
pub(crate) fn as_full(parameter: Option<&Tensor>) -> Result<Option<Tensor>, TchError> {
    parameter.map(full).transpose()
}

/// Computes `f` without mixed precision on `device`, as transforms and what lies between them are.
///
/// # Errors
///
/// Those of `f`.
///
/// ```
/// use isobar_array::{Error, Linear, in_full_precision};
/// use isobar_torch::guard::Autocast;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
/// let _bf16 = Autocast::new(Device::Cpu, Kind::BFloat16)?;
/// assert_eq!(Linear::matmul(&x, &x)?.kind(), Kind::BFloat16);
/// assert_eq!(in_full_precision(Device::Cpu, || Linear::matmul(&x, &x))?.kind(), Kind::Float);
/// # Ok::<(), Error>(())
/// ```
pub fn in_full_precision<T, E: From<Error>>(
    device: Device,
    f: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let _off = match autocast_kind(device) {
        Some(_) => Some(Autocast::off(device).map_err(Error::from)?),
        None => None,
    };
    f()
}
