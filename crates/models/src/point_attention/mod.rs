//! Attention between points by way of few slices, and the network around it, which Transolver, FLARE and GeoTransolver share.
//!
//! Arrays of points are `[batch, points…, features]` with one to three dims of points: a list, or a grid. Grids are not flattened, so
//! that they may be split along any of their dims; sums over points are small reductions.

mod block;
mod context;
mod cross;
mod distances;
mod flare;
mod heads;
mod mlp;
mod points;
mod slices;
mod spec;
mod tiles;
mod time;
pub(crate) mod traffic;
mod trunk;

pub(crate) use block::{Block, Head};
pub(crate) use context::Tokenizer;
pub(crate) use mlp::PointMlp;
pub(crate) use points::{Form, Grid, coordinates};
pub(crate) use spec::{AttentionKind, AttentionSpec, MixingMode, PointDropout, check_engine, largest};
pub(crate) use trunk::{Trunk, TrunkSpec};
