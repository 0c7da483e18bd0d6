//! Data parallelism: every rank has the whole model (or its part of it) and some of the samples.

use std::sync::{Mutex, PoisonError};

use isobar_collectives::{Group, start};
use isobar_torch::autograd::{self, BackwardOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::Tensor;

use crate::agree::{agree, same_settings};
use crate::bucket::{Reducer, SummandGroups, Word};
use crate::error::{Context, Error, Result};
use crate::gradients::{check_group, classes};
use crate::params::{ParamPlacement, Parameters};

/// Settings of [`DataParallel`]. The last two are no keys of its section of a configuration: the manager has them, under
/// `[distributed]`, and an application hands them on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataParallelConfig {
    /// Gradients are reduced in pieces of about this many MiB.
    pub bucket_mb: f64,
    /// Reduces buckets during backward; `auto` does so if there is more than one. With activation checkpointing,
    /// the first backward pass, and every pass of a rollout, reduces its buckets at the end.
    pub overlap: Overlap,
    /// Parameters that the loss does not use get zero gradients; otherwise they are an error.
    #[serde(skip)]
    pub find_unused_parameters: bool,
    /// Broadcasts buffers (running statistics) of rank 0 before each forward pass.
    #[serde(skip)]
    pub broadcast_buffers: bool,
}

impl Default for DataParallelConfig {
    fn default() -> Self {
        Self {
            bucket_mb: 4.0,
            overlap: Overlap::Auto,
            find_unused_parameters: false,
            broadcast_buffers: false,
        }
    }
}

impl DataParallelConfig {
    /// Returns all settings by their keys in a configuration; all ranks must have the same.
    pub(crate) fn by_key(&self) -> Value {
        json!({
            "data_parallel": self,
            "distributed": {
                "find_unused_parameters": self.find_unused_parameters,
                "broadcast_buffers": self.broadcast_buffers,
            },
        })
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self.bucket_mb.is_finite() && self.bucket_mb > 0.0 {
            true => Ok(()),
            false => Err(Error::setting(
                "data_parallel.bucket_mb",
                self.bucket_mb,
                "a finite number of MiB above 0",
                Self::default().bucket_mb,
            )),
        }
    }
}

/// Overlap of communication with computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// One after the other.
    Off,
    /// At the same time.
    On,
    /// On if it is expected to be faster.
    #[default]
    Auto,
}

/// Averages gradients over the ranks of a data-parallel group, each sample counting the same.
///
/// The loss of a step is the mean over all samples of the global batch: a rank whose `local` samples have the mean loss l
/// contributes local/global · l, so that uneven and empty parts give the same result on any number of ranks.
/// Gradients are summed over the group in buckets while backward goes on. Parameters of a model-parallel model are
/// reduced over the data-parallel group only.
///
/// All ranks of the group make the same calls in the same order.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_train::{DataParallel, DataParallelConfig, Parameter, Parameters};
/// use tch::Tensor;
///
/// let w = Tensor::f_from_slice(&[1.0f32])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("w", &w)])?;
/// let parallel = DataParallel::new(&params, &[], &Group::single(), &DataParallelConfig::default())?;
///
/// parallel.zero_grad()?;
/// let loss = w.f_square()?.f_mean(None)?; // the mean over this rank's 3 of 3 samples
/// parallel.backward(Some(&loss), 3, 3)?;
/// assert_eq!(w.f_grad()?.f_double_value(&[0])?, 2.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DataParallel {
    reducer: Reducer,
    buffers: Vec<(String, Tensor)>,
    group: Group,
    /// Number of ranks that compute one loss together, each with a contribution to the gradients.
    summands: usize,
    /// Share of the batch in this rank's passes since gradients were last summed.
    share: Mutex<f64>,
    find_unused_parameters: bool,
    broadcast_buffers: bool,
}

impl DataParallel {
    /// Makes all ranks' parameters and `buffers` equal to those of the group's rank 0, and prepares the reduction.
    ///
    /// # Errors
    ///
    /// [`Error::WrongGradients`] where the sum over the group is not the gradient: backward has summed those of a
    /// [`MeshParams`](isobar_shard::MeshParams) already, or leaves them pending on ranks outside the group.
    /// [`Error::ParametersDiffer`] where ranks hold parameters of different names, shapes, dtypes or placements, and
    /// [`Error::SettingsDiffer`] where their settings differ; where a setting is out of its range; where a communication fails.
    pub fn new(
        params: &Parameters,
        buffers: &[(String, Tensor)],
        group: &Group,
        config: &DataParallelConfig,
    ) -> Result<Self> {
        // A group of its own: a reduction may begin anywhere among the model's own collectives.
        let all: Vec<usize> = (0..group.size()).collect();
        let name = format!("{}/gradients", group.name());
        let group = group.subgroup(&name, &all)?.unwrap_or_else(|| group.clone());
        agree(&group, config.check())?;
        same_settings(&group, &config.by_key())?;
        let summands = check_group(params, &group)?;
        compare(params, buffers, &group)?;
        let bucket_bytes = (config.bucket_mb * 1024.0 * 1024.0) as usize;
        let summands_of = summand_groups(params, &group)?;
        let reducer = Reducer::new(params, &summands_of, bucket_bytes, config.overlap != Overlap::Off)?;
        let parallel = Self {
            reducer,
            buffers: buffers.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect(),
            group,
            summands,
            share: Mutex::default(),
            find_unused_parameters: config.find_unused_parameters,
            broadcast_buffers: config.broadcast_buffers,
        };
        for (index, group) in summands_of.groups.iter().enumerate() {
            let own = params.iter().zip(&summands_of.of).filter(|(_, of)| **of == index);
            broadcast(own.map(|(p, _)| (&p.name, &p.tensor)), group)?;
        }
        broadcast(parallel.buffers.iter().map(|(name, tensor)| (name, tensor)), &parallel.group)?;
        Ok(parallel)
    }

    /// The group over which gradients are reduced; it has the ranks of the data-parallel group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Sets all gradients to zero: before the first backward pass of a step.
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    pub fn zero_grad(&self) -> Result<()> {
        *lock(&self.share) = 0.0;
        self.reducer.zero()
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
        broadcast(self.buffers.iter().map(|(name, tensor)| (name, tensor)), &self.group)
    }

    /// The backward pass of a step: adds the gradients of the mean loss over the global batch, summed over the group.
    ///
    /// `loss` is the mean over this rank's `local` samples, `global` the number of samples of all ranks and all passes
    /// of the step. A rank without samples gives `None` and 0, and takes part with zeros.
    ///
    /// # Errors
    ///
    /// - [`Error::MissingGradient`] on all ranks if a parameter took no part in the loss on one and `find_unused_parameters` is off.
    /// - [`Error::WrongGradients`] if the ranks' shares of the batch do not add up to one batch, or if gradients that were summed
    ///   before would be summed again; [`Error::OtherRank`] if only another rank has such gradients. The ranks stay in step, and
    ///   can continue after [`zero_grad`](Self::zero_grad).
    /// - Any error of a backward closure or of the communication. If the pass itself fails, this rank leaves the group, so that the
    ///   others do not wait for it.
    pub fn backward(&self, loss: Option<&Tensor>, local: u64, global: u64) -> Result<()> {
        let begun = self.reducer.begin();
        if let Err(error) = self.backward_no_sync(loss, local, global) {
            self.reducer.abandon();
            self.group.leave(&error.to_string());
            return Err(error);
        }
        let share = std::mem::take(&mut *lock(&self.share)) / self.summands as f64;
        // A rank without samples has no say in which parameters are used.
        let complains = !self.find_unused_parameters && (local > 0 || self.reducer.has_seen_any());
        let heard = self.reducer.finish(Word { complains, refuses: begun.is_err(), share })?;
        if let Some(unused) = heard.missing {
            agree(&self.group, begun)?;
            self.report_missing(unused.first())?;
        }
        let (sum, off) = heard.shares;
        match (sum - 1.0).abs() <= off {
            true => Ok(()),
            false => Err(self.other_batch(sum)),
        }
    }

    fn other_batch(&self, sum: f64) -> Error {
        let ranks = match self.group.size() {
            1 => "this rank".to_owned(),
            ranks => format!("{ranks} ranks"),
        };
        Error::WrongGradients {
            problem: format!("the samples of this step's passes on {ranks} make {sum:.4} of its batch"),
            call: match self.summands {
                1 => "call `backward(loss, local, global)` with the number of the rank's own samples and that of the samples of all \
                      ranks"
                    .to_owned(),
                _ => "call `backward(Some(&loss), 1, 1)` with the loss of all samples, which the ranks of the mesh compute together"
                    .to_owned(),
            },
        }
    }

    /// The backward pass of a part of a step (gradient accumulation): gradients stay on this rank until the step's
    /// last pass, [`DataParallel::backward`]. PyTorch's `no_sync`.
    ///
    /// # Errors
    ///
    /// Whatever a backward closure reports.
    pub fn backward_no_sync(&self, loss: Option<&Tensor>, local: u64, global: u64) -> Result<()> {
        let expected =
            |what: &str| Error::invalid("the loss", what, "a mean over samples exactly where there are any");
        if local > global {
            return Err(Error::invalid(
                "the number of local samples",
                local,
                format!("at most the global {global}"),
            ));
        }
        let loss = match (loss, local) {
            (None, 0) => return Ok(()),
            (Some(loss), 1..) => loss,
            (None, _) => return Err(expected(&format!("missing for {local} samples"))),
            (Some(_), 0) => return Err(expected("given for 0 samples")),
        };
        let share = local as f64 / global as f64;
        *lock(&self.share) += share;
        let done = backward_of(loss, share);
        self.reducer.passed();
        done
    }

    /// All ranks call, having seen the same flag.
    fn report_missing(&self, own: Option<&String>) -> Result<()> {
        let names = self.group.all_gather_bytes(own.map_or(&[], |name| name.as_bytes()))?;
        match names.iter().position(|name| !name.is_empty()) {
            None => Ok(()),
            Some(rank) => Err(Error::MissingGradient {
                name: String::from_utf8_lossy(&names[rank]).into_owned(),
                rank,
                group: self.group.name().to_owned(),
            }),
        }
    }
}

/// Computes the gradients of `weight` times a term of this rank's loss. They stay on this rank.
pub(crate) fn backward_of(term: &Tensor, weight: f64) -> Result<()> {
    let weight = term.f_full_like(weight).context(|| "the weight of a rank's loss".to_owned())?;
    Ok(autograd::backward(&[term], &[Some(weight)], BackwardOptions::default())?)
}

/// Of parameters that are split over axes of their mesh, the ranks that hold the same part; of others all ranks of `group`.
fn summand_groups(params: &Parameters, group: &Group) -> Result<SummandGroups> {
    let mut found = SummandGroups { groups: vec![group.clone()], of: vec![0; params.len()] };
    for class in classes(params)?.iter().filter(|class| class.source.is_pending() && class.source.is_split())
    {
        let own = match &class.summands {
            Some(own) => {
                let ranks: Vec<usize> = (0..own.size()).collect();
                own.subgroup("gradients/split", &ranks)?.unwrap_or_else(|| own.clone())
            }
            None => Group::single(),
        };
        let index = found.groups.len();
        found.groups.push(own);
        for (of, param) in found.of.iter_mut().zip(params) {
            if class.params.iter().any(|own| own.name == param.name) {
                *of = index;
            }
        }
    }
    Ok(found)
}

fn lock(share: &Mutex<f64>) -> std::sync::MutexGuard<'_, f64> {
    share.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Refuses parameters and buffers that are not alike on all ranks.
pub(crate) fn compare(params: &Parameters, buffers: &[(String, Tensor)], group: &Group) -> Result<()> {
    let describe = |name: &str, tensor: &Tensor| format!("{name:?} {:?} {:?}", tensor.kind(), tensor.size());
    let params = params.iter().map(|p| {
        let described = match p.placement {
            // Ranks hold other boxes of the same parameter.
            ParamPlacement::Part { copies, .. } => {
                format!(
                    "{:?} {:?} part of {:?}, on {copies} ranks",
                    p.name,
                    p.tensor.kind(),
                    p.global_shape()
                )
            }
            _ => format!("{} {:?}", describe(&p.name, &p.tensor), p.placement),
        };
        match p.source().mesh() {
            None => described,
            Some(_) => format!("{described}, its gradient {}", p.source()),
        }
    });
    let buffers = buffers.iter().map(|(name, tensor)| format!("buffer {}", describe(name, tensor)));
    let mine = params.chain(buffers).collect::<Vec<_>>().join("\n");
    let all = group.all_gather_bytes(mine.as_bytes())?;
    let all: Vec<_> = all.iter().map(|text| String::from_utf8_lossy(text)).collect();
    let Some(rank) = all.iter().position(|text| *text != all[0]) else { return Ok(()) };
    let (mut expected, mut found) = (all[0].lines(), all[rank].lines());
    let (expected, found) = loop {
        match (expected.next(), found.next()) {
            (a, b) if a == b && a.is_some() => {}
            (a, b) => break (a.unwrap_or("no more").to_owned(), b.unwrap_or("no more").to_owned()),
        }
    };
    Err(Error::ParametersDiffer { group: group.name().to_owned(), rank, expected, found })
}

/// Overwrites tensors by those of rank 0.
pub(crate) fn broadcast<'a>(
    tensors: impl Iterator<Item = (&'a String, &'a Tensor)>,
    group: &Group,
) -> Result<()> {
    if group.size() == 1 {
        return Ok(());
    }
    let _no_grad = tch::no_grad_guard();
    let started = tensors.map(|(name, tensor)| Ok((name, tensor, start::broadcast(tensor, 0, group)?)));
    for (name, tensor, work) in started.collect::<Result<Vec<_>>>()? {
        let value = work.wait()?;
        if group.rank() != 0 {
            tensor.shallow_clone().f_copy_(&value).context(|| format!("receiving {name:?} from rank 0"))?;
        }
    }
    Ok(())
}
