//! Boxes of global tensors: what a rank holds, what it wants, and which bytes they have in common.

use isobar_collectives::Group;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::params::ParamPlacement;

/// A box of a tensor: its first index and its extent along each dim.
///
/// ```
/// use isobar_train::checkpoint::Region;
///
/// let rows = Region { start: vec![2, 0], shape: vec![3, 4] };
/// let columns = Region { start: vec![0, 3], shape: vec![5, 1] };
/// let common = rows.intersection(&columns);
/// assert_eq!(common, Some(Region { start: vec![2, 3], shape: vec![3, 1] }));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// The first index along each dim.
    pub start: Vec<i64>,
    /// The extent along each dim.
    pub shape: Vec<i64>,
}

impl Region {
    /// All of a tensor.
    pub fn whole(shape: &[i64]) -> Self {
        Self { start: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// The part of a tensor from `start` on along `dim`, whole along the others.
    pub fn along(shape: &[i64], dim: usize, start: i64, extent: i64) -> Self {
        let mut region = Self::whole(shape);
        (region.start[dim], region.shape[dim]) = (start, extent);
        region
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> i64 {
        self.shape.iter().product()
    }

    /// Returns the intersection of two boxes; `None` if it is empty, or their numbers of dims differ.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        if self.start.len() != other.start.len() {
            return None;
        }
        let mut common = Self { start: Vec::new(), shape: Vec::new() };
        for dim in 0..self.start.len() {
            let start = self.start[dim].max(other.start[dim]);
            let end = self.end(dim).min(other.end(dim));
            if start >= end {
                return None;
            }
            common.start.push(start);
            common.shape.push(end - start);
        }
        Some(common)
    }

    /// Returns whether the box lies in a tensor of that shape; its numbers come from an untrusted file.
    pub(super) fn is_within(&self, shape: &[i64]) -> bool {
        let dims = shape.len();
        self.start.len() == dims
            && self.shape.len() == dims
            && (0..dims).all(|dim| {
                let (start, extent) = (self.start[dim], self.shape[dim]);
                start >= 0 && extent >= 0 && start.checked_add(extent).is_some_and(|end| end <= shape[dim])
            })
    }

    fn end(&self, dim: usize) -> i64 {
        self.start[dim] + self.shape[dim]
    }

    /// Returns the row-major offset in this box of the element at `index` of the global tensor.
    fn offset_of(&self, index: &[i64]) -> i64 {
        let mut offset = 0;
        for (dim, at) in index.iter().enumerate() {
            offset = offset * self.shape[dim] + at - self.start[dim];
        }
        offset
    }
}

/// A box of a global tensor, with its values.
#[derive(Debug)]
pub struct TensorShard {
    /// The tensor's name in the checkpoint.
    pub name: String,
    /// The shape of the whole tensor.
    pub shape: Vec<i64>,
    /// Region of it that this is.
    pub region: Region,
    /// Its values, of the shape of the region: a second handle, not a copy.
    pub tensor: Tensor,
}

impl TensorShard {
    /// A tensor that is whole.
    pub fn whole(name: impl Into<String>, tensor: &Tensor) -> Self {
        let shape = tensor.size();
        Self { name: name.into(), region: Region::whole(&shape), shape, tensor: tensor.shallow_clone() }
    }

    /// A tensor that is placed over a group, as parameters are over the model-parallel one.
    pub fn placed(
        name: impl Into<String>,
        tensor: &Tensor,
        placement: &ParamPlacement,
        group: &Group,
    ) -> Self {
        let (shape, region) = placed(&tensor.size(), placement, group);
        Self { name: name.into(), shape, region, tensor: tensor.shallow_clone() }
    }

    pub(super) fn check(&self) -> Result<()> {
        let found = self.tensor.size();
        if self.region.is_within(&self.shape) && found == self.region.shape {
            return Ok(());
        }
        Err(Error::invalid(
            format!("the box of tensor {:?}", self.name),
            format!("{:?} with values of shape {found:?}", self.region),
            format!("a box of the tensor's shape {:?} with values of its own", self.shape),
        ))
    }
}

/// The shape of the whole tensor and this rank's box of it, given the shape of its part.
pub(super) fn placed(part: &[i64], placement: &ParamPlacement, group: &Group) -> (Vec<i64>, Region) {
    let (shape, start) = placement.place(part, group);
    (shape, Region { start, shape: part.to_vec() })
}

/// Calls `run(offset in source, offset in target, elements)` for each stretch of `common` that is in one piece in both boxes,
/// in rising order of the first.
pub(super) fn runs(
    common: &Region,
    source: &Region,
    target: &Region,
    mut run: impl FnMut(i64, i64, i64) -> Result<()>,
) -> Result<()> {
    let dims = common.shape.len();
    // Dims from `inner` on are whole in both boxes; together with the one before they make a stretch.
    let mut inner = dims;
    while inner > 0 && [source, target].iter().all(|whole| whole.shape[inner - 1] == common.shape[inner - 1])
    {
        inner -= 1;
    }
    let outer = inner.saturating_sub(1);
    let length: i64 = common.shape[outer..].iter().product();
    if common.elements() == 0 {
        return Ok(());
    }
    let mut index = common.start.clone();
    loop {
        run(source.offset_of(&index), target.offset_of(&index), length)?;
        let mut dim = outer;
        loop {
            if dim == 0 {
                return Ok(());
            }
            dim -= 1;
            index[dim] += 1;
            if index[dim] < common.end(dim) {
                break;
            }
            index[dim] = common.start[dim];
        }
    }
}

/// Checks that the boxes, each within the tensor, cover it exactly once.
pub(super) fn check_tiling(shape: &[i64], regions: &[&Region]) -> std::result::Result<(), String> {
    let filled: Vec<&Region> = regions.iter().copied().filter(|region| region.elements() > 0).collect();
    let covered: i128 = filled.iter().map(|region| i128::from(region.elements())).sum();
    let elements: i128 = shape.iter().map(|&extent| i128::from(extent)).product();
    // Along the dim with the most cuts a box meets the fewest others.
    let starts = |dim: usize| {
        let mut starts: Vec<i64> = filled.iter().map(|region| region.start[dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let Some(dim) = (0..shape.len()).max_by_key(|&dim| starts(dim)) else {
        return match filled.len() {
            1 => Ok(()),
            count => Err(format!("it has {count} boxes, expected one of a tensor without dims")),
        };
    };
    let mut sorted = filled;
    sorted.sort_by_key(|region| region.start[dim]);
    for (at, region) in sorted.iter().enumerate() {
        let later = sorted[at + 1..].iter().take_while(|other| other.start[dim] < region.end(dim));
        if let Some(other) = later.into_iter().find(|other| region.intersection(other).is_some()) {
            return Err(format!("its boxes {region:?} and {other:?} overlap"));
        }
    }
    match covered == elements {
        true => Ok(()),
        false => Err(format!("its boxes cover {covered} of {elements} elements")),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn region(start: &[i64], shape: &[i64]) -> Region {
        Region { start: start.to_vec(), shape: shape.to_vec() }
    }

    #[rstest]
    #[case(&[4, 3, 2], region(&[0, 0, 0], &[4, 3, 2]), region(&[1, 0, 0], &[2, 3, 2]))]
    #[case(&[4, 3, 2], region(&[0, 1, 0], &[4, 2, 2]), region(&[1, 0, 1], &[3, 3, 1]))]
    #[case(&[4, 3, 2], region(&[2, 0, 0], &[2, 3, 2]), region(&[0, 0, 0], &[2, 3, 2]))]
    #[case(&[7], region(&[1], &[5]), region(&[3], &[4]))]
    #[case(&[], region(&[], &[]), region(&[], &[]))]
    fn runs_copy_what_is_common(#[case] shape: &[i64], #[case] source: Region, #[case] target: Region) {
        let whole = Tensor::arange(shape.iter().product::<i64>(), (tch::Kind::Int64, tch::Device::Cpu));
        let whole = whole.view(shape);
        let cut = |region: &Region| {
            let mut part = whole.shallow_clone();
            for dim in 0..shape.len() {
                part = part.narrow(dim as i64, region.start[dim], region.shape[dim]);
            }
            Vec::<i64>::try_from(part.contiguous().view([-1])).unwrap()
        };
        let from = cut(&source);
        let mut to = vec![-1; target.elements() as usize];
        if let Some(common) = source.intersection(&target) {
            let mut before = -1;
            runs(&common, &source, &target, |s, t, n| {
                assert!(s > before);
                before = s + n - 1;
                to[t as usize..(t + n) as usize].copy_from_slice(&from[s as usize..(s + n) as usize]);
                Ok(())
            })
            .unwrap();
        }
        for (got, want) in to.iter().zip(cut(&target)) {
            assert_eq!(*got, if from.contains(&want) { want } else { -1 });
        }
    }

    #[rstest]
    #[case(&[2, 4], &[region(&[0, 0], &[2, 1]), region(&[0, 1], &[2, 3])], None)]
    #[case(&[2, 4], &[region(&[0, 0], &[2, 2]), region(&[0, 1], &[2, 3])], Some("overlap"))]
    #[case(&[2, 4], &[region(&[0, 0], &[2, 1]), region(&[0, 2], &[2, 2])], Some("cover 6 of 8"))]
    #[case(&[0, 4], &[], None)]
    #[case(&[3], &[region(&[0], &[3]), region(&[3], &[0])], None)]
    #[case(&[], &[region(&[], &[])], None)]
    #[case(&[], &[], Some("0 boxes"))]
    fn boxes_must_tile(#[case] shape: &[i64], #[case] boxes: &[Region], #[case] problem: Option<&str>) {
        let found = check_tiling(shape, &boxes.iter().collect::<Vec<_>>()).err();
        match problem {
            None => assert_eq!(found, None),
            Some(words) => assert!(found.as_ref().is_some_and(|text| text.contains(words)), "{found:?}"),
        }
    }
}
