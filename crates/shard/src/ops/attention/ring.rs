//! Ranks that hand their blocks round.

use isobar_collectives::{Group, Work, start};
use tch::Tensor;

use crate::error::Result;
use crate::layout::{Layout, coordinates, index_of};

/// The ranks along some axes, in the order of their coordinates, for exchanges in which every block reaches every rank: in
/// step s, each hands its own block to the rank s further on. A rank receives as much as in a ring that passes blocks on, but
/// waits for the block's owner only, and may leave out what it has no use for.
#[derive(Clone)]
pub(crate) struct Ring {
    pub(crate) group: Group,
    /// This rank's number.
    pub(crate) me: usize,
    /// The coordinates of all.
    pub(crate) members: Vec<Vec<usize>>,
    places: Vec<usize>,
}

impl Ring {
    /// The ranks that differ from this one along these axes only; `axes` ascend.
    pub(crate) fn new(layout: &Layout, axes: &[usize]) -> Result<Self> {
        let mesh = layout.mesh_shape();
        let own = layout.coordinates().unwrap_or(&[]);
        if axes.is_empty() || own.is_empty() {
            return Ok(Self { group: Group::single(), me: 0, members: vec![own.to_vec()], places: vec![0] });
        }
        let group = layout.group_along(axes)?;
        let ranks = layout.mesh().ranks();
        let extents: Vec<usize> = axes.iter().map(|&axis| mesh[axis]).collect();
        let member = |number: usize| {
            let mut at = own.to_vec();
            for (&axis, coordinate) in axes.iter().zip(coordinates(number, &extents)) {
                at[axis] = coordinate;
            }
            at
        };
        let members: Vec<Vec<usize>> = (0..extents.iter().product()).map(member).collect();
        let place = |at: &Vec<usize>| layout.place(group.ranks(), ranks[index_of(at, mesh)]);
        let places = members.iter().map(place).collect::<Result<_>>()?;
        let me = index_of(&axes.iter().map(|&axis| own[axis]).collect::<Vec<_>>(), &extents);
        Ok(Self { group, me, members, places })
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// Whose block comes in step `step`.
    pub(crate) fn source(&self, step: usize) -> usize {
        (self.me + self.len() - step) % self.len()
    }

    /// Returns the rank that receives this rank's block in step `step`.
    pub(crate) fn target(&self, step: usize) -> usize {
        (self.me + step) % self.len()
    }

    pub(crate) fn send(&self, block: &Tensor, to: usize) -> Result<Work<()>> {
        Ok(start::send(block, self.places[to], &self.group)?)
    }

    /// Receives a tensor of this shape, and of the dtype and device of `like`.
    pub(crate) fn receive(&self, shape: &[i64], like: &Tensor, from: usize) -> Result<Work<Tensor>> {
        let like = super::torch(Tensor::f_empty([1], (like.kind(), like.device())))?;
        let like = super::torch(like.f_reshape(vec![1; shape.len()]))?;
        let like = super::torch(like.f_expand(shape, false))?;
        Ok(start::recv(&like, self.places[from], &self.group)?)
    }

    /// The members as their parts lie in what the group gathers: numbers by the group's rank.
    pub(crate) fn by_group_rank(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_key(|&number| self.places[number]);
        order
    }
}
