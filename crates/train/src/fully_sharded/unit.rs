//! Parameters that are brought, dropped and reduced together.

use isobar_collectives::{Group, ReduceOp, Work, balanced, start};
use isobar_torch::memory::{release, restore};
use isobar_torch::{autograd, memory};
use tch::{TchError, Tensor};

use crate::error::{Context, Result};

/// A parameter in its two forms.
pub(super) struct Member {
    pub(super) name: String,
    /// Number among the parameters of the model.
    pub(super) index: usize,
    /// Full parameter, a leaf that the model uses. Its memory is allocated by the all-gather and freed after use, except for a
    /// scalar.
    pub(super) whole: Tensor,
    /// This rank's part, a leaf that the optimizer steps.
    pub(super) part: Tensor,
    /// Split over the ranks; `None` for a scalar, whose shard is a full copy.
    pub(super) cut: Option<Cut>,
    /// True once backward has computed its gradient.
    pub(super) arrived: bool,
    /// True if a gradient has arrived since the values of its unit were last dropped.
    pub(super) used_up: bool,
}

impl Member {
    /// Returns the shard of `rank` from `whole`, the full parameter or its gradient.
    fn part_of(&self, whole: &Tensor, rank: usize) -> Result<Tensor, TchError> {
        match &self.cut {
            Some(cut) => cut.part(whole, rank),
            None => Ok(whole.shallow_clone()),
        }
    }
}

/// Split of a parameter over the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) dim: i64,
    /// The extents of the ranks' parts.
    pub(super) sizes: Vec<i64>,
}

impl Cut {
    /// Along the dim where parts are most alike, the first of these. Elements that are too many for equal parts go to ranks
    /// from the `turn`th on, so that small parameters do not all lie on the first. `None` without dims.
    pub(super) fn new(shape: &[i64], ranks: usize, turn: usize) -> Option<Self> {
        let most = |extent: i64| extent.div_euclid(ranks as i64) + i64::from(extent % ranks as i64 != 0);
        let share = |extent: i64| most(extent) as f64 / extent.max(1) as f64;
        let dims = shape.iter().enumerate();
        let (dim, &extent) = dims.min_by(|(_, a), (_, b)| share(**a).total_cmp(&share(**b)))?;
        let mut sizes = balanced(extent, ranks);
        sizes.rotate_right(turn % ranks);
        Some(Self { dim: dim as i64, sizes })
    }

    pub(super) fn start(&self, rank: usize) -> i64 {
        self.sizes[..rank].iter().sum()
    }

    /// The part of that rank.
    pub(super) fn part(&self, whole: &Tensor, rank: usize) -> Result<Tensor, TchError> {
        whole.f_narrow(self.dim, self.start(rank), self.sizes[rank])
    }
}

/// Parameters of one dtype on one device, all cut or all without dims.
pub(super) struct Unit {
    pub(super) members: Vec<Member>,
    /// Elements of each rank's parts together; `None` for parameters without dims.
    sizes: Option<Vec<i64>>,
    /// Operators that use it now.
    pub(super) users: usize,
    /// Gradients of this rank's parts, packed, of the passes since gradients were last summed over the other axes.
    pub(super) unsummed: Option<Tensor>,
    state: State,
}

enum State {
    /// The ranks have their parts only.
    Apart,
    /// The parts are on their way.
    Coming(Box<Work<Tensor>>),
    /// The values are there.
    Whole,
}

impl Unit {
    pub(super) fn new(members: Vec<Member>, ranks: usize) -> Self {
        let elements = |member: &Member, rank: usize| {
            let cut = member.cut.as_ref()?;
            let shape = member.whole.size();
            let row: i64 =
                shape.iter().enumerate().filter(|(dim, _)| *dim as i64 != cut.dim).map(|(_, n)| n).product();
            Some(row * cut.sizes[rank])
        };
        let sizes =
            (0..ranks).map(|rank| members.iter().map(|member| elements(member, rank)).sum()).collect();
        Self { members, sizes, users: 0, unsummed: None, state: State::Whole }
    }

    /// Returns whether its parameters are sharded; otherwise they are replicated.
    pub(super) fn is_cut(&self) -> bool {
        self.sizes.is_some()
    }

    pub(super) fn is_whole(&self) -> bool {
        matches!(self.state, State::Whole)
    }

    /// Returns whether backward has computed all gradients.
    pub(super) fn is_complete(&self) -> bool {
        self.members.iter().all(|member| member.arrived)
    }

    /// Drops the values if backward has used all parameters since they came. Parts that are recomputed bring them again.
    pub(super) fn drop_used_up(&mut self) -> Result<bool> {
        let is_used_up = self.members.iter().all(|member| member.used_up);
        if is_used_up {
            self.members.iter_mut().for_each(|member| member.used_up = false);
            self.drop_values()?;
        }
        Ok(is_used_up)
    }

    /// Begins to bring the values.
    pub(super) fn start(&mut self, group: &Group) -> Result<()> {
        let (State::Apart, Some(sizes)) = (&self.state, &self.sizes) else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        let parts: Vec<Tensor> = self
            .members
            .iter()
            .map(|member| member.part.f_flatten(0, -1))
            .collect::<Result<_, _>>()
            .context(packing)?;
        let packed = Tensor::f_cat(&parts, 0).context(packing)?;
        let work = start::all_gather_v(&packed, Some(sizes), 0, group)?;
        self.state = State::Coming(Box::new(work));
        Ok(())
    }

    /// The values are there when it returns.
    pub(super) fn bring(&mut self, group: &Group) -> Result<()> {
        self.start(group)?;
        let _no_grad = tch::no_grad_guard();
        match std::mem::replace(&mut self.state, State::Apart) {
            State::Coming(work) => self.place(&work.wait()?, group.size())?,
            State::Apart => self.copy()?,
            State::Whole => {}
        }
        self.state = State::Whole;
        Ok(())
    }

    /// Copies all-gathered shards into the full parameters.
    fn place(&self, all: &Tensor, ranks: usize) -> Result<()> {
        let mut at = 0;
        for member in &self.members {
            restore(&member.whole)?;
        }
        for rank in 0..ranks {
            for member in &self.members {
                let place = || -> Result<i64, TchError> {
                    // (Without a new version: what a graph has saved is what comes back.)
                    let mut into = member.part_of(&member.whole.f_data()?, rank)?;
                    let elements = into.numel() as i64;
                    into.f_copy_(&all.f_narrow(0, at, elements)?.f_view_as(&into)?)?;
                    Ok(elements)
                };
                at += place().context(|| format!("placing parameter {:?}", member.name))?;
            }
        }
        Ok(())
    }

    /// Copies the optimizer's values of scalar parameters into the model's.
    fn copy(&self) -> Result<()> {
        self.members.iter().try_for_each(|member| {
            let copy = || member.whole.f_data()?.f_copy_(&member.part);
            copy().context(|| format!("placing parameter {:?}", member.name))
        })
    }

    /// Drops the values; the ranks keep their parts.
    pub(super) fn drop_values(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.state, State::Apart) {
            State::Apart => Ok(()),
            // The others take part in it.
            State::Coming(work) => Ok(work.wait().map(drop)?),
            State::Whole if self.is_cut() => {
                self.members.iter().try_for_each(|member| Ok(release(&member.whole)?))
            }
            State::Whole => Ok(()),
        }
    }

    /// Begins to add the gradients up; each rank gets those of its parts. The whole ones are dropped.
    pub(super) fn reduce(&self, group: &Group) -> Result<Work<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let grads = self.members.iter().map(|member| {
            let grad = member.whole.f_grad()?;
            // Of what took no part, zeros; the values may be gone, but not their shape.
            if grad.defined() {
                Ok(grad)
            } else {
                Tensor::f_zeros(member.whole.size(), (member.whole.kind(), member.whole.device()))
            }
        });
        let grads: Vec<Tensor> = grads.collect::<Result<_, _>>().context(packing)?;
        let segments = self.sizes.as_ref().map_or(1, Vec::len);
        let mut parts = Vec::with_capacity(grads.len() * segments);
        for rank in 0..segments {
            for (member, grad) in self.members.iter().zip(&grads) {
                parts.push(
                    member.part_of(grad, rank).and_then(|part| part.f_flatten(0, -1)).context(packing)?,
                );
            }
        }
        let packed = Tensor::f_cat(&parts, 0).context(packing)?;
        drop((parts, grads));
        for member in &self.members {
            autograd::clear_grad(&member.whole)?;
        }
        Ok(match &self.sizes {
            Some(sizes) => start::reduce_scatter_v(&packed, Some(sizes), 0, ReduceOp::Sum, true, group)?,
            None => start::all_reduce(&packed, ReduceOp::Sum, group)?,
        })
    }

    /// Adds gradients that are summed along the axis `shard` to those of earlier passes.
    pub(super) fn keep_gradients(&mut self, packed: Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        match &self.unsummed {
            None => self.unsummed = Some(packed),
            Some(sum) => {
                let sum = sum.shallow_clone().f_add_(&packed).map(drop);
                sum.context(|| "adding up the gradients of micro-batches".to_owned())?;
            }
        }
        Ok(())
    }

    /// Begins to sum the kept gradients over the other axes; `None` if there are none.
    pub(super) fn start_sum(&mut self, others: &Group) -> Result<Option<Work<Tensor>>> {
        let Some(packed) = self.unsummed.take() else { return Ok(None) };
        Ok(Some(start::all_reduce(&packed, ReduceOp::Sum, others)?))
    }

    /// Adds reduced gradients, packed, to those of the parts.
    pub(super) fn add_gradients(&self, packed: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut at = 0;
        for member in &self.members {
            let add = || -> Result<i64, TchError> {
                let mut grad = member.part.f_grad()?;
                let elements = grad.numel() as i64;
                let _ = grad.f_add_(&packed.f_narrow(0, at, elements)?.f_view_as(&grad)?)?;
                Ok(elements)
            };
            at += add().context(|| format!("the gradient of parameter {:?}", member.name))?;
        }
        Ok(())
    }

    /// Bytes of the whole parameters.
    pub(super) fn bytes(members: &[Member]) -> usize {
        members.iter().map(|member| memory::nbytes(&member.whole)).sum()
    }
}

fn packing() -> String {
    "packing the parameters of a unit".to_owned()
}
