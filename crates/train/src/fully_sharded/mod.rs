//! Fully sharded training: each rank keeps its part of the parameters, of their gradients and of the optimizer's state.
//!
//! It depends on no optimizer, task or model: it supplies parameters and takes their gradients.

mod check;
mod unit;

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use isobar_collectives::{Group, Work};
use isobar_manager::DeviceMesh;
use isobar_shard::ParameterWatch;
use isobar_torch::autograd::{self, BackwardOptions, HookHandle};
use tch::Tensor;

use self::unit::{Cut, Member, Unit};
use crate::agree::same_settings;
use crate::bucket::create_grad;
use crate::data_parallel::{DataParallelConfig, Overlap, broadcast, compare};
use crate::error::{Context, Error, Result};
use crate::fields::{MODEL_AXIS, SHARD_AXIS};
use crate::params::{ParamPlacement, Parameter, Parameters};

/// Number of units kept materialised in a forward pass, including the one in use.
const KEPT: usize = 2;

/// Supplier of a fully sharded model's parameters: passed to [`MeshParams::watched`](isobar_shard::MeshParams) when the model
/// is built, then to [`FullySharded::new`]. Until then the parameters are not sharded.
///
/// A clone is another handle to the same.
#[derive(Clone, Default)]
pub struct ShardedParameters(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    units: Vec<Unit>,
    /// For each parameter: its unit, and its place there.
    places: Vec<(usize, usize)>,
    /// Units that are whole, the one that was used last at the end.
    whole: VecDeque<usize>,
    /// Units whose reduction has not begun in this pass: always those before the others, whichever is complete first, so that
    /// all ranks begin them in one order. Those without dims, which are the first units, wait for the end of the pass.
    waiting: usize,
    /// Reductions under way, by unit.
    reductions: Vec<(usize, Work<Tensor>)>,
    group: Option<Group>,
    prefetch: bool,
    in_backward: bool,
    /// Units of which a gradient has arrived after their reduction began: recomputed parts give their parameters a gradient each.
    again: BTreeSet<usize>,
}

impl ShardedParameters {
    /// Returns the watch with which a model is built.
    pub fn watch(&self) -> Arc<dyn ParameterWatch> {
        Arc::new(self.clone())
    }
}

impl std::fmt::Debug for ShardedParameters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = lock(&self.0);
        f.debug_struct("ShardedParameters")
            .field("units", &state.units.len())
            .field("whole", &state.whole)
            .finish()
    }
}

impl ParameterWatch for ShardedParameters {
    fn identity(&self) -> Option<usize> {
        Some(Arc::as_ptr(&self.0) as usize)
    }

    fn enter(&self, parameters: &[usize]) -> isobar_shard::Result<()> {
        let mut state = lock(&self.0);
        let units = state.units_of(parameters);
        for &unit in &units {
            state.units[unit].users += 1;
        }
        if let Err(error) = units.iter().try_for_each(|&unit| state.bring(unit)) {
            units.iter().for_each(|&unit| state.units[unit].users -= 1);
            return Err(below(error));
        }
        if !state.in_backward {
            state.drop_unused(KEPT).map_err(below)?;
            if let Some(&last) = units.last().filter(|&&last| state.units[last].is_cut()) {
                state.prefetch(last + 1).map_err(below)?;
            }
        }
        Ok(())
    }

    fn leave(&self, parameters: &[usize]) {
        let mut state = lock(&self.0);
        for unit in state.units_of(parameters) {
            state.units[unit].users -= 1;
        }
    }

    fn recall(&self, parameters: &[usize]) -> isobar_shard::Result<()> {
        let mut state = lock(&self.0);
        let units = state.units_of(parameters);
        for &unit in &units {
            state.bring(unit).map_err(below)?;
        }
        let first = units.iter().find(|&&unit| state.units[unit].is_cut());
        match first.and_then(|first| first.checked_sub(1)) {
            Some(before) if !state.units[before].is_complete() => state.prefetch(before).map_err(below),
            _ => Ok(()),
        }
    }
}

/// Converts an error for an operator.
fn below(error: Error) -> isobar_shard::Error {
    match error {
        Error::Collectives(error) => error.into(),
        Error::Shard(error) => error,
        other => {
            let source = Box::new(other);
            isobar_shard::Error::from(isobar_array::Error::Registered {
                name: "fully_sharded".to_owned(),
                source,
            })
        }
    }
}

impl State {
    fn units_of(&self, parameters: &[usize]) -> Vec<usize> {
        let mut units: Vec<usize> =
            parameters.iter().filter_map(|&parameter| Some(self.places.get(parameter)?.0)).collect();
        units.sort_unstable();
        units.dedup();
        units
    }

    fn bring(&mut self, unit: usize) -> Result<()> {
        let Some(group) = self.group.clone() else { return Ok(()) };
        if !self.units[unit].is_whole() {
            self.units[unit].bring(&group)?;
        }
        if !self.units[unit].is_cut() {
            return Ok(());
        }
        self.whole.retain(|&other| other != unit);
        self.whole.push_back(unit);
        Ok(())
    }

    /// Begins to bring a unit that is used soon.
    fn prefetch(&mut self, unit: usize) -> Result<()> {
        match (&self.group, self.units.get_mut(unit)) {
            (Some(group), Some(unit)) if self.prefetch => unit.start(group),
            _ => Ok(()),
        }
    }

    /// Drops the values of units that no operator uses, those used longest ago first, down to so many.
    fn drop_unused(&mut self, kept: usize) -> Result<()> {
        while self.whole.len() > kept {
            let unused = self.whole.iter().position(|&unit| self.units[unit].users == 0);
            let Some(unit) = unused.and_then(|place| self.whole.remove(place)) else { break };
            self.units[unit].drop_values()?;
        }
        Ok(())
    }

    /// Drops all values, and what is on its way: the parts are about to change.
    fn drop_all(&mut self) -> Result<()> {
        self.whole.clear();
        self.units.iter_mut().try_for_each(Unit::drop_values)
    }

    /// Runs after a parameter's gradient is complete.
    fn arrived(&mut self, parameter: usize) -> Result<()> {
        let (unit, place) = self.places[parameter];
        let gradient = || format!("a gradient of parameter {:?}", self.units[unit].members[place].name);
        if !self.in_backward {
            let expected = "backward passes of fully sharded models to be run by FullySharded::backward";
            return Err(Error::invalid(gradient(), "there", expected));
        }
        if unit >= self.waiting {
            self.again.insert(unit);
        }
        let member = &mut self.units[unit].members[place];
        (member.arrived, member.used_up) = (true, true);
        if self.units[unit].drop_used_up()? {
            self.whole.retain(|&other| other != unit);
        }
        while let Some(next) = self.waiting.checked_sub(1).map(|next| &self.units[next])
            && next.is_cut()
            && next.is_complete()
        {
            self.reduce_next()?;
        }
        // Communication moves when it is polled.
        for (_, work) in &mut self.reductions {
            work.poll()?;
        }
        Ok(())
    }

    /// Begins the next reduction.
    fn reduce_next(&mut self) -> Result<()> {
        self.waiting -= 1;
        self.reduce(self.waiting)
    }

    /// Begins a reduction of the gradients that have arrived since the last one.
    fn reduce(&mut self, unit: usize) -> Result<()> {
        let Some(group) = &self.group else { return Ok(()) };
        let work = self.units[unit].reduce(group)?;
        self.reductions.push((unit, work));
        Ok(())
    }
}

/// Parameters, gradients and optimizer state in parts over the mesh's axis `shard` (ZeRO stage 3, Rajbhandari et al.,
/// arXiv:1910.02054; PyTorch's `fully_shard`), for models over `ShardTensor`s.
///
/// Units of parameters are gathered before operators use them, in forward and again in backward, the next one while this one is used,
/// and dropped after it. When all gradients of a unit have come (again at the end of the pass, if recomputed parts have added more), they are summed over all axes of the mesh but `model`, along which a
/// model may be split besides ([`MeshParams::along`](isobar_shard::MeshParams::along)), each rank receiving those of its parts.
/// Parameters are cut along the dim that gives the most equal parts, uneven and empty ones included; scalars stay replicated. The
/// optimizer, clipping and checkpoints take [`parameters`](Self::parameters): the parts.
///
/// The memory of the whole parameters comes and goes: of the store that made them only names and shapes are of use from then on,
/// and models are used through operators. Weights that an operator casts (mixed precision) or copies stay until backward in that
/// form. Gradients of gradients are refused.
///
/// Values, gradients and losses are those of [`DataParallel`](crate::DataParallel), but for rounding.
///
/// All ranks of the mesh make the same calls in the same order.
///
/// ```
/// use isobar_collectives::threads;
/// use isobar_manager::DeviceMesh;
/// use isobar_array::{Generator, Reduce, Linear};
/// use isobar_shard::{Init, MeshParams, ParamStore, Params, Placement, ShardTensor};
/// use isobar_train::{DataParallelConfig, FullySharded, Parameters, ShardedParameters};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let mesh = DeviceMesh::new(&group, &[2], &["shard"]).unwrap();
///     let mut store = ParamStore::new(Generator::new(1));
///     let sharded = ShardedParameters::default();
///     let mut params = MeshParams::new(&mut store, &mesh).pending().watched(sharded.watch());
///     let weight = params.param("weight", &[4, 2], Init::XavierUniform, Placement::Replicate).unwrap();
///     let (whole, _) = Parameters::from_store(&store, &isobar_collectives::Group::single()).unwrap();
///     let parallel = FullySharded::new(sharded, &whole, &[], &mesh, &DataParallelConfig::default()).unwrap();
///     assert_eq!(parallel.parameters().iter().next().unwrap().tensor.size(), [2, 2]);
///
///     let rows = Tensor::ones([6, 2], (Kind::Float, Device::Cpu));
///     let x = ShardTensor::distribute(&rows, &mesh, &[Placement::Shard(0)]).unwrap();
///     let loss = x.linear(&weight, None).unwrap().sum().unwrap().full_tensor(None).unwrap();
///     parallel.backward(&loss).unwrap();
///     let gradient = parallel.parameters().iter().next().unwrap().grad().unwrap();
///     assert_eq!(gradient, Tensor::full([2, 2], 6.0, (Kind::Float, Device::Cpu)));
/// });
/// ```
#[derive(Debug)]
pub struct FullySharded {
    sharded: ShardedParameters,
    params: Parameters,
    buffers: Vec<(String, Tensor)>,
    /// The ranks of the other axes, over which the parts' gradients are still to be summed, once a step.
    others: Group,
    /// All ranks whose gradients are summed.
    all: Group,
    /// All ranks of the mesh.
    mesh: Group,
    find_unused_parameters: bool,
    broadcast_buffers: bool,
    hooks: Vec<HookHandle>,
}

impl FullySharded {
    /// Cuts `params`, the whole parameters of the model that was made with `sharded`, and `buffers`, both as rank 0 of the mesh
    /// has them. Units have about `bucket_mb`; with `overlap` the next unit is gathered while one is used.
    ///
    /// # Errors
    ///
    /// A mesh without the axis `shard`; a model that is split over other ranks than those along the mesh's axis `model`; parameters
    /// that differ between ranks; a setting out of its range; the errors of the communication.
    pub fn new(
        sharded: ShardedParameters,
        params: &Parameters,
        buffers: &[(String, Tensor)],
        mesh: &DeviceMesh,
        config: &DataParallelConfig,
    ) -> Result<Self> {
        config.check()?;
        let names = mesh.names();
        let Some(shard) = names.iter().position(|name| *name == SHARD_AXIS) else {
            let expected = format!("one with an axis \"{SHARD_AXIS}\"");
            return Err(Error::invalid("the mesh of a fully sharded model", mesh, expected));
        };
        let model = names.iter().position(|name| *name == MODEL_AXIS);
        let sharing = match model {
            Some(axis) => mesh.group_along(&[axis]).map_err(isobar_shard::Error::from)?,
            None => Group::single(),
        };
        let split = params.model_group();
        if split.size().max(sharing.size()) > 1 && split.ranks() != sharing.ranks() {
            return Err(Error::invalid(
                "a fully sharded model",
                format!("split over the ranks {:?}", split.ranks()),
                format!("those along the mesh's axis \"{MODEL_AXIS}\": {:?}", sharing.ranks()),
            ));
        }
        let along = |name: &str, axes: Vec<usize>| -> Result<Group> {
            if axes.is_empty() {
                return Ok(Group::single());
            }
            let group = mesh.group_along(&axes).map_err(isobar_shard::Error::from)?;
            let ranks: Vec<usize> = (0..group.size()).collect();
            Ok(group.subgroup(name, &ranks)?.unwrap_or(group))
        };
        let everybody: Vec<usize> = (0..names.len()).collect();
        let everybody = mesh.group_along(&everybody).map_err(isobar_shard::Error::from)?;
        let summed = (0..names.len()).filter(|&axis| Some(axis) != model);
        let all = along("gradients", summed.clone().collect())?;
        let group = along("shard", vec![shard])?;
        let others = along("gradients/others", summed.filter(|&axis| axis != shard).collect())?;
        let parts = match model {
            None => group.clone(),
            Some(model) => along("parts", vec![shard.min(model), shard.max(model)])?,
        };
        same_settings(&all, &config.by_key())?;
        check::check_fully_sharded(params, &sharded, &all)?;
        compare(params, buffers, &all)?;
        broadcast(params.iter().map(|p| (&p.name, &p.tensor)), &all)?;
        broadcast(buffers.iter().map(|(name, tensor)| (name, tensor)), &all)?;

        let members = members(params, &group)?;
        let own = members.iter().zip(params).map(|(member, param)| {
            let (shape, mut start) = param.placement.place(&member.whole.size(), split);
            let mut copies = match param.placement {
                ParamPlacement::Replicate => split.size(),
                ParamPlacement::Shard { .. } => 1,
                ParamPlacement::Part { copies, .. } => copies,
            };
            match &member.cut {
                Some(cut) => start[cut.dim as usize] += cut.start(group.rank()),
                None => copies *= group.size(),
            }
            Parameter::part(&member.name, &member.part, (shape, start), copies)
        });
        let parts = Parameters::over(own.collect(), &parts)?.with_computed_of(params);
        parts.iter().try_for_each(create_grad)?;
        let hooks = register_hooks(&sharded, &members)?;
        let bytes = (config.bucket_mb * 1024.0 * 1024.0) as usize;
        let mut state = lock(&sharded.0);
        state.fill(units(members, bytes, group.size()), group, config.overlap != Overlap::Off);
        state.drop_all()?;
        drop(state);
        params.iter().for_each(|param| param.gradient.part());
        let buffers = buffers.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        let DataParallelConfig { find_unused_parameters, broadcast_buffers, .. } = *config;
        let params = parts;
        let mesh = everybody;
        Ok(Self {
            sharded,
            params,
            buffers,
            others,
            all,
            mesh,
            find_unused_parameters,
            broadcast_buffers,
            hooks,
        })
    }

    /// This rank's parts of the parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.params
    }

    /// Sets all gradients to zero: before the forward pass of a step.
    ///
    /// # Errors
    ///
    /// An error of libtorch, or of a communication in flight.
    pub fn zero_grad(&self) -> Result<()> {
        self.changed()?;
        lock(&self.sharded.0).units.iter_mut().for_each(|unit| unit.unsummed = None);
        self.params.zero_grad()
    }

    /// Says that the parts have new values, for instance of a checkpoint: what was gathered before is forgotten. An optimizer
    /// step between a backward pass and [`zero_grad`](Self::zero_grad) needs no word. All ranks call.
    ///
    /// # Errors
    ///
    /// A communication in flight fails.
    pub fn changed(&self) -> Result<()> {
        lock(&self.sharded.0).drop_all()
    }

    /// Replaces the buffers by those of rank 0, where the configuration asks for it: before a forward pass.
    ///
    /// # Errors
    ///
    /// A communication fails.
    pub fn sync_buffers(&self) -> Result<()> {
        match self.broadcast_buffers {
            true => self.share_buffers(),
            false => Ok(()),
        }
    }

    /// Replaces the buffers by those of rank 0, whatever the configuration says.
    pub(crate) fn share_buffers(&self) -> Result<()> {
        broadcast(self.buffers.iter().map(|(name, tensor)| (name, tensor)), &self.all)
    }

    /// The backward pass of a loss that all ranks have alike. The gradients are added to those of the parts; several passes
    /// before a step accumulate them.
    ///
    /// # Errors
    ///
    /// [`Error::MissingGradient`] where a parameter took no part in the loss on this rank and `find_unused_parameters` is off;
    /// whatever a backward closure or the communication reports. In all these cases this rank leaves the group, so that the
    /// others do not wait for it: their error then is what it says.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.pass(loss, true)
    }

    /// Runs backward for a micro-batch that is not the last of its step (gradient accumulation). Gradients are summed along the
    /// axis `shard` only; [`backward`](Self::backward) of the last micro-batch sums them over the other axes and adds them to the
    /// gradients of the shards.
    ///
    /// # Errors
    ///
    /// Those of [`backward`](Self::backward).
    pub fn backward_no_sync(&self, loss: &Tensor) -> Result<()> {
        self.pass(loss, self.others.size() == 1)
    }

    fn pass(&self, loss: &Tensor, last: bool) -> Result<()> {
        lock(&self.sharded.0).begin()?;
        let done = autograd::backward(&[loss], &[], BackwardOptions::default());
        let done = done.map_err(Error::from).and_then(|()| self.finish(last));
        let mut state = lock(&self.sharded.0);
        state.in_backward = false;
        if let Err(error) = &done {
            state.reductions.clear();
            if !error.is_shared() || matches!(error, Error::MissingGradient { .. }) {
                self.mesh.leave(&error.to_string());
            }
        }
        done
    }

    fn finish(&self, last: bool) -> Result<()> {
        let mut state = lock(&self.sharded.0);
        // Others may not miss it, where ranks have losses of their own; nothing can be waited for then.
        let missing = state.units.iter().flat_map(|unit| &unit.members).find(|member| !member.arrived);
        if let (Some(missing), false) = (missing, self.find_unused_parameters) {
            let (name, group) = (missing.name.clone(), self.all.name().to_owned());
            return Err(Error::MissingGradient { name, rank: self.all.rank(), group });
        }
        while state.waiting > 0 {
            state.reduce_next()?;
        }
        while let Some(unit) = state.again.pop_last() {
            state.reduce(unit)?;
        }
        state.drop_all()?;
        let mut sums = Vec::with_capacity(state.units.len());
        for (unit, work) in std::mem::take(&mut state.reductions) {
            state.units[unit].keep_gradients(work.wait()?)?;
            if last {
                sums.extend(state.units[unit].start_sum(&self.others)?.map(|work| (unit, work)));
            }
        }
        if !last {
            return Ok(());
        }
        // Those that this pass did not reduce may have gradients of earlier ones.
        for (unit, left) in state.units.iter_mut().enumerate() {
            sums.extend(left.start_sum(&self.others)?.map(|work| (unit, work)));
        }
        for (unit, work) in sums {
            state.units[unit].add_gradients(&work.wait()?)?;
        }
        Ok(())
    }
}

impl Drop for FullySharded {
    fn drop(&mut self) {
        self.hooks.drain(..).for_each(HookHandle::remove);
    }
}

impl State {
    fn fill(&mut self, units: Vec<Unit>, group: Group, prefetch: bool) {
        self.places = vec![(0, 0); units.iter().map(|unit| unit.members.len()).sum()];
        for (index, unit) in units.iter().enumerate() {
            for (place, member) in unit.members.iter().enumerate() {
                self.places[member.index] = (index, place);
            }
        }
        self.whole = (0..units.len()).collect();
        self.units = units;
        self.group = Some(group);
        self.prefetch = prefetch;
    }

    fn begin(&mut self) -> Result<()> {
        self.in_backward = true;
        self.reductions.clear();
        self.again.clear();
        self.waiting = self.units.len();
        for member in self.units.iter_mut().flat_map(|unit| &mut unit.members) {
            (member.arrived, member.used_up) = (false, false);
            // Clears the remains of a failed pass.
            autograd::clear_grad(&member.whole)?;
        }
        Ok(())
    }
}

/// Each parameter, whole and as this rank's part.
fn members(params: &Parameters, group: &Group) -> Result<Vec<Member>> {
    let _no_grad = tch::no_grad_guard();
    let member = |(index, param): (usize, &Parameter)| {
        let shape = param.tensor.size();
        let cut = Cut::new(&shape, group.size(), index);
        let part = || {
            let whole = param.tensor.f_detach()?;
            let part = match &cut {
                Some(cut) => cut.part(&whole, group.rank())?,
                None => whole,
            };
            part.f_detach_copy()?.f_contiguous()?.f_set_requires_grad(true)
        };
        let part = part().context(|| format!("cutting parameter {:?}", param.name))?;
        let whole = param.tensor.shallow_clone();
        Ok(Member { name: param.name.clone(), index, whole, part, cut, arrived: false, used_up: false })
    };
    params.iter().enumerate().map(member).collect()
}

/// Parameters that are neighbours in the order of their making, which is about that of their use, of one dtype and device, and about
/// so many bytes. Scalars of all layers come first, in units that are never freed.
fn units(members: Vec<Member>, bytes: usize, ranks: usize) -> Vec<Unit> {
    let mut units: Vec<Vec<Member>> = Vec::new();
    let (cut, kept): (Vec<_>, Vec<_>) = members.into_iter().partition(|member| member.cut.is_some());
    for member in kept.into_iter().chain(cut) {
        let alike = |unit: &Vec<Member>| {
            let first = &unit[0].whole;
            (first.kind(), first.device()) == (member.whole.kind(), member.whole.device())
                && unit[0].cut.is_some() == member.cut.is_some()
                && Unit::bytes(unit) + Unit::bytes(std::slice::from_ref(&member)) <= bytes
        };
        match units.last_mut().filter(|unit| alike(unit)) {
            Some(unit) => unit.push(member),
            None => units.push(vec![member]),
        }
    }
    units.into_iter().map(|members| Unit::new(members, ranks)).collect()
}

fn register_hooks(sharded: &ShardedParameters, members: &[Member]) -> Result<Vec<HookHandle>> {
    let register = |(index, member): (usize, &Member)| {
        // Weak, since the parameter, which the state holds, holds its hook.
        let state: Weak<Mutex<State>> = Arc::downgrade(&sharded.0);
        Ok(autograd::register_post_accumulate_grad_hook(&member.whole, move |_| match state.upgrade() {
            Some(state) => lock(&state).arrived(index).map_err(Into::into),
            None => Ok(()),
        })?)
    };
    members.iter().enumerate().map(register).collect()
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A panic in a hook fails the backward pass; the next one begins anew.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
