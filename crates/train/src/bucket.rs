//! Gradients in flat buffers that are reduced over ranks while backward goes on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use isobar_collectives::{Group, ReduceOp, Work, start};
use isobar_torch::autograd::{self, BackwardOptions, HookHandle};
use tch::{Device, Kind, TchError, Tensor};

use crate::error::{Context, Error, Result};
use crate::params::{Parameter, Parameters};

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

struct Shared {
    group: Group,
    params: Vec<Parameter>,
    buckets: Vec<Bucket>,
    /// For each parameter: its bucket, and its place there.
    places: Vec<(usize, usize)>,
    /// Whether a gradient has come since the last `zero`.
    seen: Vec<bool>,
    overlap: bool,
    pass: Option<Pass>,
}

/// A backward pass under way whose gradients are to be reduced.
struct Pass {
    arrived: Vec<bool>,
    /// Gradients still to come, by bucket.
    missing: Vec<usize>,
    /// Reductions begun, in bucket order.
    works: Vec<Work<Tensor>>,
}

struct Bucket {
    /// All gradients one after the other, and one element more for [`Reducer::finish`]'s flag.
    flat: Tensor,
    members: Vec<Member>,
}

struct Member {
    param: usize,
    shape: Vec<i64>,
    start: i64,
    view: Tensor,
}

impl Reducer {
    /// Replaces the gradients of `params` by zeros in buckets of about `bucket_bytes`. With `overlap`, reductions begin
    /// while backward goes on, else after it.
    pub(crate) fn new(
        params: &Parameters,
        group: &Group,
        bucket_bytes: usize,
        overlap: bool,
    ) -> Result<Self> {
        let params: Vec<Parameter> = params.iter().cloned().collect();
        let mut places = vec![(0, 0); params.len()];
        let mut buckets = Vec::new();
        for (index, members) in plan(&params, bucket_bytes).into_iter().enumerate() {
            for (place, &param) in members.iter().enumerate() {
                places[param] = (index, place);
            }
            buckets.push(Bucket::new(&params, &members)?);
        }
        let seen = vec![false; params.len()];
        let shared = Shared { group: group.clone(), params, buckets, places, seen, overlap, pass: None };
        for (index, param) in shared.params.iter().enumerate() {
            create_grad(param)?;
            shared.attach(index)?;
        }
        let shared = Arc::new(Mutex::new(shared));
        let hooks = register_hooks(&shared)?;
        Ok(Self { shared, hooks })
    }

    /// Sets all gradients to zero.
    pub(crate) fn zero(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut shared = lock(&self.shared);
        shared.seen.fill(false);
        for bucket in &mut shared.buckets {
            let _ = bucket.flat.f_zero_().context(|| "zeroing gradients".to_owned())?;
        }
        (0..shared.params.len()).try_for_each(|param| shared.attach(param))
    }

    /// From here to [`Reducer::finish`] gradients are reduced as they come.
    pub(crate) fn begin(&self) {
        let mut shared = lock(&self.shared);
        shared.pass = Some(Pass {
            arrived: vec![false; shared.params.len()],
            missing: shared.buckets.iter().map(|bucket| bucket.members.len()).collect(),
            works: Vec::new(),
        });
    }

    /// Whether a gradient has come since the last [`Reducer::zero`].
    pub(crate) fn has_seen_any(&self) -> bool {
        lock(&self.shared).seen.contains(&true)
    }

    /// Gives up a pass that failed.
    pub(crate) fn abandon(&self) {
        lock(&self.shared).pass = None;
    }

    /// Reduces what has not been begun and waits for all. With `complain` this rank tells the others, in an element of
    /// the last bucket, that it has seen no gradient of some parameter since the last [`Reducer::zero`]. With `look`
    /// the result is `None` where no rank complains, else the names of this rank's own such parameters.
    pub(crate) fn finish(&self, complain: bool, look: bool) -> Result<Option<Vec<String>>> {
        let _no_grad = tch::no_grad_guard();
        let mut shared = lock(&self.shared);
        let Some(mut pass) = shared.pass.take() else { return Ok(None) };
        let unseen = match complain {
            true => shared.unseen(),
            false => Vec::new(),
        };
        if !unseen.is_empty() {
            shared.raise_flag()?;
        }
        shared.start(&mut pass, shared.buckets.len())?;
        for (index, work) in pass.works.into_iter().enumerate() {
            let reduced = work.wait()?;
            shared.replace(index, reduced)?;
        }
        Ok((look && shared.flag_is_up()?).then_some(unseen))
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        self.hooks.drain(..).for_each(HookHandle::remove);
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<usize> = self.buckets.iter().map(|bucket| bucket.flat.numel() - 1).collect();
        f.debug_struct("Shared").field("group", &self.group).field("bucket_elements", &sizes).finish()
    }
}

impl Shared {
    /// Runs after a gradient was added to `param`'s.
    fn arrived(&mut self, param: usize) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.seen[param] = true;
        self.attach(param)?;
        let (bucket, _) = self.places[param];
        let Some(mut pass) = self.pass.take() else { return Ok(()) };
        if !std::mem::replace(&mut pass.arrived[param], true) {
            pass.missing[bucket] -= 1;
        } else if pass.works.len() > bucket {
            return Err(Error::invalid(
                format!("a gradient of parameter {:?}", self.params[param].name),
                "there again after its reduction has begun",
                "to come once a pass; where parts that share a parameter are computed again in backward, set \
                 data_parallel.overlap = \"off\"",
            ));
        }
        if self.overlap {
            // The last bucket carries the flag, so it waits until all is known.
            let whole = pass.missing.iter().take_while(|missing| **missing == 0).count();
            self.start(&mut pass, whole.min(self.buckets.len() - 1))?;
            // Communication moves when it is polled.
            for work in &mut pass.works {
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
            pass.works.push(start::all_reduce(&bucket.flat, ReduceOp::Sum, &self.group)?);
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

    fn raise_flag(&self) -> Result<()> {
        let marked = self.flag().and_then(|mut flag| flag.f_fill_(1.0));
        marked.map(drop).context(|| "marking a gradient as missing".to_owned())
    }

    fn flag_is_up(&self) -> Result<bool> {
        let flag = self.flag().and_then(|flag| match flag.f_is_complex()? {
            true => flag.f_real(),
            false => Ok(flag),
        });
        let value = flag.and_then(|flag| flag.f_double_value(&[0]));
        Ok(value.context(|| "asking whether a gradient is missing".to_owned())? != 0.0)
    }

    fn flag(&self) -> std::result::Result<Tensor, TchError> {
        match self.buckets.last() {
            Some(bucket) => bucket.flat.f_narrow(0, bucket.flat.numel() as i64 - 1, 1),
            None => Tensor::f_zeros([1], (Kind::Float, Device::Cpu)),
        }
    }
}

impl Bucket {
    fn new(params: &[Parameter], members: &[usize]) -> Result<Self> {
        let first = &params[members[0]].tensor;
        let elements: usize = members.iter().map(|&param| params[param].tensor.numel()).sum();
        let flat = Tensor::f_zeros([elements as i64 + 1], (first.kind(), first.device()))
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
        Ok(Self { flat, members })
    }
}

/// Which parameters share a bucket: in reverse order of creation, of one kind and device, about `bucket_bytes` each.
pub(crate) fn plan(params: &[Parameter], bucket_bytes: usize) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for (index, param) in params.iter().enumerate().rev() {
        let tensor = &param.tensor;
        let own = tensor.numel() * tensor.kind().elt_size_in_bytes();
        let fits = |bucket: &Vec<usize>| {
            let first = &params[bucket[0]].tensor;
            first.kind() == tensor.kind() && first.device() == tensor.device() && bytes + own <= bucket_bytes
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
