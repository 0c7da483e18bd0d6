//! Diffusion on patches of two-dimensional fields.

use isobar_array::{Array, Generator, Interpolation, Resize};
use isobar_models::{Batch, Patching};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::settings;
use crate::task::BoxError;

/// `[task.patches]`: training on random patches of the fields, and sampling with overlapping ones that cover them, as CorrDiff
/// does (Mardani et al., arXiv:2309.15214; PhysicsNeMo's `RandomPatching2D` and `GridPatching2D`). See [`Patching`].
///
/// The network gets the array `global_index`, the positions of a patch's points on the grid. Models such as `song_unet_pos_embd`
/// read it.
///
/// ```
/// use isobar_train::PatchConfig;
///
/// let table = r#"{ "patch_shape": [32, 32], "overlap_pix": 4 }"#;
/// let patches: PatchConfig = serde_json::from_str(table)?;
/// assert!(patches.condition_on_input);
/// patches.check_extents(&[64, 64])?;
/// assert!(patches.check_extents(&[64, 16]).is_err());
/// # Ok::<(), isobar_train::BoxError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PatchConfig {
    /// Height and width of a patch in points, at most those of the fields.
    pub patch_shape: [usize; 2],
    /// Number of random patches of each sample in a training step, at the same positions for all samples of the step; at most 65,536.
    /// Sampling passes this many patches of a sample to the network at a time.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 65536))]
    pub patch_num: usize,
    /// Points by which neighbouring patches overlap in sampling, besides `boundary_pix`. The network's outputs are averaged there.
    #[serde(default)]
    pub overlap_pix: usize,
    /// Points by which the first patches begin before the edges of the fields in sampling; beyond the edges, fields are reflected.
    /// Neighbouring patches overlap by these points too.
    #[serde(default)]
    pub boundary_pix: usize,
    /// Also give the network the full input, interpolated to the points of a patch, as further condition channels after those of
    /// the patch.
    #[serde(default = "yes")]
    pub condition_on_input: bool,
}

fn one() -> usize {
    1
}

fn yes() -> bool {
    true
}

impl PatchConfig {
    /// Checks the options that do not depend on the fields.
    pub(crate) fn check(&self) -> Result<(), BoxError> {
        let size = self.patch();
        self.named([16, 16], Patching::check_random(size, size, self.patch_num))
    }

    /// Names the key that an error is about. Patches of extents `works` are valid.
    fn named(&self, works: [usize; 2], checked: isobar_models::Result<()>) -> Result<(), BoxError> {
        let defaults =
            Self { patch_shape: works, patch_num: one(), overlap_pix: 0, boundary_pix: 0, ..*self };
        settings("task.patches", &defaults, checked)
    }

    /// Checks that fields of these extents can be cut into such patches and covered by them.
    ///
    /// # Errors
    ///
    /// Fields that are not two-dimensional, or numbers that [`Patching::random`] or [`Patching::covering`] refuse.
    pub fn check_extents(&self, extents: &[usize]) -> Result<(), BoxError> {
        let &[height, width] = extents else {
            return Err(format!(
                "task.patches needs fields of two dims, got extents {extents:?}; remove [task.patches]"
            )
            .into());
        };
        self.check()?;
        let grid = [height as i64, width as i64];
        let covered = Patching::covering(grid, self.patch(), self.overlap_pix, self.boundary_pix);
        self.named([height, width], covered.map(drop))
    }

    fn patch(&self) -> [i64; 2] {
        self.patch_shape.map(|extent| i64::try_from(extent).unwrap_or(i64::MAX))
    }

    fn covering(&self, grid: [i64; 2]) -> Result<Patching, BoxError> {
        Ok(Patching::covering(grid, self.patch(), self.overlap_pix, self.boundary_pix)?)
    }

    /// Draws the patches of a step.
    pub(crate) fn random<A: Array>(&self, fields: &A, generator: &Generator) -> Result<Patching, BoxError> {
        Ok(Patching::random(grid_of(fields)?, self.patch(), self.patch_num, generator)?)
    }

    /// Interpolates the inputs of a task `[sample, channel, height, width]`, without their first `mean` channels, to the points
    /// of a patch; returns `None` if the network does not get them.
    pub(crate) fn whole<A: Array>(&self, conditions: &Batch<A>, mean: i64) -> Result<Option<A>, BoxError> {
        if !self.condition_on_input {
            return Ok(None);
        }
        let fields = conditions.require("patches", Batch::<A>::FIELDS)?;
        let own = fields.narrow(1, mean, fields.extent(1)? - mean)?;
        Ok(Some(own.interpolate(&Resize::Size(self.patch().to_vec()), Interpolation::Linear, false)?))
    }

    /// Returns the conditions of patches: the patches of the fields with the `whole` inputs as further channels, the positions of
    /// their points, and other arrays of a sample, repeated for each of its patches.
    pub(crate) fn batch<A: Array>(
        &self,
        patching: &Patching,
        conditions: &Batch<A>,
        whole: Option<&A>,
    ) -> Result<Batch<A>, BoxError> {
        let mut batch = Batch::default();
        for name in conditions.names() {
            let Some(array) = conditions.get(name) else { continue };
            if name != Batch::<A>::FIELDS {
                batch = batch.with(name, patching.repeat(array)?);
                continue;
            }
            let patches = patching.apply(array)?;
            batch = batch.with(Batch::<A>::GLOBAL_INDEX, patching.global_index(&patches)?);
            let fields = match whole {
                Some(whole) => A::cat(&[&patches, &patching.repeat(whole)?], 1)?,
                None => patches,
            };
            batch = batch.with(name, fields);
        }
        Ok(batch)
    }
}

/// Height and width of the fields `[sample, channel, height, width]`.
fn grid_of<A: Array>(fields: &A) -> Result<[i64; 2], BoxError> {
    match fields.shape()[..] {
        [_, _, height, width] => Ok([height, width]),
        ref shape => {
            Err(format!("patches need fields [sample, channel, height, width], got {shape:?}").into())
        }
    }
}

/// Patches that cover the fields of a prediction, with their conditions, in groups that the network computes one at a time.
pub(crate) struct Cover<A> {
    all: Patching,
    groups: Vec<(Patching, Batch<A>)>,
}

impl<A: Array> Cover<A> {
    /// Cuts the conditions out once, for all steps of the sampler.
    pub(crate) fn new(patches: &PatchConfig, conditions: &Batch<A>, mean: i64) -> Result<Self, BoxError> {
        let fields = conditions.require("patches", Batch::<A>::FIELDS)?;
        let all = patches.covering(grid_of(fields)?)?;
        let whole = patches.whole(conditions, mean)?;
        let prepared = |group: Patching| -> Result<_, BoxError> {
            let batch = patches.batch(&group, conditions, whole.as_ref())?;
            Ok((group, batch))
        };
        let groups = all.groups(patches.patch_num).into_iter().map(prepared).collect::<Result<_, _>>()?;
        Ok(Self { all, groups })
    }

    /// Removes the noise from fields: applies `denoise` to the conditions and noisy patches of each group, and averages the
    /// results at each point.
    pub(crate) fn denoise(
        &self,
        noisy: &A,
        denoise: impl Fn(&Batch<A>, &A) -> Result<A, BoxError>,
    ) -> Result<A, BoxError> {
        let mut denoised = Vec::new();
        for (group, conditions) in &self.groups {
            denoised.extend(group.separate(&denoise(conditions, &group.apply(noisy)?)?)?);
        }
        Ok(self.all.fuse(&denoised, noisy)?)
    }
}
