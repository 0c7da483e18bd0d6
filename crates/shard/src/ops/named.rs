//! The built-in operators by name, with arguments by PyTorch's names.

use isobar_array::{
    Attrs, Binary, Comparison, Conv, Elementwise, FftNorm, Generator, GridSample, Interpolation, PadMode,
    Padding, Pool, Resample, Resize, RunningStats, SamplePadding, Spectral, Statistic, Unary, Window,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::attention::AttentionOptions;
use super::refuse;
use crate::error::Result;
use crate::promote::operand;
use crate::tensor::ShardTensor;

/// Runs the built-in operator of that name; `None` where there is none.
pub(crate) fn builtin(
    name: &str,
    inputs: &[&ShardTensor],
    attrs: &Attrs,
) -> Option<Result<Vec<ShardTensor>>> {
    let call = Call { inputs, attrs };
    let found = call.unary(name).map(|function| Ok(one(call.input(0)?.unary(function?)?)));
    let found = found.or_else(|| call.binary(name).map(|result| result.map(one)));
    let found = found.or_else(|| call.compare(name).map(|result| result.map(one)));
    let found = found.or_else(|| call.statistic(name).map(|result| result.map(one)));
    let found = found.or_else(|| call.fourier(name).map(|result| result.map(one)));
    let found = found.or_else(|| call.windowed(name));
    found.or_else(|| call.other(name))
}

fn one(tensor: ShardTensor) -> Vec<ShardTensor> {
    vec![tensor]
}

fn two((a, b): (ShardTensor, ShardTensor)) -> Vec<ShardTensor> {
    vec![a, b]
}

/// Functions of one number, without arguments.
const PLAIN: [Unary; 21] = [
    Unary::Neg,
    Unary::Abs,
    Unary::Square,
    Unary::Sqrt,
    Unary::Rsqrt,
    Unary::Reciprocal,
    Unary::Exp,
    Unary::Log,
    Unary::Sin,
    Unary::Cos,
    Unary::Tanh,
    Unary::Sigmoid,
    Unary::LogSigmoid,
    Unary::Relu,
    Unary::Elu,
    Unary::Celu,
    Unary::Selu,
    Unary::Silu,
    Unary::Softplus,
    Unary::Softsign,
    Unary::Tanhshrink,
];

/// Statistics, with libtorch's default where one has a choice.
const STATISTICS: [Statistic; 11] = [
    Statistic::Sum,
    Statistic::Mean,
    Statistic::Prod,
    Statistic::Max,
    Statistic::Min,
    Statistic::Var { correction: 1 },
    Statistic::Std { correction: 1 },
    Statistic::Norm,
    Statistic::LogSumExp,
    Statistic::Any,
    Statistic::All,
];

/// A call of an operator by name.
struct Call<'a> {
    inputs: &'a [&'a ShardTensor],
    attrs: &'a Attrs,
}

impl<'a> Call<'a> {
    fn input(&self, index: usize) -> Result<&'a ShardTensor> {
        match self.inputs.get(index) {
            Some(input) => Ok(input),
            None => refuse("op", format!("{} tensors were given; one more is needed", self.inputs.len())),
        }
    }

    /// The argument `name`, which must be there.
    fn get<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        match self.optional(name)? {
            Some(value) => Ok(value),
            None => refuse("op", format!("the argument \"{name}\" is missing")),
        }
    }

    /// The argument `name`, or the default.
    fn or<T: DeserializeOwned>(&self, name: &str, default: T) -> Result<T> {
        Ok(self.optional(name)?.unwrap_or(default))
    }

    fn optional<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        match self.attrs.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match serde_json::from_value(value.clone()) {
                Ok(value) => Ok(Some(value)),
                Err(error) => refuse("op", format!("the argument \"{name}\" is {value}: {error}")),
            },
        }
    }

    /// The number `name`, also one that is not finite, as [`number`](super::number) writes it.
    fn number(&self, name: &str) -> Result<Option<f64>> {
        match self.attrs.get(name).and_then(Value::as_str) {
            Some("inf") => Ok(Some(f64::INFINITY)),
            Some("-inf") => Ok(Some(f64::NEG_INFINITY)),
            Some("nan") => Ok(Some(f64::NAN)),
            _ => self.optional(name),
        }
    }

    /// The number `name`, which must be there.
    fn needed_number(&self, name: &str) -> Result<f64> {
        match self.number(name)? {
            Some(value) => Ok(value),
            None => refuse("op", format!("the argument \"{name}\" is missing")),
        }
    }

    /// One number or several.
    fn list<T: DeserializeOwned>(&self, name: &str, default: Vec<T>) -> Result<Vec<T>> {
        match self.attrs.get(name) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Array(_)) => self.get(name),
            Some(_) => Ok(vec![self.get(name)?]),
        }
    }

    /// The function of one tensor that is called so.
    fn unary(&self, name: &str) -> Option<Result<Unary>> {
        if let Some(plain) = PLAIN.into_iter().find(|function| function.name() == name) {
            return Some(Ok(plain));
        }
        let alone = self.inputs.len() < 2;
        let function = || {
            Ok(match name {
                "leaky_relu" => Unary::LeakyRelu(self.or("negative_slope", 0.01)?),
                "gelu" => match &self.or("approximate", "none".to_owned())?[..] {
                    "none" => Unary::Gelu,
                    "tanh" => Unary::GeluTanh,
                    other => return refuse("gelu", format!("there is no approximation \"{other}\"")),
                },
                "softshrink" => Unary::Softshrink(self.or("lambd", 0.5)?),
                "threshold" => Unary::Threshold {
                    threshold: self.needed_number("threshold")?,
                    value: self.needed_number("value")?,
                },
                "clamp" => Unary::Clamp {
                    min: self.number("min")?.unwrap_or(f64::NEG_INFINITY),
                    max: self.number("max")?.unwrap_or(f64::INFINITY),
                },
                "add" => Unary::AddScalar(self.needed_number("other")?),
                "sub" => Unary::AddScalar(-self.needed_number("other")?),
                "mul" => Unary::MulScalar(self.needed_number("other")?),
                "div" => Unary::MulScalar(1.0 / self.needed_number("other")?),
                _ => Unary::PowScalar(self.needed_number("exponent")?),
            })
        };
        let with_arguments = matches!(name, "leaky_relu" | "gelu" | "softshrink" | "threshold" | "clamp")
            || (alone && matches!(name, "add" | "sub" | "mul" | "div" | "pow"));
        with_arguments.then(function)
    }

    fn binary(&self, name: &str) -> Option<Result<ShardTensor>> {
        let function = Binary::ALL.into_iter().find(|function| function.name() == name)?;
        Some(self.with_two(|a, b| a.binary(function, b)))
    }

    fn compare(&self, name: &str) -> Option<Result<ShardTensor>> {
        let comparison = Comparison::ALL.into_iter().find(|comparison| comparison.name() == name)?;
        Some(self.with_two(|a, b| a.compare(comparison, b)))
    }

    fn statistic(&self, name: &str) -> Option<Result<ShardTensor>> {
        let statistic = STATISTICS.into_iter().find(|statistic| statistic.name() == name)?;
        let correct = |correction: i64| match statistic {
            Statistic::Var { .. } => Statistic::Var { correction },
            Statistic::Std { .. } => Statistic::Std { correction },
            other => other,
        };
        let run = || {
            let dims: Vec<i64> = self.list("dim", Vec::new())?;
            let statistic = correct(self.or("correction", 1)?);
            self.input(0)?.statistic(statistic, &dims, self.or("keepdim", false)?)
        };
        Some(run())
    }

    fn fourier(&self, name: &str) -> Option<Result<ShardTensor>> {
        let transform = name.trim_end_matches(['2', 'n']);
        let run: fn(&ShardTensor, &[i64], &[i64], FftNorm) -> isobar_array::Result<ShardTensor> =
            match transform {
                "fft" => Spectral::fftn,
                "ifft" => Spectral::ifftn,
                "rfft" => Spectral::rfftn,
                "irfft" => Spectral::irfftn,
                _ => return None,
            };
        // Default dims: the last, the last two, or all.
        let default = match &name[transform.len()..] {
            "" => vec![-1],
            "2" => vec![-2, -1],
            "n" => vec![],
            _ => return None,
        };
        let call = || {
            let norm = match &self.or("norm", "backward".to_owned())?[..] {
                "backward" => FftNorm::Backward,
                "ortho" => FftNorm::Ortho,
                "forward" => FftNorm::Forward,
                other => return refuse("fft", format!("there is no norm \"{other}\"")),
            };
            let points = if name == transform { "n" } else { "s" };
            let points = if self.attrs.contains_key(points) { points } else { "s" };
            let dims = self.list("dim", default)?;
            Ok(run(self.input(0)?, &self.list::<i64>(points, Vec::new())?, &dims, norm)?)
        };
        Some(call())
    }

    fn windowed(&self, name: &str) -> Option<Result<Vec<ShardTensor>>> {
        Some(match name {
            "conv1d" | "conv2d" | "conv3d" => self.conv(false).map(one),
            "conv_transpose1d" | "conv_transpose2d" | "conv_transpose3d" => self.conv(true).map(one),
            "max_pool1d" | "max_pool2d" | "max_pool3d" => self.max_pool(spatial(name)),
            "avg_pool1d" | "avg_pool2d" | "avg_pool3d" => self.avg_pool(spatial(name)).map(one),
            "adaptive_avg_pool1d" | "adaptive_avg_pool2d" | "adaptive_avg_pool3d" => {
                self.adaptive(spatial(name)).and_then(|size| self.input(0)?.adaptive_avg_pool(&size)).map(one)
            }
            "adaptive_max_pool1d" | "adaptive_max_pool2d" | "adaptive_max_pool3d" => {
                self.adaptive(spatial(name)).and_then(|size| self.input(0)?.adaptive_max_pool(&size)).map(one)
            }
            "interpolate" => self.interpolate().map(one),
            "pad" => self.pad().map(one),
            _ => return None,
        })
    }

    fn conv(&self, transposed: bool) -> Result<ShardTensor> {
        let padding = match self.attrs.get("padding").and_then(Value::as_str) {
            Some("same") => Padding::Same,
            Some("valid") => Padding::Each(vec![0]),
            Some(other) => {
                return refuse("conv", format!("padding \"{other}\"; expected numbers, same or valid"));
            }
            None => Padding::Each(self.list("padding", vec![0])?),
        };
        let conv = Conv {
            stride: self.list("stride", vec![1])?,
            padding,
            dilation: self.list("dilation", vec![1])?,
            groups: self.or("groups", 1)?,
            padding_mode: pad_mode(&self.or("padding_mode", "zeros".to_owned())?)?,
        };
        let (x, weight, bias) = (self.input(0)?, self.input(1)?, operand(self.inputs.get(2).copied()));
        match transposed {
            true => x.conv_transpose(weight, bias, &conv, &self.list("output_padding", vec![0])?),
            false => x.conv(weight, bias, &conv),
        }
    }

    fn pool(&self) -> Result<Pool> {
        Ok(Pool {
            stride: self.list("stride", Vec::new())?,
            padding: self.list("padding", vec![0])?,
            dilation: self.list("dilation", vec![1])?,
            ceil_mode: self.or("ceil_mode", false)?,
            count_include_pad: self.or("count_include_pad", true)?,
            divisor_override: self.optional("divisor_override")?,
            ..Pool::new(&self.list::<i64>("kernel_size", Vec::new())?)
        })
    }

    fn max_pool(&self, spatial: usize) -> Result<Vec<ShardTensor>> {
        let (values, indices) = self.input(0)?.max_pool(spatial, &self.pool()?)?;
        Ok(if self.or("return_indices", false)? { vec![values, indices] } else { vec![values] })
    }

    fn avg_pool(&self, spatial: usize) -> Result<ShardTensor> {
        self.input(0)?.avg_pool(spatial, &self.pool()?)
    }

    /// The result's extents, of which those not given are the input's.
    fn adaptive(&self, spatial: usize) -> Result<Vec<i64>> {
        let x = self.input(0)?;
        let given: Vec<Option<i64>> = self.list("output_size", Vec::new())?;
        let own =
            |index: usize| x.shape().get(x.ndim().saturating_sub(spatial) + index).copied().unwrap_or(1);
        let of = |index: usize| given.get(if given.len() == 1 { 0 } else { index }).copied().flatten();
        Ok((0..spatial).map(|index| of(index).unwrap_or_else(|| own(index))).collect())
    }

    fn interpolate(&self) -> Result<ShardTensor> {
        let mode: String = self.or("mode", "nearest".to_owned())?;
        let interpolation = match mode.as_str() {
            "nearest" => Interpolation::Nearest,
            "nearest-exact" => Interpolation::NearestExact,
            "linear" | "bilinear" | "trilinear" => Interpolation::Linear,
            "bicubic" => Interpolation::Cubic,
            "area" => Interpolation::Area,
            other => return refuse("interpolate", format!("there is no mode \"{other}\"")),
        };
        let scales: Vec<f64> = self.list("scale_factor", Vec::new())?;
        let resize = match scales.is_empty() {
            true => Resize::Size(self.list("size", Vec::new())?),
            false if self.or("recompute_scale_factor", false)? => {
                // The scale only gives the extents; positions follow these.
                let x = self.input(0)?;
                let extents = x.shape().iter().skip(2).enumerate();
                let scaled = extents.map(|(i, &extent)| (extent as f64 * scales[i % scales.len()]) as i64);
                Resize::Size(scaled.collect())
            }
            false => Resize::Scale(scales),
        };
        self.input(0)?.interpolate(&resize, interpolation, self.or("align_corners", false)?)
    }

    fn grid_sample(&self) -> Result<GridSample> {
        let interpolation = match &self.or("mode", "bilinear".to_owned())?[..] {
            "bilinear" => Interpolation::Linear,
            "nearest" => Interpolation::Nearest,
            other => return refuse("grid_sample", format!("mode \"{other}\"; expected bilinear or nearest")),
        };
        let padding = match &self.or("padding_mode", "zeros".to_owned())?[..] {
            "zeros" => SamplePadding::Zeros,
            "border" => SamplePadding::Border,
            "reflection" => SamplePadding::Reflection,
            other => {
                let reason = format!("padding_mode \"{other}\"; expected zeros, border or reflection");
                return refuse("grid_sample", reason);
            }
        };
        Ok(GridSample { interpolation, padding, align_corners: self.or("align_corners", false)? })
    }

    fn pad(&self) -> Result<ShardTensor> {
        let mode = pad_mode(&self.or("mode", "constant".to_owned())?)?;
        self.input(0)?.pad_mode(&self.get::<Vec<i64>>("pad")?, mode, self.number("value")?.unwrap_or(0.0))
    }

    fn other(&self, name: &str) -> Option<Result<Vec<ShardTensor>>> {
        let run = || -> Option<Result<Vec<ShardTensor>>> {
            Some(match name {
                "linear" => self.with_two(|x, w| x.linear(w, operand(self.inputs.get(2).copied())).map(one)),
                "matmul" => self.with_two(|a, b| a.matmul(b).map(one)),
                "bmm" => self.with_two(|a, b| a.bmm(b, operand(self.inputs.get(2).copied())).map(one)),
                "einsum" => {
                    self.get::<String>("equation").and_then(|e| ShardTensor::einsum(&e, self.inputs).map(one))
                }
                "where" => self.with_two(|c, a| c.select_where(a, self.input(2)?).map(one)),
                "scaled_dot_product_attention" => self.attention().map(one),
                "prelu" => self.with_two(|x, weight| Ok(one(Elementwise::prelu(x, weight)?))),
                "masked_fill" => {
                    self.with_two(|x, mask| x.masked_fill(mask, self.needed_number("value")?).map(one))
                }
                "dropout" => self.dropout().map(one),
                "ball_query" => self.ball_query(),
                "ball_query_limited" => self.ball_query_limited(),
                "cdist" => self.with_two(|a, b| ShardTensor::cdist(a, b, self.or("p", 2.0)?).map(one)),
                "knn" => self.with_two(|points, queries| points.knn(queries, self.get("k")?).map(two)),
                "softmax" => self.with_dim(|x, dim| x.softmax(dim).map(one)),
                "log_softmax" => self.with_dim(|x, dim| x.log_softmax(dim).map(one)),
                "cumsum" => self.with_dim(|x, dim| x.cumsum(dim).map(one)),
                "argmax" => self.arg(true).map(one),
                "argmin" => self.arg(false).map(one),
                "layer_norm" | "group_norm" | "instance_norm" | "batch_norm" => self.norm(name).map(one),
                "sort" => self.with_dim(|x, dim| x.sort(dim, self.or("descending", false)?).map(two)),
                "topk" => self.topk(),
                "index_select" => self.with_dim(|x, dim| x.index_select(dim, self.input(1)?).map(one)),
                "gather" => self.with_dim(|x, dim| x.gather(dim, self.input(1)?).map(one)),
                "index_add" => {
                    self.with_dim(|x, dim| x.index_add(dim, self.input(1)?, self.input(2)?).map(one))
                }
                "scatter_add" => {
                    self.with_dim(|x, dim| x.scatter_add(dim, self.input(1)?, self.input(2)?).map(one))
                }
                // As PyTorch's function: indices first, then the table.
                "embedding" => self.with_two(|indices, table| table.embedding(indices).map(one)),
                "select" => self.with_dim(|x, dim| x.select(dim, self.get("index")?).map(one)),
                "slice" => self.with_dim(|x, dim| {
                    x.slice(dim, self.optional("start")?, self.optional("end")?, self.or("step", 1)?).map(one)
                }),
                "narrow" => {
                    self.with_dim(|x, dim| x.narrow(dim, self.get("start")?, self.get("length")?).map(one))
                }
                "unbind" => self.with_dim(|x, dim| x.unbind(dim)),
                "split" => self.split(),
                "chunk" => self.with_dim(|x, dim| x.chunk(self.get("chunks")?, dim)),
                "view" | "reshape" => {
                    self.first(|x| x.reshape(&self.list::<i64>("size", Vec::new())?).map(one))
                }
                "flatten" => {
                    self.first(|x| x.flatten(self.or("start_dim", 0)?, self.or("end_dim", -1)?).map(one))
                }
                "permute" => self.first(|x| x.permute(&self.get::<Vec<i64>>("dims")?).map(one)),
                "transpose" => self.first(|x| x.transpose(self.get("dim0")?, self.get("dim1")?).map(one)),
                "squeeze" => self.first(|x| x.squeeze(&self.list::<i64>("dim", Vec::new())?).map(one)),
                "unsqueeze" => self.with_dim(|x, dim| x.unsqueeze(dim).map(one)),
                "expand" => self.first(|x| x.expand(&self.get::<Vec<i64>>("size")?).map(one)),
                "repeat" => self.first(|x| x.repeat(&self.get::<Vec<i64>>("repeats")?).map(one)),
                "cat" => self.get("dim").and_then(|dim| ShardTensor::cat(self.inputs, dim).map(one)),
                "stack" => self.get("dim").and_then(|dim| ShardTensor::stack(self.inputs, dim).map(one)),
                "roll" => self.first(|x| {
                    x.roll(&self.list::<i64>("shifts", Vec::new())?, &self.list::<i64>("dims", Vec::new())?)
                        .map(one)
                }),
                "pixel_shuffle" => self.first(|x| Ok(one(x.pixel_shuffle(self.get("upscale_factor")?)?))),
                "pixel_unshuffle" => {
                    self.first(|x| Ok(one(x.pixel_unshuffle(self.get("downscale_factor")?)?)))
                }
                "grid_sample" => self.with_two(|x, grid| Ok(one(x.grid_sample(grid, &self.grid_sample()?)?))),
                "flip" => self.first(|x| x.flip(&self.list::<i64>("dims", Vec::new())?).map(one)),
                "unfold" => self.first(|x| {
                    x.unfold(self.get("dimension")?, self.get("size")?, self.get("step")?).map(one)
                }),
                _ => return None,
            })
        };
        run()
    }

    fn first<T>(&self, f: impl FnOnce(&'a ShardTensor) -> Result<T>) -> Result<T> {
        f(self.input(0)?)
    }

    fn with_two<T>(&self, f: impl FnOnce(&'a ShardTensor, &'a ShardTensor) -> Result<T>) -> Result<T> {
        f(self.input(0)?, self.input(1)?)
    }

    fn with_dim<T>(&self, f: impl FnOnce(&'a ShardTensor, i64) -> Result<T>) -> Result<T> {
        f(self.input(0)?, self.get("dim")?)
    }

    fn arg(&self, greatest: bool) -> Result<ShardTensor> {
        let (x, dim, keepdim) = (self.input(0)?, self.optional("dim")?, self.or("keepdim", false)?);
        if greatest { x.argmax(dim, keepdim) } else { x.argmin(dim, keepdim) }
    }

    fn norm(&self, name: &str) -> Result<ShardTensor> {
        let x = self.input(0)?;
        // A bias may be there without a weight: a method's arguments say so.
        let mut rest = self.inputs.iter().copied().skip(1);
        let weight = if self.or("has_weight", true)? { rest.next() } else { None };
        let bias = if self.or("has_bias", true)? { rest.next() } else { None };
        let (weight, bias) = (operand(weight), operand(bias));
        let eps = self.or("eps", 1e-5)?;
        match name {
            "layer_norm" => {
                x.layer_norm(&self.list::<i64>("normalized_shape", Vec::new())?, weight, bias, eps)
            }
            "group_norm" => x.group_norm(self.get("num_groups")?, weight, bias, eps),
            "instance_norm" => x.instance_norm(weight, bias, eps),
            _ => {
                let momentum = self.or("momentum", 0.1)?;
                let running = match rest.collect::<Vec<_>>()[..] {
                    [mean, var] => Some(RunningStats { mean, var, momentum }),
                    _ => None,
                };
                x.batch_norm(weight, bias, running, self.or("training", true)?, eps)
            }
        }
    }

    fn attention(&self) -> Result<ShardTensor> {
        let generator = self.generator()?;
        let options = AttentionOptions {
            attn_mask: operand(self.inputs.get(3).copied()),
            is_causal: self.or("is_causal", false)?,
            scale: self.optional("scale")?,
            enable_gqa: self.or("enable_gqa", false)?,
            dropout_p: self.or("dropout_p", 0.0)?,
            generator: generator.as_ref(),
            ..AttentionOptions::default()
        };
        ShardTensor::scaled_dot_product_attention(self.input(0)?, self.input(1)?, self.input(2)?, &options)
    }

    /// The generator that is to draw next, by its seed and draws before.
    fn generator(&self) -> Result<Option<Generator>> {
        #[derive(Deserialize)]
        struct State {
            seed: u64,
            draws: u64,
        }
        let state: Option<State> = self.optional("generator")?;
        Ok(state.map(|state| Generator::resume(state.seed, state.draws)))
    }

    fn dropout(&self) -> Result<ShardTensor> {
        let p = self.or("p", 0.5)?;
        match self.generator()? {
            Some(generator) => self.input(0)?.dropout_of(p, &generator, &self.window()?),
            None if p == 0.0 => Ok(self.input(0)?.shallow_clone()),
            None => refuse("dropout", "the argument \"generator\", its seed and draws, is missing"),
        }
    }

    /// Which part the input is of a larger tensor, where it is one.
    fn window(&self) -> Result<Window> {
        let shape = self.input(0)?.shape();
        let Some((global, offset)) = self.optional::<(Vec<i64>, Vec<i64>)>("window")? else {
            return Ok(Window::whole(shape));
        };
        if global.len() != shape.len() || offset.len() != shape.len() {
            return refuse("dropout", format!("a window of {} dims for {} dims", global.len(), shape.len()));
        }
        let mut place = offset.into_iter().zip(shape).enumerate();
        let window = place.try_fold(Window::whole(&global), |window, (dim, (offset, &extent))| {
            window.narrow(dim, offset, extent)
        });
        Ok(window?)
    }

    fn ball_query(&self) -> Result<Vec<ShardTensor>> {
        let found = self.with_two(|points, queries| points.ball_query(queries, self.get("radius")?))?;
        Ok(vec![found.offsets, found.indices, found.distances])
    }

    fn ball_query_limited(&self) -> Result<Vec<ShardTensor>> {
        let found = self.with_two(|points, queries| {
            points.ball_query_limited(queries, self.get("radius")?, self.get("max_points")?)
        })?;
        Ok(vec![found.indices, found.counts, found.distances])
    }

    fn topk(&self) -> Result<Vec<ShardTensor>> {
        self.input(0)?.topk(self.get("k")?, self.or("dim", -1)?, self.or("largest", true)?).map(two)
    }

    fn split(&self) -> Result<Vec<ShardTensor>> {
        self.with_dim(|x, dim| x.split(&self.get::<Vec<i64>>("sizes")?, dim))
    }
}

/// The number of spatial dims that a name such as `conv2d` ends with.
fn spatial(name: &str) -> usize {
    name.bytes().rev().nth(1).map_or(0, |digit| usize::from(digit.wrapping_sub(b'0')))
}

fn pad_mode(name: &str) -> Result<PadMode> {
    Ok(match name {
        "zeros" | "constant" => PadMode::Constant,
        "circular" => PadMode::Circular,
        "reflect" => PadMode::Reflect,
        "replicate" => PadMode::Replicate,
        other => return refuse("pad", format!("there is no padding mode \"{other}\"")),
    })
}
