//! The exponential moving average of parameters.

use tch::Tensor;

use super::state::copy_into;
use super::{Optimizer, OptimizerState};
use crate::error::{Context, Error, Result};
use crate::params::{Parameter, Parameters};

/// The slot of the averages in an optimizer's state.
pub(crate) const AVERAGE: &str = "average";

/// An optimizer that keeps, if asked to, an exponential moving average of the parameters (Polyak and Juditsky, 1992), which often
/// validates better than the parameters of any one step.
///
/// After step t (from 1) average ← d · average + (1 − d) · parameter, with d = min(decay, (1 + t) / (10 + t)), so that the first
/// parameters do not weigh for long; after the first step it is the parameters. The averages are part of the optimizer's state,
/// placed as the parameters are.
///
/// ```
/// use isobar_train::optim::{Averaged, Optimizer, Sgd, SgdConfig};
/// use isobar_train::{Parameter, Parameters};
/// use tch::Tensor;
///
/// let x = Tensor::f_from_slice(&[1.0f64])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("x", &x)])?;
/// let sgd = Box::new(Sgd::new(&params, &SgdConfig::default())?);
/// let mut sgd = Averaged::new(sgd, &params, Some(0.5))?;
/// x.f_square()?.f_sum(None)?.f_backward()?;
/// sgd.step(0.1)?;
/// sgd.step(0.1)?;
/// let last = x.f_double_value(&[0])?;
/// sgd.swap()?; // x is the average now
/// assert!(x.f_double_value(&[0])? > last);
/// sgd.swap()?;
/// assert_eq!(x.f_double_value(&[0])?, last);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Averaged {
    inner: Box<dyn Optimizer>,
    average: Option<Average>,
}

struct Average {
    decay: f64,
    /// Number of averaged steps.
    taken: u64,
    slots: Vec<(Parameter, Tensor)>,
    swapped: bool,
}

impl Averaged {
    /// Averages of `params`, which `inner` steps; without a decay there are none.
    ///
    /// # Errors
    ///
    /// A decay outside [0, 1); no memory.
    pub fn new(inner: Box<dyn Optimizer>, params: &Parameters, decay: Option<f64>) -> Result<Self> {
        let Some(decay) = decay else { return Ok(Self { inner, average: None }) };
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::invalid("the decay of averaged parameters", decay, "a number in [0, 1)"));
        }
        let _no_grad = tch::no_grad_guard();
        let slot = |param: &Parameter| {
            let average = param.tensor.f_detach().and_then(|tensor| tensor.f_detach_copy());
            Ok((param.clone(), average.context(|| format!("the average of parameter {:?}", param.name))?))
        };
        let slots = params.iter().map(slot).collect::<Result<_>>()?;
        Ok(Self { inner, average: Some(Average { decay, taken: 0, slots, swapped: false }) })
    }

    /// Returns whether there are averages, that is, after the first averaged step.
    pub fn averages(&self) -> bool {
        self.average.as_ref().is_some_and(Average::begun)
    }

    /// Exchanges the parameters and their averages, for a validation; once more puts them back. Where there are no averages,
    /// nothing.
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    pub fn swap(&mut self) -> Result<()> {
        let Some(average) = self.average.as_mut().filter(|average| average.begun()) else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        for (param, average) in &average.slots {
            let swap = || {
                let values = param.tensor.f_detach()?.f_detach_copy()?;
                param.tensor.shallow_clone().f_copy_(average)?;
                average.shallow_clone().f_copy_(&values)
            };
            swap().context(|| format!("taking the average of parameter {:?}", param.name))?;
        }
        average.swapped = !average.swapped;
        Ok(())
    }
}

impl Optimizer for Averaged {
    fn step(&mut self, lr: f64) -> Result<()> {
        if self.average.as_ref().is_some_and(|average| average.swapped) {
            return Err(Error::invalid(
                "the parameters",
                "their averages",
                "those that are trained: swap them back first",
            ));
        }
        self.inner.step(lr)?;
        match &mut self.average {
            Some(average) => average.take(),
            None => Ok(()),
        }
    }

    fn state(&self) -> OptimizerState {
        let mut state = self.inner.state();
        // Before the first step there is nothing to average.
        if let Some(average) = self.average.as_ref().filter(|average| average.begun()) {
            state.averaged = Some(average.taken);
            average.slots.iter().for_each(|(param, tensor)| state.push(AVERAGE, param, tensor));
        }
        state
    }

    /// State without averages, of a run that kept none, is accepted: they begin with the next step.
    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        if let (Some(average), Some(_)) = (&self.average, state.averaged) {
            average.slots.iter().try_for_each(|(param, _)| state.find(AVERAGE, param).map(drop))?;
        }
        self.inner.load_state(state)?;
        let Some(average) = &mut self.average else { return Ok(()) };
        average.taken = state.averaged.unwrap_or(0);
        if state.averaged.is_none() {
            return Ok(());
        }
        average
            .slots
            .iter()
            .try_for_each(|(param, tensor)| copy_into(tensor, state.find(AVERAGE, param)?, AVERAGE))
    }
}

impl Average {
    fn begun(&self) -> bool {
        self.taken > 0
    }

    fn take(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.taken += 1;
        let steps = self.taken as f64;
        let decay = match self.taken {
            1 => 0.0,
            _ => self.decay.min((1.0 + steps) / (10.0 + steps)),
        };
        for (param, average) in &self.slots {
            let taken = match decay {
                0.0 => average.shallow_clone().f_copy_(&param.tensor),
                _ => average.shallow_clone().f_lerp_(&param.tensor, 1.0 - decay).map(drop),
            };
            taken.context(|| format!("averaging parameter {:?}", param.name))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::super::{AdamWConfig, OptimizerKind};
    use super::*;

    fn averaged(x: &Tensor, decay: Option<f64>) -> Averaged {
        let params = Parameters::new(vec![Parameter::replicated("x", x)]).unwrap();
        let inner = OptimizerKind::from(AdamWConfig::default()).build(&params).unwrap();
        Averaged::new(inner, &params, decay).unwrap()
    }

    fn leaf() -> Tensor {
        (Tensor::arange(5, (Kind::Double, Device::Cpu)) - 1.5).set_requires_grad(true)
    }

    fn step(x: &Tensor, optimizer: &mut Averaged) {
        if x.grad().defined() {
            let _ = x.grad().zero_();
        }
        x.square().sum(Kind::Double).backward();
        optimizer.step(0.1).unwrap();
    }

    #[test]
    fn the_average_is_by_its_definition_and_goes_on_from_its_state() {
        let (x, other) = (leaf(), leaf());
        let mut optimizer = averaged(&x, Some(0.3));
        let mut expected = Tensor::new();
        let mut resumed = averaged(&other, Some(0.3));
        for t in 1..8 {
            step(&x, &mut optimizer);
            let decay = f64::min(0.3, (1 + t) as f64 / (10 + t) as f64);
            expected = if t == 1 { x.detach().copy() } else { expected * decay + x.detach() * (1.0 - decay) };
            if t == 4 {
                resumed.load_state(&optimizer.state()).unwrap();
                tch::no_grad(|| other.shallow_clone().copy_(&x));
            } else if t > 4 {
                step(&other, &mut resumed);
            }
        }
        let last = x.detach().copy();
        for (x, optimizer) in [(&x, &mut optimizer), (&other, &mut resumed)] {
            optimizer.swap().unwrap();
            assert!(x.allclose(&expected, 1e-14, 0.0, false), "{x}");
            assert!(optimizer.step(0.1).is_err());
            optimizer.swap().unwrap();
            assert_eq!(x.detach(), last);
        }
    }

    #[test]
    fn runs_with_and_without_averages_go_on_from_each_other() {
        let (x, y) = (leaf(), leaf());
        let (mut with, mut without) = (averaged(&x, Some(0.9)), averaged(&y, None));
        step(&x, &mut with);
        step(&y, &mut without);
        without.load_state(&with.state()).unwrap();
        without.swap().unwrap();
        step(&y, &mut without);
        with.load_state(&without.state()).unwrap();
        assert!(!with.averages() && with.state().averaged.is_none());
        step(&x, &mut with);
        with.swap().unwrap();
        // The first step after it begins them anew.
        let average = x.detach().copy();
        with.swap().unwrap();
        assert_eq!(x.detach(), average);
        assert!(Averaged::new(Box::new(without), &Parameters::new(vec![]).unwrap(), Some(1.0)).is_err());
    }
}
