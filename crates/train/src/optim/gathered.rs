//! Parameters in parts, whole on one rank for a while.

use isobar_collectives::{Group, Work, start};
use serde::{Deserialize, Serialize};
use tch::{TchError, Tensor};

use crate::error::{Context, Error, Result};
use crate::params::{ParamPlacement, Parameter};

/// Parts of some parameters, by rank of a group.
#[derive(Debug)]
pub(super) struct GatheredParams {
    group: Group,
    /// For each parameter; none for one that all ranks have whole.
    boxes: Vec<Option<Boxes>>,
}

/// The parts of a parameter, by rank.
#[derive(Debug)]
struct Boxes {
    shape: Vec<i64>,
    parts: Vec<Part>,
    elements: Vec<i64>,
    /// Rank that gathers the full tensor.
    owner: usize,
}

#[derive(Debug, Serialize, Deserialize)]
struct Part {
    start: Vec<i64>,
    size: Vec<i64>,
}

impl GatheredParams {
    /// All ranks of the group call, with the same parameters.
    pub(super) fn new(params: &[&Parameter], group: &Group) -> Result<Self> {
        let in_parts = |param: &&&Parameter| param.placement != ParamPlacement::Replicate;
        let own: Vec<(&str, Part)> = params
            .iter()
            .filter(in_parts)
            .map(|param| {
                let size = param.tensor.size();
                (&param.name[..], Part { start: param.placement.place(&size, group).1, size })
            })
            .collect();
        let mut by_rank = Vec::new();
        if !own.is_empty() {
            let unread = |error| wrong(group, format!("{error}"));
            for bytes in group.all_gather_bytes(&serde_json::to_vec(&own).map_err(unread)?)? {
                let parts: Vec<(String, Part)> = serde_json::from_slice(&bytes).map_err(unread)?;
                if !parts.iter().map(|(name, _)| &name[..]).eq(own.iter().map(|(name, _)| *name)) {
                    return Err(wrong(group, "not of the same names on all ranks".to_owned()));
                }
                by_rank.push(parts.into_iter().map(|(_, part)| part));
            }
        }
        let mut owners = (0..group.size()).cycle();
        let boxes = params.iter().map(|param| {
            in_parts(&param).then(|| {
                let parts: Vec<Part> = by_rank.iter_mut().filter_map(Iterator::next).collect();
                let elements = parts.iter().map(|part| part.size.iter().product()).collect();
                Boxes {
                    shape: param.global_shape(),
                    parts,
                    elements,
                    owner: owners.next().unwrap_or_default(),
                }
            })
        });
        Ok(Self { boxes: boxes.collect(), group: group.clone() })
    }

    pub(super) fn are_in_parts(&self, parameter: usize) -> bool {
        self.boxes[parameter].is_some()
    }

    /// Of each part of a parameter that is in parts, by its number, that of what `change` makes of the whole, which keeps its shape
    /// and kind. All ranks call, with parts of the same parameters; each computes the wholes that are its own.
    pub(super) fn map(
        &self,
        parts: &[(usize, Tensor)],
        change: impl Fn(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let changed = self.exchange(parts, change);
        if let Err(error) = &changed
            && !error.is_shared()
        {
            self.group.leave(&error.to_string());
        }
        changed
    }

    fn exchange(
        &self,
        parts: &[(usize, Tensor)],
        change: impl Fn(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let mut gathers = Vec::with_capacity(parts.len());
        for (boxes, part) in self.boxes_of(parts) {
            let flat = part.f_reshape([-1]).context(of_update)?;
            gathers.push(start::gather_v(&flat, Some(&boxes.elements), 0, boxes.owner, &self.group)?);
        }
        let mut scatters = Vec::with_capacity(parts.len());
        let mut others = Vec::new();
        for ((boxes, part), (gather, &(parameter, _))) in
            self.boxes_of(parts).zip(gathers.into_iter().zip(parts))
        {
            let out = if self.group.rank() == boxes.owner {
                let whole = boxes.join(&gather.wait()?).context(of_update)?;
                boxes.cut(&change(parameter, &whole)?).context(of_update)?
            } else {
                others.push(gather);
                Tensor::f_empty([0], (part.kind(), part.device())).context(of_update)?
            };
            scatters.push(start::scatter_v(&out, Some(&boxes.elements), 0, boxes.owner, &self.group)?);
        }
        for gather in others {
            let _ = gather.wait()?;
        }
        let shaped = |(work, (_, part)): (Work<Tensor>, &(usize, Tensor))| {
            work.wait()?.f_view(&part.size()[..]).context(of_update)
        };
        scatters.into_iter().zip(parts).map(shaped).collect()
    }

    fn boxes_of<'a>(&'a self, parts: &'a [(usize, Tensor)]) -> impl Iterator<Item = (&'a Boxes, &'a Tensor)> {
        parts.iter().filter_map(|(parameter, part)| Some((self.boxes[*parameter].as_ref()?, part)))
    }
}

impl Boxes {
    /// The whole, of the ranks' parts one after another.
    fn join(&self, flat: &Tensor) -> std::result::Result<Tensor, TchError> {
        let whole = Tensor::f_empty(&self.shape, (flat.kind(), flat.device()))?;
        let mut at = 0;
        for (part, &elements) in self.parts.iter().zip(&self.elements) {
            let values = flat.f_narrow(0, at, elements)?.f_view(&part.size[..])?;
            part.of(&whole)?.f_copy_(&values)?;
            at += elements;
        }
        Ok(whole)
    }

    /// The ranks' parts of the whole, one after another.
    fn cut(&self, whole: &Tensor) -> std::result::Result<Tensor, TchError> {
        let parts = self.parts.iter().map(|part| part.of(whole)?.f_reshape([-1]));
        Tensor::f_cat(&parts.collect::<std::result::Result<Vec<_>, _>>()?, 0)
    }
}

impl Part {
    fn of(&self, whole: &Tensor) -> std::result::Result<Tensor, TchError> {
        let dims = self.start.iter().zip(&self.size).enumerate();
        dims.map(|(dim, (&start, &size))| (dim as i64, start, size))
            .try_fold(whole.shallow_clone(), |tensor, (dim, start, size)| tensor.f_narrow(dim, start, size))
    }
}

fn of_update() -> String {
    "an update in parts".to_owned()
}

fn wrong(group: &Group, found: String) -> Error {
    let of = format!("the list of the parameters in parts over group {:?}", group.name());
    Error::invalid(of, found, "the same on all its ranks, one program that makes the same calls")
}
