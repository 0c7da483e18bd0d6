//! Operators by name, a program's own among them.

use isobar_array::kernel::is_registered;
use isobar_array::{Array, Attrs, registered_ops};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::rules::{announce, built_in, operators, registered_sharded_ops, replacement, rule};
use crate::tensor::{ShardTensor, same_mesh};

impl ShardTensor {
    /// Runs an operator by name: the handler that a program registered for sharded tensors; else its dense handler under the
    /// sharding that it declared; else this crate's own rule; else the dense handler on tensors gathered whole, which warns
    /// once for each operator. See [`rules`](crate::rules).
    ///
    /// All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// A name that nobody registered; [`Error::HiddenCommunication`] where the inputs would be gathered and that is
    /// [forbidden](crate::forbid_hidden_communication); what the operator refuses.
    pub fn op(name: &str, inputs: &[&Self], attrs: &Attrs) -> Result<Vec<Self>> {
        if let Some(result) = replacement(name, inputs, || attrs.clone()) {
            return result;
        }
        if let Some(operator) = built_in(name) {
            return operator.run(inputs, attrs);
        }
        if !is_registered(name) {
            let mut known = registered_ops();
            known.extend(registered_sharded_ops());
            known.extend(operators().into_iter().map(|operator| operator.name().to_owned()));
            known.sort_unstable();
            known.dedup();
            return Err(Error::from(isobar_array::Error::UnknownOperator { name: name.to_owned(), known }));
        }
        rule(name, inputs, || on_whole_tensors(name, inputs, attrs))
    }
}

/// The fallback: every rank gathers the inputs, and computes everything.
fn on_whole_tensors(name: &str, inputs: &[&ShardTensor], attrs: &Attrs) -> Result<Vec<ShardTensor>> {
    let Some(first) = inputs.first() else {
        return Err(Error::from(isobar_array::Error::Argument {
            op: "op",
            reason: format!("{name}: no tensors were given, which say the mesh"),
        }));
    };
    same_mesh("op", inputs)?;
    for input in inputs {
        announce(name, input, &input.layout().replicated())?;
    }
    let wholes: Vec<Tensor> = inputs
        .iter()
        .map(|input| Ok(input.to_layout(&input.layout().replicated())?.local().shallow_clone()))
        .collect::<Result<_>>()?;
    let outputs = Tensor::op(name, &wholes.iter().collect::<Vec<_>>(), attrs)?;
    let give = |output: &Tensor| {
        let layout = first.layout().replicated_shape(&output.size());
        ShardTensor::new(output.shallow_clone(), layout)
    };
    Ok(outputs.iter().map(give).collect())
}
