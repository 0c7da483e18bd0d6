//! Gradient mode of the calling thread, restored on drop, also when a panic unwinds.
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

use std::marker::PhantomData;

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

/// Whether operations of the calling thread record a graph.
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
    fn the_mode_is_the_threads_own() {
        let _off = NoGrad::new();
        assert!(std::thread::spawn(is_grad_enabled).join().unwrap());
        assert!(!is_grad_enabled());
    }
}
