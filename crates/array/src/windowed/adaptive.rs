//! Adaptive pooling of dense tensors.

use tch::{TchError, Tensor};

/// Averages over the last dims such that the result has the extents `output`.
///
/// # Errors
///
/// libtorch refuses the shape or the dtype.
pub fn means(x: &Tensor, output: &[i64]) -> Result<Tensor, TchError> {
    match output.len() {
        1 => x.f_adaptive_avg_pool1d(output),
        2 => x.f_adaptive_avg_pool2d(output),
        _ => x.f_adaptive_avg_pool3d(output),
    }
}
