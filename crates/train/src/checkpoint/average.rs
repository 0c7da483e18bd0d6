//! Averages of any width after a run, from those in its checkpoints (Karras et al., arXiv:2312.02696, section 3.2).

use std::path::Path;

use tch::Tensor;

use super::contents::{MODEL, OPTIMIZER, averages_of};
use super::dtype::kind;
use super::manifest::{Manifest, TensorEntry};
use super::read::Opened;
use super::tools::{open_all, whole, write_file};
use crate::error::{Context, Error, Result};
use crate::optim::{AverageRule, average_slot, exponent};

/// Result of [`export_average`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExportedAverage {
    /// Number of tensors in the file.
    pub tensors: usize,
    /// Number of saved averages that it is a sum of.
    pub averages: usize,
    /// Relative L2 error of its profile: of the weights that it gives to the parameters of each step. More checkpoints make it
    /// smaller.
    pub profile_error: f64,
}

/// A profile of weights over the steps of a run: (γ + 1) τ^γ / t^(γ + 1) for τ up to t.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Profile {
    exponent: f64,
    steps: f64,
}

impl Profile {
    /// Returns the integral of the product of two profiles.
    fn dot(self, other: Self) -> f64 {
        let (first, last) = if self.steps < other.steps { (self, other) } else { (other, self) };
        let ratio = (first.steps / last.steps).powf(last.exponent);
        (self.exponent + 1.0) * (other.exponent + 1.0) * ratio
            / ((self.exponent + other.exponent + 1.0) * last.steps)
    }
}

/// An average in a checkpoint.
struct Snapshot<'a> {
    opened: &'a Opened,
    /// The name of its slot in the optimizer's state.
    slot: String,
    /// Steps of the run before its first.
    origin: u64,
    profile: Profile,
}

/// Largest accepted error of a profile.
const MOST_ERROR: f64 = 0.1;

/// Writes the average of the parameters with relative width `width`, and the newest checkpoint's buffers, in the format of
/// [`export`](super::export). The average is the weighted sum of all saved averages in the folder `path` that best fits the weight
/// profile of the width. Averages that started at another step than the newest checkpoint's are excluded: a resumed run had other
/// widths then.
///
/// # Errors
///
/// [`Error::Invalid`] for a newest checkpoint without such averages, a width out of range, and averages from which that of the width
/// cannot be made; [`Error::Checkpoint`] for one that is damaged; a file that cannot be written.
pub fn export_average(path: &Path, out: &Path, width: f64) -> Result<ExportedAverage> {
    let wanted = exponent(width)?;
    let checkpoints = open_all(path)?;
    let mut snapshots = snapshots(&checkpoints)?;
    let newest = checkpoints.first().zip(snapshots.first());
    let newest = newest.filter(|((newest, _), snapshot)| std::ptr::eq(newest, snapshot.opened));
    let Some(((newest, manifest), &Snapshot { origin, profile, .. })) = newest else {
        return Err(Error::invalid(
            format!("the newest checkpoint in {}", path.display()),
            "without averages of a width",
            "one of a run with train.average_widths, such as [0.05, 0.1], and checkpoint.keep = 0, which keeps all",
        ));
    };
    let all = snapshots.len();
    snapshots.retain(|snapshot| snapshot.origin == origin);
    if snapshots.len() < all {
        tracing::warn!(
            "{} saved averages began at another step than {origin}, and are left out",
            all - snapshots.len()
        );
    }
    let profiles: Vec<Profile> = snapshots.iter().map(|snapshot| snapshot.profile).collect();
    let (weights, profile_error) = fit(&profiles, Profile { exponent: wanted, steps: profile.steps })?;
    if profile_error > MOST_ERROR {
        return Err(Error::invalid(
            format!("an average of width {width}"),
            format!("off by {:.0} % as a sum of {} saved averages", 100.0 * profile_error, profiles.len()),
            "a width between those of train.average_widths, or more checkpoints: checkpoint.keep = 0 keeps all",
        ));
    }
    let tensors = write_file(out, manifest, |tensor| match tensor.name.strip_prefix(MODEL) {
        Some(param) => sum(&snapshots, &weights, param, tensor),
        None => whole(newest, &tensor.name, tensor),
    })?;
    Ok(ExportedAverage { tensors, averages: snapshots.len(), profile_error })
}

/// Returns the averages of a width in all checkpoints, those of the newest checkpoint first.
fn snapshots(checkpoints: &[(Opened, Manifest)]) -> Result<Vec<Snapshot<'_>>> {
    let mut found = Vec::new();
    for (opened, manifest) in checkpoints {
        for (at, average) in averages_of(manifest)?.into_iter().enumerate() {
            let AverageRule::Width(width) = average.rule else { continue };
            let profile = Profile { exponent: exponent(width)?, steps: average.steps as f64 };
            // Earlier versions did not save it; then no step may have been left out.
            let origin = average.origin.unwrap_or(manifest.state.step.saturating_sub(average.steps));
            if average.steps > 0 {
                found.push(Snapshot { opened, slot: average_slot(at), origin, profile });
            }
        }
    }
    Ok(found)
}

/// Returns the weights of the profiles, 1 in all, whose sum is nearest to `wanted`, and the relative L2 error of that sum.
fn fit(profiles: &[Profile], wanted: Profile) -> Result<(Vec<f64>, f64)> {
    let count = profiles.len() as i64;
    let products: Vec<f64> = profiles.iter().flat_map(|a| profiles.iter().map(|b| a.dot(*b))).collect();
    let right: Vec<f64> = profiles.iter().map(|profile| profile.dot(wanted)).collect();
    let square = wanted.dot(wanted);
    let solve = || {
        let matrix = Tensor::f_from_slice(&products)?.f_view([count, count])?.f_div_scalar(square)?;
        let right = Tensor::f_from_slice(&right)?.f_view([count, 1])?.f_div_scalar(square)?;
        // The last row and column, with a Lagrange multiplier, keep the sum of the weights.
        let (ones, zero) = (right.f_ones_like()?, Tensor::f_from_slice(&[0.0])?.f_view([1, 1])?);
        let upper = Tensor::f_cat(&[&matrix, &ones], 1)?;
        let lower = Tensor::f_cat(&[&ones.f_transpose(0, 1)?, &zero], 1)?;
        let bordered = Tensor::f_cat(&[&upper, &lower], 0)?;
        let sides = Tensor::f_cat(&[&right, &zero.f_add_scalar(1.0)?], 0)?;
        // Profiles may be nearly equal, so that the matrix has no inverse.
        let weights = bordered.f_linalg_lstsq(&sides, None, "gelsd")?.0.f_narrow(0, 0, count)?;
        let lost = weights.f_mul(&matrix.f_matmul(&weights)?.f_sub(&right.f_mul_scalar(2.0)?)?)?;
        let lost = lost.f_sum(tch::Kind::Double)?.f_double_value(&[])?;
        Ok((Vec::<f64>::try_from(weights.f_flatten(0, -1)?)?, lost))
    };
    let solved: std::result::Result<_, tch::TchError> = solve();
    let (weights, lost) = solved.context(|| "fitting a profile of averages".to_owned())?;
    Ok((weights, (1.0 + lost).max(0.0).sqrt()))
}

/// Returns the weighted sum of a parameter's averages, in double precision until it is whole.
fn sum(snapshots: &[Snapshot<'_>], weights: &[f64], param: &str, tensor: &TensorEntry) -> Result<Tensor> {
    let mut sum: Option<Tensor> = None;
    for (snapshot, weight) in snapshots.iter().zip(weights) {
        let average = whole(snapshot.opened, &format!("{OPTIMIZER}{}.{param}", snapshot.slot), tensor)?;
        let double = match average.is_complex() {
            true => tch::Kind::ComplexDouble,
            false => tch::Kind::Double,
        };
        let add = || {
            let term = average.f_to_kind(double)?.f_mul_scalar(*weight)?;
            match &sum {
                Some(sum) => sum.f_add(&term),
                None => Ok(term),
            }
        };
        sum = Some(add().context(|| format!("the average of parameter {param:?}"))?);
    }
    let sum = sum.ok_or_else(|| Error::invalid("averages", "none", "one or more"))?;
    let kind = kind(tensor.dtype).unwrap_or(tch::Kind::Float);
    sum.f_to_kind(kind).context(|| format!("the average of parameter {param:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The weights that averages give to each step.
    fn weights_of(rule: AverageRule, steps: u64) -> Vec<f64> {
        let mut weights = Vec::new();
        for t in 1..=steps {
            let kept = rule.kept(t);
            weights.iter_mut().for_each(|weight| *weight *= kept);
            weights.push(1.0 - kept);
        }
        weights
    }

    /// A sum of averages of two widths, saved now and then, has the weights of a third width.
    #[test]
    fn an_average_of_another_width_is_a_sum_of_those_that_were_saved() {
        let steps = 2048;
        let (mut profiles, mut saved) = (Vec::new(), Vec::new());
        for at in (1..=16).map(|number| number * steps / 16) {
            for width in [0.05, 0.1] {
                profiles.push(Profile { exponent: exponent(width).unwrap(), steps: at as f64 });
                saved.push(weights_of(AverageRule::Width(width), at));
            }
        }
        for width in [0.05, 0.08, 0.15] {
            let wanted = Profile { exponent: exponent(width).unwrap(), steps: steps as f64 };
            let (weights, error) = fit(&profiles, wanted).unwrap();
            assert!(error < 0.02, "{width}: {error}");
            assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{width}");
            let mut sum = vec![0.0; steps as usize];
            for (weight, saved) in weights.iter().zip(&saved) {
                saved.iter().enumerate().for_each(|(at, own)| sum[at] += weight * own);
            }
            let direct = weights_of(AverageRule::Width(width), steps);
            let square =
                |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
            let off = square(&mut sum.iter().zip(&direct).map(|(a, b)| a - b))
                / square(&mut direct.iter().copied());
            assert!(off.sqrt() < 0.03, "{width}: {}", off.sqrt());
        }
        // One average alone cannot become another.
        let wanted = Profile { exponent: exponent(0.2).unwrap(), steps: steps as f64 };
        assert!(fit(&profiles[..1], wanted).unwrap().1 > 0.5);
    }
}
