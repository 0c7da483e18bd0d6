//! Weights of the elements of fields in a mean, in the layout of the fields.

use isobar_array::{Array, Reduction, Unary};
use tch::Kind;

use crate::error::{Error, Result};

/// Weights of fields `[sample, channel, spatial…]`: of channels, of points, and a mask of the points that count; and scales of
/// differences from the target.
///
/// Weights of channels and of points have mean one, so that a weighted loss keeps its scale; equal weights change nothing.
/// Masked points, and their values (NaN included), have no part in values and gradients. The arrays lie as the fields do, so that
/// weighting communicates nothing: each rank holds its own window of them.
///
/// ```
/// use isobar_train::loss::{LossKind, Mse, Weighting};
/// use tch::Tensor;
///
/// let target = Tensor::from_slice(&[0.0, 0.0, f64::NAN, 0.0]).view([1, 1, 4]);
/// let prediction = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).view([1, 1, 4]);
/// let area = Tensor::from_slice(&[2.0, 0.0, 1.0, 1.0]).view([1, 1, 4]);
/// let mask = Tensor::from_slice(&[true, true, false, true]).view([1, 1, 4]);
/// let weights = Weighting::default().with_area(area).with_mask(mask);
/// let loss = LossKind::from(Mse {}).weighted(&prediction, &target, &weights)?;
/// assert_eq!(loss.double_value(&[]), (2.0 * 1.0 + 1.0 * 16.0) / 3.0);
/// # Ok::<(), isobar_train::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Weighting<A> {
    channels: Option<A>,
    area: Option<A>,
    mask: Option<A>,
    scales: Option<A>,
}

impl<A> Default for Weighting<A> {
    fn default() -> Self {
        Self { channels: None, area: None, mask: None, scales: None }
    }
}

impl<A> Weighting<A> {
    /// Adds weights of channels, of mean one: `[1, channel, 1…]`, replicated.
    #[must_use]
    pub fn with_channels(self, channels: A) -> Self {
        Self { channels: Some(channels), ..self }
    }

    /// Adds weights of points, of mean one over all points of a field: of a shape that broadcasts to `[sample, channel, spatial…]`.
    #[must_use]
    pub fn with_area(self, area: A) -> Self {
        Self { area: Some(area), ..self }
    }

    /// Adds a boolean mask of the points that count, true where they do: with the dims `[sample, channel, spatial…]`, the first two
    /// of which may have extent 1.
    #[must_use]
    pub fn with_mask(self, mask: A) -> Self {
        Self { mask: Some(mask), ..self }
    }

    /// Adds factors of the differences between predictions and targets, `[1, channel, 1…]`, replicated. A loss is given predictions
    /// with scaled differences, unless it takes [predictions as they are](super::Support::unscaled).
    #[must_use]
    pub fn with_scales(self, scales: A) -> Self {
        Self { scales: Some(scales), ..self }
    }

    /// Returns whether all elements count alike.
    pub fn is_uniform(&self) -> bool {
        self.channels.is_none() && self.area.is_none() && self.mask.is_none() && self.scales.is_none()
    }
}

impl<A: Array> Weighting<A> {
    /// Returns these weights without those of points; the mask stays.
    #[must_use]
    pub fn without_area(&self) -> Self {
        Self { area: None, ..self.shallow_clone() }
    }

    /// Returns other handles to the same arrays.
    pub(crate) fn shallow_clone(&self) -> Self {
        let [channels, area, mask, scales] = [&self.channels, &self.area, &self.mask, &self.scales]
            .map(|part| part.as_ref().map(A::shallow_clone));
        Self { channels, area, mask, scales }
    }

    /// Returns these weights without scales of differences.
    pub(super) fn without_scales(&self) -> Self {
        Self { scales: None, ..self.shallow_clone() }
    }

    /// Scales the difference of a prediction from its target.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast.
    pub(super) fn scale_difference(&self, prediction: &A, target: &A) -> Result<A> {
        match &self.scales {
            None => Ok(prediction.shallow_clone()),
            Some(scales) => Ok(target.add(&prediction.sub(target)?.mul(scales)?)?),
        }
    }

    /// Returns the weights and the mask of points alone, without weights of channels.
    #[must_use]
    pub fn without_channels(&self) -> Self {
        Self { channels: None, ..self.shallow_clone() }
    }

    /// Returns these weights with changed weights and mask of points, where there are some.
    pub(crate) fn map_points<E>(&self, change: impl Fn(&A) -> Result<A, E>) -> Result<Self, E> {
        let [area, mask] = [&self.area, &self.mask].map(|part| part.as_ref().map(&change).transpose());
        Ok(Self { area: area?, mask: mask?, ..self.shallow_clone() })
    }

    /// Returns these weights over those points that a boolean mask counts, too. It has as many dims as the fields, of which any may
    /// have extent 1.
    pub(crate) fn over(&self, points: &A) -> Result<Self> {
        let mask = match &self.mask {
            None => points.shallow_clone(),
            Some(own) => own.select_where(points, &points.constant(&tch::Tensor::from(false))?)?,
        };
        Ok(Self { mask: Some(mask), ..self.shallow_clone() })
    }

    /// Sets fields to zero where they do not count.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast.
    pub fn fill(&self, fields: &A) -> Result<A> {
        let Some(mask) = &self.mask else { return Ok(fields.shallow_clone()) };
        let zero = fields.constant(&tch::Tensor::from(0.0).to_kind(fields.kind()))?;
        Ok(mask.select_where(fields, &zero)?)
    }

    /// Multiplies fields by the root of the weights, and by zero where they do not count: norms of the result are weighted norms.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast.
    pub fn scale_by_root(&self, fields: &A) -> Result<A> {
        let mut scaled = self.fill(fields)?;
        for weights in [&self.channels, &self.area].into_iter().flatten() {
            scaled = scaled.mul(&weights.unary(Unary::Sqrt)?)?;
        }
        Ok(scaled)
    }

    /// Computes the weighted mean of errors of elements, `[sample, channel, spatial…]`, that count: the mean over samples of
    /// Σ w e / Σ w, a scalar. A sample without a point that counts adds 0. Errors of masked points must be finite:
    /// [`fill`](Self::fill) the fields first. For sharded fields all ranks of their mesh call; they exchange one number for
    /// each sample.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast; the reduction fails.
    pub fn mean(&self, errors: &A) -> Result<A> {
        let dims: Vec<i64> = (1..errors.shape().len() as i64).collect();
        match &self.mask {
            None => Ok(self.times(errors)?.mean()?),
            Some(_) => Ok(self.means_over(errors, &dims)?.mean()?),
        }
    }

    /// Computes the weighted means over points of errors, `[sample, channel, spatial…]`, that count: `[sample, channel]`. Weights
    /// of channels have no part. A channel without a point that counts has the mean 0.
    ///
    /// # Errors
    ///
    /// Those of [`mean`](Self::mean).
    pub fn point_means(&self, errors: &A) -> Result<A> {
        let dims: Vec<i64> = (2..errors.shape().len() as i64).collect();
        match &self.mask {
            None => Ok(self.without_channels().times(errors)?.reduce(Reduction::Mean, &dims, false)?),
            Some(_) => self.without_channels().means_over(errors, &dims),
        }
    }

    /// Computes ‖d‖ / ‖t‖ of each sample of fields that were [scaled](Self::scale_by_root): `[sample]`. A sample without a point that
    /// counts has 0.
    ///
    /// # Errors
    ///
    /// The reduction fails.
    pub(crate) fn quotient(&self, difference: &A, target: &A) -> Result<A> {
        let dims: Vec<i64> = (1..target.shape().len() as i64).collect();
        let norm = |fields: &A| fields.reduce(Reduction::Norm, &dims, false);
        let (difference, target) = (norm(difference)?, norm(target)?);
        let target = match &self.mask {
            None => target,
            Some(_) => target.unary(Unary::Clamp { min: LEAST, max: f64::INFINITY })?,
        };
        Ok(difference.div(&target)?)
    }

    /// Computes the mean of errors that have no points, `[sample, channel, …]`, weighted by channel: a scalar.
    ///
    /// # Errors
    ///
    /// Another number of channels; the reduction fails.
    pub fn mean_of_channels(&self, errors: &A) -> Result<A> {
        let Some(channels) = &self.channels else { return Ok(errors.mean()?) };
        let mut shape = vec![1; errors.shape().len()];
        if let Some(extent) = shape.get_mut(1) {
            *extent = channels.extent(1)?;
        }
        Ok(errors.mul(&channels.reshape(&shape)?)?.mean()?)
    }

    /// Counts the points that count, `[sample, channel]`.
    ///
    /// # Errors
    ///
    /// Those of [`mean`](Self::mean).
    pub fn point_count(&self, like: &A) -> Result<A> {
        let dims: Vec<i64> = (2..like.shape().len() as i64).collect();
        let ones = like.constant(&tch::Tensor::from(1.0).to_kind(like.kind()))?;
        let ones = ones.expand(&vec![1; like.shape().len()])?;
        let counted = match &self.mask {
            Some(mask) => mask.to_kind(like.kind())?,
            None => ones,
        };
        let repeated = repeats(&counted, like, &dims)?;
        Ok(counted.reduce(Reduction::Sum, &dims, false)?.mul_scalar(repeated as f64)?)
    }

    fn times(&self, errors: &A) -> Result<A> {
        let mut weighted = errors.shallow_clone();
        for weights in [&self.channels, &self.area].into_iter().flatten() {
            weighted = weighted.mul(weights)?;
        }
        Ok(weighted)
    }

    /// Σ w m e / Σ w m over dims.
    fn means_over(&self, errors: &A, dims: &[i64]) -> Result<A> {
        let Some(mask) = &self.mask else {
            return Ok(self.times(errors)?.reduce(Reduction::Mean, dims, false)?);
        };
        let counted = self.times(&mask.to_kind(errors.kind())?)?;
        let sum = errors.mul(&counted)?.reduce(Reduction::Sum, dims, false)?;
        let repeated = repeats(&counted, errors, dims)?;
        let total = counted.reduce(Reduction::Sum, dims, false)?.mul_scalar(repeated as f64)?;
        Ok(sum.div(&total.unary(Unary::Clamp { min: LEAST, max: f64::INFINITY })?)?)
    }
}

/// Number of elements along dims that each weight of another extent stands for.
fn repeats<A: Array>(weights: &A, fields: &A, dims: &[i64]) -> Result<i64> {
    let (from, to) = (weights.shape(), fields.shape());
    if from.len() != to.len() {
        let expected = format!("as many dims as the fields, {to:?}");
        return Err(Error::invalid("the shape of a mask", format!("{from:?}"), expected));
    }
    let extent = |shape: &[i64], dim: i64| shape.get(dim as usize).copied().unwrap_or(1);
    Ok(dims.iter().map(|&dim| if extent(&from, dim) == 1 { extent(&to, dim) } else { 1 }).product())
}

/// Least sum of weights, so that the mean over no points is 0.
const LEAST: f64 = 1e-30;

/// Returns fields in float64, for metrics.
pub(crate) fn double<A: Array>(fields: &A) -> Result<A> {
    Ok(fields.to_kind(Kind::Double)?)
}
