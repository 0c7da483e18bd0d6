//! Models against golden cases, and on ranks against one.

mod channels_and_domain;
mod checkpointing;
mod common;
mod distributed;
mod domain_conv;
mod domain_spectral;
mod dropout;
mod golden;
mod mixed_precision;
mod models;
mod pending;
mod registry;
mod size;
mod spectral;
