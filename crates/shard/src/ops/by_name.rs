//! Operators by name, a program's own among them, of sharded and of dense tensors.

use std::sync::OnceLock;

use isobar_array::kernel::{Provider, is_registered};
use isobar_array::{Array, Attrs, registered_ops};
use isobar_collectives::Group;
use isobar_mesh::DeviceMesh;
use tch::Tensor;

use crate::error::{Error, Result};
use crate::layout::{Layout, Placement, Sizes};
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
            known.extend(names());
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

isobar_array::inventory::submit! { Provider { names, run: on_dense_tensors } }

/// The names of all operators of sharded tensors.
fn names() -> Vec<String> {
    let mut names = registered_sharded_ops();
    names.extend(operators().into_iter().map(|operator| operator.name().to_owned()));
    names
}

/// Runs an operator on dense tensors, as it runs on a mesh of one rank; `None` if the name is of none.
fn on_dense_tensors(
    name: &str,
    inputs: &[&Tensor],
    attrs: &Attrs,
) -> Option<isobar_array::Result<Vec<Tensor>>> {
    names().iter().any(|known| known == name).then(|| Ok(on_one_rank(name, inputs, attrs)?))
}

fn on_one_rank(name: &str, inputs: &[&Tensor], attrs: &Attrs) -> Result<Vec<Tensor>> {
    static MESH: OnceLock<DeviceMesh> = OnceLock::new();
    let mesh = match MESH.get() {
        Some(mesh) => mesh,
        None => {
            let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
            MESH.get_or_init(|| mesh)
        }
    };
    let whole = |tensor: &&Tensor| {
        let layout = Layout::new(mesh, &[Placement::Replicate], &tensor.size(), &Sizes::Chunk)?;
        Ok(ShardTensor::new(tensor.shallow_clone(), layout))
    };
    let inputs: Vec<ShardTensor> = inputs.iter().map(whole).collect::<Result<_>>()?;
    let outputs = ShardTensor::op(name, &inputs.iter().collect::<Vec<_>>(), attrs)?;
    outputs.iter().map(|output| Ok(output.resolved()?.local().shallow_clone())).collect()
}
