//! CUDA streams and events, and pinned memory, where there is CUDA; a clear error elsewhere.
//!
//! One program serves machines with and without a GPU: libtorch's CUDA part is no dependency of it, and is opened by
//! [`load`] where there is a driver. Call [`load`] before anything asks torch for CUDA, since torch remembers a "no".
//!
//! ```
//! use isobar_torch::cuda;
//!
//! if cuda::is_available() {
//!     let side = cuda::Stream::from_pool(0, false)?;
//!     let ready = cuda::Event::new(false)?;
//!     ready.record(&cuda::Stream::current(0)?)?;
//!     ready.block(&side)?;
//! } else {
//!     assert!(cuda::Stream::current(0).is_err());
//! }
//! # Ok::<(), isobar_torch::Error>(())
//! ```

mod load;
mod stream;

pub use load::{device_count, is_available, load};
pub use stream::{Event, Stream, StreamGuard, pinned, record_stream};

#[cfg(test)]
mod tests;
