//! Operators by name: the descriptors of all ([`operators`]), and the rules that programs bring themselves ([`register!`](crate::register),
//! functions of local parts, declared shardings). It knows no operator.
//!
//! An operator, by name ([`ShardTensor::op`](crate::ShardTensor::op)) or by its method, is, in this order: the handler of
//! sharded tensors that [`register_sharded_op`] put there; what the program registers by [`register!`](crate::register); the dense handler of [`register_op`](isobar_array::register_op) under the sharding of
//! [`register_sharding`]; the rule that this crate has; the dense handler on tensors gathered whole, which is told of once,
//! and an error where hidden communication is forbidden.

mod call;
mod footprint;
mod local_map;
mod named;
mod operator;
mod rule;
mod running;
mod sharding;
mod traffic;

use std::sync::atomic::{AtomicBool, Ordering};

pub use call::Call;
pub use footprint::{Footprint, FootprintTensor, Side, SideWindow, summed};
pub use isobar_array::kernel::Dtype;
pub use local_map::{LocalMap, LocalOutput, local_map};
pub(crate) use named::{announce, replacement};
pub use named::{register_sharded_op, registered_sharded_ops};
#[doc(hidden)]
pub use operator::{IntoTensors, Tensors};
pub use operator::{Operator, operators};
pub(crate) use operator::{assert_arguments, built_in, is_first_call};
pub(crate) use rule::{Outputs, check_dtypes, rule};
pub use sharding::{Sharding, Shardings, register_sharding};
pub(crate) use traffic::broadcast;
pub use traffic::{Indexing, Traffic};

/// Error of a program's own function.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// True if a program has registered anything for sharded tensors; otherwise operators skip the lookup.
static ANY: AtomicBool = AtomicBool::new(false);

/// Returns whether operators must look up registered rules.
pub(crate) fn is_anything_registered() -> bool {
    ANY.load(Ordering::Acquire) || operator::is_any_own()
}

/// Records that a program has registered a rule; operators look rules up from then on.
fn something_is_registered() {
    ANY.store(true, Ordering::Release);
}
