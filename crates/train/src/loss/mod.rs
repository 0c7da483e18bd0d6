//! Losses of fields `[sample, channel, spatial…]`, a file each, which registers its settings; and errors that are reported.
//!
//! A loss depends on no model, task or rank: sums over shards are those of the arrays.

mod crps;
mod errors;
mod huber;
mod mae;
pub(crate) mod missing;
mod mse;
mod relative_l2;
mod sobolev;
mod spectral;
mod sum;
mod weighting;

use std::fmt;
use std::sync::Arc;

use isobar_array::Array;
use isobar_registry::{Choice, Entry, Family, Holds, Registered};
use isobar_shard::ShardTensor;
use tch::Tensor;

pub use self::crps::{Crps, crps, ensemble_mean, ensemble_variance};
pub(crate) use self::errors::numbers;
pub use self::errors::{masked_variable_errors, relative_l2_errors, spectrum_errors, variable_errors};
pub use self::huber::Huber;
pub use self::mae::Mae;
pub use self::mse::Mse;
pub use self::relative_l2::RelativeL2;
pub use self::sobolev::Sobolev;
pub use self::spectral::Spectral;
pub use self::sum::{Sum, Term};
pub use self::weighting::Weighting;
pub(crate) use self::weighting::double;
use crate::error::{Error, Result};

/// Training loss that a TOML file can name: `train.loss = "NAME"`, or `[train.loss] type = "NAME"` with its settings.
///
/// Its name and its keys are those of [`Registered`]. [`register_loss!`](crate::register_loss) makes it known to every program that
/// is linked with the crate it stands in. It is written once over [`Array`], for dense and for sharded fields.
///
/// ```
/// use isobar_array::{Array, Unary};
/// use isobar_train::loss::{Loss, LossKind};
/// use isobar_train::{Registered, Result};
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
/// use tch::Tensor;
///
/// /// Mean of the differences' fourth powers.
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
/// #[serde(deny_unknown_fields)]
/// struct Quartic {}
///
/// impl Registered for Quartic {
///     const NAME: &'static str = "quartic";
///     const SUMMARY: &'static str = "Mean of the differences' fourth powers.";
/// }
///
/// impl Loss for Quartic {
///     fn compute<A: Array>(&self, prediction: &A, target: &A) -> Result<A> {
///         Ok(prediction.sub(target)?.unary(Unary::PowScalar(4.0))?.mean()?)
///     }
/// }
///
/// isobar_train::register_loss!(Quartic);
///
/// let loss: LossKind = serde_json::from_str(r#""quartic""#)?;
/// let (prediction, target) = (Tensor::from_slice(&[1.0, 3.0]), Tensor::from_slice(&[1.0, 1.0]));
/// assert_eq!(loss.of(&prediction.view([1, 2]), &target.view([1, 2]))?.double_value(&[]), 8.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Loss: fmt::Debug + Send + Sync {
    /// Computes the loss of predictions against targets of the same shape, `[sample, …]`: a scalar on the graph of both. It is a
    /// mean over samples, since ranks' losses are weighted by their numbers of samples. For sharded fields all ranks of their mesh
    /// call.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    fn compute<A: LossArray>(&self, prediction: &A, target: &A) -> Result<A>;

    /// Returns the weights that the loss takes; by default none, so that `[train.weights]` is refused. A loss that takes weights
    /// implements [`weighted`](Self::weighted) too.
    fn support(&self) -> Support {
        Support::default()
    }

    /// Computes the loss with weights of channels and points: like [`compute`](Self::compute), with [`Weighting::mean`] or
    /// [`Weighting::scale_by_root`]. Called with weights that the loss [supports](Self::support).
    ///
    /// # Errors
    ///
    /// Those of [`compute`](Self::compute), and by default that the loss takes no weights.
    fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        match weights.is_uniform() {
            true => self.compute(prediction, target),
            false => Err(Error::invalid(
                "a weighted loss",
                format!("{self:?}"),
                "a loss that takes weights (`Loss::support` and `Loss::weighted`)",
            )),
        }
    }

    /// Checks that settings are in their ranges.
    ///
    /// # Errors
    ///
    /// A setting out of its range.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// Inputs of a [`Loss`] besides predictions and targets of one shape.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Support {
    /// Weights of channels.
    pub channels: bool,
    /// Weights of points. A loss that takes weights takes masks in any case.
    pub points: bool,
    /// Predictions of an ensemble, `[sample, member, channel, spatial…]`, against targets `[sample, channel, spatial…]`.
    pub members: bool,
    /// Predictions as they are, if the network predicts changes; by default their differences from the targets are in units of each
    /// variable's changes. A loss that takes them implements [`Loss::weighted`].
    pub unscaled: bool,
}

impl Support {
    /// Weights of channels and of points.
    pub const WEIGHTS: Self = Self { channels: true, points: true, members: false, unscaled: false };
    /// Weights of channels alone.
    pub const CHANNELS: Self = Self { channels: true, points: false, members: false, unscaled: false };
}

/// Registers a type as a loss: see [`Loss`](crate::loss::Loss).
#[macro_export]
macro_rules! register_loss {
    ($loss:ty) => {
        $crate::inventory::submit! { $crate::loss::LossEntry::of::<$loss>() }
    };
}

isobar_registry::collected! {
    /// Entry of the registry of losses.
    pub struct LossEntry(Losses);
}

/// The family of the losses.
#[derive(Debug)]
pub struct Losses;

impl Family for Losses {
    const NOUN: &'static str = "loss";
    const SUMMARY: &'static str = "Loss, on normalised values.";
    const SHORT: bool = true;
    const LIST: Option<[&'static str; 2]> = Some([Sum::NAME, "terms"]);
    type Member = dyn AnyLoss;

    fn entries() -> Vec<Entry<Self>> {
        entries()
    }

    fn standard() -> Choice<Self> {
        RelativeL2 {}.into()
    }
}

impl<L: Loss + Registered> Holds<L> for Losses {
    fn hold(loss: L) -> Arc<dyn AnyLoss> {
        Arc::new(loss)
    }
}

/// The loss of a run: any registered one, by default [`RelativeL2`].
///
/// ```
/// use isobar_train::loss::{LossKind, Mse};
/// use tch::Tensor;
///
/// let (prediction, target) = (Tensor::from_slice(&[1.0, 3.0]), Tensor::from_slice(&[1.0, 1.0]));
/// let loss = LossKind::from(Mse {}).of(&prediction.view([1, 2]), &target.view([1, 2]))?;
/// assert_eq!(loss.double_value(&[]), 2.0);
/// # Ok::<(), isobar_train::Error>(())
/// ```
pub type LossKind = Choice<Losses>;

/// A [`Loss`] of any type.
pub trait AnyLoss: fmt::Debug + Send + Sync {
    /// Computes the loss of dense fields.
    ///
    /// # Errors
    ///
    /// Those of [`Loss::weighted`].
    fn dense(&self, prediction: &Tensor, target: &Tensor, weights: &Weighting<Tensor>) -> Result<Tensor>;

    /// Computes the loss of sharded fields. All ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// Those of [`Loss::weighted`].
    fn sharded(
        &self,
        prediction: &ShardTensor,
        target: &ShardTensor,
        weights: &Weighting<ShardTensor>,
    ) -> Result<ShardTensor>;

    /// Returns the weights that the loss takes.
    fn support(&self) -> Support;

    /// Checks that settings are in their ranges.
    ///
    /// # Errors
    ///
    /// A setting out of its range.
    fn check(&self) -> Result<()>;
}

impl<L: Loss> AnyLoss for L {
    fn dense(&self, prediction: &Tensor, target: &Tensor, weights: &Weighting<Tensor>) -> Result<Tensor> {
        either(self, prediction, target, weights)
    }

    fn sharded(
        &self,
        prediction: &ShardTensor,
        target: &ShardTensor,
        weights: &Weighting<ShardTensor>,
    ) -> Result<ShardTensor> {
        either(self, prediction, target, weights)
    }

    fn support(&self) -> Support {
        Loss::support(self)
    }

    fn check(&self) -> Result<()> {
        Loss::check(self)
    }
}

/// Without weights a loss is computed as if there were none, to the last bit.
fn either<A: LossArray>(loss: &impl Loss, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
    match weights.is_uniform() {
        true => loss.compute(prediction, target),
        false => loss.weighted(prediction, target, weights),
    }
}

impl dyn AnyLoss {
    /// Computes the loss of predictions, `[sample, …]`, against targets of the same shape: a scalar on the graph of both. For
    /// sharded fields all ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// The shapes differ, or an exchange fails.
    pub fn of<A: LossArray>(&self, prediction: &A, target: &A) -> Result<A> {
        self.weighted(prediction, target, &Weighting::default())
    }

    /// Computes the loss with weights of channels and points. A prediction may be an ensemble, `[sample, member, channel,
    /// spatial…]`, if the loss takes [members](Support::members). For sharded fields all ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// The shapes differ, the loss takes no such weights, or an exchange fails.
    ///
    /// ```
    /// use isobar_train::loss::{LossKind, Mae, Weighting};
    /// use tch::Tensor;
    ///
    /// let (prediction, target) = (Tensor::from_slice(&[1.0, 3.0]), Tensor::from_slice(&[0.0, 0.0]));
    /// let weights = Weighting::default().with_channels(Tensor::from_slice(&[1.5, 0.5]).view([1, 2]));
    /// let loss = LossKind::from(Mae {}).weighted(&prediction.view([1, 2]), &target.view([1, 2]), &weights)?;
    /// assert_eq!(loss.double_value(&[]), 1.5);
    /// # Ok::<(), isobar_train::Error>(())
    /// ```
    pub fn weighted<A: LossArray>(&self, prediction: &A, target: &A, weights: &Weighting<A>) -> Result<A> {
        match self.support().members && is_ensemble(prediction, target) {
            true => {}
            false => same_shape(prediction, target)?,
        }
        if self.support().unscaled {
            return A::loss(self, prediction, target, weights);
        }
        let prediction = weights.scale_difference(prediction, target)?;
        A::loss(self, &prediction, target, &weights.without_scales())
    }
}

/// Arrays that registered losses are computed of: `tch::Tensor` and `ShardTensor`.
pub trait LossArray: Array {
    /// Computes `loss`.
    ///
    /// # Errors
    ///
    /// Those of [`Loss::weighted`].
    fn loss(loss: &dyn AnyLoss, prediction: &Self, target: &Self, weights: &Weighting<Self>) -> Result<Self>;
}

impl LossArray for Tensor {
    fn loss(loss: &dyn AnyLoss, prediction: &Self, target: &Self, weights: &Weighting<Self>) -> Result<Self> {
        loss.dense(prediction, target, weights)
    }
}

impl LossArray for ShardTensor {
    fn loss(loss: &dyn AnyLoss, prediction: &Self, target: &Self, weights: &Weighting<Self>) -> Result<Self> {
        loss.sharded(prediction, target, weights)
    }
}

/// Returns whether predictions are `[sample, member, …]` for targets `[sample, …]`.
pub(crate) fn is_ensemble<A: Array>(prediction: &A, target: &A) -> bool {
    let (found, expected) = (prediction.shape(), target.shape());
    expected.len() > 1
        && found.len() == expected.len() + 1
        && found[1] > 0
        && found[0] == expected[0]
        && found[2..] == expected[1..]
}

fn same_shape<A: Array>(prediction: &A, target: &A) -> Result<()> {
    let (found, expected) = (prediction.shape(), target.shape());
    if found == expected && found.len() > 1 {
        return Ok(());
    }
    Err(Error::invalid(
        "the shape of the prediction",
        format!("{found:?}"),
        format!("that of the target, {expected:?}, a sample in each row"),
    ))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tch::{Device, Kind, Reduction};

    use super::*;

    fn fields() -> [Tensor; 2] {
        let at = Tensor::arange(3 * 2 * 6 * 5, (Kind::Double, Device::Cpu)).view([3, 2, 6, 5]);
        [1.3, 2.1].map(|rate| (&at * rate).sin() * rate)
    }

    #[rstest]
    #[case(Mse {}, |p: &Tensor, t: &Tensor| p.mse_loss(t, Reduction::Mean))]
    #[case(Mae {}, |p: &Tensor, t: &Tensor| p.l1_loss(t, Reduction::Mean))]
    #[case(Huber { delta: 0.7 }, |p: &Tensor, t: &Tensor| p.huber_loss(t, Reduction::Mean, 0.7))]
    fn losses_are_those_of_libtorch(
        #[case] loss: impl Into<LossKind>,
        #[case] want: fn(&Tensor, &Tensor) -> Tensor,
    ) {
        let [prediction, target] = fields().map(|field| field.set_requires_grad(true));
        let loss = loss.into().of(&prediction, &target).unwrap();
        let want = want(&prediction, &target);
        let gradients = |loss: &Tensor| Tensor::run_backward(&[loss], &[&prediction, &target], false, false);
        for (got, want) in gradients(&loss).iter().zip(gradients(&want)).chain([(&loss, want)]) {
            assert!((got - want).abs().max().double_value(&[]) < 1e-14);
        }
    }

    #[test]
    fn relative_errors_follow_their_definition() {
        let target = Tensor::from_slice(&[3.0, 4.0, 0.0, 2.0]).view([2, 2]);
        let prediction = Tensor::from_slice(&[3.0, 3.0, 0.0, 1.0]).view([2, 2]);
        let relative = LossKind::default().of(&prediction, &target).unwrap().double_value(&[]);
        assert!((relative - 0.35).abs() < 1e-15);
    }

    #[test]
    fn the_sobolev_norm_weights_modes_by_their_wave_numbers() {
        // Waves of 1 and of 3 periods: weights √2 and √10.
        let x = Tensor::arange(16, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / 16.0);
        let (slow, fast) = (x.sin().view([1, 1, 16]), (&x * 3.0).sin().view([1, 1, 16]));
        let loss = |order: f64| {
            let loss = LossKind::from(Sobolev { order });
            loss.of(&(&slow + &fast * 0.1), &slow).unwrap().double_value(&[])
        };
        assert!((loss(0.0) - 0.1).abs() < 1e-14);
        assert!((loss(1.0) - 0.1 * 5.0_f64.sqrt()).abs() < 1e-14);
        assert!((loss(2.0) - 0.5).abs() < 1e-14);
    }

    #[test]
    fn a_perfect_prediction_has_a_gradient() {
        let x = Tensor::from_slice(&[3.0, 4.0]).view([1, 2]).set_requires_grad(true);
        LossKind::default().of(&x, &x.detach()).unwrap().backward();
        assert_eq!(Vec::<f64>::try_from(x.grad().view(-1)).unwrap(), [0.0, 0.0]);
    }

    #[test]
    fn shapes_must_agree() {
        let [a, b] = [[2, 3], [2, 4]].map(|shape| Tensor::zeros(shape, (Kind::Float, Device::Cpu)));
        let error = LossKind::from(Mse {}).of(&a, &b).unwrap_err().to_string();
        insta::assert_snapshot!(error, @"the shape of the prediction is [2, 3], expected that of the target, [2, 4], a sample in each row");
    }

    #[test]
    fn settings_are_checked() {
        for loss in [r#"{ "type": "huber", "delta": 0.0 }"#, r#"{ "type": "sobolev", "order": -1.0 }"#] {
            let loss: LossKind = serde_json::from_str(loss).unwrap();
            let error = loss.check().unwrap_err().to_string();
            assert!(error.contains("; --set train.loss."), "{error}");
        }
    }

    #[test]
    fn a_name_alone_stands_for_a_table() {
        let loss: LossKind = serde_json::from_str(r#""mse""#).unwrap();
        assert_eq!((loss.name(), serde_json::to_string(&loss).unwrap()), ("mse", r#""mse""#.to_owned()));
        let huber: LossKind = serde_json::from_str(r#""huber""#).unwrap();
        assert_eq!(huber, Huber::default().into());
        assert_eq!(serde_json::to_string(&huber).unwrap(), r#"{"type":"huber","delta":1.0}"#);
        let error = serde_json::from_str::<LossKind>(r#""mae2""#).unwrap_err().to_string();
        assert!(error.starts_with("no loss is called \"mae2\"; did you mean \"mae\"?"), "{error}");
    }
}
