//! The store of one rank's parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use isobar_array::{Generator, Window};
use isobar_torch::guard::NoGrad;
use tch::{Device, Kind, Tensor};

use super::{
    BufferValues, ComputedBuffer, GradientSource, GradientState, Init, Params, Placement, StateDict,
    read_safetensors,
};
use crate::error::{Error, Result};
use crate::region::ParallelRegion;

/// One parameter or buffer of a [`ParamStore`].
#[derive(Debug)]
pub struct Parameter {
    /// Its state-dict name.
    pub name: String,
    /// This rank's part: a leaf, which has a gradient where `trainable`.
    pub tensor: Tensor,
    /// Shape of the global tensor.
    pub shape: Vec<i64>,
    /// Placement along the `model_parallel` axis.
    pub placement: Placement,
    /// The box that the rank holds, if the parameter is split over axes of a mesh.
    pub shard: Option<MeshShard>,
    /// True if it is trained; false for a buffer.
    pub trainable: bool,
    /// Content of its gradient after backward.
    pub gradient: GradientSource,
    /// State of its gradient since backward.
    pub state: GradientState,
}

/// A rank's box of a parameter that is split over axes of a mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshShard {
    /// The first index of the box along each dim of the whole parameter.
    pub start: Vec<i64>,
    /// Number of boxes that the parameter is cut into.
    pub count: usize,
}

/// The parameters of a model on one rank, in the order in which they were made.
///
/// New parameters get values that depend on the seed, the name and the global shape only, so that they are the same on
/// every mesh. A state dict is loaded afterwards.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_shard::{Init, ParamStore, Params, Placement};
///
/// let mut store = ParamStore::new(Generator::new(1));
/// let weight = store.param("fc.weight", &[4, 3], Init::XavierUniform, Placement::Replicate)?;
/// assert!(weight.requires_grad());
/// assert_eq!(store.parameters()[0].name, "fc.weight");
/// # Ok::<(), isobar_shard::Error>(())
/// ```
#[derive(Debug)]
pub struct ParamStore {
    generator: Generator,
    region: ParallelRegion,
    options: (Kind, Device),
    parameters: Vec<Parameter>,
    /// Place in `parameters` by name.
    places: BTreeMap<String, usize>,
    computed: Vec<ComputedBuffer>,
    /// Further names, and the names that they stand for.
    aliases: BTreeMap<String, String>,
}

impl ParamStore {
    /// An empty store of single-precision parameters on the CPU, whole on this rank.
    pub fn new(generator: Generator) -> Self {
        Self {
            generator,
            region: ParallelRegion::single(),
            options: (Kind::Float, Device::Cpu),
            parameters: Vec::new(),
            places: BTreeMap::new(),
            computed: Vec::new(),
            aliases: BTreeMap::new(),
        }
    }

    /// The store with its sharded parameters split over `region`. All its ranks make the same model from equal generators.
    #[must_use]
    pub fn with_region(mut self, region: ParallelRegion) -> Self {
        self.region = region;
        self
    }

    /// The store with parameters of `kind` on `device`, from the next one on.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, ParamStore, Params, Placement};
    /// use tch::{Device, Kind};
    ///
    /// let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
    /// let weight = store.param("weight", &[4, 3], Init::XavierUniform, Placement::Replicate)?;
    /// assert_eq!(weight.kind(), Kind::Double);
    /// # Ok::<(), isobar_shard::Error>(())
    /// ```
    #[must_use]
    pub fn with_options(mut self, kind: Kind, device: Device) -> Self {
        self.options = (kind, device);
        self
    }

    /// All parameters and buffers, in the order in which they were made, which is the same on every rank.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The trained parameters, in order.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, ParamStore, Params, Placement};
    ///
    /// let mut store = ParamStore::new(Generator::new(1));
    /// store.param("weight", &[4], Init::Constant(1.0), Placement::Replicate)?;
    /// store.buffer("running_mean", &[4], Init::Constant(0.0), Placement::Replicate)?;
    /// assert_eq!(store.parameters().len(), 2);
    /// assert_eq!(store.trainable().map(|parameter| &*parameter.name).collect::<Vec<_>>(), ["weight"]);
    /// # Ok::<(), isobar_shard::Error>(())
    /// ```
    pub fn trainable(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter().filter(|parameter| parameter.trainable)
    }

    /// The buffers that are computed, not stored, in the order in which they were added.
    pub fn computed_buffers(&self) -> &[ComputedBuffer] {
        &self.computed
    }

    /// The parameter `name`, which may be a tied name.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        let name = self.aliases.get(name).map_or(name, String::as_str);
        self.places.get(name).map(|&place| &self.parameters[place])
    }

    /// Further state-dict names, each with the name that it stands for.
    pub fn tied(&self) -> &BTreeMap<String, String> {
        &self.aliases
    }

    /// Sets all gradients to zero.
    ///
    /// # Errors
    ///
    /// libtorch refuses.
    pub fn zero_grad(&self) -> Result<()> {
        let _guard = NoGrad::new();
        for Parameter { tensor, name, .. } in &self.parameters {
            let zero = |grad: Tensor| grad.f_detach()?.f_zero_();
            if let Some(grad) = grad_of(tensor) {
                let _ = zero(grad).map_err(|source| refused("zero_grad", name, source))?;
            }
        }
        Ok(())
    }

    /// Converts all parameters and their gradients to `kind`, in place: the model's handles see it.
    ///
    /// # Errors
    ///
    /// The dtype is not floating.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, ParamStore, Params, Placement};
    /// use tch::Kind;
    ///
    /// let mut store = ParamStore::new(Generator::new(1));
    /// let weight = store.param("weight", &[4], Init::Constant(1.0), Placement::Replicate)?;
    /// store.set_kind(Kind::BFloat16)?;
    /// assert_eq!(weight.kind(), Kind::BFloat16);
    /// assert!(store.set_kind(Kind::Int64).is_err());
    /// # Ok::<(), isobar_shard::Error>(())
    /// ```
    pub fn set_kind(&mut self, kind: Kind) -> Result<()> {
        if !matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double) {
            return Err(Error::from(isobar_array::Error::Argument {
                op: "set_kind",
                reason: format!("{kind:?} is not a floating dtype"),
            }));
        }
        let _guard = NoGrad::new();
        let convert = |tensor: &Tensor| tensor.f_detach()?.f_to_kind(kind);
        // All new values first: where memory does not suffice, nothing has changed.
        let mut converted = Vec::with_capacity(self.parameters.len());
        for Parameter { tensor, name, .. } in &self.parameters {
            for tensor in std::iter::once(tensor.shallow_clone()).chain(grad_of(tensor)) {
                let value = convert(&tensor).map_err(|source| refused("convert", name, source))?;
                converted.push((tensor, value));
            }
        }
        for (mut tensor, value) in converted {
            tensor.f_set_data(&value).map_err(|source| refused("set_data", "a parameter", source))?;
        }
        self.computed.iter_mut().for_each(|buffer| buffer.kind = kind);
        self.options.0 = kind;
        Ok(())
    }

    /// Loads a safetensors file as [`load`](Self::load) does a state dict.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or does not fit.
    pub fn load_file(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load(&read_safetensors(path)?)
    }

    /// Takes the values of a state dict, on any device. A sharded parameter may come whole, and the rank takes its part, or
    /// as the rank's own part. Tied names and computed buffers may be there or not; where they are, they must agree.
    ///
    /// # Errors
    ///
    /// Names are missing or not of this model, or shapes or dtypes differ; the error lists them all, and nothing is changed.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, ParamStore, Params, Placement, StateDict};
    /// use tch::Tensor;
    ///
    /// let mut store = ParamStore::new(Generator::new(1));
    /// let weight = store.param("weight", &[2], Init::Constant(0.0), Placement::Replicate)?;
    /// let state = StateDict::from([("weight".to_owned(), Tensor::from_slice(&[1.0f32, 2.0]))]);
    /// store.load(&state)?;
    /// assert_eq!(weight, state["weight"]);
    /// // Names that are missing or unknown are listed.
    /// let error = store.load(&StateDict::from([("wieght".to_owned(), state["weight"].copy())])).unwrap_err();
    /// assert!(error.to_string().contains("weight") && error.to_string().contains("wieght"));
    /// # Ok::<(), isobar_shard::Error>(())
    /// ```
    pub fn load(&mut self, state: &StateDict) -> Result<()> {
        let mut missing = Vec::new();
        let mut wrong = Vec::new();
        let mut values = Vec::with_capacity(self.parameters.len());
        for parameter in &self.parameters {
            match state.get(&parameter.name).or_else(|| self.tied_value(state, &parameter.name)) {
                None => missing.push(parameter.name.clone()),
                Some(value) => match self.part_of(parameter, value) {
                    Ok(part) => values.push(part),
                    Err(reason) => wrong.push(format!("\"{}\" {reason}", parameter.name)),
                },
            }
        }
        for (alias, name) in &self.aliases {
            if let (Some(a), Some(b)) = (state.get(alias), state.get(name))
                && !a.f_equal(b).unwrap_or(false)
            {
                wrong.push(format!("\"{alias}\" differs from \"{name}\", to which it is tied"));
            }
        }
        for buffer in &self.computed {
            let Some(value) = state.get(&buffer.name) else { continue };
            if let Some(reason) = differs(buffer, value)? {
                wrong.push(reason);
            }
        }
        let computed = self.computed.iter().map(|buffer| &buffer.name);
        let known: BTreeSet<&String> =
            self.places.keys().chain(self.aliases.keys()).chain(computed).collect();
        let unused: Vec<String> = state.keys().filter(|name| !known.contains(name)).cloned().collect();
        if !(missing.is_empty() && unused.is_empty() && wrong.is_empty()) {
            return Err(Error::StateDict { missing, unused, wrong });
        }
        let _guard = NoGrad::new();
        for (parameter, value) in self.parameters.iter_mut().zip(values) {
            let Parameter { tensor, name, .. } = parameter;
            tensor.f_copy_(&value).map_err(|source| refused("load", name, source))?;
        }
        Ok(())
    }

    /// This rank's tensors by name, tied names included, outside the graph; they share memory with the parameters. Computed buffers
    /// are full, on the CPU.
    ///
    /// # Errors
    ///
    /// libtorch refuses a tensor.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, ParamStore, Params, Placement};
    ///
    /// let mut store = ParamStore::new(Generator::new(1));
    /// store.param("embedding", &[8, 4], Init::XavierUniform, Placement::Replicate)?;
    /// store.tie("head.weight", "embedding")?;
    /// let state = store.state_dict()?;
    /// assert_eq!(state.keys().collect::<Vec<_>>(), ["embedding", "head.weight"]);
    /// assert!(!state["embedding"].requires_grad());
    /// # Ok::<(), isobar_shard::Error>(())
    /// ```
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = StateDict::new();
        let names = self.places.keys().map(|name| (name, name)).chain(&self.aliases);
        for (name, target) in names {
            let tensor = &self.parameters[self.places[target]].tensor;
            state.insert(
                name.clone(),
                tensor.f_detach().map_err(|source| refused("state_dict", name, source))?,
            );
        }
        for buffer in &self.computed {
            state.insert(buffer.name.clone(), buffer.values(&Window::whole(&buffer.shape))?);
        }
        Ok(state)
    }

    fn tied_value<'a>(&self, state: &'a StateDict, name: &str) -> Option<&'a Tensor> {
        self.aliases.iter().filter(|(_, target)| *target == name).find_map(|(alias, _)| state.get(alias))
    }

    /// This rank's part of a value from a state dict.
    fn part_of(&self, parameter: &Parameter, value: &Tensor) -> Result<Tensor, String> {
        let (shape, own) = (value.size(), parameter.tensor.size());
        if value.kind() != parameter.tensor.kind() {
            return Err(format!("is {:?}, the model's is {:?}", value.kind(), parameter.tensor.kind()));
        }
        if shape == own {
            return Ok(value.shallow_clone());
        }
        if let Some(shard) = parameter.shard.as_ref().filter(|_| shape == parameter.shape) {
            let mut along = shard.start.iter().zip(&own).enumerate();
            let part = along.try_fold(value.shallow_clone(), |part, (dim, (&start, &extent))| {
                part.f_narrow(dim as i64, start, extent)
            });
            return part.map_err(|error| error.to_string());
        }
        match parameter.placement {
            Placement::Shard(dim) if shape == parameter.shape => {
                let (start, extent) = self.region.part(parameter.shape[dim]);
                value.f_narrow(dim as i64, start, extent).map_err(|error| error.to_string())
            }
            Placement::Shard(_) => Err(format!(
                "has shape {shape:?}, the model's is {:?}, this rank's part {own:?}",
                parameter.shape
            )),
            _ => Err(format!("has shape {shape:?}, the model's is {own:?}")),
        }
    }

    fn window(&self, name: &str, shape: &[i64], placement: Placement) -> Result<Window> {
        if shape.iter().any(|&extent| extent < 0) {
            return Err(parameter_error(name, format!("shape {shape:?} has a negative extent")));
        }
        let whole = Window::whole(shape);
        match placement {
            Placement::Replicate => Ok(whole),
            Placement::Shard(dim) => {
                let Some(&extent) = shape.get(dim) else {
                    return Err(parameter_error(name, format!("shape {shape:?} has no dim {dim} to shard")));
                };
                let (start, extent) = self.region.part(extent);
                Ok(whole.narrow(dim, start, extent)?)
            }
            other => Err(parameter_error(
                name,
                format!("{other} along the model_parallel axis; expected Replicate or Shard"),
            )),
        }
    }

    fn check_new(&self, name: &str) -> Result<()> {
        let computed = self.computed.iter().any(|buffer| buffer.name == name);
        if computed || self.places.contains_key(name) || self.aliases.contains_key(name) {
            return Err(parameter_error(name, "the name is taken".into()));
        }
        Ok(())
    }

    fn insert(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<Tensor>,
        placement: Placement,
        trainable: bool,
    ) -> Result<Tensor> {
        self.check_new(name)?;
        let values = self.draw(name, shape, &init, placement)?;
        self.keep(name, shape, values, (placement, None), trainable)
    }

    /// The trained parameter of which this rank holds the box `window`, one of `count`.
    pub(super) fn insert_shard(
        &mut self,
        name: &str,
        init: &Init<Tensor>,
        window: &Window,
        count: usize,
    ) -> Result<Tensor> {
        self.check_new(name)?;
        let values = self.draw_window(name, init, window)?;
        let shard = MeshShard { start: window.offset().to_vec(), count };
        self.keep(name, window.global(), values, (Placement::Replicate, Some(shard)), true)
    }

    /// Initial values of the box `window` of a parameter.
    pub(super) fn draw_window(&self, name: &str, init: &Init<Tensor>, window: &Window) -> Result<Tensor> {
        let values = init.values(&self.generator.fork(name), window, self.options);
        values.map_err(|error| parameter_error(name, error.to_string()))
    }

    fn keep(
        &mut self,
        name: &str,
        shape: &[i64],
        values: Tensor,
        (placement, shard): (Placement, Option<MeshShard>),
        trainable: bool,
    ) -> Result<Tensor> {
        let tensor = if trainable {
            values.f_set_requires_grad(true).map_err(|source| refused("requires_grad", name, source))?
        } else {
            values
        };
        self.places.insert(name.to_string(), self.parameters.len());
        self.parameters.push(Parameter {
            name: name.to_string(),
            tensor: tensor.shallow_clone(),
            shape: shape.to_vec(),
            placement,
            shard,
            trainable,
            gradient: GradientSource::in_region(self.region.group()),
            state: GradientState::default(),
        });
        Ok(tensor)
    }

    /// Records what backward leaves in the gradient of the latest parameter.
    pub(super) fn record_gradient(&mut self, source: GradientSource) {
        if let Some(latest) = self.parameters.last_mut() {
            latest.gradient = source;
        }
    }
}

impl Params for ParamStore {
    type Array = Tensor;

    fn param(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<Tensor>,
        placement: Placement,
    ) -> Result<Tensor> {
        self.insert(name, shape, init, placement, true)
    }

    fn buffer(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<Tensor>,
        placement: Placement,
    ) -> Result<Tensor> {
        self.insert(name, shape, init, placement, false)
    }

    fn computed_buffer(&mut self, name: &str, shape: &[i64], values: BufferValues) -> Result<()> {
        self.check_new(name)?;
        let (name, shape, kind) = (name.to_owned(), shape.to_vec(), self.options.0);
        self.computed.push(ComputedBuffer { name, shape, kind, compute: values });
        Ok(())
    }

    fn draw(&self, name: &str, shape: &[i64], init: &Init<Tensor>, placement: Placement) -> Result<Tensor> {
        self.draw_window(name, init, &self.window(name, shape, placement)?)
    }

    fn tie(&mut self, alias: &str, name: &str) -> Result<()> {
        self.check_new(alias)?;
        if !self.places.contains_key(name) {
            return Err(parameter_error(alias, format!("there is no \"{name}\" to tie it to")));
        }
        self.aliases.insert(alias.to_string(), name.to_string());
        Ok(())
    }

    fn region(&self) -> &ParallelRegion {
        &self.region
    }
}

/// Returns how the value of a computed buffer in a state dict differs from the computed one.
fn differs(buffer: &ComputedBuffer, value: &Tensor) -> Result<Option<String>> {
    let (name, shape) = (&buffer.name, value.size());
    if shape != buffer.shape {
        return Ok(Some(format!("\"{name}\" has shape {shape:?}, the model's is {:?}", buffer.shape)));
    }
    let agrees = buffer.agrees(&Window::whole(&shape), value)?;
    Ok((!agrees)
        .then(|| format!("\"{name}\" differs from the values computed from the model's configuration")))
}

fn grad_of(tensor: &Tensor) -> Option<Tensor> {
    tensor.f_grad().ok().filter(Tensor::defined)
}

fn parameter_error(name: &str, reason: String) -> Error {
    Error::Parameter { name: name.to_string(), reason }
}

fn refused(op: &'static str, name: &str, source: tch::TchError) -> Error {
    Error::from(isobar_array::Error::Operator { op, shapes: format!("\"{name}\""), source })
}

#[cfg(test)]
mod tests;
