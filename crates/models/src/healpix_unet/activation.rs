//! Activations by the names of their classes.

use isobar_array::{Array, Comparison, Unary};
use isobar_nn::{Activation, ActivationLayer};
use isobar_shard::{Init, Params, Placement};

use super::MODEL;
use super::checks::class;
use super::parts::HealpixFunction;
use crate::error::{Checker, Result};

/// An activation, checked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Function {
    Plain(Activation),
    Unary { function: Unary, cap: Option<f64> },
}

impl Function {
    pub(super) fn new(name: &str, config: &HealpixFunction) -> Result<Self> {
        const PLAIN: [(&str, Activation); 11] = [
            ("ELU", Activation::Elu),
            ("Identity", Activation::Identity),
            ("Mish", Activation::Mish),
            ("PReLU", Activation::Prelu),
            ("ReLU", Activation::Relu),
            ("SELU", Activation::Selu),
            ("SiLU", Activation::Silu),
            ("Sigmoid", Activation::Sigmoid),
            ("Softplus", Activation::Softplus),
            ("Softsign", Activation::Softsign),
            ("Tanh", Activation::Tanh),
        ];
        let known: Vec<&str> = ["CappedGELU", "CappedLeakyReLU", "GELU", "LeakyReLU"]
            .into_iter()
            .chain(PLAIN.map(|f| f.0))
            .collect();
        let class = class(&format!("{name}.activation"), &config.target, &known)?;
        let check = Checker(MODEL);
        let refuses = |argument: &str, given: bool, takes: bool| {
            check.ensure(!given || takes, || {
                format!("{name}.activation: {class} takes no {argument}; remove it")
            })
        };
        let capped = class.starts_with("Capped");
        let (gelu, leaky) = (class.ends_with("GELU"), class.ends_with("LeakyReLU"));
        refuses("cap_value", config.cap_value.is_some(), capped)?;
        refuses("approximate", config.approximate.is_some(), gelu)?;
        refuses("negative_slope", config.negative_slope.is_some(), leaky)?;
        let cap = capped.then(|| config.cap_value.unwrap_or(1.0));
        check.ensure(cap.is_none_or(f64::is_finite), || {
            format!("{name}.activation.cap_value is not finite")
        })?;
        if let Some((_, plain)) = PLAIN.iter().find(|(known, _)| *known == class) {
            return Ok(Self::Plain(*plain));
        }
        let function = match config.approximate.as_deref() {
            _ if leaky => Unary::LeakyRelu(config.negative_slope.unwrap_or(0.01)),
            None | Some("none") => Unary::Gelu,
            Some("tanh") => Unary::GeluTanh,
            Some(other) => {
                let reason =
                    || format!("{name}.activation.approximate is {other:?}, expected \"none\" or \"tanh\"");
                return check.ensure(false, reason).map(|()| Self::Plain(Activation::Identity));
            }
        };
        Ok(Self::Unary { function, cap })
    }
}

/// An activation that serves several layers, and the name under which its state was made.
#[derive(Debug)]
pub(super) struct SharedActivation<A> {
    function: Function,
    layer: Option<ActivationLayer<A>>,
    /// Cap of the values, a buffer: a loaded state dict replaces the configuration's cap.
    cap: Option<A>,
    first: String,
}

impl<A: Array> SharedActivation<A> {
    /// Makes the activation under its first name.
    pub(super) fn new(function: Function, name: String, params: &mut impl Params<Array = A>) -> Result<Self> {
        let (mut layer, mut cap) = (None, None);
        match function {
            Function::Plain(activation) => {
                layer = Some(ActivationLayer::new(activation, &mut params.scope(&name))?);
            }
            Function::Unary { cap: Some(value), .. } => {
                let init = Init::Constant(value);
                cap = Some(params.buffer(&format!("{name}.cap"), &[], init, Placement::Replicate)?);
            }
            Function::Unary { .. } => {}
        }
        Ok(Self { function, layer, cap, first: name })
    }

    /// Gives its state a further name.
    pub(super) fn tie(&self, name: &str, params: &mut impl Params<Array = A>) -> Result<()> {
        if let Some(layer) = &self.layer {
            layer.tie(name, &self.first, params)?;
        }
        if self.cap.is_some() {
            params.tie(&format!("{name}.cap"), &format!("{}.cap", self.first))?;
        }
        Ok(())
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        let y = match (&self.layer, self.function) {
            (Some(layer), _) => layer.forward(x)?,
            (None, Function::Unary { function, .. }) => x.unary(function)?,
            (None, Function::Plain(_)) => x.shallow_clone(),
        };
        let Some(cap) = &self.cap else { return Ok(y) };
        let cap = cap.to_kind(y.kind())?;
        Ok(y.compare(Comparison::Gt, &cap)?.select_where(&cap, &y)?)
    }
}
