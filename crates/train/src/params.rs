//! The parameters that training works on: names, tensors and what each is over the model-parallel group.

use std::collections::HashSet;

use isobar_array::Window;
use isobar_collectives::{Group, chunk};
use isobar_manager::DeviceMesh;
use isobar_shard::{ComputedBuffer, GradientSource, ParamStore, Params, Placement};
use tch::{Kind, Tensor};

use crate::error::{Context, Error, Result};
use crate::fields::DOMAIN_AXES;
use crate::gradient::Gradient;

/// Placement of a parameter over the model-parallel group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParamPlacement {
    /// Equal on every rank of the group.
    Replicate,
    /// Cut along a dim; the rank holds its part.
    Shard {
        /// The dim of the tensor that is cut.
        dim: i64,
        /// The extent of every rank's part along it, in group order; some may be 0.
        sizes: Vec<i64>,
    },
    /// Cut along several dims, or into parts that several ranks have: the rank holds a box of it.
    Part {
        /// The shape of the whole parameter.
        shape: Vec<i64>,
        /// Offset of the rank's shard, along each dim.
        start: Vec<i64>,
        /// Number of ranks of the group that hold this shard; the same for all shards.
        copies: usize,
    },
}

impl ParamPlacement {
    /// The shape of the whole parameter, and where in it the rank's part begins, whose shape this is.
    pub(crate) fn place(&self, part: &[i64], group: &Group) -> (Vec<i64>, Vec<i64>) {
        let (mut shape, mut start) = (part.to_vec(), vec![0; part.len()]);
        match self {
            Self::Replicate => {}
            Self::Shard { dim, sizes } => {
                let dim = wrap_dim(*dim, part.len());
                shape[dim] = sizes.iter().sum();
                start[dim] = sizes[..group.rank()].iter().sum();
            }
            Self::Part { shape: whole, start: begin, .. } => {
                shape.clone_from(whole);
                start.clone_from(begin);
            }
        }
        (shape, start)
    }
}

/// A parameter: a leaf tensor that requires gradients, under its state-dict name.
#[derive(Debug)]
pub struct Parameter {
    /// The name in state dicts and checkpoints, for example `blocks.0.mlp.fc1.weight`.
    pub name: String,
    /// This rank's part.
    pub tensor: Tensor,
    /// Placement of the tensor over the model-parallel group.
    pub placement: ParamPlacement,
    /// State of its gradient.
    pub(crate) gradient: Gradient,
}

impl Parameter {
    fn new(name: String, tensor: &Tensor, placement: ParamPlacement) -> Self {
        Self { name, tensor: tensor.shallow_clone(), placement, gradient: Gradient::default() }
    }

    /// Makes a parameter that every rank holds in full. Its gradient counts as that of this rank's own loss,
    /// unless changed by [`with_source`](Self::with_source).
    pub fn replicated(name: impl Into<String>, tensor: &Tensor) -> Self {
        Self::new(name.into(), tensor, ParamPlacement::Replicate)
    }

    /// A parameter that is cut along `dim` into parts of the extents `sizes` over the model-parallel group.
    pub fn sharded(name: impl Into<String>, tensor: &Tensor, dim: i64, sizes: Vec<i64>) -> Self {
        Self::new(name.into(), tensor, ParamPlacement::Shard { dim, sizes })
    }

    /// A parameter of which the rank holds a part: see [`ParamPlacement::Part`].
    pub fn part(
        name: impl Into<String>,
        tensor: &Tensor,
        (shape, start): (Vec<i64>, Vec<i64>),
        copies: usize,
    ) -> Self {
        Self::new(name.into(), tensor, ParamPlacement::Part { shape, start, copies })
    }

    /// Sets the source of the parameter's gradient. Parameters of a store have it set already.
    #[must_use]
    pub fn with_source(self, source: GradientSource) -> Self {
        Self { gradient: self.gradient.with_source(source), ..self }
    }

    /// Returns the content of its gradient after backward.
    pub fn source(&self) -> &GradientSource {
        self.gradient.source()
    }

    /// The gradient, or `None` where there is none yet.
    pub fn grad(&self) -> Option<Tensor> {
        let grad = self.tensor.f_grad().ok()?;
        grad.defined().then_some(grad)
    }

    /// The shape of the whole parameter, all ranks' parts together.
    pub fn global_shape(&self) -> Vec<i64> {
        let mut shape = self.tensor.size();
        match &self.placement {
            ParamPlacement::Replicate => shape,
            ParamPlacement::Shard { dim, sizes } => {
                let dim = wrap_dim(*dim, shape.len());
                shape[dim] = sizes.iter().sum();
                shape
            }
            ParamPlacement::Part { shape, .. } => shape.clone(),
        }
    }
}

impl Clone for Parameter {
    /// A second handle to the same tensor, not a copy of it.
    fn clone(&self) -> Self {
        Self {
            name: self.name.clone(),
            tensor: self.tensor.shallow_clone(),
            placement: self.placement.clone(),
            gradient: self.gradient.clone(),
        }
    }
}

/// All parameters of a model, in the order of their creation, which is the same on every rank.
///
/// ```
/// use isobar_train::{Parameter, Parameters};
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::f_zeros([2, 3], (Kind::Float, Device::Cpu))?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("weight", &weight)])?;
/// assert_eq!(params.elements(), 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Parameters {
    entries: Vec<Parameter>,
    model_group: Group,
    /// Buffers that are computed, not stored, each with the box that this rank writes to checkpoints and compares with them.
    computed: Vec<(ComputedBuffer, Window)>,
}

impl Parameters {
    /// Parameters of a model that is not model-parallel.
    ///
    /// # Errors
    ///
    /// See [`Parameters::over`].
    pub fn new(entries: Vec<Parameter>) -> Result<Self> {
        Self::over(entries, &Group::single())
    }

    /// Parameters whose placements are over `model_group`. Every rank of the group calls with the same names in
    /// the same order.
    ///
    /// # Errors
    ///
    /// A name occurs twice, a tensor is not a leaf of floating or complex elements that requires gradients, or a
    /// placement does not fit its tensor and the group.
    pub fn over(entries: Vec<Parameter>, model_group: &Group) -> Result<Self> {
        let mut names = HashSet::new();
        for entry in &entries {
            check(entry, model_group)?;
            if !names.insert(entry.name.as_str()) {
                return Err(Error::DuplicateParameter { name: entry.name.clone() });
            }
        }
        Ok(Self { entries, model_group: model_group.clone(), computed: Vec::new() })
    }

    /// Returns the trained parameters of a store, sharded over the ranks of its region or replicated, and its
    /// buffers by name.
    ///
    /// # Errors
    ///
    /// See [`Parameters::over`].
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, ParamStore, Params, Placement};
    /// use isobar_train::Parameters;
    ///
    /// let mut store = ParamStore::new(Generator::new(1));
    /// store.param("weight", &[4, 3], Init::XavierUniform, Placement::Replicate)?;
    /// let (params, buffers) = Parameters::of(&store)?;
    /// assert!(params.get("weight").is_some() && buffers.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of(store: &ParamStore) -> Result<(Self, Vec<(String, Tensor)>)> {
        Self::from_store(store, store.region().group())
    }

    /// Does the same as [`Parameters::of`] for a `model_group` with the ranks of the store's region:
    /// `Group::single()` for a store without one.
    ///
    /// # Errors
    ///
    /// See [`Parameters::over`].
    pub fn from_store(store: &ParamStore, model_group: &Group) -> Result<(Self, Vec<(String, Tensor)>)> {
        let sizes = |extent| isobar_shard::ParallelRegion::new(model_group.clone()).sizes(extent);
        let entries = store.trainable().map(|p| {
            let parameter = match p.placement {
                _ if p.shard.is_some() => Self::part_of(p, model_group),
                Placement::Replicate => Ok(Parameter::replicated(&p.name, &p.tensor)),
                Placement::Shard(dim) => {
                    Ok(Parameter::sharded(&p.name, &p.tensor, dim as i64, sizes(p.shape[dim])))
                }
                other => {
                    let what = format!("the placement of parameter {:?}", p.name);
                    Err(Error::invalid(what, format!("{other:?}"), "Replicate or Shard"))
                }
            };
            Ok(Parameter { gradient: Gradient::new(p.gradient.clone(), p.state.clone()), ..parameter? })
        });
        let mut params = Self::over(entries.collect::<Result<_>>()?, model_group)?;
        params.computed = computed_parts(store, 0, 1)?;
        let buffers = store.parameters().iter().filter(|p| !p.trainable);
        Ok((params, buffers.map(|p| (p.name.clone(), p.tensor.shallow_clone())).collect()))
    }

    /// A parameter that is split over axes of a mesh whose ranks `group` has.
    fn part_of(p: &isobar_shard::Parameter, group: &Group) -> Result<Parameter> {
        let (start, count) = p.shard.as_ref().map_or((Vec::new(), 1), |s| (s.start.clone(), s.count));
        if group.size() < count || !group.size().is_multiple_of(count) {
            let what = format!("the group over which parameter {:?} is split", p.name);
            return Err(Error::invalid(
                what,
                format!("of {} ranks", group.size()),
                format!(
                    "the ranks of the mesh's axes that split parameters, a multiple of {count}: `Parameters::on_mesh(&store, &mesh)`"
                ),
            ));
        }
        Ok(Parameter::part(&p.name, &p.tensor, (p.shape.clone(), start), group.size() / count))
    }

    /// Does the same as [`Parameters::of`] for a store whose parameters are on a mesh: some may be split over its axes, as a
    /// model declares.
    ///
    /// # Errors
    ///
    /// As for [`Parameters::over`]; a rank outside the mesh.
    pub fn on_mesh(store: &ParamStore, mesh: &DeviceMesh) -> Result<(Self, Vec<(String, Tensor)>)> {
        let names = mesh.names();
        let axes: Vec<usize> = (0..mesh.ndim()).filter(|&axis| DOMAIN_AXES.contains(&names[axis])).collect();
        if axes.is_empty() {
            return Self::of(store);
        }
        let group = mesh.group_along(&axes).map_err(isobar_shard::Error::from)?;
        let (rank, ranks) = (group.rank(), group.size());
        let (mut params, buffers) = if store.parameters().iter().all(|p| p.shard.is_none()) {
            Self::of(store)?
        } else {
            // Of its own: its collectives run beside those of the model.
            let all: Vec<usize> = (0..ranks).collect();
            let group = group.subgroup("parameters", &all)?.unwrap_or(group);
            Self::from_store(store, &group)?
        };
        params.computed = computed_parts(store, rank, ranks)?;
        Ok((params, buffers))
    }

    /// Replaces the computed buffers by those of `other`, whose parameters are these in another placement.
    #[must_use]
    pub(crate) fn with_computed_of(self, other: &Self) -> Self {
        Self { computed: other.computed.clone(), ..self }
    }

    /// Buffers that are computed, not stored, each with this rank's box.
    pub(crate) fn computed(&self) -> &[(ComputedBuffer, Window)] {
        &self.computed
    }

    /// Sets the source of the gradients, for parameters that were not made by a store, or whose gradients the
    /// program itself sums over ranks ([`GradientSource::summed`]).
    ///
    /// ```
    /// use isobar_collectives::Group;
    /// use isobar_manager::DeviceMesh;
    /// use isobar_shard::GradientSource;
    /// use isobar_train::{Parameter, Parameters};
    /// use tch::Tensor;
    ///
    /// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
    /// let weight = Tensor::f_from_slice(&[1.0f32])?.f_set_requires_grad(true)?;
    /// let params = Parameters::new(vec![Parameter::replicated("weight", &weight)])?;
    /// // Each rank of the mesh uses the weight with its own part of a field.
    /// let params = params.with_source(&GradientSource::pending(&mesh));
    /// assert!(params.iter().all(|param| param.source().is_pending()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_source(self, source: &GradientSource) -> Self {
        let entries = self.entries.into_iter().map(|entry| entry.with_source(source.clone())).collect();
        Self { entries, ..self }
    }

    /// The group over which placements are meant.
    pub fn model_group(&self) -> &Group {
        &self.model_group
    }

    /// The parameters in the order of their creation.
    pub fn iter(&self) -> std::slice::Iter<'_, Parameter> {
        self.entries.iter()
    }

    /// Returns the number of parameters (tensors).
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The parameter of that name.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        self.entries.iter().find(|p| p.name == name)
    }

    /// Returns the number of elements of the full model, over all ranks' shards.
    pub fn elements(&self) -> i64 {
        self.entries.iter().map(|p| p.global_shape().iter().product::<i64>()).sum()
    }

    /// Sets every gradient to zeros, in place; those that do not exist stay so.
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    pub fn zero_grad(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for entry in &self.entries {
            if let Some(mut grad) = entry.grad() {
                let _ = grad.f_zero_().context(|| format!("zeroing the gradient of {}", entry.name))?;
            }
            entry.gradient.summed();
        }
        Ok(())
    }
}

/// The computed buffers of a store, each with the box of `rank` of so many ranks.
fn computed_parts(store: &ParamStore, rank: usize, ranks: usize) -> Result<Vec<(ComputedBuffer, Window)>> {
    let part = |buffer: &ComputedBuffer| {
        let (shape, full) = (buffer.shape(), Window::whole(buffer.shape()));
        let dim = shape.iter().position(|&extent| extent > 1);
        let Some(dim) = dim else { return Ok((buffer.clone(), full)) };
        let sizes = chunk(shape[dim], ranks);
        let part = full.narrow(dim, sizes[..rank].iter().sum(), sizes[rank]);
        Ok((buffer.clone(), part.map_err(isobar_shard::Error::from)?))
    };
    store.computed_buffers().iter().map(part).collect()
}

impl<'a> IntoIterator for &'a Parameters {
    type Item = &'a Parameter;
    type IntoIter = std::slice::Iter<'a, Parameter>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// The index of a dim that may count from the end.
pub(crate) fn wrap_dim(dim: i64, dims: usize) -> usize {
    let dims = dims as i64;
    (if dim < 0 { dim + dims } else { dim }) as usize
}

fn check(entry: &Parameter, group: &Group) -> Result<()> {
    let what = || format!("parameter {:?}", entry.name);
    let kind = entry.tensor.kind();
    if !is_trainable(kind) {
        return Err(Error::invalid(what(), format!("of dtype {kind:?}"), "a floating or complex dtype"));
    }
    let leaf = entry.tensor.f_is_leaf().context(what)?;
    if !leaf || !entry.tensor.requires_grad() {
        return Err(Error::invalid(
            what(),
            "no leaf that requires gradients",
            "a leaf that requires gradients",
        ));
    }
    let own = entry.tensor.size();
    if let ParamPlacement::Part { shape, start, copies } = &entry.placement {
        let fits = |(dim, extent): (usize, &i64)| {
            start[dim] >= 0 && start[dim].checked_add(own[dim]).is_some_and(|end| end <= *extent)
        };
        let dims = shape.len() == own.len() && start.len() == own.len();
        return match dims && *copies > 0 && shape.iter().enumerate().all(fits) {
            true => Ok(()),
            false => Err(Error::invalid(
                what(),
                format!("of shape {own:?} at {start:?} of {shape:?}, on {copies} ranks"),
                "a box of the whole parameter that a rank or more hold",
            )),
        };
    }
    let ParamPlacement::Shard { dim, sizes } = &entry.placement else { return Ok(()) };
    let shape = own;
    let dims = shape.len() as i64;
    if !(-dims..dims).contains(dim) {
        return Err(Error::invalid(
            what(),
            format!("cut along dim {dim}"),
            format!("a dim of shape {shape:?}"),
        ));
    }
    let extent = shape[wrap_dim(*dim, shape.len())];
    if sizes.len() != group.size() || sizes[group.rank()] != extent {
        return Err(Error::invalid(
            what(),
            format!("of extent {extent} along dim {dim} with parts {sizes:?}"),
            format!(
                "one part a rank of group {:?} ({} ranks), rank {}'s being its extent",
                group.name(),
                group.size(),
                group.rank()
            ),
        ));
    }
    Ok(())
}

fn is_trainable(kind: Kind) -> bool {
    use Kind::{BFloat16, ComplexDouble, ComplexFloat, Double, Float, Half};
    matches!(kind, Half | BFloat16 | Float | Double | ComplexFloat | ComplexDouble)
}
