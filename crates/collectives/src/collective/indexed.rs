//! `indexed_all_to_all_v` and its adjoint, `indexed_scatter_add_v`.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use isobar_torch::guard::NoGrad;
use tch::Tensor;

use crate::collective::arguments::extent;
use crate::collective::linear::{LinearMap, records, run};
use crate::collective::parts::{others, with_extent};
use crate::engine::call::Call;
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::Result;
use crate::local::memory::{self, output_like};
use crate::local::rows;
use crate::local::sizes::offsets;

/// Sends rank q the rows along `dim` that `indices[q]` names, and joins what comes, in rank order.
///
/// `sizes[r][q]` is the number of rows that rank r sends to rank q, the same table on all ranks; `indices[q]` are
/// `Int64` of length `sizes[rank][q]`. A row may go to several ranks, or several times to one.
///
/// Every rank calls. Backward sends the gradients back and adds them up row by row (scatter-add), in fp32 for 16-bit
/// floats where `use_fp32` says so.
///
/// # Errors
///
/// Tables, indices or a dim that do not fit; the errors of the exchange.
///
/// ```
/// use isobar_collectives::{indexed_all_to_all_v, threads};
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     // Each rank keeps its rows, and rank 1 sends its last one to rank 0 as well.
///     let x = Tensor::from_slice(&[0.0, 1.0]) + 10.0 * group.rank() as f64;
///     let sizes = [vec![2, 0], vec![1, 2]];
///     let (all, none) = (Tensor::from_slice(&[0_i64, 1]), Tensor::zeros([0], (Kind::Int64, Device::Cpu)));
///     let indices = match group.rank() {
///         0 => [all, none],
///         _ => [Tensor::from_slice(&[1_i64]), all],
///     };
///     let y = indexed_all_to_all_v(&x, &indices, &sizes, true, 0, &group).unwrap();
///     let want: &[f64] = [&[0.0, 1.0, 11.0][..], &[10.0, 11.0]][group.rank()];
///     assert_eq!(y, Tensor::from_slice(want));
/// });
/// ```
pub fn indexed_all_to_all_v(
    tensor: &Tensor,
    indices: &[Tensor],
    sizes: &[Vec<i64>],
    use_fp32: bool,
    dim: i64,
    group: &Group,
) -> Result<Tensor> {
    if !records(tensor) {
        return start(tensor, indices, sizes, dim, group)?.wait();
    }
    let rows = Rows {
        group: group.clone(),
        // Copies, since backward must use what forward did.
        indices: indices.iter().map(kept).collect::<Result<_>>()?,
        sizes: sizes.to_vec(),
        extent: extent(tensor, dim),
        dim,
        use_fp32,
    };
    run(tensor, IndexedAllToAll(Arc::new(Mutex::new(rows))))
}

/// The adjoint of [`indexed_all_to_all_v`], as a function of its own: rank q's rows, in rank order of where they go, are
/// added up in zeros of extent `extent` along `dim`, at the places that `indices[q]` names on the rank that gets them.
///
/// `sizes[r][q]` is the number of rows that rank r gets from rank q, and `indices[q]` the places of those on this rank.
///
/// Every rank calls. Backward is [`indexed_all_to_all_v`].
///
/// # Errors
///
/// See [`indexed_all_to_all_v`].
pub fn indexed_scatter_add_v(
    tensor: &Tensor,
    indices: &[Tensor],
    sizes: &[Vec<i64>],
    extent: i64,
    dim: i64,
    use_fp32: bool,
    group: &Group,
) -> Result<Tensor> {
    if !records(tensor) {
        return start_scatter_add(tensor, indices, sizes, extent, dim, use_fp32, group)?.wait();
    }
    let rows = Rows {
        group: group.clone(),
        indices: indices.iter().map(kept).collect::<Result<_>>()?,
        sizes: sizes.to_vec(),
        extent,
        dim,
        use_fp32,
    };
    run(tensor, IndexedScatterAdd(Arc::new(Mutex::new(rows))))
}

/// A copy that later changes of the tensor do not reach.
fn kept(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.detach().f_to_device_(tensor.device(), tensor.kind(), false, true)?)
}

/// See [`indexed_all_to_all_v`](crate::indexed_all_to_all_v).
///
/// # Errors
///
/// Those of that function.
pub fn start(
    tensor: &Tensor,
    indices: &[Tensor],
    sizes: &[Vec<i64>],
    dim: i64,
    group: &Group,
) -> Result<Work<Tensor>> {
    let call = group.call("indexed_all_to_all_v");
    let dim = call.dim(tensor, dim)?;
    check_indices(&call, tensor, tensor.size()[dim], indices, sizes)?;
    let _guard = NoGrad::new();
    let (rank, ranks) = (group.rank(), group.size());
    let tensor = tensor.detach();
    let received: Vec<i64> = sizes.iter().map(|from| from[rank]).collect();
    let output = output_like(&tensor, &with_extent(&tensor, dim, received.iter().sum()))?;
    let starts = offsets(&received);
    let mut pending = Vec::with_capacity(ranks);
    // Between devices, one exchange: a device runs exchanges one by one, and those of a ring of ranks would wait for each other.
    let at_once = call.communicator_for(&tensor).is_some();
    let mut exchange = Exchange::new(&call, 0);
    for peer in others(rank, ranks) {
        exchange.receive(peer, &output.f_narrow(dim as i64, starts[peer], received[peer])?, dim)?;
        let picked = rows::select(&tensor, dim, &indices[peer])?;
        exchange.send(peer, &picked, dim)?;
        if !at_once {
            // Each peer's rows leave as soon as they are gathered.
            pending.push(Box::pin(std::mem::replace(&mut exchange, Exchange::new(&call, 0)).start()?));
        }
    }
    if at_once {
        pending.push(Box::pin(exchange.start()?));
    }
    let own = output.f_narrow(dim as i64, starts[rank], received[rank])?;
    rows::select_into(&own, &tensor, dim, &indices[rank])?;
    Ok(Work::start(call, async move {
        all(pending).await?;
        Ok(output)
    }))
}

/// The adjoint of [`indexed_all_to_all_v`]: what each rank received goes back to where it came from, and is added up
/// there, into zeros of extent `extent` along `dim`.
///
/// # Errors
///
/// Those of that function.
pub fn start_scatter_add(
    tensor: &Tensor,
    indices: &[Tensor],
    sizes: &[Vec<i64>],
    extent: i64,
    dim: i64,
    use_fp32: bool,
    group: &Group,
) -> Result<Work<Tensor>> {
    let call = group.call("indexed_scatter_add_v");
    let dim = call.dim(tensor, dim)?;
    check_indices(&call, tensor, extent, indices, sizes)?;
    let (rank, ranks) = (group.rank(), group.size());
    let received: Vec<i64> = sizes.iter().map(|from| from[rank]).collect();
    if tensor.size()[dim] != received.iter().sum::<i64>() {
        return Err(call.refuse(format!(
            "the tensor of shape {:?} has another extent along dim {dim} than the sizes {received:?} sum to",
            tensor.size()
        )));
    }
    let _guard = NoGrad::new();
    let tensor = tensor.detach();
    let starts = offsets(&received);
    let mut exchange = Exchange::new(&call, 0);
    let mut back = Vec::with_capacity(ranks);
    for peer in 0..ranks {
        let block = tensor.f_narrow(dim as i64, starts[peer], received[peer])?;
        if peer == rank {
            back.push(block);
            continue;
        }
        exchange.send(peer, &block, dim)?;
        let rows =
            memory::empty(&with_extent(&tensor, dim, sizes[rank][peer]), tensor.kind(), tensor.device())?;
        exchange.receive(peer, &rows, dim)?;
        back.push(rows);
    }
    let pending = exchange.start()?;
    let indices: Vec<Tensor> = indices.iter().map(Tensor::shallow_clone).collect();
    let shape = with_extent(&tensor, dim, extent);
    Ok(Work::start(call, async move {
        pending.await?;
        rows::add_up(&tensor, &shape, dim, &indices, &back, use_fp32)
    }))
}

fn check_indices(
    call: &Call,
    tensor: &Tensor,
    extent: i64,
    indices: &[Tensor],
    sizes: &[Vec<i64>],
) -> Result<()> {
    let (rank, ranks) = (call.group().rank(), call.group().size());
    if indices.len() != ranks || sizes.len() != ranks || sizes.iter().any(|s| s.len() != ranks) {
        return Err(call.refuse(format!(
            "{} index tensors and {} lists of sizes were given; expected {ranks} of each, one a rank, and {ranks} \
             sizes in each list",
            indices.len(),
            sizes.len()
        )));
    }
    if sizes.iter().flatten().any(|&s| s < 0) {
        return Err(call.refuse(format!("the sizes {sizes:?} hold a negative one")));
    }
    for (peer, index) in indices.iter().enumerate() {
        call.defined(index)?;
        if index.dim() != 1 || index.size()[0] != sizes[rank][peer] || index.kind() != tch::Kind::Int64 {
            return Err(call.refuse(format!(
                "the indices for rank {peer} are {:?} of shape {:?}; expected Int64 of shape [{}], as the sizes say",
                index.kind(),
                index.size(),
                sizes[rank][peer]
            )));
        }
        if index.device() != tensor.device() {
            return Err(call.refuse(format!(
                "the indices for rank {peer} are on {:?} and the tensor is on {:?}; expected both on one device",
                index.device(),
                tensor.device()
            )));
        }
        if let Some(bad) = rows::out_of_range(index, extent)? {
            return Err(call.refuse(format!(
                "the indices for rank {peer} hold {bad}; expected 0 to {}, the extent being {extent}",
                extent - 1
            )));
        }
    }
    Ok(())
}

/// Ends when all of `exchanges` have. All of them move on at each poll: ranks that wait for one peer after the other wait
/// for each other in a ring.
async fn all(mut exchanges: Vec<Pin<Box<impl Future<Output = Result<()>>>>>) -> Result<()> {
    poll_fn(|context| {
        let mut at = 0;
        while let Some(exchange) = exchanges.get_mut(at) {
            match exchange.as_mut().poll(context) {
                Poll::Ready(Ok(())) => drop(exchanges.remove(at)),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => at += 1,
            }
        }
        if exchanges.is_empty() { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await
}

/// Rows along a dim that go to each rank.
struct Rows {
    group: Group,
    indices: Vec<Tensor>,
    sizes: Vec<Vec<i64>>,
    extent: i64,
    dim: i64,
    use_fp32: bool,
}

/// Sends rows.
struct IndexedAllToAll(Arc<Mutex<Rows>>);

/// Sends them back, and adds them up.
struct IndexedScatterAdd(Arc<Mutex<Rows>>);

impl LinearMap for IndexedAllToAll {
    fn name(&self) -> &'static str {
        "indexed_all_to_all_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let work = {
            let rows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            start(x, &rows.indices, &rows.sizes, rows.dim, &rows.group)?
        };
        work.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(IndexedScatterAdd(self.0.clone()))
    }
}

impl LinearMap for IndexedScatterAdd {
    fn name(&self) -> &'static str {
        "indexed_scatter_add_v"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let work = {
            let rows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let Rows { group, indices, sizes, extent, dim, use_fp32 } = &*rows;
            start_scatter_add(x, indices, sizes, *extent, *dim, *use_fp32, group)?
        };
        work.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(IndexedAllToAll(self.0.clone()))
    }
}
