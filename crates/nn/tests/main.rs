//! Layers against libtorch's functions, and on ranks against one.

mod arguments;
mod attention;
mod case;
mod convolutions;
mod fields;
mod initial;
mod tokens;
