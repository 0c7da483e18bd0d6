//! The ranks that share samples: each predicts its own of a round of samples.

use anyhow::Result;
use isobar_array::Convert;
use isobar_collectives::{Group, balanced};
use isobar_manager::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
use isobar_train::{DATA_AXIS, FieldLayout, ShardedFields};

/// Layout of the predictions of a round of samples over the ranks that share them; `L` is the layout of the network's fields.
pub(super) trait Sharing<L: FieldLayout> {
    /// Layout of the predictions.
    type Fields: FieldLayout;

    /// Returns the layout of the predictions of all ranks: with it errors and metrics of a round are those of all its samples, on
    /// every rank.
    fn fields(&self) -> &Self::Fields;

    /// Returns the samples of a round that this rank passes to the network.
    ///
    /// # Errors
    ///
    /// Those of the layout.
    fn network_samples<'a>(&self, round: &'a [usize]) -> Result<&'a [usize]>;

    /// Returns the place of the network's batch in a round of `samples` samples: 0 where ranks form one batch of all of them.
    fn offset(&self, samples: usize) -> usize;

    /// Joins what ranks predicted of a round of `samples` samples, `[sample, …]` or `[sample, member, …]`. Communicates nothing.
    ///
    /// # Errors
    ///
    /// Fields of another number of samples.
    fn join(&self, predicted: &L::Array, samples: usize) -> Result<<Self::Fields as FieldLayout>::Array>;
}

/// Samples that the network's own layout shares: sharded fields, or full fields on one data rank.
pub(super) struct InLayout<'a, L>(pub(super) &'a L);

impl<L: FieldLayout> Sharing<L> for InLayout<'_, L> {
    type Fields = L;

    fn fields(&self) -> &L {
        self.0
    }

    fn network_samples<'a>(&self, round: &'a [usize]) -> Result<&'a [usize]> {
        Ok(self.0.own(round)?)
    }

    fn offset(&self, _samples: usize) -> usize {
        0
    }

    fn join(&self, predicted: &L::Array, _samples: usize) -> Result<L::Array> {
        Ok(predicted.shallow_clone())
    }
}

/// Samples that data ranks share, each of which predicts full fields alone.
pub(super) struct OverData<'a, L> {
    layout: &'a L,
    fields: ShardedFields,
    mesh: DeviceMesh,
    /// This rank's number among the data ranks.
    rank: usize,
}

impl<'a, L: FieldLayout> OverData<'a, L> {
    /// Lays out predictions of full fields, in the network's layout `layout`, over the ranks of `data`. `extents` are those of inputs
    /// and targets. All ranks of `data` call.
    pub(super) fn new(layout: &'a L, data: &Group, extents: [&[usize]; 2]) -> Result<Self> {
        let mesh = DeviceMesh::new(data, &[-1], &[DATA_AXIS])?;
        let fields = ShardedFields::new(&mesh, extents[0])?.with_targets(extents[1])?;
        Ok(Self { layout, fields, mesh, rank: data.rank() })
    }
}

impl<L: FieldLayout> Sharing<L> for OverData<'_, L> {
    type Fields = ShardedFields;

    fn fields(&self) -> &ShardedFields {
        &self.fields
    }

    /// This rank's sample. A rank beyond the last sample of a round predicts that one, too, so that all ranks know the shape of
    /// predictions; [`join`](Sharing::join) leaves it out.
    fn network_samples<'a>(&self, round: &'a [usize]) -> Result<&'a [usize]> {
        let at = self.offset(round.len());
        Ok(round.get(at..=at).unwrap_or_default())
    }

    fn offset(&self, samples: usize) -> usize {
        self.rank.min(samples.saturating_sub(1))
    }

    fn join(&self, predicted: &L::Array, samples: usize) -> Result<ShardTensor> {
        let round: Vec<usize> = (0..samples).collect();
        let own = self.fields.own(&round)?.len() as i64;
        let local = self.layout.local(predicted).map_err(anyhow::Error::from_boxed)?.f_narrow(0, 0, own)?;
        let mut shape = local.size();
        shape[0] = samples as i64;
        let sizes = Sizes::Explicit(vec![(0, balanced(shape[0], self.fields.sharing_ranks()))]);
        let layout = Layout::new(&self.mesh, &[Placement::Shard(0)], &shape, &sizes)?;
        Ok(ShardTensor::from_parts(&local, &layout)?)
    }
}
