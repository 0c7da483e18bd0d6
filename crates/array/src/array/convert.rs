//! Kind, device, and the graph of gradients.

use tch::{Device, Kind, TchError, Tensor};

use super::by_name::one;
use super::{Array, named};
use crate::error::Result;

/// Conversions that change no value beyond its precision.
#[expect(clippy::missing_errors_doc, reason = "all fail alike: the kind or device is refused")]
pub trait Convert: Sized {
    /// Another handle on the same elements and the same place in the graph.
    fn shallow_clone(&self) -> Self;

    /// The elements as another kind; the same handle where nothing changes.
    fn to_kind(&self, kind: Kind) -> Result<Self>
    where
        Self: Array,
    {
        one("to_kind", &[self], args!("kind": format!("{kind:?}")))
    }

    /// The elements on another device; the same handle where nothing changes.
    fn to_device(&self, device: Device) -> Result<Self>
    where
        Self: Array,
    {
        one("to_device", &[self], args!("device": format!("{device:?}")))
    }

    /// Detaches the tensor from the autograd graph.
    fn detach(&self) -> Result<Self>;

    /// A plain tensor, the same on all ranks, as an array beside this one, on its device.
    fn constant(&self, plain: &Tensor) -> Result<Self>;

    /// The elements in row-major order in memory; the same handle where they are.
    fn contiguous(&self) -> Result<Self>
    where
        Self: Array,
    {
        one("contiguous", &[self], args!())
    }

    /// A complex array as a real one with a last dim of 2 (re, im), the same memory.
    fn view_as_real(&self) -> Result<Self>;

    /// A real array with a last dim of 2 (re, im) as a complex one, the same memory where it is aligned to the complex
    /// element, else a copy.
    fn view_as_complex(&self) -> Result<Self>;
}

impl Convert for Tensor {
    fn shallow_clone(&self) -> Self {
        Tensor::shallow_clone(self)
    }

    fn to_kind(&self, kind: Kind) -> Result<Self> {
        named("to_kind", &[self], self.f_to_kind(kind))
    }

    fn to_device(&self, device: Device) -> Result<Self> {
        named("to_device", &[self], self.f_to_device(device))
    }

    fn detach(&self) -> Result<Self> {
        named("detach", &[self], self.f_detach())
    }

    fn constant(&self, plain: &Tensor) -> Result<Self> {
        named("constant", &[plain], plain.f_to(Tensor::device(self)))
    }

    fn contiguous(&self) -> Result<Self> {
        named("contiguous", &[self], self.f_contiguous())
    }

    fn view_as_real(&self) -> Result<Self> {
        let parts = || match self.numel() {
            // Its gradient is viewed as complex, which the strides of an empty tensor may not allow.
            0 => Tensor::f_stack(&[self.f_real()?, self.f_imag()?], -1),
            _ => self.f_view_as_real(),
        };
        named("view_as_real", &[self], parts())
    }

    fn view_as_complex(&self) -> Result<Self> {
        named("view_as_complex", &[self], as_complex(self))
    }
}

/// Views the last dim, real and imaginary parts, as complex numbers.
///
/// # Errors
///
/// libtorch refuses: a last extent other than 2, or a dtype without complex numbers.
pub fn as_complex(pairs: &Tensor) -> Result<Tensor, TchError> {
    if pairs.numel() == 0 {
        // The strides of an empty tensor are whatever they were, and a view asks for the last to be 1.
        return Tensor::f_complex(&pairs.f_select(-1, 0)?, &pairs.f_select(-1, 1)?);
    }
    // Vectorised complex kernels fault on memory that is not aligned to 16 bytes, as maps of files may be.
    let aligned = (pairs.data_ptr() as usize).is_multiple_of(16);
    let copy = pairs.f_to_device_(Tensor::device(pairs), Tensor::kind(pairs), false, !aligned)?;
    copy.f_contiguous()?.f_view_as_complex()
}
