//! Kind, device, and the graph of gradients.

use tch::{Device, Kind, TchError, Tensor};

use super::by_name::one;
use super::{Array, named};
use crate::error::Result;

/// Conversions that change no value beyond its precision.
///
/// # Errors
///
/// All methods fail alike: a dtype that does not exist on the device, or a device that is not there.
#[expect(clippy::missing_errors_doc, reason = "all fail alike: the dtype or device is refused")]
pub trait Convert: Sized {
    /// Another handle on the same elements and the same place in the graph.
    ///
    /// ```
    /// use isobar_array::Convert;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[1.0, 2.0]);
    /// let _ = Convert::shallow_clone(&x).fill_(5.0);
    /// assert_eq!(x, Tensor::from_slice(&[5.0, 5.0]));
    /// ```
    fn shallow_clone(&self) -> Self;

    /// Converts the elements to another dtype; returns the same handle if nothing changes.
    ///
    /// ```
    /// use isobar_array::Convert;
    /// use tch::{Kind, Tensor};
    ///
    /// let x = Tensor::from_slice(&[1.75, -1.75]);
    /// assert_eq!(Convert::to_kind(&x, Kind::Int64)?, Tensor::from_slice(&[1_i64, -1]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
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
    ///
    /// ```
    /// use isobar_array::Convert;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    /// // The second factor is a constant for backward.
    /// let y = &x * Convert::detach(&x)?;
    /// y.sum(tch::Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[3.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn detach(&self) -> Result<Self>;

    /// A plain tensor, the same on all ranks, as an array beside this one, on its device.
    ///
    /// ```
    /// use isobar_array::Array;
    /// use tch::Tensor;
    ///
    /// /// Code that is generic over arrays converts its tables with `constant`.
    /// fn scaled<A: Array>(x: &A, scale: &[f64]) -> isobar_array::Result<A> {
    ///     x.mul(&x.constant(&Tensor::from_slice(scale))?)
    /// }
    /// let y = scaled(&Tensor::from_slice(&[1.0, 2.0]), &[10.0, 100.0])?;
    /// assert_eq!(y, Tensor::from_slice(&[10.0, 200.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn constant(&self, plain: &Tensor) -> Result<Self>;

    /// The elements in row-major order in memory; the same handle where they are.
    ///
    /// ```
    /// use isobar_array::Convert;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).transpose(0, 1);
    /// assert_eq!(x.stride(), [1, 3]);
    /// assert_eq!(Convert::contiguous(&x)?.stride(), [2, 1]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn contiguous(&self) -> Result<Self>
    where
        Self: Array,
    {
        one("contiguous", &[self], args!())
    }

    /// A complex array as a real one with a last dim of 2 (re, im), the same memory.
    ///
    /// ```
    /// use isobar_array::Convert;
    /// use tch::Tensor;
    ///
    /// let z = Tensor::complex(&Tensor::from_slice(&[1.0, 2.0]), &Tensor::from_slice(&[3.0, 4.0]));
    /// assert_eq!(Convert::view_as_real(&z)?, Tensor::from_slice2(&[[1.0, 3.0], [2.0, 4.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn view_as_real(&self) -> Result<Self>;

    /// A real array with a last dim of 2 (re, im) as a complex one, the same memory where it is aligned to the complex
    /// element, else a copy.
    ///
    /// ```
    /// use isobar_array::Convert;
    /// use tch::{Kind, Tensor};
    ///
    /// let z = Convert::view_as_complex(&Tensor::from_slice2(&[[1.0, 3.0], [2.0, 4.0]]))?;
    /// assert_eq!((z.kind(), z.size()), (Kind::ComplexDouble, vec![2]));
    /// assert_eq!(z.imag(), Tensor::from_slice(&[3.0, 4.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
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
        named("to_device", &[self], on_device(self, device))
    }

    fn detach(&self) -> Result<Self> {
        named("detach", &[self], self.f_detach())
    }

    fn constant(&self, plain: &Tensor) -> Result<Self> {
        named("constant", &[plain], on_device(plain, Tensor::device(self)))
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

/// Returns the tensor on a device: itself where it is there. (libtorch copies a meta tensor, whose device `tch` knows by another name.)
///
/// # Errors
///
/// libtorch refuses: a device that is not there, or without memory.
pub fn on_device(tensor: &Tensor, device: Device) -> Result<Tensor, TchError> {
    if tensor.device() == device { Ok(tensor.shallow_clone()) } else { tensor.f_to_device(device) }
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
    let pairs = match aligned {
        true => pairs.shallow_clone(),
        false => pairs.f_to_device_(Tensor::device(pairs), Tensor::kind(pairs), false, true)?,
    };
    pairs.f_contiguous()?.f_view_as_complex()
}
