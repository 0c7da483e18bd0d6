//! DiT: a diffusion transformer on fields.
//!
//! It depends on no rank, data set or training.

mod arguments;
mod block;
mod conditioning;
mod config;
mod detokenizer;
mod invalid;
mod kwargs;
mod model;
mod modulation;
mod sharding;
mod traffic;

pub use config::DitConfig;
pub use kwargs::{
    AttentionBackend, DetokenizerKind, DitAttention, DitBlockOptions, DitConditioning, DitDetokenizer,
    DitEmbedder, DitPositions, DitTokenizer, EmbedFn, LayerNormBackend, TokenizerKind,
};
pub use model::Dit;

const MODEL: &str = "dit";
