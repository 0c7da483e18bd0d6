//! Convolution, pooling, interpolation and padding of dense tensors: option structs, checks of arguments against shapes, and
//! the calls of libtorch. A sharded operator computes its window of the input first and then calls the same kernels.
//!
//! Nothing here depends on ranks.

mod adaptive;
mod conv;
mod interpolate;
mod pad;
mod pool;
mod steps;

use tch::Tensor;

pub use adaptive::means;
pub use conv::{Conv, Padding};
pub use interpolate::{Grid, Interpolation, Resize, Rest, Taps, interpolated, to_bytes};
pub use pad::{Around, PadMode};
pub use pool::{Pool, average, check_dims, cut_like, maxima, nonempty, values};
pub use steps::{ConvParams, Shapes, spatial_dims};

use crate::error::{Result, refuse};

/// Geometry of a windowed operator along one dim.
#[derive(Debug, Clone, Copy)]
pub struct WindowGeometry {
    /// Dim of the input.
    pub dim: usize,
    /// Extent of the input along it.
    pub extent: i64,
    /// Extent of the result.
    pub result: i64,
    /// Number of the kernel's elements.
    pub kernel: i64,
    /// Step between outputs.
    pub stride: i64,
    /// Step between the kernel's elements.
    pub dilation: i64,
    /// Number of padding elements before the first.
    pub before: i64,
    /// Number of padding elements after the last.
    pub after: i64,
}

impl WindowGeometry {
    /// Returns the extent of the kernel with its gaps.
    ///
    /// ```
    /// use isobar_array::Conv;
    ///
    /// let dilated = Conv { dilation: vec![2], ..Conv::default() };
    /// let geometry = dilated.geometry(&[1, 1, 16], &[1, 1, 3], None)?;
    /// assert_eq!(geometry[0].reach(), 5);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn reach(&self) -> i64 {
        self.dilation * (self.kernel - 1) + 1
    }
}

/// Returns the name of an operator of that number of spatial dims, or the first name for an unsupported number.
pub fn spatial_name(names: [&'static str; 3], spatial: usize) -> &'static str {
    names.get(spatial.wrapping_sub(1)).unwrap_or(&names[0])
}

/// Returns one value for each of `dims` dims, repeating a single one.
///
/// # Errors
///
/// Neither one value nor `dims` of them.
pub fn each(op: &'static str, what: &str, values: &[i64], dims: usize) -> Result<Vec<i64>> {
    match values {
        [one] => Ok(vec![*one; dims]),
        many if many.len() == dims => Ok(many.to_vec()),
        _ => refuse(op, format!("{what} {values:?}: expected one value, or one for each of {dims} dims")),
    }
}

/// Views a vector along dim `dim` of a tensor of `dims` dims.
///
/// # Errors
///
/// libtorch refuses the view.
pub fn along(vector: &Tensor, dim: usize, dims: usize) -> Result<Tensor, tch::TchError> {
    let shape: Vec<i64> = (0..dims).map(|d| if d == dim { -1 } else { 1 }).collect();
    vector.f_view(shape.as_slice())
}
