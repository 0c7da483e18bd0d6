//! Declared shardings of operators.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use isobar_array::{Array, Attrs};
use tch::Tensor;

use super::local_map::{added_up, differing};
use super::running::Running;
use super::{Failure, rule, something_is_registered};
use crate::error::{Error, Result};
use crate::layout::{Dim, Layout, Placement, Sizes, listed};
use crate::tensor::{ShardTensor, received, same_mesh};

/// Placements along one axis of a mesh under which an operator may run on the ranks' parts alone: so placed inputs give so
/// placed outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sharding {
    /// Of each input.
    pub inputs: Vec<Placement>,
    /// Of each output.
    pub outputs: Vec<Placement>,
}

impl Sharding {
    /// So placed inputs give so placed outputs.
    pub fn new(inputs: &[Placement], outputs: &[Placement]) -> Self {
        Self { inputs: inputs.to_vec(), outputs: outputs.to_vec() }
    }
}

/// Result of a rule for given inputs: all acceptable shardings, of which the cheapest is taken.
#[derive(Debug, Clone, Default)]
pub struct Shardings {
    choices: Vec<Sharding>,
    shapes: Option<Vec<Vec<i64>>>,
}

impl Shardings {
    /// The acceptable shardings along an axis; that all are replicated is acceptable in any case. On a mesh of more axes, each
    /// axis has its own. Of equally cheap ones the first counts.
    pub fn new(choices: Vec<Sharding>) -> Self {
        Self { choices, shapes: None }
    }

    /// The global shapes of the outputs. Where they are not given, the ranks find out the layout of a sharded output by an
    /// exchange of shapes.
    #[must_use]
    pub fn with_shapes(self, shapes: Vec<Vec<i64>>) -> Self {
        Self { shapes: Some(shapes), ..self }
    }
}

type Rule = dyn Fn(&[&Layout], &Attrs) -> Result<Shardings, Failure> + Send + Sync;

static RULES: RwLock<BTreeMap<String, Arc<Rule>>> = RwLock::new(BTreeMap::new());

/// Declares how the operator `name`, whose dense handler [`register_op`](isobar_array::register_op) has, runs on sharded tensors, or
/// replaces what was declared; says whether something was.
///
/// Built-in operators may be declared too. Those with a number in place of a tensor, as [`add_scalar`], ask under the same name,
/// with one input.
///
/// [`add_scalar`]: isobar_array::Elementwise::add_scalar
///
/// The rule sees the layouts of the inputs, and decides from them and the attributes alone: all ranks must come to the same.
/// Of its choices, for each axis of the mesh, those are taken for which the inputs must be moved the least, counted in bytes
/// that the rank receives that receives the most. Sharded inputs of one extent are split alike, as the largest of them; sharded
/// outputs are split as the inputs are along the same axes.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_mesh::DeviceMesh;
/// use isobar_shard::rules::{Sharding, Shardings, register_sharding};
/// use isobar_array::register_op;
/// use isobar_shard::{Placement, ShardTensor};
/// use tch::Tensor;
///
/// register_op("halved", |x, _| Ok(vec![x[0].f_mul_scalar(0.5)?]));
/// register_sharding("halved", |layouts, _| {
///     let any_dim = (0..layouts[0].ndim()).map(Placement::Shard);
///     let choices = any_dim.map(|placement| Sharding::new(&[placement], &[placement])).collect();
///     Ok(Shardings::new(choices).with_shapes(vec![layouts[0].shape().to_vec()]))
/// });
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let x = ShardTensor::distribute(&Tensor::from_slice(&[2.0, 4.0]), &mesh, &[Placement::Shard(0)])?;
/// let halves = ShardTensor::op("halved", &[&x], &Default::default())?;
/// assert_eq!(halves[0].placements(), [Placement::Shard(0)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn register_sharding(
    name: &str,
    rule: impl Fn(&[&Layout], &Attrs) -> Result<Shardings, Failure> + Send + Sync + 'static,
) -> bool {
    let mut rules = RULES.write().unwrap_or_else(PoisonError::into_inner);
    let before = rules.insert(name.to_owned(), Arc::new(rule)).is_some();
    something_is_registered();
    before
}

/// Runs the operator as declared; `None` where nothing is.
pub(super) fn run(
    name: &str,
    inputs: &[&ShardTensor],
    args: impl FnOnce() -> Attrs,
) -> Option<Result<Vec<ShardTensor>>> {
    // The lock is not held while the rule runs: it may declare others.
    let declared = RULES.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()?;
    let attrs = &args();
    Some(rule(name, inputs, || {
        same_mesh("sharding", inputs)?;
        // Rules speak of placements, which say nothing of parts in several pieces.
        let joined: Vec<ShardTensor> =
            inputs.iter().map(|input| input.consecutive()).collect::<Result<_>>()?;
        let inputs: &[&ShardTensor] = &joined.iter().collect::<Vec<_>>();
        let layouts: Vec<&Layout> = inputs.iter().map(|input| input.layout()).collect();
        let shardings = declared(&layouts, attrs).map_err(|source| {
            Error::from(isobar_array::Error::Registered { name: name.to_owned(), source })
        })?;
        let plan = cheapest(inputs, &shardings)?;
        // A built-in operator without a dense handler of the program's runs on the shards as it is.
        let _running = Running::new(name);
        apply(name, inputs, attrs, &plan, shardings.shapes.as_deref())
    }))
}

/// Choice: a sharding for each axis, and the resulting layouts of the inputs.
struct Plan {
    axes: Vec<Sharding>,
    inputs: Vec<Layout>,
}

fn cheapest(inputs: &[&ShardTensor], shardings: &Shardings) -> Result<Plan> {
    let outputs = shardings.choices.first().map_or(0, |choice| choice.outputs.len());
    let outputs = shardings.shapes.as_ref().map_or(outputs, Vec::len);
    let mut choices: Vec<&Sharding> = shardings.choices.iter().collect();
    let replicated =
        Sharding::new(&vec![Placement::Replicate; inputs.len()], &vec![Placement::Replicate; outputs]);
    choices.push(&replicated);
    for choice in &choices {
        if choice.inputs.len() != inputs.len() || choice.outputs.len() != outputs {
            return Err(refuse(format!(
                "the rule has {} → {} placements, expected one for each of {} inputs, and one for each of {outputs} outputs",
                listed(&choice.inputs),
                listed(&choice.outputs),
                inputs.len()
            )));
        }
    }
    let Some(first) = inputs.first() else { return Err(refuse("no tensors were given".into())) };
    let axes = first.placements().len();
    let mut combinations: Vec<Vec<&Sharding>> = vec![vec![]];
    for _ in 0..axes {
        let mut longer = Vec::with_capacity(combinations.len() * choices.len());
        for head in &combinations {
            longer.extend(choices.iter().map(|choice| [&head[..], &[*choice]].concat()));
        }
        combinations = longer;
    }
    let mut best: Option<(i64, Plan)> = None;
    for combination in combinations {
        let layouts = targets(inputs, &combination)?;
        let costs = inputs
            .iter()
            .zip(&layouts)
            .map(|(input, to)| received(input.layout(), to, input.kind().elt_size_in_bytes()));
        let Some(bytes) = costs.sum::<Result<Option<i64>>>()? else { continue };
        if best.as_ref().is_none_or(|(least, _)| bytes < *least) {
            let axes = combination.into_iter().cloned().collect();
            best = Some((bytes, Plan { axes, inputs: layouts }));
        }
    }
    best.map(|(_, plan)| plan).ok_or_else(|| refuse("no sharding is acceptable".into()))
}

/// The layouts of the inputs under a sharding for each axis.
fn targets(inputs: &[&ShardTensor], axes: &[&Sharding]) -> Result<Vec<Layout>> {
    let target = |(index, input): (usize, &&ShardTensor)| {
        let placements: Vec<Placement> = axes.iter().map(|choice| choice.inputs[index]).collect();
        input.layout().moved_to(&placements, &Sizes::Chunk)
    };
    let layouts: Vec<Layout> = inputs.iter().enumerate().map(target).collect::<Result<_>>()?;
    let mut by_size: Vec<&Layout> = layouts.iter().collect();
    by_size.sort_by_key(|layout| std::cmp::Reverse(layout.numel()));
    let alike = |dim: &Dim| -> Dim {
        let same =
            |other: &&Dim| other.axes == dim.axes && other.extent() == dim.extent() && other.is_consecutive();
        let found = by_size.iter().flat_map(|layout| layout.dims()).find(same);
        found.filter(|_| dim.is_split() && dim.is_consecutive()).unwrap_or(dim).clone()
    };
    let agree = |layout: &Layout| {
        layout.with_placements(layout.placements().to_vec(), layout.dims().iter().map(alike).collect())
    };
    Ok(layouts.iter().map(agree).collect())
}

fn apply(
    name: &str,
    inputs: &[&ShardTensor],
    attrs: &Attrs,
    plan: &Plan,
    shapes: Option<&[Vec<i64>]>,
) -> Result<Vec<ShardTensor>> {
    let mut locals = Vec::with_capacity(inputs.len());
    let along = |axis: &Sharding| {
        axis.inputs.iter().chain(&axis.outputs).any(|placement| *placement != Placement::Replicate)
    };
    let marks: Vec<Placement> = plan
        .axes
        .iter()
        .map(|axis| if along(axis) { Placement::Shard(0) } else { Placement::Replicate })
        .collect();
    let ranks_differ = differing(std::iter::once(&marks[..]));
    for (input, to) in inputs.iter().zip(&plan.inputs) {
        let moved = input.to_layout(to)?;
        locals.push(moved.leaving_parts(moved.to_local(Some(&added_up(&moved, &ranks_differ)))?)?);
    }
    let views: Vec<&Tensor> = locals.iter().collect();
    let parts = Tensor::op(name, &views, attrs)?;
    let outputs = plan.axes.first().map_or(0, |axis| axis.outputs.len());
    if parts.len() != outputs {
        return Err(refuse(format!("the rule has {outputs} outputs, and the handler gave {}", parts.len())));
    }
    let give = |(index, part): (usize, &Tensor)| {
        let placements: Vec<Placement> = plan.axes.iter().map(|axis| axis.outputs[index]).collect();
        match shapes {
            Some(shapes) => {
                ShardTensor::from_parts(part, &output_layout(&plan.inputs, placements, &shapes[index])?)
            }
            None => {
                let sharded = placements.iter().any(|placement| placement.dim().is_some());
                let sizes = if sharded { Sizes::Infer } else { Sizes::Chunk };
                ShardTensor::from_local(part, Some(plan.inputs[0].mesh()), &placements, &sizes, None)
            }
        }
    };
    parts.iter().enumerate().map(give).collect()
}

/// The layout of an output: dims that are split by the same axes as an input's dim are split as that is, scaled to the
/// extent.
fn output_layout(inputs: &[Layout], placements: Vec<Placement>, shape: &[i64]) -> Result<Layout> {
    let chunked = Layout::new(inputs[0].mesh(), &placements, shape, &Sizes::Chunk)?;
    let split = |(index, dim): (usize, &Dim)| {
        if !dim.is_split() || !dim.is_consecutive() {
            return dim.clone();
        }
        let alike: Vec<(usize, &Dim)> = inputs
            .iter()
            .flat_map(|layout| layout.dims().iter().enumerate())
            .filter(|(_, other)| other.axes == dim.axes && other.is_consecutive())
            .collect();
        let extent = dim.extent();
        let same_extent = alike.iter().find(|(_, other)| other.extent() == extent);
        let same_place = alike.iter().find(|(place, _)| *place == index);
        match same_extent.or(same_place).or(alike.first()) {
            Some((_, other)) if other.extent() == extent => (*other).clone(),
            Some((_, other)) => other.scaled(extent),
            None => dim.clone(),
        }
    };
    let dims = chunked.dims().iter().enumerate().map(split).collect();
    Ok(chunked.with_placements(placements, dims))
}

fn refuse(reason: String) -> Error {
    Error::from(isobar_array::Error::Argument { op: "register_sharding", reason })
}
