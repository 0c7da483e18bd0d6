//! Parts that several models are made of.
//!
//! A layer depends on no model.

mod constant;
mod patches;
mod per_dim;
mod recompute;
mod start;
mod token_attention;
mod window_attention;

pub(crate) use constant::{constant, zeros};
pub(crate) use patches::{patch_grid, split_positions, unpatched};
pub use per_dim::PerDim;
pub(crate) use recompute::Recompute;
pub(crate) use start::Start;
pub use token_attention::QkNorm;
pub(crate) use token_attention::{
    Reach, TokenAttention, TokenAttentionConfig, attention_window, axial_rotary, batch_dim, hidden_width,
};
