//! Gradient mode and mixed precision of the calling thread, restored on drop, also when a panic unwinds.
//!
//! ```
//! use isobar_torch::guard::{EnableGrad, NoGrad};
//! use tch::{Device, Kind, Tensor};
//!
//! let w = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let no_grad = NoGrad::new();
//! assert!(!w.f_mul_scalar(2.0)?.requires_grad());
//! {
//!     let _grad = EnableGrad::new();
//!     assert!(w.f_mul_scalar(2.0)?.requires_grad());
//! }
//! drop(no_grad);
//! assert!(w.f_mul_scalar(2.0)?.requires_grad());
//! # Ok::<(), tch::TchError>(())
//! ```

use std::ffi::c_int;
use std::marker::PhantomData;

use tch::{Device, Kind};

use crate::error::{Error, Result, call};
use crate::ffi::{self, AutocastState};

/// Mixed precision while this lives, for tensors of one device: libtorch's autocast. Matrix products and convolutions of single
/// precision compute in a kind of 16 bits, and give it; their weights, and all gradients of these, stay as they are. Guards
/// nest; drop them in reverse order.
///
/// Backward goes by the dtypes of the forward pass; it is run after the guard is dropped. Weights are cast anew wherever they are
/// used: a cast that is kept would lack a graph where it was made without gradients.
///
/// ```
/// use isobar_torch::guard::Autocast;
/// use tch::{Device, Kind, Tensor};
///
/// let w = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let y = {
///     let _bf16 = Autocast::new(Device::Cpu, Kind::BFloat16)?;
///     w.f_matmul(&w)?
/// };
/// assert_eq!(y.kind(), Kind::BFloat16);
/// y.to_kind(Kind::Float).sum(Kind::Float).backward();
/// assert_eq!(w.grad().kind(), Kind::Float);
/// # Ok::<(), isobar_torch::Error>(())
/// ```
#[must_use = "precision is restored when the guard is dropped"]
pub struct Autocast {
    device: c_int,
    before: AutocastState,
    // The state belongs to the thread.
    _not_send: PhantomData<*const ()>,
}

impl Autocast {
    /// Turns mixed precision on.
    ///
    /// # Errors
    ///
    /// A dtype that is not of 16 bits; a device without it.
    pub fn new(device: Device, kind: Kind) -> Result<Self> {
        let scalar_type = match kind {
            Kind::Half => HALF,
            Kind::BFloat16 => BFLOAT16,
            other => {
                return Err(Error::Argument(format!(
                    "mixed precision computes in {other:?}, expected Half or BFloat16"
                )));
            }
        };
        let Some(device) = device_type(device) else {
            return Err(Error::Argument(format!("there is no mixed precision on {device:?}")));
        };
        Self::set(device, |_| AutocastState { enabled: true, kind: scalar_type, cached: false })
    }

    /// Turns it off, within a part that computes in full precision.
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    pub fn off(device: Device) -> Result<Self> {
        Self::set(device_type(device).unwrap_or(0), |before| AutocastState { enabled: false, ..before })
    }

    fn set(device: c_int, state: impl FnOnce(AutocastState) -> AutocastState) -> Result<Self> {
        let before = autocast_state(device)?;
        let state = state(before);
        // SAFETY: sets the thread's state; the pointers are valid during the call.
        call(|error| unsafe { ffi::isobar_autocast_set(device, &state, error) })?;
        Ok(Self { device, before, _not_send: PhantomData })
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        // The previous value can always be restored.
        // SAFETY: as in `set`.
        let _ = call(|error| unsafe { ffi::isobar_autocast_set(self.device, &self.before, error) });
    }
}

/// The dtype in which the calling thread's products on this device compute, where mixed precision is on.
pub fn autocast_kind(device: Device) -> Option<Kind> {
    let state = autocast_state(device_type(device)?).ok()?;
    match (state.enabled, state.kind) {
        (true, HALF) => Some(Kind::Half),
        (true, BFLOAT16) => Some(Kind::BFloat16),
        _ => None,
    }
}

/// `c10::ScalarType`'s numbers.
const HALF: c_int = 5;
const BFLOAT16: c_int = 15;

/// `c10::DeviceType`'s number.
fn device_type(device: Device) -> Option<c_int> {
    match device {
        Device::Cpu => Some(0),
        Device::Cuda(_) => Some(1),
        _ => None,
    }
}

fn autocast_state(device: c_int) -> Result<AutocastState> {
    let mut state = AutocastState::default();
    // SAFETY: reads the thread's state; the pointers are valid during the call.
    call(|error| unsafe { ffi::isobar_autocast_get(device, &mut state, error) })?;
    Ok(state)
}

/// Operations record no graph while this lives. Guards nest; drop them in reverse order.
#[must_use = "gradient mode is restored when the guard is dropped"]
pub struct NoGrad {
    _restore: GradMode,
}

impl NoGrad {
    /// Turns gradient mode off for the calling thread.
    pub fn new() -> Self {
        Self { _restore: GradMode::set(false) }
    }
}

impl Default for NoGrad {
    fn default() -> Self {
        Self::new()
    }
}

/// Operations record their graph while this lives, also inside [`NoGrad`]. Guards nest; drop them in reverse order.
#[must_use = "gradient mode is restored when the guard is dropped"]
pub struct EnableGrad {
    _restore: GradMode,
}

impl EnableGrad {
    /// Turns gradient mode on for the calling thread.
    pub fn new() -> Self {
        Self { _restore: GradMode::set(true) }
    }
}

impl Default for EnableGrad {
    fn default() -> Self {
        Self::new()
    }
}

/// Restricts libtorch to kernels that are bitwise reproducible, for the whole process; operators without such a kernel
/// become errors. The cost depends on the operator. On CUDA, cuBLAS also needs `CUBLAS_WORKSPACE_CONFIG=:4096:8` in the
/// environment, and says so.
///
/// # Errors
///
/// An error of libtorch.
///
/// ```
/// use isobar_torch::guard::{is_deterministic, set_deterministic};
///
/// set_deterministic(true)?;
/// assert!(is_deterministic());
/// # set_deterministic(false)?;
/// # Ok::<(), isobar_torch::Error>(())
/// ```
pub fn set_deterministic(on: bool) -> Result<()> {
    // SAFETY: sets flags of libtorch.
    call(|error| unsafe { ffi::isobar_set_deterministic(on, error) })
}

/// Returns the setting of [`set_deterministic`].
pub fn is_deterministic() -> bool {
    // SAFETY: reads a flag of libtorch.
    unsafe { ffi::isobar_is_deterministic() }
}

/// Returns whether operations of the calling thread record a graph.
pub fn is_grad_enabled() -> bool {
    let current = GradMode::set(true);
    current.before
}

struct GradMode {
    before: bool,
    // The mode belongs to the thread.
    _not_send: PhantomData<*const ()>,
}

impl GradMode {
    fn set(on: bool) -> Self {
        // SAFETY: sets a thread-local flag of libtorch and returns its former value.
        let before = unsafe { torch_sys::at_grad_set_enabled(on.into()) } != 0;
        Self { before, _not_send: PhantomData }
    }
}

impl Drop for GradMode {
    fn drop(&mut self) {
        // SAFETY: as in `set`.
        unsafe { torch_sys::at_grad_set_enabled(self.before.into()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_nest_and_survive_a_panic() {
        assert!(is_grad_enabled());
        let panicked = std::panic::catch_unwind(|| {
            let _off = NoGrad::new();
            assert!(!is_grad_enabled());
            let _on = EnableGrad::new();
            assert!(is_grad_enabled());
            panic!("unwinds through both guards");
        });
        assert!(panicked.is_err());
        assert!(is_grad_enabled());
    }

    #[test]
    fn precision_nests() -> Result<()> {
        let cpu = Device::Cpu;
        assert_eq!(autocast_kind(cpu), None);
        {
            let _half = Autocast::new(cpu, Kind::Half)?;
            let _bf16 = Autocast::new(cpu, Kind::BFloat16)?;
            assert_eq!(autocast_kind(cpu), Some(Kind::BFloat16));
            drop(Autocast::off(cpu)?);
            assert_eq!(autocast_kind(cpu), Some(Kind::BFloat16));
            assert_eq!(std::thread::spawn(|| autocast_kind(Device::Cpu)).join().ok(), Some(None));
        }
        assert_eq!(autocast_kind(cpu), None);
        assert!(Autocast::new(cpu, Kind::Double).is_err());
        Ok(())
    }

    #[test]
    fn the_mode_is_the_threads_own() {
        let _off = NoGrad::new();
        assert!(std::thread::spawn(is_grad_enabled).join().unwrap());
        assert!(!is_grad_enabled());
    }
}
