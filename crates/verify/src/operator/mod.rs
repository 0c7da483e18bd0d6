//! The operators that cases name, each as what a rank does with its parts.
//!
//! An operator depends on its tensors, not on a case's file.

mod channel_parallel;
mod diffusion;
mod model;
mod sharded;
mod traffic;
mod v_collectives;

use anyhow::{Context, Result};
use isobar_array::Generator;
use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_models::Mode;
use isobar_shard::{ParamStore, Parameter};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tch::Tensor;

use super::case::{Case, Header};
use super::layout::{Layout, Parts};
use super::mesh::Mesh;

/// Operator of golden cases, on shards.
pub(crate) trait Operator: Sync {
    /// Its name in the cases.
    fn name(&self) -> &'static str;

    /// The layouts of a case on a mesh that it works on.
    fn layouts(&self, header: &Header, mesh: &Mesh) -> Result<Vec<Layout>> {
        Ok(Layout::asked(header, mesh))
    }

    /// The meshes on which a case runs where these were asked for.
    fn meshes(&self, _header: &Header, asked: &[Mesh]) -> Result<Vec<Mesh>> {
        Ok(asked.to_vec())
    }

    /// Returns notes on requested layouts that were not run.
    fn notes(&self, _header: &Header, _asked: &[Mesh]) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    /// Returns the reason why all ranks must refuse a layout; `None` if they must accept it.
    fn must_refuse(&self, _header: &Header, _layout: &Layout) -> Result<Option<String>> {
        Ok(None)
    }

    /// Runs it on this rank's parts, forward. All ranks call.
    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward>;

    /// Returns the bytes that a rank may receive in forward alone; without limit where only both passes together have one.
    fn forward_budget(&self, _case: &Case, _layout: &Layout) -> Result<u64> {
        Ok(u64::MAX)
    }

    /// Returns the bytes that `rank` may receive, forward and backward together.
    fn budget(&self, case: &Case, layout: &Layout, rank: &Rank) -> Result<u64>;
}

/// An operator that is neither one of sharded tensors nor a model over them. Registered next to its definition.
pub(crate) struct Entry(&'static dyn Operator);

inventory::collect!(Entry);

/// The operator of that name.
pub(crate) fn find(name: &str) -> Option<&'static dyn Operator> {
    let sharded = sharded::ALL.iter().map(|operator| operator as &dyn Operator);
    let others = inventory::iter::<Entry>().map(|entry| entry.0);
    let own = others.chain(sharded).find(|operator| operator.name() == name);
    own.or_else(|| model::is_registered(name).then_some(&model::Registered))
}

/// One rank of a run.
#[derive(Debug)]
pub(crate) struct Rank {
    /// All ranks.
    pub(crate) world: Group,
    /// Along each axis of the mesh, the ranks that differ from this one only there.
    pub(crate) axes: Vec<Group>,
    /// The mesh.
    pub(crate) mesh: DeviceMesh,
}

impl Rank {
    /// This rank of a mesh of all ranks. All call.
    pub(crate) fn new(world: &Group, mesh: &Mesh) -> Result<Self> {
        let names: Vec<String> = (0..mesh.axes().len()).map(|axis| format!("{mesh} axis {axis}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let shape: Vec<i64> = mesh.axes().iter().map(|&extent| extent as i64).collect();
        let mesh = DeviceMesh::new(world, &shape, &names)?;
        let axes = names.iter().map(|name| mesh.group(name)).collect::<Result<_, _>>()?;
        Ok(Self { world: world.clone(), axes, mesh })
    }

    /// Its number among all ranks.
    pub(crate) fn number(&self) -> usize {
        self.world.rank()
    }
}

/// Result of an operator on this rank, or its refusal.
#[derive(Debug)]
pub(crate) enum Forward {
    /// It ran.
    Ran {
        /// Its results.
        outputs: Vec<LocalTensor>,
        /// The tensors whose gradients count.
        leaves: Vec<LocalTensor>,
    },
    /// It refused the layout, with this error.
    Refused(String),
}

/// A tensor on this rank.
#[derive(Debug)]
pub(crate) struct LocalTensor {
    /// Its name in the case.
    pub(crate) name: String,
    /// This rank's shard.
    pub(crate) tensor: Tensor,
    /// Part of the case's tensor that this is.
    pub(crate) part: Part,
}

/// Part of a case's tensor that a rank holds.
#[derive(Debug, Clone)]
pub(crate) enum Part {
    /// Its part by a layout.
    Of(Parts),
    /// The whole of a tensor that the case names for this rank.
    Own {
        /// True if the ranks' tensors are bitwise the same.
        identical: bool,
    },
    /// Nothing: there is no such tensor in the case, and this rank's has no elements.
    Nothing,
}

impl LocalTensor {
    /// This rank's part of the case's tensor `name`, as a leaf that takes a gradient where the case has one.
    pub(crate) fn leaf(rank: &Rank, case: &Case, name: &str, parts: Parts) -> Result<Self> {
        let part = parts.of(case.tensor(name)?, rank.number())?;
        let wants_grad = case.get(&format!("grad.{name}")).is_some();
        // A copy, so that a part is a tensor of its own and has the strides of one.
        let tensor = part.f_contiguous()?.f_detach_copy()?.f_set_requires_grad(wants_grad)?;
        Ok(Self { name: name.to_owned(), tensor, part: Part::Of(parts) })
    }
}

/// The configuration of a model from a case's arguments.
fn config<T: DeserializeOwned>(header: &Header) -> Result<T> {
    serde_json::from_value(arguments(header))
        .with_context(|| format!("`attrs` are no arguments of {}", header.op))
}

/// The arguments of a case that are a model's.
fn arguments(header: &Header) -> Value {
    let mut arguments = header.attrs.clone();
    if let Some(arguments) = arguments.as_object_mut() {
        // They speak of the case, not of the model.
        arguments.remove("tied");
        arguments.remove("training");
        // A network inside the model is named as the case's own operator is.
        if let Some(network) = arguments.get_mut("model").and_then(Value::as_object_mut)
            && let Some(name) = network.remove("op")
        {
            network.insert("type".to_owned(), name);
        }
    }
    arguments
}

/// Purpose of a case's pass.
struct Pass(Option<Generator>);

impl Pass {
    fn of(header: &Header) -> Self {
        let training = header.attrs["training"].as_bool().unwrap_or_default();
        // Nothing in a case is random.
        Self(training.then(|| Generator::new(0)))
    }

    fn mode(&self) -> Mode<'_> {
        self.0.as_ref().map_or(Mode::Eval, Mode::train)
    }
}

/// The parameters of a model whose gradients the case has.
fn parameters(store: &ParamStore, case: &Case, parts: impl Fn(&Parameter) -> Parts) -> Vec<LocalTensor> {
    let counted = store.trainable().filter(|p| case.get(&format!("grad.{}", p.name)).is_some());
    let hold = |p: &Parameter| LocalTensor {
        name: p.name.clone(),
        tensor: p.tensor.shallow_clone(),
        part: Part::Of(parts(p)),
    };
    counted.map(hold).collect()
}

/// The bytes of a tensor's elements.
fn bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}
