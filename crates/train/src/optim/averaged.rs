//! Averages of parameters over the steps of a run.

use tch::Tensor;

use super::state::copy_into;
use super::{AverageRule, AverageState, Optimizer, OptimizerState};
use crate::error::{Context, Error, Result};
use crate::params::{Parameter, Parameters};

/// The slot of the average of that number in an optimizer's state.
pub(crate) fn average_slot(at: usize) -> String {
    match at {
        0 => "average".to_owned(),
        _ => format!("average_{}", at + 1),
    }
}

/// Returns, for each rule, the place in `saved` of the average that it continues: one of an equal rule, else the first that it
/// [may continue](AverageRule::continues). Each saved average is continued at most once.
pub(crate) fn continued(rules: &[AverageRule], saved: &[AverageState]) -> Vec<Option<usize>> {
    // An average without steps has not begun; the state of an optimizer does not list it.
    let mut free: Vec<bool> = saved.iter().map(|saved| saved.steps > 0).collect();
    let mut take = |fits: &dyn Fn(AverageRule) -> bool| {
        let at = (0..saved.len()).find(|&at| free[at] && fits(saved[at].rule))?;
        free[at] = false;
        Some(at)
    };
    let equal: Vec<Option<usize>> = rules.iter().map(|&rule| take(&|saved| saved == rule)).collect();
    let or_other =
        |(rule, equal): (&AverageRule, Option<usize>)| equal.or_else(|| take(&|saved| rule.continues(saved)));
    rules.iter().zip(equal).map(or_other).collect()
}

/// Optimizer that keeps running averages of the parameters (Polyak and Juditsky, 1992), one for each [`AverageRule`]. They often
/// validate better than the parameters of any one step. The first average is used for validation and prediction.
///
/// The averages are part of the optimizer's state, placed as the parameters are.
///
/// ```
/// use isobar_train::optim::{AverageRule, Averaged, Optimizer, Sgd, SgdConfig};
/// use isobar_train::{Parameter, Parameters};
/// use tch::Tensor;
///
/// let x = Tensor::f_from_slice(&[1.0f64])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("x", &x)])?;
/// let sgd = Box::new(Sgd::new(&params, &SgdConfig::default())?);
/// let mut sgd = Averaged::new(sgd, &params, &[AverageRule::Decay(0.5)])?;
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
    averages: Vec<Average>,
    /// True while the parameters are the first averages.
    swapped: bool,
}

struct Average {
    rule: AverageRule,
    /// Number of averaged steps.
    taken: u64,
    /// Step of the run after which it began.
    origin: Option<u64>,
    slots: Vec<(Parameter, Tensor)>,
}

impl Averaged {
    /// Averages of `params`, which `inner` steps, one for each rule.
    ///
    /// # Errors
    ///
    /// A decay or a width out of its range; no memory.
    pub fn new(inner: Box<dyn Optimizer>, params: &Parameters, rules: &[AverageRule]) -> Result<Self> {
        let averages = rules.iter().map(|&rule| Average::new(rule, params)).collect::<Result<_>>()?;
        Ok(Self { inner, averages, swapped: false })
    }

    /// Returns whether there are averages, that is, after the first averaged step.
    pub fn averages(&self) -> bool {
        self.averages.first().is_some_and(Average::begun)
    }

    /// Sets the number of steps of the run before the next [`step`](Optimizer::step), skipped steps included. Averages that
    /// begin with that step have it as their origin. Averages from checkpoints of earlier versions, which lack an origin, get
    /// one as if no step had been skipped.
    pub fn set_run_step(&mut self, step: u64) {
        for average in &mut self.averages {
            average.origin = match average.begun() {
                true => average.origin.or(Some(step.saturating_sub(average.taken))),
                false => Some(step),
            };
        }
    }

    /// Swaps the parameters with their first averages for validation; a second call swaps them back. A no-op without averages.
    ///
    /// # Errors
    ///
    /// An error of libtorch.
    pub fn swap(&mut self) -> Result<()> {
        let Some(average) = self.averages.first().filter(|average| average.begun()) else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        for (param, average) in &average.slots {
            let swap = || {
                let values = param.tensor.f_detach()?.f_detach_copy()?;
                param.tensor.shallow_clone().f_copy_(average)?;
                average.shallow_clone().f_copy_(&values)
            };
            swap().context(|| format!("taking the average of parameter {:?}", param.name))?;
        }
        self.swapped = !self.swapped;
        Ok(())
    }
}

impl Optimizer for Averaged {
    fn step(&mut self, lr: f64) -> Result<()> {
        if self.swapped {
            return Err(Error::invalid(
                "the parameters",
                "their averages",
                "those that are trained: swap them back first",
            ));
        }
        self.inner.step(lr)?;
        self.averages.iter_mut().try_for_each(Average::take)
    }

    fn state(&self) -> OptimizerState {
        let mut state = self.inner.state();
        // Before the first step there is nothing to average.
        for average in self.averages.iter().filter(|average| average.begun()) {
            let slot = average_slot(state.averages.len());
            state.averages.push(AverageState {
                rule: average.rule,
                steps: average.taken,
                origin: average.origin,
            });
            average.slots.iter().for_each(|(param, tensor)| state.push(&slot, param, tensor));
        }
        state
    }

    /// Averages that the state does not have, of a run that kept none or others, begin with the next step.
    fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        let rules: Vec<AverageRule> = self.averages.iter().map(|average| average.rule).collect();
        let sources: Vec<Option<(String, AverageState)>> = continued(&rules, &state.averages)
            .into_iter()
            .map(|at| at.map(|at| (average_slot(at), state.averages[at])))
            .collect();
        for (average, source) in self.averages.iter().zip(&sources) {
            if let Some((slot, _)) = source {
                average.slots.iter().try_for_each(|(param, _)| state.find(slot, param).map(drop))?;
            }
        }
        self.inner.load_state(state)?;
        for (average, source) in self.averages.iter_mut().zip(sources) {
            average.taken = source.as_ref().map_or(0, |(_, saved)| saved.steps);
            average.origin = source.as_ref().and_then(|(_, saved)| saved.origin);
            let Some((slot, _)) = source else { continue };
            let mut slots = average.slots.iter();
            slots.try_for_each(|(param, tensor)| copy_into(tensor, state.find(&slot, param)?, &slot))?;
        }
        Ok(())
    }
}

impl Average {
    fn new(rule: AverageRule, params: &Parameters) -> Result<Self> {
        rule.check()?;
        let _no_grad = tch::no_grad_guard();
        let slot = |param: &Parameter| {
            let average = param.tensor.f_detach().and_then(|tensor| tensor.f_detach_copy());
            Ok((param.clone(), average.context(|| format!("the average of parameter {:?}", param.name))?))
        };
        Ok(Self { rule, taken: 0, origin: None, slots: params.iter().map(slot).collect::<Result<_>>()? })
    }

    fn begun(&self) -> bool {
        self.taken > 0
    }

    fn take(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.taken += 1;
        let kept = self.rule.kept(self.taken);
        for (param, average) in &self.slots {
            let taken = match kept {
                0.0 => average.shallow_clone().f_copy_(&param.tensor),
                _ => average.shallow_clone().f_lerp_(&param.tensor, 1.0 - kept).map(drop),
            };
            taken.context(|| format!("averaging parameter {:?}", param.name))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tch::{Device, Kind};

    use super::super::{AdamWConfig, OptimizerKind};
    use super::AverageRule::{Decay, Width};
    use super::*;

    fn averaged(x: &Tensor, rules: &[AverageRule]) -> Averaged {
        let params = Parameters::new(vec![Parameter::replicated("x", x)]).unwrap();
        let inner = OptimizerKind::from(AdamWConfig::default()).build(&params).unwrap();
        Averaged::new(inner, &params, rules).unwrap()
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
        let mut optimizer = averaged(&x, &[Decay(0.3)]);
        let mut expected = Tensor::new();
        let mut resumed = averaged(&other, &[Decay(0.3)]);
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
        let (mut with, mut without) = (averaged(&x, &[Decay(0.9)]), averaged(&y, &[]));
        step(&x, &mut with);
        step(&y, &mut without);
        without.load_state(&with.state()).unwrap();
        without.swap().unwrap();
        step(&y, &mut without);
        with.load_state(&without.state()).unwrap();
        assert!(!with.averages() && with.state().averages.is_empty());
        step(&x, &mut with);
        with.swap().unwrap();
        // The first step after it begins them anew.
        let average = x.detach().copy();
        with.swap().unwrap();
        assert_eq!(x.detach(), average);
        assert!(Averaged::new(Box::new(without), &Parameters::new(vec![]).unwrap(), &[Decay(1.0)]).is_err());
    }

    /// The first average is the one that is swapped in; each goes on from its own in the state, in whatever place that is.
    #[test]
    fn several_averages_go_on_from_their_own() {
        let (x, other) = (leaf(), leaf());
        let mut optimizer = averaged(&x, &[Width(0.05), Width(0.1)]);
        let mut resumed = averaged(&other, &[Width(0.1), Decay(0.5), Width(0.05)]);
        let (mut narrow, mut wide) = (Tensor::new(), Tensor::new());
        for t in 1..8u64 {
            step(&x, &mut optimizer);
            let next = |average: &Tensor, width: f64| match t {
                1 => x.detach().copy(),
                _ => {
                    let kept = (1.0 - 1.0 / t as f64).powf(super::super::exponent(width).unwrap() + 1.0);
                    average * kept + x.detach() * (1.0 - kept)
                }
            };
            (narrow, wide) = (next(&narrow, 0.05), next(&wide, 0.1));
            if t == 4 {
                resumed.load_state(&optimizer.state()).unwrap();
                tch::no_grad(|| other.shallow_clone().copy_(&x));
            } else if t > 4 {
                step(&other, &mut resumed);
            }
        }
        optimizer.swap().unwrap();
        assert!(x.allclose(&narrow, 1e-13, 0.0, false), "{x}");
        resumed.swap().unwrap();
        assert!(other.allclose(&wide, 1e-13, 0.0, false), "{other}");
        let steps: Vec<u64> = resumed.state().averages.iter().map(|average| average.steps).collect();
        assert_eq!(steps, [7, 3, 7]);
    }

    #[rstest]
    #[case::alike(&[Decay(0.9), Decay(0.999)], &[Some(0), Some(1)])]
    #[case::in_another_order(&[Decay(0.999), Decay(0.9)], &[Some(1), Some(0)])]
    #[case::an_equal_rule_comes_first(&[Decay(0.5), Decay(0.9)], &[Some(1), Some(0)])]
    #[case::others_in_order(&[Decay(0.5), Decay(0.6)], &[Some(0), Some(1)])]
    #[case::each_once(&[Decay(0.5), Decay(0.9), Decay(0.9), Width(0.1)], &[Some(1), Some(0), None, None])]
    #[case::none(&[], &[])]
    fn each_rule_continues_a_saved_average_of_its_own(
        #[case] rules: &[AverageRule],
        #[case] expected: &[Option<usize>],
    ) {
        let of = |rule, steps| AverageState { rule, steps, origin: None };
        let saved = [of(Decay(0.9), 3), of(Decay(0.999), 3), of(Width(0.1), 0)];
        assert_eq!(continued(rules, &saved), expected);
    }

    #[rstest]
    #[case::in_the_same_order(&[Decay(0.1), Decay(0.2)], ["average", "average_2"])]
    #[case::in_another_order(&[Decay(0.2), Decay(0.1)], ["average_2", "average"])]
    fn two_decays_go_on_from_their_own(#[case] rules: &[AverageRule], #[case] slots: [&str; 2]) {
        let (x, other) = (leaf(), leaf());
        let mut optimizer = averaged(&x, &[Decay(0.1), Decay(0.2)]);
        (0..3).for_each(|_| step(&x, &mut optimizer));
        let mut resumed = averaged(&other, rules);
        resumed.load_state(&optimizer.state()).unwrap();
        let param = Parameter::replicated("x", &x);
        let (found, saved) = (resumed.state(), optimizer.state());
        assert_ne!(saved.find("average", &param).unwrap(), saved.find("average_2", &param).unwrap());
        for (at, slot) in slots.into_iter().enumerate() {
            assert_eq!(found.averages[at].rule, rules[at]);
            assert_eq!(found.find(&average_slot(at), &param).unwrap(), saved.find(slot, &param).unwrap());
        }
    }

    /// A run leaves out its second and its third step. Averages of a state without origins get theirs from the run.
    #[test]
    fn steps_that_are_left_out_do_not_move_the_origin() {
        let (x, other) = (leaf(), leaf());
        let mut optimizer = averaged(&x, &[Width(0.05)]);
        let origin = |optimizer: &Averaged| optimizer.state().averages[0].origin;
        for at in [10, 13, 14] {
            optimizer.set_run_step(at);
            step(&x, &mut optimizer);
            assert_eq!(origin(&optimizer), Some(10));
        }
        let mut saved = optimizer.state();
        let mut resumed = averaged(&other, &[Width(0.05)]);
        resumed.load_state(&saved).unwrap();
        assert_eq!(origin(&resumed), Some(10));
        saved.averages[0].origin = None;
        resumed.load_state(&saved).unwrap();
        resumed.set_run_step(15);
        assert_eq!(origin(&resumed), Some(12));
    }
}
