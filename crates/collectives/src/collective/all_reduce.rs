//! `all_reduce`, which is its own adjoint.

use std::sync::Arc;

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use crate::collective::arguments::averages;
use crate::collective::linear::{LinearMap, keep, records, run};
use crate::collective::parts::{Form, SMALL, done, everybody, others, send_parts};
use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory;
use crate::local::reduce::{ReduceOp, combine};
use crate::local::sizes::{balanced, offsets};

/// Combines the ranks' tensors, element by element, on every rank: the same bits everywhere. All have the same shape.
/// 16-bit floats are combined in fp32.
///
/// Every rank calls. Sum and mean are differentiable and their own adjoints: for P ranks that go on alike, the gradient
/// is P-fold (for a value that counts once, see [`reduce_from_parallel_region`](crate::reduce_from_parallel_region)).
///
/// # Errors
///
/// A dtype that has no such reduction; a gradient asked for through minimum, maximum or product; the errors of the
/// exchange.
///
/// ```
/// use isobar_collectives::{ReduceOp, all_reduce, threads};
/// use tch::Tensor;
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[1.0, 10.0]) * (group.rank() + 1) as f64;
///     let x = x.set_requires_grad(true);
///     let sum = all_reduce(&x, ReduceOp::Sum, &group).unwrap();
///     assert_eq!(sum, Tensor::from_slice(&[3.0, 30.0]));
///     // Both ranks use the sum, and the gradients of both uses are added up.
///     sum.sum(tch::Kind::Double).backward();
///     assert_eq!(x.grad(), Tensor::from_slice(&[2.0, 2.0]));
/// });
/// ```
pub fn all_reduce(tensor: &Tensor, op: ReduceOp, group: &Group) -> Result<Tensor> {
    if group.size() == 1 || !records(tensor) {
        return start(tensor, op, group)?.wait().map(|y| keep(tensor, y));
    }
    let average = averages(op, "all_reduce", group)?;
    run(tensor, AllReduce { group: group.clone(), average, use_fp32: true })
}

/// See [`all_reduce`](crate::all_reduce).
///
/// # Errors
///
/// Those of that function.
pub fn start(tensor: &Tensor, op: ReduceOp, group: &Group) -> Result<Work<Tensor>> {
    start_in(tensor, op, true, group)
}

fn start_in(tensor: &Tensor, op: ReduceOp, use_fp32: bool, group: &Group) -> Result<Work<Tensor>> {
    start_as(group.call("all_reduce"), tensor, op, use_fp32)
}

/// Starts an all-reduce as part of an operation that has begun.
pub(crate) fn start_as(call: Call, tensor: &Tensor, op: ReduceOp, use_fp32: bool) -> Result<Work<Tensor>> {
    call.reducible(op, tensor)?;
    let (rank, ranks) = (call.group().rank(), call.group().size());
    if ranks == 1 {
        return Ok(done(call, tensor));
    }
    if let Some(work) = all_reduce_on_device(&call, tensor, op) {
        return work;
    }
    let _guard = NoGrad::new();
    let flat = tensor.detach().f_contiguous()?.f_view([-1])?;
    let form = Form::of(tensor);
    let output = memory::empty(&flat.size(), flat.kind(), flat.device())?;
    if memory::nbytes(&flat) <= SMALL {
        let (exchange, parts) = everybody(&call, &flat)?;
        let pending = exchange.start()?;
        return Ok(Work::start(call, async move {
            pending.await?;
            combine(&output, &parts, op, use_fp32)?;
            form.give(&output)
        }));
    }
    let sizes = balanced(flat.size()[0], ranks);
    let (exchange, mut parts, own) = send_parts(&call, &flat, &sizes, 0)?;
    let pending = exchange.start()?;
    Ok(Work::start(call.clone(), async move {
        pending.await?;
        parts.insert(rank, own);
        let starts = offsets(&sizes);
        let pending = {
            let mine = output.f_narrow(0, starts[rank], sizes[rank])?;
            combine(&mine, &parts, op, use_fp32)?;
            drop(parts);
            let mut exchange = Exchange::new(&call, 1);
            for peer in others(rank, ranks) {
                exchange.send(peer, &mine, 0)?;
                exchange.receive(peer, &output.f_narrow(0, starts[peer], sizes[peer])?, 0)?;
            }
            exchange.start()?
        };
        pending.await?;
        form.give(&output)
    }))
}

/// Reduces with NCCL, if the group has a communicator, the tensor is on its device, and NCCL reduces its dtype as this crate
/// promises.
fn all_reduce_on_device(call: &Call, tensor: &Tensor, op: ReduceOp) -> Option<Result<Work<Tensor>>> {
    let communicator = call.communicator_for(tensor)?;
    communicator.reduces(tensor.kind(), op).then(|| {
        // On a group that has ended, the kernel would never end.
        call.check_alive()?;
        let input = memory::plain(tensor)?.f_contiguous()?;
        let output = input.f_empty_like()?;
        let request =
            communicator.all_reduce(&input, &output, op).map_err(|failure| call.broken(failure.0))?;
        call.count(memory::nbytes(&output), memory::nbytes(&output));
        let waited = call.complete(request);
        Ok(Work::start(call.clone(), async move {
            waited.await?;
            Ok(output)
        }))
    })
}

/// The sum, or the mean, of what all ranks hold, on all of them. Its own adjoint.
struct AllReduce {
    group: Group,
    average: bool,
    use_fp32: bool,
}

impl LinearMap for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let op = if self.average { ReduceOp::Avg } else { ReduceOp::Sum };
        start_in(x, op, self.use_fp32, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        let Self { group, average, use_fp32 } = self;
        Arc::new(AllReduce { group: group.clone(), average: *average, use_fp32: *use_fp32 })
    }
}
