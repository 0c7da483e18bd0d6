//! Every combination of parameter supplier, ranks and field layout gives the dense gradient, or is rejected
//! on all ranks with an error that names the correct call.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrangement;
mod by_hand;
mod model;
mod runs;
