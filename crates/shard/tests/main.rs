//! Sharded tensors on every layout against dense ones.

mod adjoints;
mod arguments;
mod attention;
mod checkpoint;
mod common;
mod dtypes;
mod edges;
mod fourier;
mod fourier_gradients;
mod fourier_modes;
mod halo;
mod module;
mod neighbours;
mod never_wrong;
mod norms;
mod operators;
mod periodic;
mod provided;
mod redistribute;
mod resample;
mod rules;
mod traffic;
mod views;
mod windows;
