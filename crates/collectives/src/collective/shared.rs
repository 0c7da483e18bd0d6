//! Parameters that several ranks hold alike and use on different data: their gradients are summed over the ranks.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use isobar_torch::autograd::{self, HookHandle};
use isobar_torch::guard::NoGrad;
use tch::{Kind, Tensor};

use crate::collective::fused;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::{Error, Result};
use crate::local::memory;
use crate::local::reduce::ReduceOp;

/// Settings of [`mark_module_as_shared`].
#[derive(Debug, Clone, Copy)]
pub struct SharedOptions {
    /// Gradients are summed in buckets of about this many bytes, each begun as soon as it is full.
    pub bucket_bytes: usize,
    /// True if gradients of 16-bit dtypes are summed in fp32.
    pub use_fp32: bool,
}

impl Default for SharedOptions {
    fn default() -> Self {
        Self { bucket_bytes: 4 << 20, use_fp32: true }
    }
}

/// Makes every backward pass sum the gradients that it gives to `parameters` over `group`: all ranks get the same
/// gradients, those that earlier passes have left included once.
///
/// Buckets travel while backward goes on, in the reverse order of the parameters, the same on all ranks; the pass ends
/// when all have come back. Every rank calls, with the same parameters in the same order, and runs the same passes; a
/// parameter takes part in a pass on all ranks or on none. What [`autograd::grad`] returns is not summed: it is this
/// rank's own share; so is what a pass that fails leaves. Hooks that change the gradients are registered before.
///
/// The marking lasts until [`unmark_module_as_shared`].
///
/// # Errors
///
/// A tensor that is no leaf with a gradient, or is marked already.
///
/// ```
/// use isobar_collectives::{SharedOptions, mark_module_as_shared, threads, unmark_module_as_shared};
/// use isobar_torch::autograd;
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let weight = Tensor::from_slice(&[1.0]).set_requires_grad(true);
///     let module = mark_module_as_shared(&[&weight], &group, SharedOptions::default()).unwrap();
///     let x = Tensor::from_slice(&[1.0 + group.rank() as f64]);
///     autograd::backward(&[&(&weight * x).sum(tch::Kind::Double)], &[None], Default::default()).unwrap();
///     assert_eq!(weight.grad().double_value(&[0]), 3.0);
///     unmark_module_as_shared(module);
/// });
/// ```
pub fn mark_module_as_shared(
    parameters: &[&Tensor],
    group: &Group,
    options: SharedOptions,
) -> Result<SharedModule> {
    let problem = |index: usize, what: &str| Error::Input {
        operation: "mark_module_as_shared",
        problem: format!("parameter {index} {what}"),
    };
    for (index, parameter) in parameters.iter().enumerate() {
        if !parameter.requires_grad() || !parameter.f_is_leaf()? {
            return Err(problem(index, "is not a leaf that requires a gradient"));
        }
    }
    let mut mine = BTreeSet::new();
    {
        let mut marked = marked();
        // Parameters without elements have no address, and nothing to sum.
        for (index, parameter) in parameters.iter().enumerate().filter(|(_, p)| p.numel() > 0) {
            let key = parameter.data_ptr() as usize;
            if marked.contains(&key) || mine.contains(&key) {
                return Err(problem(
                    index,
                    "is marked as shared already; unmark_module_as_shared takes it back",
                ));
            }
            mine.insert(key);
        }
        marked.extend(&mine);
    }
    let mut module = SharedModule { hooks: Vec::new(), keys: mine.into_iter().collect() };
    let shared = Arc::new(Mutex::new(Shared {
        group: group.clone(),
        use_fp32: options.use_fp32,
        parameters: parameters.iter().map(|p| p.shallow_clone()).collect(),
        buckets: buckets(parameters, options.bucket_bytes),
        announced: parameters.iter().map(|_| None).collect(),
        pass: None,
    }));
    for (index, parameter) in parameters.iter().enumerate() {
        let (before, after) = (shared.clone(), shared.clone());
        module.hooks.push(autograd::register_hook(parameter, move |gradient| {
            Ok(Some(lock(&before).announced(index, gradient)?))
        })?);
        module.hooks.push(autograd::register_post_accumulate_grad_hook(parameter, move |_| {
            if lock(&after).arrived(index)? {
                let pass = OpenPass(after.clone());
                autograd::after_backward(move || lock(&pass.0).finish().map_err(Into::into))?;
            }
            Ok(())
        })?);
    }
    Ok(module)
}

/// Ends what [`mark_module_as_shared`] began.
pub fn unmark_module_as_shared(module: SharedModule) {
    drop(module);
}

/// Parameters that are marked as shared, until this value is dropped.
#[derive(Debug)]
#[must_use = "the parameters are shared for as long as this lives"]
pub struct SharedModule {
    hooks: Vec<HookHandle>,
    keys: Vec<usize>,
}

impl Drop for SharedModule {
    fn drop(&mut self) {
        self.hooks.drain(..).for_each(HookHandle::remove);
        let mut marked = marked();
        for key in &self.keys {
            marked.remove(key);
        }
    }
}

struct Shared {
    group: Group,
    use_fp32: bool,
    parameters: Vec<Tensor>,
    buckets: Vec<Vec<usize>>,
    /// Gradients on their way to parameters that earlier passes have left one. Those of a pass that only returns them, and
    /// adds them to nothing, are forgotten with the next.
    announced: Vec<Option<Accumulating>>,
    pass: Option<Pass>,
}

/// A gradient that is to be added to what earlier passes have left.
struct Accumulating {
    gradient: Tensor,
    left: Tensor,
}

/// Goes when a pass is over: of one that has failed, what it left is not the next one's.
struct OpenPass(Arc<Mutex<Shared>>);

impl Drop for OpenPass {
    fn drop(&mut self) {
        let left = lock(&self.0).pass.take();
        drop(left);
    }
}

/// A backward pass under way.
struct Pass {
    gradients: Vec<Option<Tensor>>,
    /// Results of earlier passes.
    left: Vec<Option<Tensor>>,
    works: Vec<Work<Vec<Tensor>>>,
}

impl Shared {
    /// Sees a gradient before it is added to what earlier passes have left; gives what is to be added.
    fn announced(&mut self, index: usize, gradient: &Tensor) -> Result<Tensor> {
        let left = self.parameters[index].f_grad()?;
        self.announced[index] = None;
        if left.defined() {
            // The gradient is added in place.
            let accumulating = Accumulating { gradient: gradient.detach(), left: copied(&left)? };
            self.announced[index] = Some(accumulating);
            return Ok(gradient.shallow_clone());
        }
        // The sum is written into what becomes the gradient of the parameter, whose memory others may have: a view of it
        // came here. A pass that keeps its graph makes a copy itself.
        if gradient.requires_grad() { Ok(gradient.shallow_clone()) } else { copied(gradient) }
    }

    /// Takes a gradient that was added; says whether it is the pass's first.
    fn arrived(&mut self, index: usize) -> Result<bool> {
        let first = self.pass.is_none();
        let none = || self.parameters.iter().map(|_| None).collect();
        let mut pass =
            self.pass.take().unwrap_or_else(|| Pass { gradients: none(), left: none(), works: Vec::new() });
        match self.announced[index].take() {
            Some(Accumulating { gradient, left }) => {
                pass.gradients[index] = Some(gradient);
                pass.left[index] = Some(left);
            }
            None => pass.gradients[index] = Some(self.parameters[index].f_grad()?.detach()),
        }
        while let Some(bucket) = self.buckets.get(pass.works.len())
            && bucket.iter().all(|&i| pass.gradients[i].is_some())
        {
            self.start(&mut pass)?;
        }
        for work in &mut pass.works {
            work.poll()?;
        }
        self.pass = Some(pass);
        Ok(first)
    }

    fn start(&self, pass: &mut Pass) -> Result<()> {
        let bucket = &self.buckets[pass.works.len()];
        let gradients = bucket
            .iter()
            .map(|&i| match &pass.gradients[i] {
                Some(gradient) => Ok(gradient.shallow_clone()),
                None => Ok(self.parameters[i].f_zeros_like()?.detach()),
            })
            .collect::<Result<Vec<_>>>()?;
        let gradients: Vec<&Tensor> = gradients.iter().collect();
        let kind = gradients.first().map_or(Kind::Float, |g| g.kind());
        let buffer_kind = if self.use_fp32 { None } else { Some(kind) };
        let sums = fused::start_in(&gradients, ReduceOp::Sum, buffer_kind, self.use_fp32, &self.group)?;
        pass.works.push(sums);
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        let Some(mut pass) = self.pass.take() else { return Ok(()) };
        while pass.works.len() < self.buckets.len() {
            self.start(&mut pass)?;
        }
        let _guard = NoGrad::new();
        for (bucket, work) in self.buckets.iter().zip(pass.works) {
            for (&index, sum) in bucket.iter().zip(work.wait()?) {
                if pass.gradients[index].is_some() {
                    let sum = match &pass.left[index] {
                        Some(left) => left.f_add(&sum)?,
                        None => sum,
                    };
                    self.parameters[index].f_grad()?.f_copy_(&sum)?;
                }
            }
        }
        Ok(())
    }
}

/// The values in memory of their own.
fn copied(tensor: &Tensor) -> Result<Tensor> {
    let copy = tensor.detach().f_empty_like()?;
    memory::copy(&copy, tensor)?;
    Ok(copy)
}

/// Groups the parameters that travel together: in reverse order, of one dtype and device.
fn buckets(parameters: &[&Tensor], bucket_bytes: usize) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for (index, parameter) in parameters.iter().enumerate().rev() {
        let own = memory::nbytes(parameter);
        let alike = |i: usize| {
            parameters[i].kind() == parameter.kind() && parameters[i].device() == parameter.device()
        };
        match buckets.last_mut().filter(|bucket| bytes + own <= bucket_bytes && alike(bucket[0])) {
            Some(bucket) => bucket.push(index),
            None => {
                buckets.push(vec![index]);
                bytes = 0;
            }
        }
        bytes += own;
    }
    buckets
}

/// The parameters of this process that are marked, by the address of their values.
fn marked() -> MutexGuard<'static, BTreeSet<usize>> {
    static MARKED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
    MARKED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
