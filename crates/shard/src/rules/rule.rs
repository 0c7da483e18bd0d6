//! Execution of a rule, and the outputs of an operator.

use isobar_array::kernel::Inside;

use super::built_in;
use crate::error::{Error, Result};
use crate::tensor::{ShardTensor, Use};

/// Outputs of an operator.
pub(crate) trait Outputs: Sized {
    /// From what a program's handler gave.
    fn from_outputs(op: &str, outputs: Vec<ShardTensor>) -> Result<Self>;

    /// All of them.
    fn each(&mut self) -> Vec<&mut ShardTensor>;
}

impl Outputs for Vec<ShardTensor> {
    fn from_outputs(_op: &str, outputs: Vec<ShardTensor>) -> Result<Self> {
        Ok(outputs)
    }

    fn each(&mut self) -> Vec<&mut ShardTensor> {
        self.iter_mut().collect()
    }
}

impl<const N: usize> Outputs for [ShardTensor; N] {
    fn from_outputs(op: &str, outputs: Vec<ShardTensor>) -> Result<Self> {
        outputs.try_into().map_err(|outputs: Vec<ShardTensor>| {
            Error::from(isobar_array::Error::Argument {
                op: "register_sharded_op",
                reason: format!("what is registered as {op} gave {} tensors, expected {N}", outputs.len()),
            })
        })
    }

    fn each(&mut self) -> Vec<&mut ShardTensor> {
        self.iter_mut().collect()
    }
}

impl Outputs for ShardTensor {
    fn from_outputs(op: &str, outputs: Vec<ShardTensor>) -> Result<Self> {
        <[Self; 1]>::from_outputs(op, outputs).map(|[only]| only)
    }

    fn each(&mut self) -> Vec<&mut ShardTensor> {
        vec![self]
    }
}

impl Outputs for (ShardTensor, ShardTensor) {
    fn from_outputs(op: &str, outputs: Vec<ShardTensor>) -> Result<Self> {
        <[ShardTensor; 2]>::from_outputs(op, outputs).map(|[first, second]| (first, second))
    }

    fn each(&mut self) -> Vec<&mut ShardTensor> {
        vec![&mut self.0, &mut self.1]
    }
}

/// Runs a rule, and names the operator and the layouts of its inputs in what goes wrong.
pub(crate) fn rule<T: Outputs>(
    op: &str,
    inputs: &[&ShardTensor],
    run: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if let Some(outside) = inputs.iter().find(|input| input.layout().coordinates().is_none()) {
        return Err(Error::from(isobar_array::Error::Argument {
            op: "operator",
            reason: format!(
                "{op}: this rank is outside of {}; ranks outside take no part",
                outside.device_mesh()
            ),
        }));
    }
    let device = inputs.first().map_or(tch::Device::Cpu, |input| input.device());
    let inside = Inside::enter(device)?;
    let watched = Use::enter(inputs)?;
    let mut done = run();
    drop(inside);
    if let (Some(watched), Ok(outputs)) = (watched, &mut done) {
        outputs.each().into_iter().try_for_each(|output| watched.mark(inputs, output))?;
    }
    done.map_err(|source| match source {
        // The innermost operator tells.
        inner @ (Error::Sharded { .. } | Error::HiddenCommunication { .. }) => inner,
        source => failed(op, inputs, source),
    })
}

/// Refuses dtypes that the built-in operator does not take, before anything is computed or exchanged.
pub(crate) fn check_dtypes(op: &str, inputs: &[&ShardTensor]) -> Result<()> {
    built_in(op).map_or(Ok(()), |operator| operator.check_dtypes(inputs))
}

pub(super) fn failed(op: &str, inputs: &[&ShardTensor], source: Error) -> Error {
    Error::Sharded {
        op: op.to_owned(),
        layouts: inputs.iter().map(|input| input.to_string()).collect(),
        source: Box::new(source),
    }
}
