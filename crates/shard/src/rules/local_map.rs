//! A function of the ranks' local parts as an operator.

use isobar_collectives::ReduceOp;
use isobar_mesh::DeviceMesh;
use tch::Tensor;

use super::{Failure, rule};
use crate::error::{Error, Result};
use crate::layout::{Layout, Placement, Sizes};
use crate::tensor::ShardTensor;

/// Requirements of [`local_map`] on its inputs.
#[derive(Debug, Clone, Default)]
pub struct LocalMap {
    /// The name that errors have; `local_map` where empty.
    pub name: String,
    /// For each input the placements that the function needs; `None`, or a shorter list: as it is.
    pub inputs: Vec<Option<Vec<Placement>>>,
    /// Inputs of other placements are redistributed; else they are an error.
    pub redistribute: bool,
    /// For each input what the ranks' gradients of its part are, as [`ShardTensor::to_local`] takes them. Where not given: those
    /// of a replicated input are added up along the axes along which some input or output is not replicated, since ranks
    /// compute differently there; else as the input is.
    pub gradients: Vec<Option<Vec<Placement>>>,
    /// The mesh of the outputs, where it is not that of the first input.
    pub mesh: Option<DeviceMesh>,
}

/// Layout of an output of [`local_map`].
#[derive(Debug, Clone)]
pub enum LocalOutput {
    /// In a layout that is there, such as an input's.
    Like(Layout),
    /// By placements, as [`ShardTensor::from_local`] takes them.
    Placed {
        /// Placement along each axis.
        placements: Vec<Placement>,
        /// Split of sharded dims.
        sizes: Sizes,
        /// The global shape, where the sizes do not tell it.
        shape: Option<Vec<i64>>,
    },
}

impl LocalOutput {
    /// By placements; the sizes of sharded dims are found out by one exchange of shapes.
    pub fn placed(placements: &[Placement]) -> Self {
        let sharded = placements.iter().any(|placement| placement.dim().is_some());
        let sizes = if sharded { Sizes::Infer } else { Sizes::Chunk };
        Self::Placed { placements: placements.to_vec(), sizes, shape: None }
    }

    fn placements(&self) -> &[Placement] {
        match self {
            Self::Like(layout) => layout.placements(),
            Self::Placed { placements, .. } => placements,
        }
    }
}

/// Runs `f` on this rank's parts of the inputs, and takes what it returns for this rank's parts of the outputs.
///
/// Differentiable, if `f` is. All ranks of the mesh call. Communicates where inputs are redistributed, and where the sizes of an
/// output are [`Sizes::Infer`].
///
/// # Errors
///
/// An input that is not placed as declared, where it may not be redistributed; another number of outputs than declared, or
/// parts that do not fit their layouts; what `f` returns.
///
/// ```
/// use isobar_collectives::{Group, ReduceOp};
/// use isobar_mesh::DeviceMesh;
/// use isobar_shard::rules::{LocalMap, LocalOutput, local_map};
/// use isobar_shard::{Placement, ShardTensor};
/// use tch::{Kind, Tensor};
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let x = Tensor::ones([4, 3], (Kind::Float, tch::Device::Cpu));
/// let x = ShardTensor::distribute(&x, &mesh, &[Placement::Shard(0)])?;
/// // Each rank sums its rows; the sum of these is the sum of all.
/// let columns = local_map(
///     |parts| Ok(vec![parts[0].f_sum_dim_intlist(0, false, None)?]),
///     &[&x],
///     &[LocalOutput::placed(&[Placement::Partial(ReduceOp::Sum)])],
///     &LocalMap::default(),
/// )?;
/// assert_eq!(columns[0].full_tensor(None)?, Tensor::from_slice(&[4.0_f32, 4.0, 4.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn local_map(
    f: impl FnOnce(&[Tensor]) -> Result<Vec<Tensor>, Failure>,
    inputs: &[&ShardTensor],
    outputs: &[LocalOutput],
    options: &LocalMap,
) -> Result<Vec<ShardTensor>> {
    let name = if options.name.is_empty() { "local_map" } else { &options.name };
    rule(name, inputs, || {
        let refuse = |reason: String| Error::from(isobar_array::Error::Argument { op: "local_map", reason });
        let Some(first) = inputs.first() else {
            return Err(refuse("no tensors were given".into()));
        };
        let mesh = options.mesh.as_ref().unwrap_or_else(|| first.device_mesh());
        let mut placed = Vec::with_capacity(inputs.len());
        for (index, input) in inputs.iter().enumerate() {
            placed.push(match options.inputs.get(index).and_then(Option::as_deref) {
                None => input.shallow_clone(),
                Some(wanted) if wanted == input.placements() => input.shallow_clone(),
                Some(wanted) if options.redistribute => {
                    input.redistribute(Some(input.device_mesh()), wanted)?
                }
                Some(wanted) => {
                    return Err(refuse(format!(
                        "input {index} is {}, expected {}; redistribute it, or let local_map do so",
                        input.layout(),
                        crate::layout::listed(wanted)
                    )));
                }
            });
        }
        // A declared result is of consecutive parts, and so must be what it is made of.
        let placed: Vec<ShardTensor> = placed.iter().map(ShardTensor::consecutive).collect::<Result<_>>()?;
        let others = outputs.iter().map(LocalOutput::placements);
        let ranks_differ = differing(placed.iter().map(ShardTensor::placements).chain(others));
        let locals = placed.iter().enumerate().map(|(index, input)| {
            match options.gradients.get(index).and_then(Option::as_deref) {
                Some(given) => input.leaving_parts(input.to_local(Some(given))?),
                None => input.leaving_parts(input.to_local(Some(&added_up(input, &ranks_differ)))?),
            }
        });
        let parts = run(name, f, &locals.collect::<Result<Vec<_>>>()?)?;
        if parts.len() != outputs.len() {
            return Err(refuse(format!("{} outputs are declared, got {}", outputs.len(), parts.len())));
        }
        let give = |(part, output): (&Tensor, &LocalOutput)| match output {
            LocalOutput::Like(layout) => ShardTensor::from_parts(part, layout),
            LocalOutput::Placed { placements, sizes, shape } => {
                ShardTensor::from_local(part, Some(mesh), placements, sizes, shape.as_deref())
            }
        };
        parts.iter().zip(outputs).map(give).collect()
    })
}

/// The axes along which something is not replicated.
pub(super) fn differing<'a>(placements: impl Iterator<Item = &'a [Placement]>) -> Vec<usize> {
    let mut axes: Vec<usize> = placements
        .flat_map(|placements| placements.iter().enumerate())
        .filter(|(_, placement)| **placement != Placement::Replicate)
        .map(|(axis, _)| axis)
        .collect();
    axes.sort_unstable();
    axes.dedup();
    axes
}

/// Returns the placements of an input's gradient if ranks compute differently along these axes.
pub(super) fn added_up(input: &ShardTensor, differing: &[usize]) -> Vec<Placement> {
    let own = input.layout().without_partial();
    let of = |(axis, own): (usize, &Placement)| {
        // A partial input's gradient is whole on every rank already.
        let whole = input.placements()[axis] == Placement::Replicate;
        if whole && differing.contains(&axis) { Placement::Partial(ReduceOp::Sum) } else { *own }
    };
    own.placements().iter().enumerate().map(of).collect()
}

/// Runs a program's own function.
pub(super) fn run<T>(
    name: &str,
    f: impl FnOnce(&[Tensor]) -> Result<T, Failure>,
    parts: &[Tensor],
) -> Result<T> {
    f(parts).map_err(|source| Error::from(isobar_array::Error::Registered { name: name.to_owned(), source }))
}
