//! Gradients in flat buffers that are reduced over ranks while backward goes on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use isobar_collectives::{Group, ReduceOp, Work, start};
use isobar_torch::autograd::{self, BackwardOptions, HookHandle};
use isobar_torch::meta::is_meta;
use tch::{Device, Kind, TchError, Tensor};

use crate::error::{Context, Error, Result};
use crate::gradients::Repeats;
use crate::params::{Parameter, Parameters};

/// The ranks over which each parameter's gradient is summed.
#[derive(Debug, Clone)]
pub(crate) struct SummandGroups {
    /// The first is that of all ranks.
    pub(crate) groups: Vec<Group>,
    /// For each parameter, the index of its group.
    pub(crate) of: Vec<usize>,
}

/// Sums the gradients of parameters over a group, bucket by bucket.
///
/// A bucket is a flat tensor of which its parameters' `grad` are views, so that nothing is copied before or after the
/// reduction. Buckets hold parameters in the reverse order of their creation, which is about the order in which backward
/// reaches them, and are always begun in that order: the same on every rank, whichever gradient is ready first.
#[derive(Debug)]
pub(crate) struct Reducer {
    shared: Arc<Mutex<Shared>>,
    hooks: Vec<HookHandle>,
}

/// Values that this rank sends along with its gradients.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Word {
    /// True if the rank reports parameters without gradients.
    pub(crate) complains: bool,
    /// True if the rank has refused the pass: see [`Reducer::begin`].
    pub(crate) refuses: bool,
    /// Its share of the batch.
    pub(crate) share: f64,
}

/// Values that the ranks have exchanged.
#[derive(Debug)]
pub(crate) struct Heard {
    /// Names of this rank's own parameters without gradients, if any rank reports some or has refused the pass.
    pub(crate) missing: Option<Vec<String>>,
    /// The sum of the shares, and how far it may be from what it should be in the dtype that it was summed in.
    pub(crate) shares: (f64, f64),
}

struct Shared {
    /// All ranks, whose words are summed beside the gradients.
    group: Group,
    params: Vec<Parameter>,
    buckets: Vec<Bucket>,
    /// For each parameter: its bucket, and its place there.
    places: Vec<(usize, usize)>,
    /// True for parameters whose gradient has arrived since the last `zero`.
    seen: Vec<bool>,
    overlap: bool,
    repeats: Repeats,
    pass: Option<Pass>,
    /// True if gradients have been reduced since the last `zero`.
    reduced: bool,
}

/// A backward pass under way whose gradients are to be reduced.
struct Pass {
    arrived: Vec<bool>,
    /// Gradients still to come, by bucket.
    missing: Vec<usize>,
    /// Reductions begun, in bucket order; none where there is nothing to sum.
    works: Vec<Option<Work<Tensor>>>,
}

struct Bucket {
    /// All gradients one after the other, and [`WORDS`] elements more for what [`Reducer::finish`] tells other ranks.
    flat: Tensor,
    members: Vec<Member>,
    /// The ranks over which it is summed.
    group: Group,
}

struct Member {
    param: usize,
    shape: Vec<i64>,
    start: i64,
    view: Tensor,
}

/// A flag and a share.
const WORDS: i64 = 2;

impl Reducer {
    /// Replaces the gradients of `params` by zeros in buckets of about `bucket_bytes`. With `overlap`, reductions begin
    /// while backward goes on, unless gradients may come several times (`Repeats`); else after it.
    pub(crate) fn new(
        params: &Parameters,
        summands: &SummandGroups,
        bucket_bytes: usize,
        overlap: bool,
    ) -> Result<Self> {
        let params: Vec<Parameter> = params.iter().cloned().collect();
        let mut places = vec![(0, 0); params.len()];
        let mut buckets = Vec::new();
        for (index, members) in plan(&params, bucket_bytes, &summands.of).into_iter().enumerate() {
            for (place, &param) in members.iter().enumerate() {
                places[param] = (index, place);
            }
            buckets.push(Bucket::new(&params, &members, &summands.groups[summands.of[members[0]]])?);
        }
        // The last bucket carries what ranks tell all others.
        let last = params.first().filter(|_| summands.of.first().is_some_and(|of| *of != 0));
        if let Some(param) = last {
            buckets.push(Bucket::empty(param, &summands.groups[0])?);
        }
        let seen = vec![false; params.len()];
        let shared = Shared {
            group: summands.groups[0].clone(),
            params,
            buckets,
            places,
            seen,
            overlap,
            repeats: Repeats::default(),
            pass: None,
            reduced: false,
        };
        for (index, param) in shared.params.iter().enumerate() {
            create_grad(param)?;
            shared.attach(index)?;
        }
        shared.params.iter().for_each(|param| param.gradient.take());
        let shared = Arc::new(Mutex::new(shared));
        let hooks = register_hooks(&shared)?;
        Ok(Self { shared, hooks })
    }

    /// Sets all gradients to zero.
    pub(crate) fn zero(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut shared = lock(&self.shared);
        shared.seen.fill(false);
        shared.reduced = false;
        shared.params.iter().for_each(|param| param.gradient.summed());
        for bucket in &mut shared.buckets {
            let _ = bucket.flat.f_zero_().context(|| "zeroing gradients".to_owned())?;
        }
        (0..shared.params.len()).try_for_each(|param| shared.attach(param))
    }

    /// Begins a pass: until [`Reducer::finish`], gradients are reduced as they arrive.
    ///
    /// # Errors
    ///
    /// Gradients that were reduced before, possibly on this rank only. The pass has begun nevertheless: the rank must finish it,
    /// as the others do, and report the error to them at its end.
    pub(crate) fn begin(&self) -> Result<()> {
        let mut shared = lock(&self.shared);
        let refused = shared.refuse_reduced();
        shared.repeats.begin();
        shared.pass = Some(Pass {
            arrived: vec![false; shared.params.len()],
            missing: shared.buckets.iter().map(|bucket| bucket.members.len()).collect(),
            works: Vec::new(),
        });
        refused
    }

    /// Returns whether a gradient has come since the last [`Reducer::zero`].
    pub(crate) fn has_seen_any(&self) -> bool {
        lock(&self.shared).seen.contains(&true)
    }

    /// Says that a backward pass is over, reduced or not.
    pub(crate) fn passed(&self) {
        lock(&self.shared).repeats.forget();
    }

    /// Gives up a pass that failed.
    pub(crate) fn abandon(&self) {
        lock(&self.shared).pass = None;
    }

    /// Reduces the remaining buckets and waits for all. Two elements of the last bucket carry this rank's word to the others: its
    /// share of the batch, and a flag. The flag is set if the rank `refuses` the pass, or if it `complains` and has seen no
    /// gradient of some parameter since the last [`Reducer::zero`].
    pub(crate) fn finish(&self, word: Word) -> Result<Heard> {
        let _no_grad = tch::no_grad_guard();
        let mut shared = lock(&self.shared);
        let Some(mut pass) = shared.pass.take() else {
            return Ok(Heard { missing: None, shares: (word.share, 0.0) });
        };
        let unseen = match word.complains {
            true => shared.unseen(),
            false => Vec::new(),
        };
        shared.repeats.end();
        shared.tell(!unseen.is_empty() || word.refuses, word.share)?;
        shared.start(&mut pass, shared.buckets.len())?;
        for (index, work) in pass.works.into_iter().enumerate() {
            if let Some(work) = work {
                let reduced = work.wait()?;
                shared.replace(index, reduced)?;
            }
        }
        shared.reduced = true;
        shared.params.iter().for_each(|param| param.gradient.summed());
        if shared.group.size() == 1 {
            return Ok(Heard { missing: (!unseen.is_empty()).then_some(unseen), shares: (word.share, 1e-9) });
        }
        let (flag, shares) = shared.flags_and_shares()?;
        Ok(Heard { missing: (flag != 0.0).then_some(unseen), shares })
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        self.hooks.drain(..).for_each(HookHandle::remove);
        lock(&self.shared).params.iter().for_each(|param| param.gradient.release());
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<usize> =
            self.buckets.iter().map(|bucket| bucket.flat.numel() - WORDS as usize).collect();
        f.debug_struct("Shared").field("group", &self.group).field("bucket_elements", &sizes).finish()
    }
}

impl Shared {
    /// Runs after a gradient was added to `param`'s.
    fn arrived(&mut self, param: usize) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.seen[param] = true;
        if self.group.size() > 1 {
            self.params[param].gradient.arrived();
        }
        self.attach(param)?;
        let (bucket, _) = self.places[param];
        let Some(mut pass) = self.pass.take() else { return Ok(()) };
        if !std::mem::replace(&mut pass.arrived[param], true) {
            pass.missing[bucket] -= 1;
        } else {
            self.repeats.repeated();
        }
        if pass.works.len() > bucket {
            return Err(Error::invalid(
                format!("a gradient of parameter {:?}", self.params[param].name),
                "there after its reduction has begun",
                "one for each parameter, as in the last pass with as many recomputed parts; --set data_parallel.overlap=off \
                 takes several",
            ));
        }
        if self.overlap && self.repeats.are_none() {
            // The last bucket carries the flag, so it waits until all is known.
            let whole = pass.missing.iter().take_while(|missing| **missing == 0).count();
            self.start(&mut pass, whole.min(self.buckets.len() - 1))?;
            // Communication moves when it is polled.
            for work in pass.works.iter_mut().flatten() {
                work.poll()?;
            }
        }
        self.pass = Some(pass);
        Ok(())
    }

    /// Makes `param`'s gradient a view of its bucket where it is not, keeping its values.
    fn attach(&self, param: usize) -> Result<()> {
        let (bucket, place) = self.places[param];
        let mut view = self.buckets[bucket].members[place].view.shallow_clone();
        let param = &self.params[param];
        let Some(mut grad) = param.grad() else {
            let what = format!("the gradient of parameter {:?}", param.name);
            return Err(Error::invalid(what, "gone", "that which it had when data parallelism was set up"));
        };
        if grad.data_ptr() == view.data_ptr() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let placed = view.f_copy_(&grad).and_then(|()| grad.f_set_data(&view));
        placed.context(|| format!("placing the gradient of parameter {:?}", param.name))
    }

    /// Begins the reductions of the first `count` buckets, those that have not been begun.
    fn start(&self, pass: &mut Pass, count: usize) -> Result<()> {
        if self.group.size() == 1 {
            return Ok(());
        }
        for bucket in &self.buckets[pass.works.len().min(count)..count] {
            pass.works.push(match bucket.group.size() {
                1 => None,
                _ => Some(start::all_reduce(&bucket.flat, ReduceOp::Sum, &bucket.group)?),
            });
        }
        Ok(())
    }

    fn unseen(&self) -> Vec<String> {
        let params = self.params.iter().zip(&self.seen);
        params.filter(|(_, seen)| !**seen).map(|(param, _)| param.name.clone()).collect()
    }

    /// Puts a reduced bucket in the place of the old one.
    fn replace(&mut self, index: usize, flat: Tensor) -> Result<()> {
        let bucket = &mut self.buckets[index];
        for member in &mut bucket.members {
            let name = || format!("placing the gradient of parameter {:?}", self.params[member.param].name);
            member.view = view(&flat, member.start, &member.shape).context(name)?;
            let mut grad = self.params[member.param].tensor.f_grad().context(name)?;
            grad.f_set_data(&member.view).context(name)?;
        }
        bucket.flat = flat;
        Ok(())
    }

    /// Refuses gradients that were reduced before: once more they would be summed again.
    fn refuse_reduced(&self) -> Result<()> {
        if !self.reduced || self.group.size() == 1 {
            return Ok(());
        }
        // Gradients zeroed in another way are fine.
        let is_zero = |bucket: &Bucket| {
            let gradients = bucket.flat.f_narrow(0, 0, bucket.flat.numel() as i64 - WORDS)?;
            Ok(gradients.f_count_nonzero(None::<i64>)?.f_int64_value(&[])? == 0)
        };
        let zero = self.buckets.iter().map(is_zero).collect::<std::result::Result<Vec<bool>, TchError>>();
        if zero.context(|| "looking for gradients of the last step".to_owned())?.contains(&false) {
            return Err(Error::WrongGradients {
                problem: "the gradients of an earlier `DataParallel::backward` would be summed over the ranks again".to_owned(),
                call: "call `zero_grad` before each step, and `backward_no_sync` for all passes of a step but the last".to_owned(),
            });
        }
        Ok(())
    }

    /// Values that this rank sends.
    fn tell(&self, flag: bool, share: f64) -> Result<()> {
        let Some(words) = self.words() else { return Ok(()) };
        let told = words.and_then(|words| {
            let _flag = words.f_narrow(0, 0, 1)?.f_fill_(f64::from(u8::from(flag)))?;
            words.f_narrow(0, 1, 1)?.f_fill_(share)
        });
        told.map(drop).context(|| "what a rank says beside its gradients".to_owned())
    }

    /// The sum of all ranks' flags; that of their shares, and how far it may be off by rounding.
    fn flags_and_shares(&self) -> Result<(f64, (f64, f64))> {
        // Without parameters, or without values, nothing can be wrong.
        let on_meta = self.buckets.last().is_some_and(|bucket| is_meta(&bucket.flat));
        let Some(words) = self.words().filter(|_| !on_meta) else { return Ok((0.0, (1.0, 0.0))) };
        let read = words.and_then(|words| Ok((numbers(&words)?, words.kind())));
        let (words, kind) = read.context(|| "what ranks say beside their gradients".to_owned())?;
        let off = match kind {
            Kind::Double | Kind::ComplexDouble => 1e-9,
            Kind::Float | Kind::ComplexFloat => 1e-4,
            _ => 3e-2,
        };
        Ok((words[0], (words[1], off)))
    }

    /// The elements of the last bucket that are no gradients.
    fn words(&self) -> Option<std::result::Result<Tensor, TchError>> {
        let last = &self.buckets.last()?.flat;
        Some(last.f_narrow(0, last.numel() as i64 - WORDS, WORDS))
    }
}

/// The elements on the host; of complex ones the real parts.
fn numbers(words: &Tensor) -> std::result::Result<Vec<f64>, TchError> {
    let real = if words.f_is_complex()? { words.f_real()? } else { words.shallow_clone() };
    Vec::<f64>::try_from(real.f_to_device_(Device::Cpu, Kind::Double, false, true)?)
}

impl Bucket {
    /// A bucket without gradients, for what ranks tell each other.
    fn empty(like: &Parameter, group: &Group) -> Result<Self> {
        let options = (like.tensor.kind(), like.tensor.device());
        let flat = Tensor::f_zeros([WORDS], options).context(|| "an empty gradient bucket".to_owned())?;
        Ok(Self { flat, members: Vec::new(), group: group.clone() })
    }

    fn new(params: &[Parameter], members: &[usize], group: &Group) -> Result<Self> {
        let first = &params[members[0]].tensor;
        let elements: usize = members.iter().map(|&param| params[param].tensor.numel()).sum();
        let flat = Tensor::f_zeros([elements as i64 + WORDS], (first.kind(), first.device()))
            .context(|| format!("a gradient bucket of {elements} elements"))?;
        let mut start = 0;
        let members = members.iter().map(|&param| {
            let shape = params[param].tensor.size();
            let view = view(&flat, start, &shape).context(|| "a view of a gradient bucket".to_owned())?;
            let member = Member { param, shape, start, view };
            start += params[param].tensor.numel() as i64;
            Ok(member)
        });
        let members = members.collect::<Result<_>>()?;
        Ok(Self { flat, members, group: group.clone() })
    }
}

/// Assigns parameters to buckets: in reverse order of creation, of one dtype and device, about `bucket_bytes` each.
pub(crate) fn plan(params: &[Parameter], bucket_bytes: usize, classes: &[usize]) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for (index, param) in params.iter().enumerate().rev() {
        let tensor = &param.tensor;
        let own = tensor.numel() * tensor.kind().elt_size_in_bytes();
        let fits = |bucket: &Vec<usize>| {
            let first = &params[bucket[0]].tensor;
            let alike = first.kind() == tensor.kind() && first.device() == tensor.device();
            alike && classes[bucket[0]] == classes[index] && bytes + own <= bucket_bytes
        };
        match buckets.last_mut().filter(|bucket| fits(bucket)) {
            Some(bucket) => {
                bucket.push(index);
                bytes += own;
            }
            None => {
                buckets.push(vec![index]);
                bytes = own;
            }
        }
    }
    buckets
}

fn register_hooks(shared: &Arc<Mutex<Shared>>) -> Result<Vec<HookHandle>> {
    let params: Vec<Tensor> = lock(shared).params.iter().map(|p| p.tensor.shallow_clone()).collect();
    let register = |(index, tensor): (usize, &Tensor)| {
        // Weak, since the parameter, which the buckets hold, holds its hook.
        let shared: Weak<Mutex<Shared>> = Arc::downgrade(shared);
        Ok(autograd::register_post_accumulate_grad_hook(tensor, move |_| match shared.upgrade() {
            Some(shared) => lock(&shared).arrived(index).map_err(Into::into),
            None => Ok(()),
        })?)
    };
    params.iter().enumerate().map(register).collect()
}

/// Gives a leaf a gradient of zeros, before it has hooks: libtorch's Rust binding can't set one, but a backward pass
/// makes one.
pub(crate) fn create_grad(param: &Parameter) -> Result<()> {
    if param.grad().is_some() {
        return Ok(());
    }
    let zeros = param.tensor.f_zeros_like();
    let zeros = zeros.context(|| format!("the gradient of parameter {:?}", param.name))?;
    Ok(autograd::backward(&[&param.tensor], &[Some(zeros)], BackwardOptions::default())?)
}

fn view(flat: &Tensor, start: i64, shape: &[i64]) -> std::result::Result<Tensor, TchError> {
    flat.f_narrow(0, start, shape.iter().product())?.f_view(shape)
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // A panic in a hook fails the backward pass, which `abandon` ends: the state is good for the next one.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
