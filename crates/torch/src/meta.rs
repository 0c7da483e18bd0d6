//! Tensors with a shape and without memory: libtorch's meta device. A program that runs on it shows how much memory it needs,
//! without allocating or computing.
//!
//! [`tch`] cannot name the device; [`DEVICE`] stands for it after [`enable`]. Operators return tensors of the right shape,
//! dtype and strides. A value that is read from one, such as a loss, is 0.
//!
//! ```
//! use isobar_torch::meta;
//! use tch::{Kind, Tensor};
//!
//! meta::enable()?;
//! let x = Tensor::f_zeros([1 << 20, 1 << 10], (Kind::Float, meta::DEVICE))?;
//! assert_eq!(meta::live_bytes(), 1 << 32);
//! let y = x.f_matmul(&x.f_transpose(0, 1)?)?;
//! assert_eq!((y.size(), y.f_double_value(&[0, 0])?), (vec![1 << 20, 1 << 20], 0.0));
//! drop((x, y));
//! assert_eq!((meta::live_bytes(), meta::peak_bytes()), (0, (1 << 32) + (1 << 42)));
//! # Ok::<(), isobar_torch::Error>(())
//! ```

use tch::{Device, Tensor};

use crate::error::{Result, call};
use crate::ffi;

/// The meta device. Uses the name of MPS, which libtorch for Linux does not have.
pub const DEVICE: Device = Device::Mps;

/// Makes [`DEVICE`] usable, for the rest of the process. Further calls do nothing.
///
/// # Errors
///
/// libtorch rejects a kernel.
pub fn enable() -> Result<()> {
    // SAFETY: registers functions of this program, which stay loaded.
    call(|error| unsafe { ffi::isobar_meta_enable(error) })
}

/// Returns whether the tensor is on the meta device.
pub fn is_meta(tensor: &Tensor) -> bool {
    tensor.defined() && tensor.device() == DEVICE
}

/// Returns the size of the live meta tensors that this thread made, in bytes.
pub fn live_bytes() -> u64 {
    // SAFETY: reads a number of this thread.
    unsafe { ffi::isobar_meta_live() }.unsigned_abs()
}

/// Returns the highest [`live_bytes`] of this thread since it started or called [`reset_peak`].
pub fn peak_bytes() -> u64 {
    // SAFETY: reads a number of this thread.
    unsafe { ffi::isobar_meta_peak() }.unsigned_abs()
}

/// Resets this thread's peak to its [`live_bytes`].
pub fn reset_peak() {
    // SAFETY: writes a number of this thread.
    unsafe { ffi::isobar_meta_reset_peak() };
}
