//! Fourier transforms over dims that may be split.
//!
//! A transform over several dims is one along each of them. Each rank transforms the dims that it holds in full, the
//! real-to-complex dim first; an all-to-all then reshards another dim onto a finished one, and so on. The result keeps its
//! transposed layout.
//!
//! They depend on no model.

pub(crate) mod distributed;
mod modes;
mod pieces;
mod plan;

use std::ops::Range;

use tch::Tensor;

use self::pieces::Pieces;
pub use self::pieces::TransformPieces;
use self::plan::{Step, is_whole, steps};
use super::operator;
use crate::error::Result;
use crate::layout::{Dim, Layout};
use crate::rules::Call;
use crate::tensor::{ShardTensor, received};
use crate::window::{HaloSpec, Windows, fetch};
use isobar_array::kernel::{Kind, Transform};
use isobar_array::{FftNorm, Spectral};

/// The indices of a dim that this rank has.
fn own_indices(layout: &Layout, dim: usize) -> Vec<i64> {
    layout.intervals()[dim].iter().flat_map(|own| own.start..own.end()).collect()
}

impl ShardTensor {
    /// A transform over dims, of which some may be split.
    pub(crate) fn fourier(
        &self,
        op: &'static str,
        kind: Kind,
        s: &[i64],
        dims: &[i64],
        norm: FftNorm,
    ) -> Result<Self> {
        operator(op, &[self], args!("s": s, "dim": dims, "norm": norm.name()), || {
            let transform = Transform::new(op, kind, self.kind(), self.shape(), s, dims)?;
            self.transformed(op, &transform, None, norm)
        })
    }

    fn transformed(
        &self,
        op: &'static str,
        transform: &Transform,
        to: Option<&Layout>,
        norm: FftNorm,
    ) -> Result<Self> {
        let mut x = self.resolved()?;
        // Elements that are not read are not sent.
        for &dim in &transform.dims {
            let read = transform.read_extent(dim);
            if x.layout().is_sharded(dim) && read < x.shape()[dim] {
                x = x.narrow(dim as i64, 0, read)?;
            }
        }
        let mut steps = steps(x.layout(), transform, x.kind().elt_size_in_bytes())?.into_iter().peekable();
        while let Some(step) = steps.next() {
            let mut after = step.layout(x.layout(), transform);
            if let (Some(to), Step::Turn(_, dim) | Step::Spread(_, dim)) = (to, &step) {
                after = after.with_parts_of(to, *dim);
            }
            if let (Step::Turn(..), Some(Step::Transform(dims))) = (&step, steps.peek())
                && let Some(pieces) = Pieces::new(&x, &after, dims)
            {
                let local = |part: &Tensor| Ok(transform.local(op, part, dims, norm)?);
                let result = Step::Transform(dims.clone()).layout(&after, transform);
                x = pieces.transformed(&x, (&after, &result), local)?;
                steps.next();
                continue;
            }
            x = match step {
                Step::Turn(..) | Step::Gather(_) => x.to_layout(&after)?,
                Step::Transform(dims) => Self::new(transform.local(op, x.local(), &dims, norm)?, after),
                Step::Sum(from, _) => {
                    let own = own_indices(x.layout(), from);
                    let sums = transform.contribution(op, x.local(), (from, &own), norm)?;
                    Self::new(sums, plan::sums(x.layout(), from, transform)).to_layout(&after)?
                }
                Step::Spread(from, to) => {
                    let everywhere = HaloSpec::own(&Dim::whole(x.shape()[from]));
                    let windows = Windows::own(x.layout()).with(from, everywhere);
                    let modes = fetch(x.local(), x.layout(), &windows, 0.0)?;
                    let own = own_indices(&after, to);
                    Self::new(transform.points_at(op, &modes, (to, &own), norm)?, after)
                }
            };
        }
        Ok(x)
    }

    /// The tensor with these dims whole; what split them splits that other dim for which a rank receives the fewest bytes. Of
    /// a tensor that has no other dims, they are gathered.
    pub(crate) fn reshard_off(&self, dims: &[usize]) -> Result<Self> {
        let mut x = self.resolved()?;
        for &from in dims {
            let layout = x.layout();
            if is_whole(layout, from) {
                continue;
            }
            let mut best: Option<(i64, Layout)> = None;
            for to in (0..x.ndim()).filter(|to| !dims.contains(to) && layout.shape()[*to] > 1) {
                let resharded = layout.all_to_all(from, to);
                let bytes = received(layout, &resharded, x.kind().elt_size_in_bytes())?.unwrap_or(i64::MAX);
                if best.as_ref().is_none_or(|(least, _)| bytes < *least) {
                    best = Some((bytes, resharded));
                }
            }
            let whole = || layout.with_dim(from, Dim::whole(layout.shape()[from]));
            let to = best.map_or_else(whole, |(_, resharded)| resharded);
            x = x.to_layout(&to)?;
        }
        Ok(x)
    }
}

crate::register! {
    /// The Fourier transform over the dim `dim`.
    "fft"(input; s, dim, norm; n) Transform: |call| transform(call, Spectral::fftn, &[-1]);
    /// The Fourier transform over two dims.
    "fft2"(input; s, dim, norm) Transform: |call| transform(call, Spectral::fftn, &[-2, -1]);
    /// The Fourier transform over any dims.
    "fftn"(input; s, dim, norm) Transform: |call| transform(call, Spectral::fftn, &[]);
    /// The inverse Fourier transform over the dim `dim`.
    "ifft"(input; s, dim, norm; n) Transform: |call| transform(call, Spectral::ifftn, &[-1]);
    /// The inverse Fourier transform over two dims.
    "ifft2"(input; s, dim, norm) Transform: |call| transform(call, Spectral::ifftn, &[-2, -1]);
    /// The inverse Fourier transform over any dims.
    "ifftn"(input; s, dim, norm) Transform: |call| transform(call, Spectral::ifftn, &[]);
    /// The Fourier transform of real numbers, one half of the last dim, over the dim `dim`.
    "rfft"(input; s, dim, norm; n) Transform: |call| transform(call, Spectral::rfftn, &[-1]);
    /// The Fourier transform of real numbers, one half of the last dim, over two dims.
    "rfft2"(input; s, dim, norm) Transform: |call| transform(call, Spectral::rfftn, &[-2, -1]);
    /// The Fourier transform of real numbers, one half of the last dim, over any dims.
    "rfftn"(input; s, dim, norm) Transform: |call| transform(call, Spectral::rfftn, &[]);
    /// The inverse of `rfft` over the dim `dim`.
    "irfft"(input; s, dim, norm; n) Transform: |call| transform(call, Spectral::irfftn, &[-1]);
    /// The inverse of `rfft` over two dims.
    "irfft2"(input; s, dim, norm) Transform: |call| transform(call, Spectral::irfftn, &[-2, -1]);
    /// The inverse of `rfft` over any dims.
    "irfftn"(input; s, dim, norm) Transform: |call| transform(call, Spectral::irfftn, &[]);
    /// The modes `kept` of `rfftn` over `dim`, for each dim the ranges `[first, behind the last]`.
    "rfftn_modes"(input; s, dim, kept, norm) Transform: |call| modes(call, "rfftn_modes", Kind::Real);
    /// The field of the extents `s` along `dim` that has the modes `kept`, and no others.
    "irfftn_modes"(input; s, dim, kept, norm) Transform: |call| modes(call, "irfftn_modes", Kind::InverseReal);
}

/// A transform of which only some modes are kept.
fn modes(call: &Call<'_>, op: &'static str, kind: Kind) -> Result<ShardTensor> {
    let (s, dims) = (call.list("s", Vec::new())?, call.list::<i64>("dim", Vec::new())?);
    let kept: Vec<Vec<[i64; 2]>> = call.get("kept")?;
    let kept: Vec<Vec<Range<i64>>> =
        kept.iter().map(|ranges| ranges.iter().map(|&[start, end]| start..end).collect()).collect();
    call.tensor(0)?.fourier_modes(op, kind, None, &s, (&dims, &kept), norm_of(call)?)
}

type Transforms = fn(&ShardTensor, &[i64], &[i64], FftNorm) -> isobar_array::Result<ShardTensor>;

/// A transform over `dim`, or over `default`, to `s` or `n` points.
fn transform(call: &Call<'_>, run: Transforms, default: &[i64]) -> Result<ShardTensor> {
    let norm = norm_of(call)?;
    let one_dim = default.len() == 1;
    if one_dim {
        call.either("n", "s")?;
    }
    let points: Vec<i64> = call.list(if one_dim && call.has("n")? { "n" } else { "s" }, Vec::new())?;
    let dims = call.list("dim", default.to_vec())?;
    Ok(run(call.tensor(0)?, &points, &dims, norm)?)
}

fn norm_of(call: &Call<'_>) -> Result<FftNorm> {
    match &call.word("norm", "backward")?[..] {
        "backward" => Ok(FftNorm::Backward),
        "ortho" => Ok(FftNorm::Ortho),
        "forward" => Ok(FftNorm::Forward),
        other => call.refuse(format!("norm = \"{other}\"; expected backward, ortho or forward")),
    }
}
