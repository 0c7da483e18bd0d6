//! The linear layer.

use isobar_array::{Array, Reduction};
use isobar_shard::{Init, Params, Placement, Result};

use crate::check::{extent, refuse};
use crate::layer::layers_without_mode;

/// Parametrization of a linear layer's weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightForm {
    /// W = `weight`.
    #[default]
    Plain,
    /// W = `weight_g` · `weight` / ‖`weight`‖, row by row: Salimans and Kingma, *Weight Normalization*, arXiv:1602.07868.
    Normalized,
    /// W = `g` · `v`, row by row: Wang et al., *Random Weight Factorization*, arXiv:2210.01274.
    Factorized,
}

/// Options of a [`Linear`] layer.
#[derive(Debug)]
pub struct LinearOptions<A> {
    /// Adds a bias.
    pub bias: bool,
    /// Initial weight; PyTorch's default is uniform in ±1/√`in_features`.
    pub weight_init: Option<Init<A>>,
    /// Initial bias; PyTorch's default is uniform in ±1/√`in_features`.
    pub bias_init: Option<Init<A>>,
    /// Parametrization of the weight.
    pub form: WeightForm,
    /// Number of trailing dims of extent 1 of `weight` in the state dict: for weights of a convolution of kernel 1 that is
    /// computed as a linear layer on channels-last fields. Only with a plain weight.
    pub kernel_dims: usize,
    /// Trains the bias; otherwise it is a buffer.
    pub train_bias: bool,
}

impl<A> Default for LinearOptions<A> {
    fn default() -> Self {
        Self {
            bias: true,
            weight_init: None,
            bias_init: None,
            form: WeightForm::Plain,
            kernel_dims: 0,
            train_bias: true,
        }
    }
}

/// y = x Wᵀ + b along the last dim (`torch.nn.Linear`).
///
/// Shapes: input `[…, in_features]`, output `[…, out_features]`. State dict: `weight` `[out_features, in_features]`, `bias`
/// `[out_features]`. Both start uniform in ±1/√`in_features`.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::Linear;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let mut params = ParamStore::new(Generator::new(1));
/// let linear = Linear::new(3, 5, &mut params)?;
/// let y = linear.forward(&Tensor::ones([2, 7, 3], (Kind::Float, Device::Cpu)))?;
/// assert_eq!(y.size(), [2, 7, 5]);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Linear<A> {
    form: WeightForm,
    weight: A,
    /// Length or factor of each row, `[out_features, 1]`.
    row: Option<A>,
    bias: Option<A>,
}

impl<A: Array> Linear<A> {
    /// Makes a layer with a bias and PyTorch's initial values.
    ///
    /// # Errors
    ///
    /// A size below 1, or a parameter that `params` refuses.
    pub fn new(in_features: i64, out_features: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        Self::with_options(in_features, out_features, LinearOptions::default(), params)
    }

    /// Makes a layer with options.
    ///
    /// # Errors
    ///
    /// A size below 1, `kernel_dims` with another form than a plain weight, or a parameter that `params` refuses.
    pub fn with_options(
        in_features: i64,
        out_features: i64,
        options: LinearOptions<A>,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        const OP: &str = "Linear";
        let (inputs, outputs) =
            (extent(OP, "in_features", in_features)?, extent(OP, "out_features", out_features)?);
        if options.kernel_dims > 0 && options.form != WeightForm::Plain {
            return refuse(
                OP,
                format!("{:?} together with kernel_dims; expected a plain weight", options.form),
            );
        }
        let whole = Placement::Replicate;
        let shape = [&[outputs, inputs], &vec![1; options.kernel_dims][..]].concat();
        let start = options.weight_init.unwrap_or(Init::FanIn(inputs));
        let (weight, row) = match options.form {
            WeightForm::Plain => (params.param("weight", &shape, start, whole)?, None),
            WeightForm::Normalized => {
                let weight = params.param("weight", &shape, start, whole)?;
                (weight, Some(params.param("weight_g", &[outputs, 1], Init::Constant(1.0), whole)?))
            }
            WeightForm::Factorized => {
                let factor = Init::LogNormal { mean: 1.0, std: 0.1 };
                let row = params.param("g", &[outputs, 1], factor, whole)?;
                let weight = params.draw("weight", &shape, &start, whole)?.div(&row.detach()?)?;
                (params.param("v", &shape, Init::Given(weight), whole)?, Some(row))
            }
        };
        let bias = if options.bias {
            let start = options.bias_init.unwrap_or(Init::FanIn(inputs));
            Some(match options.train_bias {
                true => params.param("bias", &[outputs], start, whole)?,
                false => params.buffer("bias", &[outputs], start, whole)?,
            })
        } else {
            None
        };
        Ok(Self { form: options.form, weight, row, bias })
    }

    /// Computes `[…, out_features]` from `x` `[…, in_features]`.
    ///
    /// # Errors
    ///
    /// Another last extent, or an operator that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        let shape = self.weight.shape();
        let flat;
        let weight = match (self.form, &self.row) {
            (WeightForm::Normalized, Some(row)) => {
                let length = self.weight.reduce(Reduction::Norm, &[1], true)?;
                flat = self.weight.mul(&row.div(&length)?)?;
                &flat
            }
            (WeightForm::Factorized, Some(row)) => {
                flat = self.weight.mul(row)?;
                &flat
            }
            _ if shape.len() > 2 => {
                flat = self.weight.reshape(&shape[..2])?;
                &flat
            }
            _ => &self.weight,
        };
        Ok(x.linear(weight, self.bias.as_ref())?)
    }

    /// Returns the number of output features.
    pub fn out_features(&self) -> i64 {
        self.weight.shape()[0]
    }
}

layers_without_mode!(Linear);
