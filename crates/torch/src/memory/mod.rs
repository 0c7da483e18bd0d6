//! Memory: vectors handed to torch and back, what raw communication asks of a tensor, and the caching allocator.
//!
//! ```
//! use isobar_torch::{Complex64, memory};
//!
//! // The vector becomes the tensor's memory; nothing is copied.
//! let field = memory::from_vec(vec![Complex64::new(1.0, -1.0); 6], &[2, 3])?;
//! assert_eq!(field.size(), [2, 3]);
//! assert_eq!(memory::nbytes(&field), 96);
//! // A conjugate is a view with a mark; reading it back resolves the mark.
//! let conjugate: Vec<Complex64> = memory::to_vec(&field.f_conj()?)?;
//! assert_eq!(conjugate[0], Complex64::new(1.0, 1.0));
//! # Ok::<(), isobar_torch::Error>(())
//! ```

mod allocator;
mod blocks;
mod layout;
mod storage;
mod vec;

pub use allocator::{
    cached_bytes, empty_cache, install_caching_allocator, is_installed, largest_blocks, live_bytes,
    peak_bytes, reset_peak,
};
pub use layout::{
    MemoryFormat, copy_no_grad, data_ptr, dense, empty_as, empty_like, is_contiguous, memory_format, nbytes,
    storage_offset,
};
pub use storage::{release, restore, shares_storage};
pub use vec::{from_vec, to_vec};
