//! Statistics of fields in float64, and the normalisation made from them.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::area::PointWeights;
use crate::{Error, Result};

/// Count, mean, standard deviation and extremes of a field, computed in float64.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Number of values.
    pub count: u64,
    /// Sum of their weights: `count`, unless they are weighted, such as by cell area; 0 in files of earlier versions.
    #[serde(default)]
    pub weight: f64,
    /// Their weighted mean.
    pub mean: f64,
    /// The population's standard deviation (the weighted sum of squares divided by `weight`).
    pub std: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Statistics {
    /// Statistics of all values of a tensor of any shape and real dtype, on any device.
    ///
    /// # Errors
    /// If the tensor is empty, or libtorch cannot convert it to float64 on the CPU.
    pub fn of(tensor: &Tensor) -> Result<Self> {
        let mut accumulator = Accumulator::default();
        let flat = tensor.f_detach()?.f_reshape([-1])?;
        let mut values = vec![0.0; BLOCK];
        let total = flat.size().first().copied().unwrap_or(0);
        let mut start = 0;
        while start < total {
            let length = (total - start).min(BLOCK as i64);
            let part = flat.f_narrow(0, start, length)?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
            let part = part.f_contiguous()?;
            let block = &mut values[..length as usize];
            part.f_copy_data(block, length as usize)?;
            accumulator.push(block.iter().copied());
            start += length;
        }
        accumulator.finish()
    }

    /// Combines statistics of parts into those of all their values.
    ///
    /// # Errors
    /// If there are no values.
    ///
    /// ```
    /// use isobar_data::Statistics;
    /// use tch::Tensor;
    ///
    /// let [left, right] = [[1.0_f64, 2.0], [3.0, 6.0]].map(|values| Statistics::of(&Tensor::from_slice(&values)));
    /// let all = Statistics::merged(&[left?, right?])?;
    /// assert_eq!((all.count, all.mean, all.max), (4, 3.0, 6.0));
    /// # Ok::<(), isobar_data::Error>(())
    /// ```
    pub fn merged(parts: &[Self]) -> Result<Self> {
        let mut all = Accumulator::default();
        for &Self { count, weight, mean, std, min, max } in parts {
            all.merge(Accumulator { count, weight, mean, squares: std * std * weight, min, max });
        }
        all.finish()
    }
}

/// Maps a field to zero mean and unit standard deviation, and back: by the same two numbers everywhere, or by two for each
/// channel of `[sample, channel, …]`.
///
/// Make it from the *training* part and use it for validation and prediction as well; it is a few numbers, to be saved
/// with a checkpoint.
///
/// ```
/// use isobar_data::Normalizer;
/// use tch::Tensor;
///
/// let depth_m = Tensor::from_slice(&[9_800.0_f32, 10_000.0, 10_200.0]);
/// let normalizer = Normalizer::fit(&depth_m)?;
/// let back = normalizer.decode(&normalizer.encode(&depth_m)?)?;
/// assert!(back.allclose(&depth_m, 1e-6, 0.0, false));
/// # Ok::<(), isobar_data::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Normalizer {
    mean: Vec<f64>,
    std: Vec<f64>,
}

impl Normalizer {
    /// From a mean and a standard deviation in the field's units.
    ///
    /// # Errors
    /// If one of them is not finite, or `std` is not positive (a constant field).
    pub fn new(mean: f64, std: f64) -> Result<Self> {
        if !mean.is_finite() || !std.is_finite() || std <= 0.0 {
            return Err(Error::Invalid(format!(
                "a field with mean {mean} and standard deviation {std} can't be normalised: both must be finite, and \
                 the deviation positive"
            )));
        }
        Ok(Self { mean: vec![mean], std: vec![std] })
    }

    /// From statistics of the training part.
    ///
    /// # Errors
    /// See [`Normalizer::new`].
    pub fn from_statistics(statistics: &Statistics) -> Result<Self> {
        Self::new(statistics.mean, statistics.std)
    }

    /// From statistics of each channel of the training part.
    ///
    /// # Errors
    /// As [`Normalizer::new`], and where there are none.
    pub fn of_channels(statistics: &[Statistics]) -> Result<Self> {
        if statistics.is_empty() {
            return Err(Error::Invalid("there is no channel to normalise".to_owned()));
        }
        let each = statistics.iter().map(Self::from_statistics).collect::<Result<Vec<_>>>()?;
        let (mean, std) = each.into_iter().map(|one| (one.mean[0], one.std[0])).unzip();
        Ok(Self { mean, std })
    }

    /// Divides each channel by a scale without subtracting its mean: for changes, where zero means no change.
    ///
    /// # Errors
    /// If there are no scales, or one is not finite and positive.
    pub fn of_scales(scales: &[f64]) -> Result<Self> {
        if scales.is_empty() {
            return Err(Error::Invalid("there is no channel to normalise".to_owned()));
        }
        let each = scales.iter().map(|&scale| Self::new(0.0, scale)).collect::<Result<Vec<_>>>()?;
        Ok(Self { mean: vec![0.0; each.len()], std: scales.to_vec() })
    }

    /// From the training part itself.
    ///
    /// # Errors
    /// As [`Statistics::of`] and [`Normalizer::new`].
    pub fn fit(tensor: &Tensor) -> Result<Self> {
        Self::from_statistics(&Statistics::of(tensor)?)
    }

    /// Returns whether both normalize the same channels with the same numbers, up to rounding: to 1e-6 of the deviation.
    ///
    /// ```
    /// use isobar_data::Normalizer;
    ///
    /// let kelvin = Normalizer::new(280.0, 10.0)?;
    /// assert!(kelvin.is_close_to(&Normalizer::new(280.0 + 1e-9, 10.0)?));
    /// assert!(!kelvin.is_close_to(&Normalizer::new(281.0, 10.0)?));
    /// # Ok::<(), isobar_data::Error>(())
    /// ```
    pub fn is_close_to(&self, other: &Self) -> bool {
        let near = |(a, b): (&f64, &f64), scale: f64| (a - b).abs() <= 1e-6 * scale;
        let pairs = self.mean.iter().zip(&other.mean).zip(self.std.iter().zip(&other.std));
        let same = |(means, stds): ((&f64, &f64), (&f64, &f64))| near(means, *stds.0) && near(stds, *stds.0);
        self.mean.len() == other.mean.len() && pairs.into_iter().all(same)
    }

    /// The mean of each channel, or of all together, in the field's units.
    pub fn mean(&self) -> &[f64] {
        &self.mean
    }

    /// The standard deviation of each channel, or of all together, in the field's units.
    pub fn std(&self) -> &[f64] {
        &self.std
    }

    /// `(x - mean) / std`, of the same shape and dtype.
    ///
    /// # Errors
    /// If the tensor has not as many channels, or libtorch refuses, such as for an integer tensor on a device that is out of
    /// memory.
    pub fn encode(&self, physical: &Tensor) -> Result<Tensor> {
        match (&self.mean[..], &self.std[..]) {
            (&[mean], &[std]) => Ok(physical.f_sub_scalar(mean)?.f_div_scalar(std)?),
            _ => {
                let [mean, std] = self.along(physical)?;
                Ok(physical.f_sub(&mean)?.f_div(&std)?)
            }
        }
    }

    /// `x * std + mean`, the inverse of [`Normalizer::encode`].
    ///
    /// # Errors
    /// See [`Normalizer::encode`].
    pub fn decode(&self, normalized: &Tensor) -> Result<Tensor> {
        match (&self.mean[..], &self.std[..]) {
            (&[mean], &[std]) => Ok(normalized.f_mul_scalar(std)?.f_add_scalar(mean)?),
            _ => {
                let [mean, std] = self.along(normalized)?;
                Ok(normalized.f_mul(&std)?.f_add(&mean)?)
            }
        }
    }

    /// Mean and deviation of each channel, as they lie in `x`.
    fn along(&self, x: &Tensor) -> Result<[Tensor; 2]> {
        let (shape, channels) = (x.size(), self.mean.len() as i64);
        if shape.get(1) != Some(&channels) {
            return Err(Error::Invalid(format!(
                "a normalizer of {channels} channels takes [sample, {channels}, …], not {shape:?}"
            )));
        }
        let mut view = vec![1; shape.len()];
        view[1] = channels;
        let lay = |values: &[f64]| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(values)?
                .f_view(&view[..])?
                .f_to_kind(x.kind())?
                .f_to_device(x.device())?)
        };
        Ok([lay(&self.mean)?, lay(&self.std)?])
    }
}

/// Values taken at a time: small enough that a block's float64 copy stays in cache.
const BLOCK: usize = 1 << 16;

/// Running statistics; blocks are merged by Chan's formula, so that a large offset costs no digits.
#[derive(Default)]
pub(crate) struct Accumulator {
    count: u64,
    weight: f64,
    mean: f64,
    squares: f64,
    min: f64,
    max: f64,
}

impl Accumulator {
    pub(crate) fn push(&mut self, values: impl Iterator<Item = f64> + Clone) {
        self.push_weighted(values.map(|value| (value, 1.0)));
    }

    /// Adds values with a weight each.
    fn push_weighted(&mut self, values: impl Iterator<Item = (f64, f64)> + Clone) {
        let (mut count, mut weight, mut sum) = (0_u64, 0.0, 0.0);
        let (mut min, mut max) = (f64::INFINITY, f64::NEG_INFINITY);
        values.clone().for_each(|(value, own)| {
            count += 1;
            weight += own;
            sum += own * value;
            min = min.min(value);
            max = max.max(value);
        });
        if count == 0 {
            return;
        }
        // Of equal values, the mean is exactly theirs; NaN stays NaN.
        let mean = match sum / weight {
            mean if mean < min => min,
            mean if mean > max => max,
            mean => mean,
        };
        let squares: f64 = values.map(|(value, own)| own * (value - mean).powi(2)).sum();
        self.merge(Self { count, weight, mean, squares, min, max });
    }

    /// Adds the values of another accumulator.
    fn merge(&mut self, other: Self) {
        if self.count == 0 || other.count == 0 {
            if self.count == 0 {
                *self = other;
            }
            return;
        }
        let total = self.weight + other.weight;
        let delta = other.mean - self.mean;
        let share = other.weight / total;
        self.squares += other.squares + delta * delta * self.weight * share;
        self.mean += delta * share;
        self.weight = total;
        self.count += other.count;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    pub(crate) fn finish(self) -> Result<Statistics> {
        if self.count == 0 {
            return Err(Error::Invalid("there are no values to take statistics of".to_owned()));
        }
        Ok(Statistics {
            count: self.count,
            weight: self.weight,
            mean: self.mean,
            std: (self.squares / self.weight).sqrt(),
            min: self.min,
            max: self.max,
        })
    }
}

/// Running statistics of each channel of `[frame, channel, x, …]`.
#[derive(Default)]
pub(crate) struct ChannelStatistics(Vec<Accumulator>);

impl ChannelStatistics {
    /// Adds values of a window whose points have these weights.
    pub(crate) fn push(&mut self, values: &Tensor, weights: &PointWeights) -> Result<()> {
        let shape = values.size();
        let channels = shape.get(1).copied().unwrap_or(0);
        let (inner, weights) = weights.in_turn(shape.get(2..).unwrap_or_default());
        if self.0.is_empty() {
            self.0 = (0..channels).map(|_| Accumulator::default()).collect();
        }
        for (channel, all) in self.0.iter_mut().enumerate() {
            let own = values.f_select(1, channel as i64)?.f_to_kind(Kind::Double)?.f_reshape([-1])?;
            let own: Vec<f64> = isobar_torch::memory::to_vec(&own.f_contiguous()?)?;
            let rows = own.chunks(inner).zip(weights.iter().cycle());
            let weighted = rows.flat_map(|(row, &weight)| row.iter().map(move |&value| (value, weight)));
            // NaN is a missing value: readers refuse others.
            all.push_weighted(weighted.filter(|(value, _)| !value.is_nan()));
        }
        Ok(())
    }

    /// Returns `None` of a channel without a value.
    pub(crate) fn finish(self) -> Result<Vec<Option<Statistics>>> {
        if self.0.is_empty() {
            return Err(Error::Invalid("there are no values to take statistics of".to_owned()));
        }
        Ok(self.0.into_iter().map(|channel| channel.finish().ok()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_merge_to_the_statistics_of_the_whole() {
        // A large offset, where a sum of squares would lose every digit of the deviation.
        let values: Vec<f64> = (0..1000).map(|i| 1e9 + f64::from(i % 7)).collect();
        let mut accumulator = Accumulator::default();
        for block in values.chunks(137) {
            accumulator.push(block.iter().copied());
        }
        let got = accumulator.finish().unwrap();
        let mean = values.iter().sum::<f64>() / 1000.0;
        let std = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 1000.0).sqrt();
        assert_eq!((got.count, got.min, got.max), (1000, 1e9, 1e9 + 6.0));
        assert!((got.mean - mean).abs() < 1e-6, "{} {mean}", got.mean);
        assert!((got.std - std).abs() < 1e-7, "{} {std}", got.std);
    }

    #[test]
    fn statistics_of_a_tensor_take_all_blocks_and_any_strides() {
        let n = (BLOCK * 2 + 5) as i64;
        let tensor = Tensor::arange(n, (Kind::Float, Device::Cpu)).view([1, n]).transpose(0, 1);
        let got = Statistics::of(&tensor).unwrap();
        assert_eq!((got.count, got.min, got.max), (n as u64, 0.0, (n - 1) as f64));
        assert!((got.mean - (n - 1) as f64 / 2.0).abs() < 1e-6);
        let std = (((n * n - 1) as f64) / 12.0).sqrt();
        assert!((got.std / std - 1.0).abs() < 1e-12);
    }

    #[test]
    fn an_empty_tensor_has_no_statistics() {
        let error = Statistics::of(&Tensor::zeros([0, 3], (Kind::Float, Device::Cpu))).unwrap_err();
        assert_eq!(error.to_string(), "there are no values to take statistics of");
    }

    #[test]
    fn channels_have_numbers_of_their_own() {
        let fields = Tensor::arange(16, (Kind::Double, Device::Cpu)).view([2, 2, 4]);
        let channels: Vec<Statistics> =
            (0..2).map(|channel| Statistics::of(&fields.select(1, channel)).unwrap()).collect();
        let normalizer = Normalizer::of_channels(&channels).unwrap();
        let scaled = normalizer.encode(&fields).unwrap();
        for channel in 0..2 {
            let statistics = Statistics::of(&scaled.select(1, channel)).unwrap();
            assert!(statistics.mean.abs() < 1e-12 && (statistics.std - 1.0).abs() < 1e-12, "{statistics:?}");
        }
        assert!(normalizer.decode(&scaled).unwrap().allclose(&fields, 0.0, 1e-12, false));
        let error = normalizer.encode(&fields.select(0, 0).view([1, 1, 8])).unwrap_err().to_string();
        assert_eq!(error, "a normalizer of 2 channels takes [sample, 2, …], not [1, 1, 8]");
    }

    #[test]
    fn a_constant_field_has_no_normalizer() {
        let error = Normalizer::fit(&Tensor::ones([4], (Kind::Float, Device::Cpu))).unwrap_err();
        assert!(error.to_string().contains("standard deviation 0"), "{error}");
    }
}
