//! Dropout with a trained probability.

use isobar_array::{Array, Unary};
use isobar_shard::{Init, Params, Placement, Result};

use crate::mode::Mode;

/// Keeps logarithms and quotients finite, as in PhysicsNeMo.
const EPS: f64 = 1e-7;
/// Temperature of the relaxation: masks are closer to 0 and 1 for a lower one.
const TEMPERATURE: f64 = 0.1;
/// Bound of the logit, beyond which its gradient vanishes.
const LARGEST_LOGIT: f64 = 10.0;

/// Dropout with a trained probability p = σ(`p_logit`): Gal, Hron and Kendall, *Concrete Dropout*, arXiv:1705.07832, as PhysicsNeMo
/// computes it. In training, with uniform u for each element,
///
/// ```text
/// y = x (1 − σ((ln u − ln(1 − u) + ln p − ln(1 − p)) / 0.1)) / (1 − p)
/// ```
///
/// which has a gradient in p. The numbers u belong to the global tensor: they are the same on any number of ranks. p learns only if
/// [`regularization`](Self::regularization) is added to the loss. The logit counts as ±10 beyond that; PhysicsNeMo changes the
/// parameter itself then.
///
/// State dict: `p_logit`, without dims.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::{ConcreteDropout, Mode};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let dropout = ConcreteDropout::new(0.25, &mut ParamStore::new(Generator::new(1)))?;
/// let x = Tensor::ones([100, 100], (Kind::Float, Device::Cpu));
/// assert_eq!(dropout.forward(&x, Mode::Eval)?, x);
/// let dropped = dropout.forward(&x, Mode::train(&Generator::new(2)))?.lt(0.5).to_kind(Kind::Float);
/// assert!((dropped.mean(Kind::Float).double_value(&[]) - 0.25).abs() < 0.02);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct ConcreteDropout<A> {
    p_logit: A,
}

impl<A: Array> ConcreteDropout<A> {
    /// Makes the layer. It starts with the probability `p`, of at least 0.01 and at most 0.99.
    ///
    /// # Errors
    ///
    /// `params` refuses the parameter.
    pub fn new(p: f64, params: &mut impl Params<Array = A>) -> Result<Self> {
        let p = p.clamp(0.01, 0.99);
        let start = Init::Constant((p / (1.0 - p)).ln());
        Ok(Self { p_logit: params.param("p_logit", &[], start, Placement::Replicate)? })
    }

    /// Drops elements of `x` `[batch, …]` in training; returns `x` in evaluation.
    ///
    /// # Errors
    ///
    /// A mode whose part of the batch has another number of samples.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        match mode.uniform(x, 0)? {
            Some(u) => self.drop_with(x, &u),
            None => Ok(x.shallow_clone()),
        }
    }

    /// Drops elements of `x` by the uniform numbers `u` of the same shape.
    fn drop_with(&self, x: &A, u: &A) -> Result<A> {
        let u = u.unary(Unary::Clamp { min: EPS, max: 1.0 - EPS })?;
        let noise = u.unary(Unary::Log)?.sub(&one_minus(&u)?.unary(Unary::Log)?)?;
        let logit = self.logit()?;
        let dropped = noise.add(&logit)?.mul_scalar(1.0 / TEMPERATURE)?.unary(Unary::Sigmoid)?;
        let kept = one_minus(&logit.unary(Unary::Sigmoid)?)?.add_scalar(EPS)?;
        Ok(x.mul(&one_minus(&dropped)?)?.div(&kept)?)
    }

    /// Returns the logit within its bounds. Its gradient is that of the parameter.
    fn logit(&self) -> Result<A> {
        let bounds = Unary::Clamp { min: -LARGEST_LOGIT, max: LARGEST_LOGIT };
        let beyond = self.p_logit.unary(bounds)?.sub(&self.p_logit)?.detach()?;
        Ok(self.p_logit.add(&beyond)?)
    }

    /// Computes p, without dims.
    ///
    /// # Errors
    ///
    /// An operator fails.
    pub fn probability(&self) -> Result<A> {
        Ok(self.p_logit.unary(Unary::Sigmoid)?)
    }

    /// Computes p ln p + (1 − p) ln(1 − p), the negative entropy of a dropped element, without dims. Training adds it to the loss,
    /// times a weight.
    ///
    /// # Errors
    ///
    /// An operator fails.
    pub fn regularization(&self) -> Result<A> {
        let entropy = |p: &A| p.mul(&p.add_scalar(EPS)?.unary(Unary::Log)?);
        let p = self.probability()?;
        Ok(entropy(&p)?.add(&entropy(&one_minus(&p)?)?)?)
    }
}

fn one_minus<A: Array>(x: &A) -> isobar_array::Result<A> {
    x.mul_scalar(-1.0)?.add_scalar(1.0)
}

#[cfg(test)]
mod tests {
    use isobar_array::{Generator, Window};
    use isobar_shard::ParamStore;
    use tch::{Device, Kind, Tensor};

    use super::*;

    /// Gradients of the logit, the probability and the entropy agree with differences.
    #[test]
    fn gradients_are_those_of_finite_differences() {
        let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
        let dropout = ConcreteDropout::new(0.3, &mut store).unwrap();
        let draw =
            |seed: u64| Generator::new(seed).uniform(&Window::whole(&[3, 5]), 0.0, 1.0, DOUBLE).unwrap();
        let (x, u, c) = (draw(2), draw(3), draw(4));
        let loss = || {
            let y = dropout.drop_with(&x, &u).unwrap();
            (y * &c).sum(Kind::Double) + dropout.regularization().unwrap()
        };
        loss().backward();
        let logit = &store.parameters()[0].tensor;
        assert!((logit.detach().sigmoid().double_value(&[]) - 0.3).abs() < 1e-12);
        let gradient = logit.grad().double_value(&[]);
        let moved = |by: f64| {
            let _ = logit.detach().f_add_scalar_(by).unwrap();
            let value = loss().double_value(&[]);
            let _ = logit.detach().f_add_scalar_(-by).unwrap();
            value
        };
        let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        assert!((gradient - difference).abs() < 1e-8 * gradient.abs().max(1.0), "{gradient} {difference}");
    }

    /// The logit counts as at most 10, and recovers from beyond.
    #[test]
    fn a_logit_out_of_bounds_has_a_gradient() {
        let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
        let dropout = ConcreteDropout::new(0.3, &mut store).unwrap();
        let logit = &store.parameters()[0].tensor;
        let _ = logit.detach().f_fill_(50.0).unwrap();
        assert_eq!(dropout.logit().unwrap().double_value(&[]), 10.0);
        let (x, u) = (Tensor::ones([4], DOUBLE), Tensor::full([4], 1e-4, DOUBLE));
        dropout.drop_with(&x, &u).unwrap().sum(Kind::Double).backward();
        assert!(logit.grad().abs().double_value(&[]) > 0.0);
    }

    const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
}
