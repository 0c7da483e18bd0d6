//! Handlers that programs register for operators of sharded tensors, by name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use isobar_array::Attrs;

use super::running::Running;
use super::{Failure, is_anything_registered, operator, rule, sharding, something_is_registered};
use crate::context::is_hidden_communication_forbidden;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::tensor::{ShardTensor, received};

type Handler = dyn Fn(&[&ShardTensor], &Attrs) -> Result<Vec<ShardTensor>, Failure> + Send + Sync;

static HANDLERS: RwLock<BTreeMap<String, Arc<Handler>>> = RwLock::new(BTreeMap::new());

/// Adds the operator `name` of sharded tensors, or replaces it, a built-in one too; says whether a program had added one
/// before.
///
/// Built-in operators have PyTorch's names, as `softmax`, `conv2d`, `layer_norm`, `add`; every call of theirs, as
/// [`ShardTensor::softmax`], asks for a handler, also where other operators are made of them. The handler gets the tensors in
/// PyTorch's order, those that were given, and the other arguments by PyTorch's names, a generator as its seed and draws. While
/// it runs, its own name stands for the built-in operator, so that it may do something before and after that.
///
/// The handler is called on all ranks, and must do the same on all of them, deciding from layouts only. All ranks register
/// the same names.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
/// use isobar_shard::rules::register_sharded_op;
/// use isobar_array::Elementwise;
/// use isobar_shard::{Placement, ShardTensor};
/// use tch::Tensor;
///
/// register_sharded_op("cubed", |inputs, _| Ok(vec![inputs[0].mul(inputs[0])?.mul(inputs[0])?]));
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let x = ShardTensor::distribute(&Tensor::from_slice(&[2.0]), &mesh, &[Placement::Shard(0)])?;
/// let y = ShardTensor::op("cubed", &[&x], &Default::default())?;
/// assert_eq!(y[0].full_tensor(None)?, Tensor::from_slice(&[8.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn register_sharded_op(
    name: &str,
    handler: impl Fn(&[&ShardTensor], &Attrs) -> Result<Vec<ShardTensor>, Failure> + Send + Sync + 'static,
) -> bool {
    let mut handlers = HANDLERS.write().unwrap_or_else(PoisonError::into_inner);
    let before = handlers.insert(name.to_owned(), Arc::new(handler)).is_some();
    something_is_registered();
    before
}

/// Calls the function registered under an operator's name; `None` if there is none, or it is running already.
pub(crate) fn replacement(
    name: &str,
    inputs: &[&ShardTensor],
    args: impl FnOnce() -> Attrs,
) -> Option<Result<Vec<ShardTensor>>> {
    if !is_anything_registered() || Running::is(name) {
        return None;
    }
    // The lock is not held while the handler runs: it may register or run others.
    let handler = HANDLERS.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
    if let Some(handler) = handler {
        let _running = Running::new(name);
        return Some(rule(name, inputs, || {
            handler(inputs, &args()).map_err(|source| {
                Error::from(isobar_array::Error::Registered { name: name.to_owned(), source })
            })
        }));
    }
    if let Some(own) = operator::own(name) {
        let _running = Running::new(name);
        return Some(rule(name, inputs, || own.run(inputs, &args())));
    }
    sharding::run(name, inputs, args)
}

/// The names that [`register_sharded_op`] has added, sorted.
pub fn registered_sharded_ops() -> Vec<String> {
    HANDLERS.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
}

/// Says, once for an operator, that it gathers what it has no rule for, and what that costs; refuses where that is forbidden.
pub(crate) fn announce(name: &str, input: &ShardTensor, to: &Layout) -> Result<()> {
    // (Nothing is gathered to a layout that there is no way to.)
    let bytes = received(input.layout(), to, input.kind().elt_size_in_bytes())?.unwrap_or(0);
    if bytes == 0 {
        return Ok(());
    }
    let layouts = input.layout().to_string();
    if is_hidden_communication_forbidden() {
        return Err(Error::HiddenCommunication { op: name.to_owned(), layouts, bytes });
    }
    if warns_first(name) {
        tracing::warn!(
            operator = name,
            bytes,
            "{name} has no rule for {layouts}: it is gathered on every rank, {bytes} bytes this time; register a rule with \
             register_sharding or register_sharded_op"
        );
    }
    Ok(())
}

/// Returns whether this is the first warning about this operator.
fn warns_first(name: &str) -> bool {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned())
}
