//! Forecasts and what truly came of them, as metrics see them.

use std::cell::OnceCell;

use isobar_array::{Array, Comparison, Unary, periodic};

use crate::error::{Error, Result};
use crate::loss::{Weighting, double, ensemble_mean, is_ensemble};

/// A forecast of fields `[sample, channel, spatial…]` at one lead time, on physical values in float64, with the truth.
///
/// Points that a mask leaves out are zero in prediction, target and climatology; of members see [`fill`](Self::fill).
#[derive(Debug)]
pub struct Forecast<A> {
    prediction: A,
    members: Option<A>,
    target: A,
    climatology: Option<A>,
    weights: Weighting<A>,
    /// Energy spectra of prediction and target, once they are asked for.
    energies: OnceCell<[A; 2]>,
}

impl<A: Array> Forecast<A> {
    /// Makes a forecast. A prediction may be an ensemble, `[sample, member, channel, spatial…]`; metrics of one forecast then take
    /// its mean.
    ///
    /// # Errors
    ///
    /// Shapes that differ, or without a spatial dim.
    pub fn new(prediction: &A, target: &A) -> Result<Self> {
        let (found, expected) = (prediction.shape(), target.shape());
        let ensemble = is_ensemble(prediction, target);
        if expected.len() < 3 || !(ensemble || found == expected) {
            let expected = format!("that of the target, [sample, channel, spatial…] {expected:?}");
            return Err(Error::invalid("the shape of a forecast", format!("{found:?}"), expected));
        }
        let prediction = double(&prediction.detach()?)?;
        let (prediction, members) = match ensemble {
            true => (ensemble_mean(&prediction)?, Some(prediction)),
            false => (prediction, None),
        };
        let target = double(&target.detach()?)?;
        let (weights, energies) = (Weighting::default(), OnceCell::new());
        Ok(Self { prediction, members, target, climatology: None, weights, energies })
    }

    /// Adds a climatology of the shape of the target, or one that broadcasts to it; NaN at points without one. It is zero at points
    /// that do not count, whether weights are given before or after.
    ///
    /// # Errors
    ///
    /// More dims than the target; shapes that do not broadcast.
    pub fn with_climatology(self, climatology: &A) -> Result<Self> {
        let (found, expected) = (climatology.shape(), self.target.shape());
        if found.len() > expected.len() {
            let expected = format!("one that broadcasts to that of the target, {expected:?}");
            return Err(Error::invalid("the shape of a climatology", format!("{found:?}"), expected));
        }
        let mut climatology = double(climatology)?;
        for _ in found.len()..expected.len() {
            climatology = climatology.unsqueeze(0)?;
        }
        Ok(Self { climatology: Some(self.weights.fill(&climatology)?), ..self })
    }

    /// Weights points, and leaves out those that a mask does not count. Weights of channels have no part.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast.
    pub fn weighted(self, weights: Weighting<A>) -> Result<Self> {
        let Self { prediction, members, target, climatology, .. } = self;
        Ok(Self {
            energies: OnceCell::new(),
            prediction: weights.fill(&prediction)?,
            target: weights.fill(&target)?,
            climatology: climatology.map(|fields| weights.fill(&fields)).transpose()?,
            members,
            weights,
        })
    }

    /// Returns the prediction, `[sample, channel, spatial…]`; the mean of an ensemble.
    pub fn prediction(&self) -> &A {
        &self.prediction
    }

    /// Returns the members of an ensemble, `[sample, member, channel, spatial…]`; `None` of a single forecast.
    pub fn members(&self) -> Option<&A> {
        self.members.as_ref()
    }

    /// Returns the truth, `[sample, channel, spatial…]`.
    pub fn target(&self) -> &A {
        &self.target
    }

    /// Returns the climatology: with as many dims as the target, of a shape that broadcasts to its.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn climatology(&self) -> Result<&A> {
        self.climatology.as_ref().ok_or_else(|| {
            let expected = "the mean over the training samples at each point (`Forecast::with_climatology`)";
            Error::invalid("the climatology of a forecast", "missing", expected)
        })
    }

    /// Returns this forecast, or the mean of its ensemble, over the points that count and have a climatology, which is zero at the
    /// others.
    ///
    /// # Errors
    ///
    /// There is no climatology, or shapes that do not broadcast.
    pub fn over_climatology(&self) -> Result<Self> {
        let climatology = self.climatology()?;
        let known = climatology.compare(Comparison::Eq, climatology)?;
        let weights = self.weights.over(&known)?;
        Ok(Self {
            energies: OnceCell::new(),
            prediction: weights.fill(&self.prediction)?,
            members: None,
            target: weights.fill(&self.target)?,
            climatology: Some(weights.fill(climatology)?),
            weights,
        })
    }

    /// Returns the spatial dims.
    pub fn spatial(&self) -> Vec<i64> {
        (2..self.target.shape().len() as i64).collect()
    }

    /// Computes the energy spectra of prediction and target, `[sample, channel, shell]`, once
    /// ([`periodic::energy_spectrum`](isobar_array::periodic::energy_spectrum)). For sharded fields all ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    pub fn energy_spectra(&self) -> Result<&[A; 2]> {
        if let Some(known) = self.energies.get() {
            return Ok(known);
        }
        let energy = |fields: &A| periodic::energy_spectrum(fields, &self.spatial());
        let both = [energy(&self.prediction)?, energy(&self.target)?];
        Ok(self.energies.get_or_init(|| both))
    }

    /// Computes p − t, `[sample, channel, spatial…]`.
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    pub fn error(&self) -> Result<A> {
        Ok(self.prediction.sub(&self.target)?)
    }

    /// Computes the means over points, `[sample, channel]`, weighted by latitude where the run is, over the points that count.
    /// For sharded fields all ranks of their mesh call, and exchange one number for each sample and channel.
    ///
    /// # Errors
    ///
    /// The reduction fails.
    pub fn mean(&self, fields: &A) -> Result<A> {
        self.weights.point_means(fields)
    }

    /// Computes the means over points of the square of fields, `[sample, channel]`.
    ///
    /// # Errors
    ///
    /// Those of [`mean`](Self::mean).
    pub fn mean_square(&self, fields: &A) -> Result<A> {
        self.mean(&fields.unary(Unary::Square)?)
    }

    /// Counts the points that count, `[sample, channel]`.
    ///
    /// # Errors
    ///
    /// The reduction fails.
    pub fn points(&self) -> Result<A> {
        self.weights.point_count(&self.target)
    }

    /// Sets fields of the shape of the target to zero where they do not count.
    ///
    /// # Errors
    ///
    /// Shapes that do not broadcast.
    pub fn fill(&self, fields: &A) -> Result<A> {
        self.weights.fill(fields)
    }
}
