//! Operators by name.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::sync::{Arc, PoisonError, RwLock};

use tch::Tensor;

use crate::error::{Error, Result};

/// Arguments of an operator by name, as in a golden case's `attrs`.
pub type Attrs = serde_json::Map<String, serde_json::Value>;

type Failure = Box<dyn StdError + Send + Sync>;
type Handler = dyn Fn(&[&Tensor], &Attrs) -> Result<Vec<Tensor>, Failure> + Send + Sync;

static HANDLERS: RwLock<BTreeMap<String, Arc<Handler>>> = RwLock::new(BTreeMap::new());

/// Adds the operator `name`, or replaces it; says whether there was one.
///
/// The handler works on one rank's dense tensors and must be differentiable itself. All ranks register the same names.
///
/// ```
/// use isobar_array::{Array, register_op};
/// use tch::Tensor;
///
/// register_op("double", |inputs, _attrs| Ok(vec![inputs[0].f_mul_scalar(2.0)?]));
/// let outputs = Tensor::op("double", &[&Tensor::from_slice(&[1.5f64])], &Default::default())?;
/// assert_eq!(outputs[0], Tensor::from_slice(&[3.0f64]));
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn register_op(
    name: &str,
    handler: impl Fn(&[&Tensor], &Attrs) -> Result<Vec<Tensor>, Failure> + Send + Sync + 'static,
) -> bool {
    let mut handlers = HANDLERS.write().unwrap_or_else(PoisonError::into_inner);
    handlers.insert(name.to_string(), Arc::new(handler)).is_some()
}

/// The names of all registered operators, sorted.
///
/// ```
/// use isobar_array::{register_op, registered_ops};
///
/// register_op("halve", |inputs, _attrs| Ok(vec![inputs[0].f_mul_scalar(0.5)?]));
/// assert!(registered_ops().contains(&"halve".to_string()));
/// # Ok::<(), isobar_array::Error>(())
/// ```
pub fn registered_ops() -> Vec<String> {
    HANDLERS.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
}

/// Returns whether the name is registered.
pub fn is_registered(name: &str) -> bool {
    HANDLERS.read().unwrap_or_else(PoisonError::into_inner).contains_key(name)
}

/// Runs an operator; `None` if there is none of that name.
type Run = fn(&str, &[&Tensor], &Attrs) -> Option<Result<Vec<Tensor>>>;

/// Operators of a crate above, for dense tensors by their names. Collected at link time.
#[doc(hidden)]
#[derive(Debug)]
pub struct Provider {
    /// Returns their names.
    pub names: fn() -> Vec<String>,
    /// Runs one; `None` if it is none of them.
    pub run: Run,
}

inventory::collect!(Provider);

pub(crate) fn run(name: &str, inputs: &[&Tensor], attrs: &Attrs) -> Result<Vec<Tensor>> {
    // The lock is not held while the handler runs: it may register or run others.
    let handler = HANDLERS.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
    if let Some(handler) = handler {
        return handler(inputs, attrs).map_err(|source| Error::Registered { name: name.to_string(), source });
    }
    let provided = inventory::iter::<Provider>.into_iter().find_map(|it| (it.run)(name, inputs, attrs));
    provided.unwrap_or_else(|| Err(Error::UnknownOperator { name: name.to_string(), known: known() }))
}

/// The names of all operators, sorted.
fn known() -> Vec<String> {
    let provided = inventory::iter::<Provider>.into_iter().flat_map(|it| (it.names)());
    let mut names: Vec<_> = registered_ops().into_iter().chain(provided).collect();
    names.sort_unstable();
    names.dedup();
    names
}
