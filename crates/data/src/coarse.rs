//! Coarse fields on a fine grid: inputs of super-resolution.

use tch::{Kind, Tensor};

use crate::{Error, Result};

/// Points that cubic interpolation reads beyond a border.
const MARGIN: i64 = 2;

/// Averages fields `[…, x, y]` over blocks of `factor` × `factor` points, and interpolates the coarse fields to the fine grid
/// by bicubic convolution (Keys, 1981; a = −0.75). Beyond the ends of dims that are not `periodic` the border is repeated.
///
/// ```
/// use isobar_data::coarse_fields;
/// use tch::{Device, Kind, Tensor};
///
/// let fine = Tensor::ones([3, 8, 12], (Kind::Float, Device::Cpu));
/// assert!(coarse_fields(&fine, 4, [true, false])?.allclose(&fine, 1e-6, 1e-6, false));
/// # Ok::<(), isobar_data::Error>(())
/// ```
///
/// # Errors
///
/// Fewer than two dims, blocks that do not divide the extents, or fewer than two of them along a dim.
pub fn coarse_fields(fields: &Tensor, factor: usize, periodic: [bool; 2]) -> Result<Tensor> {
    let shape = fields.size();
    let coarse = means(fields, factor)?;
    let block = factor as i64;
    let [across, along] = periodic.map(|periodic| if periodic { "circular" } else { "replicate" });
    let padded = coarse.f_pad([0, 0, MARGIN, MARGIN], across, None)?;
    let padded = padded.f_pad([MARGIN, MARGIN, 0, 0], along, None)?;
    let [rows, columns] = [shape[shape.len() - 2], shape[shape.len() - 1]];
    let extents = [rows, columns].map(|extent| extent + 2 * MARGIN * block);
    let fine = padded.f_upsample_bicubic2d(extents, false, None, None)?;
    let fine = fine.f_narrow(2, MARGIN * block, rows)?.f_narrow(3, MARGIN * block, columns)?;
    Ok(fine.f_reshape(&shape)?.f_to_kind(fields.kind())?)
}

/// Averages fields `[…, x, y]` over blocks of `factor` × `factor` points: fields on the coarse grid.
///
/// ```
/// use isobar_data::block_means;
/// use tch::{Device, Kind, Tensor};
///
/// let fine = Tensor::ones([3, 8, 12], (Kind::Float, Device::Cpu));
/// assert_eq!(block_means(&fine, 4)?.size(), [3, 2, 3]);
/// # Ok::<(), isobar_data::Error>(())
/// ```
///
/// # Errors
///
/// Those of [`coarse_fields`].
pub fn block_means(fields: &Tensor, factor: usize) -> Result<Tensor> {
    let coarse = means(fields, factor)?;
    let shape = fields.size();
    let shape = [&shape[..shape.len() - 2], &coarse.size()[2..]].concat();
    Ok(coarse.f_reshape(shape)?.f_to_kind(fields.kind())?)
}

/// Means over blocks, `[field, 1, x, y]`, in double precision.
fn means(fields: &Tensor, factor: usize) -> Result<Tensor> {
    let shape = fields.size();
    let [.., rows, columns] = shape[..] else {
        return Err(Error::Invalid(format!("the fields have shape {shape:?}, expected two spatial dims")));
    };
    let block = i64::try_from(factor).unwrap_or(i64::MAX);
    if block < 2 || rows % block != 0 || columns % block != 0 || rows / block < 2 || columns / block < 2 {
        return Err(Error::Invalid(format!(
            "blocks have {factor} points along each dim, expected a number of at least 2 that divides {rows} and {columns} \
             into two blocks or more"
        )));
    }
    let flat = fields.f_to_kind(Kind::Double)?.f_reshape([-1, 1, rows, columns])?;
    Ok(flat.f_avg_pool2d([block, block], [block, block], [0, 0], false, true, None)?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Waves of amplitude 1 along both dims, with `number` periods.
    fn wave(points: i64, number: f64) -> Tensor {
        let line = (Tensor::arange(points, (Kind::Double, Device::Cpu)) + 0.5)
            * (std::f64::consts::TAU * number / points as f64);
        line.view([-1, 1]).cos() + line.sin()
    }

    #[test]
    fn long_waves_are_kept_also_around_the_ends() {
        let fine = wave(64, 1.0);
        let error = (coarse_fields(&fine, 4, [true, true]).unwrap() - &fine).abs();
        let largest = error.max().double_value(&[]);
        assert!(largest < 0.02 * 2.0, "{largest} of an amplitude of 2");
        // Moved around the ends, the coarse field moves along.
        let moved = coarse_fields(&fine.roll([8, 4], [0, 1]), 4, [true, true]).unwrap();
        let expected = coarse_fields(&fine, 4, [true, true]).unwrap().roll([8, 4], [0, 1]);
        assert!(moved.allclose(&expected, 1e-12, 1e-12, false));
    }

    #[test]
    fn short_waves_are_lost_and_means_are_kept() {
        let long = wave(32, 1.0);
        let coarse = coarse_fields(&(&long + wave(32, 8.0) + 3.0), 4, [true, true]).unwrap();
        assert!((coarse.mean(Kind::Double).double_value(&[]) - 3.0).abs() < 1e-12);
        let expected = coarse_fields(&(long + 3.0), 4, [true, true]).unwrap();
        assert!(coarse.allclose(&expected, 1e-12, 1e-12, false));
    }

    #[test]
    fn blocks_that_do_not_fit_are_errors() {
        for (shape, factor) in [(&[8][..], 4), (&[8, 6], 4), (&[4, 8], 4), (&[8, 8], 1)] {
            let fields = Tensor::zeros(shape, (Kind::Float, Device::Cpu));
            assert!(coarse_fields(&fields, factor, [true, true]).is_err(), "{shape:?} {factor}");
        }
    }
}
