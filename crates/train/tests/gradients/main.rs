//! Every combination of a supplier of parameters, ranks and a layout of fields gives the dense gradient, or is refused on all ranks
//! with the call that is right.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrangement;
mod by_hand;
mod model;
mod runs;
