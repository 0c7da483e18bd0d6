//! Random tensors: each fills the window that the caller holds of a global tensor.

use isobar_torch::memory::from_vec;
use isobar_torch::meta;
use tch::{Device, Kind, Tensor};

use super::generator::{Generator, unit};
use super::quantile::{normal_cdf, normal_quantile};
use super::window::Window;
use crate::error::{Error, Result};

impl Generator {
    /// Draws uniform numbers from [`low`, `high`) in a floating dtype; below double precision they have 24 random bits.
    ///
    /// # Errors
    ///
    /// The dtype is not floating, or the interval is empty or not finite.
    ///
    /// ```
    /// use isobar_array::{Generator, Window};
    /// use tch::{Device, Kind};
    ///
    /// let x = Generator::new(7).uniform(&Window::whole(&[4, 6]), -1.0, 1.0, (Kind::Float, Device::Cpu))?;
    /// assert_eq!(x.size(), [4, 6]);
    /// assert!(x.abs().max().double_value(&[]) <= 1.0);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn uniform(&self, window: &Window, low: f64, high: f64, options: (Kind, Device)) -> Result<Tensor> {
        let span = high - low;
        if !(span > 0.0 && span.is_finite()) {
            return Err(random("uniform", format!("low {low} must be below high {high}")));
        }
        let last = (high as f32).next_down();
        self.fill(
            "uniform",
            window,
            options,
            |bits| ((low + span * unit(bits & SINGLE)) as f32).min(last),
            |bits| (low + span * unit(bits)).min(high.next_down()),
        )
    }

    /// Draws normal numbers in a floating dtype: computed in double precision, then rounded.
    ///
    /// # Errors
    ///
    /// The dtype is not floating, or `std` is negative or not finite.
    ///
    /// ```
    /// use isobar_array::{Generator, Window};
    /// use tch::{Device, Kind};
    ///
    /// let x = Generator::new(7).normal(&Window::whole(&[1000]), 10.0, 2.0, (Kind::Double, Device::Cpu))?;
    /// assert!((x.mean(Kind::Double).double_value(&[]) - 10.0).abs() < 0.5);
    /// assert!((x.std(true).double_value(&[]) - 2.0).abs() < 0.5);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn normal(&self, window: &Window, mean: f64, std: f64, options: (Kind, Device)) -> Result<Tensor> {
        check_std("normal", mean, std)?;
        let value = |bits| mean + std * normal_quantile(open_unit(bits));
        self.fill("normal", window, options, |bits| value(bits) as f32, value)
    }

    /// Normal numbers given that they fall into [`low`, `high`], which is in the units of the result.
    ///
    /// # Errors
    ///
    /// The dtype is not floating, `std` is not positive, or the interval is empty or holds next to none of the distribution.
    ///
    /// ```
    /// use isobar_array::{Generator, Window};
    /// use tch::{Device, Kind};
    ///
    /// let window = Window::whole(&[1000]);
    /// let x = Generator::new(7).trunc_normal(&window, (0.0, 0.02), (-0.04, 0.04), (Kind::Double, Device::Cpu))?;
    /// assert!(x.abs().max().double_value(&[]) <= 0.04);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn trunc_normal(
        &self,
        window: &Window,
        (mean, std): (f64, f64),
        (low, high): (f64, f64),
        options: (Kind, Device),
    ) -> Result<Tensor> {
        check_std("trunc_normal", mean, std)?;
        let (below, above) = (normal_cdf((low - mean) / std), normal_cdf((high - mean) / std));
        if std <= 0.0 || low >= high || (above - below).is_nan() || above - below < 1e-12 {
            let reason = format!("no part of a normal distribution ({mean}, {std}) in [{low}, {high}]");
            return Err(random("trunc_normal", reason));
        }
        let value = |bits| {
            let p = below + (above - below) * open_unit(bits);
            (mean + std * normal_quantile(p.clamp(f64::MIN_POSITIVE, 1.0 - f64::EPSILON / 2.0)))
                .clamp(low, high)
        };
        self.fill("trunc_normal", window, options, |bits| value(bits) as f32, value)
    }

    /// Draws integers `low` ≤ n < `high`, of dtype `Int64`.
    ///
    /// # Errors
    ///
    /// `low` is not below `high`.
    ///
    /// ```
    /// use isobar_array::{Generator, Window};
    /// use tch::Device;
    ///
    /// let x = Generator::new(7).randint(&Window::whole(&[100]), 0, 10, Device::Cpu)?;
    /// assert!(x.min().int64_value(&[]) >= 0 && x.max().int64_value(&[]) < 10);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn randint(&self, window: &Window, low: i64, high: i64, device: Device) -> Result<Tensor> {
        if low >= high {
            return Err(random("randint", format!("low {low} must be below high {high}")));
        }
        let span = high.wrapping_sub(low) as u64;
        let value = |bits: u64| low.wrapping_add(((u128::from(bits) * u128::from(span)) >> 64) as i64);
        on_device(from_vec(self.values(window, value), window.shape())?, device)
    }

    /// Draws a random order of the numbers 0 … `count` − 1, of dtype `Int64` and shape `[count]`. Equal to
    /// [`permutation`](Self::permutation).
    ///
    /// # Errors
    ///
    /// The device refuses the tensor.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use tch::{Device, Tensor};
    ///
    /// let order = Generator::new(7).randperm(4, Device::Cpu)?;
    /// assert_eq!(order.sort(0, false).0, Tensor::from_slice(&[0_i64, 1, 2, 3]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn randperm(&self, count: usize, device: Device) -> Result<Tensor> {
        on_device(from_vec(self.permutation(count), &[count as i64])?, device)
    }

    /// Draws ones with probability `p`, else zeros, in any real dtype.
    ///
    /// # Errors
    ///
    /// `p` is outside [0, 1].
    ///
    /// ```
    /// use isobar_array::{Generator, Window};
    /// use tch::{Device, Kind};
    ///
    /// let x = Generator::new(7).bernoulli(&Window::whole(&[1000]), 0.25, (Kind::Double, Device::Cpu))?;
    /// assert!((x.mean(Kind::Double).double_value(&[]) - 0.25).abs() < 0.1);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn bernoulli(&self, window: &Window, p: f64, options: (Kind, Device)) -> Result<Tensor> {
        self.two_valued("bernoulli", window, p, 1.0, options)
    }

    /// Returns a dropout mask: zero with probability `p`, otherwise 1 / (1 − p); floating dtypes.
    ///
    /// # Errors
    ///
    /// `p` is outside [0, 1].
    ///
    /// ```
    /// use isobar_array::{Generator, Window};
    /// use tch::{Device, Kind};
    ///
    /// let mask = Generator::new(7).dropout_mask(&Window::whole(&[1000]), 0.5, (Kind::Double, Device::Cpu))?;
    /// assert_eq!((mask.min().double_value(&[]), mask.max().double_value(&[])), (0.0, 2.0));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn dropout_mask(&self, window: &Window, p: f64, options: (Kind, Device)) -> Result<Tensor> {
        if !(0.0..=1.0).contains(&p) {
            return Err(random("dropout_mask", format!("probability {p} is not in [0, 1]")));
        }
        self.two_valued("dropout_mask", window, 1.0 - p, 1.0 / (1.0 - p), options)
    }

    fn two_valued(
        &self,
        what: &'static str,
        window: &Window,
        p: f64,
        value: f64,
        (kind, device): (Kind, Device),
    ) -> Result<Tensor> {
        if !(0.0..=1.0).contains(&p) {
            return Err(random(what, format!("probability {p} is not in [0, 1]")));
        }
        if device == meta::DEVICE {
            return self.without_values(window, (kind, device));
        }
        let chosen = |bits| unit(bits) < p;
        let tensor = if kind == Kind::Double {
            let values = self.values(window, |bits| if chosen(bits) { value } else { 0.0 });
            from_vec(values, window.shape())?
        } else {
            let value = value as f32;
            let values = self.values(window, |bits| if chosen(bits) { value } else { 0.0 });
            to_kind(from_vec(values, window.shape())?, kind)?
        };
        on_device(tensor, device)
    }

    fn fill(
        &self,
        what: &'static str,
        window: &Window,
        (kind, device): (Kind, Device),
        single: impl Fn(u64) -> f32,
        double: impl Fn(u64) -> f64,
    ) -> Result<Tensor> {
        let tensor = match kind {
            Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16 if device == meta::DEVICE => {
                return self.without_values(window, (kind, device));
            }
            Kind::Double => from_vec(self.values(window, double), window.shape())?,
            Kind::Float | Kind::Half | Kind::BFloat16 => {
                to_kind(from_vec(self.values(window, single), window.shape())?, kind)?
            }
            _ => return Err(random(what, format!("{kind:?} is not a floating dtype"))),
        };
        on_device(tensor, device)
    }

    /// Makes a meta tensor; the draw counts.
    fn without_values(&self, window: &Window, options: (Kind, Device)) -> Result<Tensor> {
        let _ = self.draw();
        Tensor::f_empty(window.shape(), options).map_err(|source| refused("empty", source))
    }

    fn values<T: Clone + Default>(&self, window: &Window, value: impl Fn(u64) -> T) -> Vec<T> {
        let draw = self.draw();
        let mut values = vec![T::default(); window.numel()];
        let mut rest = &mut values[..];
        window.for_each_run(|first, count| {
            let (run, after) = std::mem::take(&mut rest).split_at_mut(count);
            draw.fill(first, run, &value);
            rest = after;
        });
        values
    }
}

/// The bits that a number of [0, 1) in single precision keeps.
const SINGLE: u64 = !0 << 40;

/// The middle of one of 2⁵² equal parts of (0, 1): never 0 or 1.
#[inline(always)]
fn open_unit(bits: u64) -> f64 {
    ((bits >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
}

fn check_std(what: &'static str, mean: f64, std: f64) -> Result<()> {
    if mean.is_finite() && std.is_finite() && std >= 0.0 {
        return Ok(());
    }
    Err(random(what, format!("mean {mean} and std {std} must be finite and std not negative")))
}

fn random(what: &'static str, reason: String) -> Error {
    Error::Random { what, reason }
}

fn to_kind(tensor: Tensor, kind: Kind) -> Result<Tensor> {
    if kind == Kind::Float {
        return Ok(tensor);
    }
    tensor.f_to_kind(kind).map_err(|source| refused("to_kind", source))
}

fn on_device(tensor: Tensor, device: Device) -> Result<Tensor> {
    if device == Device::Cpu {
        return Ok(tensor);
    }
    tensor.f_to_device(device).map_err(|source| refused("to_device", source))
}

fn refused(op: &'static str, source: tch::TchError) -> Error {
    Error::Operator { op, shapes: "a random tensor".into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
    const CPU64: (Kind, Device) = (Kind::Double, Device::Cpu);

    type Draw = fn(&Generator, &Window) -> Tensor;

    #[rstest]
    #[case::uniform(|g: &Generator, w: &Window| g.uniform(w, -1.0, 3.0, CPU).unwrap())]
    #[case::normal(|g: &Generator, w: &Window| g.normal(w, 1.0, 2.0, CPU64).unwrap())]
    #[case::trunc_normal(|g: &Generator, w: &Window| g.trunc_normal(w, (0.0, 1.0), (-0.5, 1.0), CPU).unwrap())]
    #[case::randint(|g: &Generator, w: &Window| g.randint(w, -3, 12, Device::Cpu).unwrap())]
    #[case::dropout(|g: &Generator, w: &Window| g.dropout_mask(w, 0.3, CPU).unwrap())]
    #[case::half(|g: &Generator, w: &Window| g.normal(w, 1.0, 2.0, (Kind::Half, Device::Cpu)).unwrap())]
    fn parts_are_cut_from_the_whole(#[case] make: Draw) {
        let shape = [5, 7, 6];
        let whole = make(&Generator::new(9), &Window::whole(&shape));
        for (dim, offset, extent) in [(0, 2, 3), (1, 1, 4), (2, 5, 1), (1, 7, 0)] {
            let window = Window::whole(&shape).narrow(dim, offset, extent).unwrap();
            let part = make(&Generator::new(9), &window);
            assert_eq!(part, whole.narrow(dim as i64, offset, extent), "dim {dim}");
        }
    }

    #[test]
    fn single_and_double_agree() {
        let window = Window::whole(&[1000]);
        for make in [
            |g: &Generator, w: &Window, o| g.uniform(w, 0.0, 1.0, o),
            |g: &Generator, w: &Window, o| g.normal(w, 0.0, 1.0, o),
        ] {
            let single = make(&Generator::new(2), &window, CPU).unwrap().to_kind(Kind::Double);
            let double = make(&Generator::new(2), &window, CPU64).unwrap();
            assert!((single - double).abs().max().double_value(&[]) < 1e-6);
        }
    }

    #[test]
    fn moments_and_bounds() {
        let generator = Generator::new(4);
        let window = Window::whole(&[400, 500]);
        let near = |got: f64, want: f64| assert!((got - want).abs() < 0.02, "{got} is not near {want}");
        let u = generator.uniform(&window, 2.0, 3.0, CPU).unwrap();
        near(u.mean(Kind::Double).double_value(&[]), 2.5);
        assert!(u.min().double_value(&[]) >= 2.0 && u.max().double_value(&[]) < 3.0);
        let n = generator.normal(&window, -1.0, 2.0, CPU).unwrap();
        near(n.mean(Kind::Double).double_value(&[]), -1.0);
        near(n.std(true).double_value(&[]), 2.0);
        let t = generator.trunc_normal(&window, (0.0, 1.0), (0.0, 1e9), CPU).unwrap();
        near(t.mean(Kind::Double).double_value(&[]), (2.0 / std::f64::consts::PI).sqrt());
        assert!(t.min().double_value(&[]) >= 0.0);
        let b = generator.bernoulli(&window, 0.3, CPU).unwrap();
        near(b.mean(Kind::Double).double_value(&[]), 0.3);
        let d = generator.dropout_mask(&window, 0.75, CPU).unwrap();
        near(d.mean(Kind::Double).double_value(&[]), 1.0);
        let i = generator.randint(&window, 5, 8, Device::Cpu).unwrap();
        near(i.mean(Kind::Double).double_value(&[]), 6.0);
        assert_eq!((i.min().int64_value(&[]), i.max().int64_value(&[])), (5, 7));
    }

    #[test]
    fn dropout_scales_in_the_precision_of_the_kind() {
        let window = Window::whole(&[64]);
        let scale =
            |options| Generator::new(4).dropout_mask(&window, 0.1, options).unwrap().max().double_value(&[]);
        assert_eq!(scale(CPU64), 1.0 / 0.9);
        assert_eq!(scale(CPU), f64::from((1.0 / 0.9) as f32));
    }

    #[test]
    fn draws_differ_from_each_other() {
        let generator = Generator::new(4);
        let window = Window::whole(&[64]);
        let [a, b] = [0, 1].map(|_| generator.normal(&window, 0.0, 1.0, CPU).unwrap());
        assert_ne!(a, b);
        assert_eq!(generator.draws(), 2);
    }

    #[test]
    fn permutation_is_one() {
        let mut order = Vec::<i64>::try_from(Generator::new(0).randperm(1000, Device::Cpu).unwrap()).unwrap();
        assert_ne!(order, (0..1000).collect::<Vec<_>>());
        order.sort();
        assert_eq!(order, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn bad_arguments_are_errors() {
        let generator = Generator::new(0);
        let window = Window::whole(&[3]);
        let errors = [
            generator.uniform(&window, 1.0, 1.0, CPU).unwrap_err(),
            generator.uniform(&window, f64::NAN, 1.0, CPU).unwrap_err(),
            generator.normal(&window, 0.0, -1.0, CPU).unwrap_err(),
            generator.normal(&window, 0.0, 1.0, (Kind::Int64, Device::Cpu)).unwrap_err(),
            generator.trunc_normal(&window, (0.0, 1.0), (2.0, 1.0), CPU).unwrap_err(),
            generator.trunc_normal(&window, (0.0, 0.0), (-1.0, 1.0), CPU).unwrap_err(),
            generator.randint(&window, 3, 3, Device::Cpu).unwrap_err(),
            generator.bernoulli(&window, 1.5, CPU).unwrap_err(),
            generator.dropout_mask(&window, 1.5, CPU).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().starts_with("random "), "{error}");
        }
    }
}
