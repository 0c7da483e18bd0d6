//! Random numbers that belong to the global tensor.
//!
//! A [`Generator`] is counter-based (Philox-4x32-10): element `i` of its `n`-th draw is a pure function of the seed, `n`
//! and the element's *global* row-major index. So a rank that holds a part of a tensor makes only that part, and the
//! values are the same for every layout and every number of ranks.

mod generator;
mod philox;
mod quantile;
mod tensors;
mod window;

pub use generator::Generator;
pub use philox::philox4x32;
pub use window::Window;
