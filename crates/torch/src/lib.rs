//! Parts of libtorch that Isobar needs and [`tch`] lacks: a narrow C++ shim and its safe interface.
//!
//! | module | is |
//! |---|---|
//! | [`autograd`] | custom functions with a Rust closure as backward, `backward` and `grad` with every option, hooks |
//! | [`guard`] | gradient mode and mixed precision, restored on drop; deterministic kernels |
//! | [`observe`] | the first result that is not finite |
//! | [`memory`] | owned memory handed to torch and back, a caching CPU allocator that counts, memory formats |
//! | [`meta`] | tensors with a shape and without memory, and how many bytes they would take |
//! | [`element`] | Rust's element types as torch dtypes, complex and bfloat16 included |
//! | [`c10d`] | torch's gloo group |
//! | [`cuda`] | streams, events and pinned memory, loaded at run time where there is a driver |
//!
//! The crate knows nothing of meshes, opens no socket of its own, and reads no environment variable. It is thread-safe as far as
//! torch is: a tensor may go to another thread, and closures of the backward pass may run on the engine's device threads.

#![expect(unsafe_code, reason = "this crate is the border to C++; every block says why it is sound")]

pub mod autograd;
pub mod c10d;
pub mod cuda;
pub mod element;
mod error;
mod ffi;
pub mod guard;
pub mod memory;
pub mod meta;
pub mod observe;

pub use element::{Complex32, Complex64, Element};
pub use error::{BoxError, Error, Result, error_text};

/// The version of libtorch that this was built with, as `2.11.0`.
///
/// ```
/// assert_eq!(isobar_torch::libtorch_version().split('.').count(), 3);
/// ```
pub fn libtorch_version() -> String {
    // SAFETY: a text of the library's own, that ends with 0 and stays.
    let text = unsafe { std::ffi::CStr::from_ptr(ffi::isobar_libtorch_version()) };
    text.to_string_lossy().into_owned()
}

/// Returns the instruction set that libtorch's own CPU kernels use here, as `AVX512`, `AVX2` or `DEFAULT`: the best that
/// the processor has, or what the environment variable `ATEN_CPU_CAPABILITY` limits it to.
///
/// ```
/// assert!(!isobar_torch::cpu_capability().is_empty());
/// ```
pub fn cpu_capability() -> String {
    // SAFETY: a text with static lifetime that ends with 0.
    let text = unsafe { std::ffi::CStr::from_ptr(ffi::isobar_cpu_capability()) };
    text.to_string_lossy().into_owned()
}

/// Lets the process end without static destructors: those of libtorch take about 0.1 s, a third of a short command.
///
/// Call it once at the start of `main`. At exit, `atexit` handlers that were registered after this call run (such as HDF5's), then
/// C's `stdout` is flushed, and the process ends. Handlers registered earlier and all static destructors are
/// skipped, including those that write profiles or coverage data. If the handler cannot be registered, the process exits as usual.
///
/// ```
/// isobar_torch::skip_static_destructors();
/// ```
pub fn skip_static_destructors() {
    // SAFETY: registers a handler that refers to no memory of this process but its code, which stays loaded.
    let _ = unsafe { ffi::isobar_skip_earlier_exit_handlers() };
}
