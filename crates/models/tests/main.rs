//! Models against golden cases, and on ranks against one.

mod bf16_zoo;
mod channels_and_domain;
mod checkpointing;
mod common;
mod diffusion;
mod distributed;
mod domain_conv;
mod domain_spectral;
mod dropout;
mod faces;
mod golden;
mod kernels;
mod mixed_precision;
mod models;
mod patching;
mod pending;
mod registry;
mod size;
mod song_positions;
mod spectral;
mod transformer_formulas;
mod transformer_masks;
mod transformer_volumes;
mod transformers;
mod transolver;
mod windows;
