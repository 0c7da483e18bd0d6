//! Frames that are missing in a series.

use crate::adapt::time_text;
use crate::dataset::Dataset;

/// Steps without a frame from which on there is a gap; months have 28 to 31 days.
const MOST: f64 = 1.5;

/// Returns whether frames are missing where times differ by `difference` and usual steps are `step`.
pub(crate) fn is_gap(difference: f64, step: f64) -> bool {
    difference > MOST * step
}

/// Describes the first place in the times of a data set where frames are missing; `None` if there is none. A frame is missing where
/// two times differ by more than 1.5 times the median step. Of trajectories that are cut, all times count.
///
/// ```
/// use isobar_data::missing_frames;
/// # use isobar_data::{DataVariable, Dataset, Dim, Result, Window};
/// # #[derive(Debug)]
/// # struct Series(Vec<f64>);
/// # impl Dataset for Series {
/// #     fn path(&self) -> &std::path::Path { "series.nc".as_ref() }
/// #     fn samples(&self) -> usize { 1 }
/// #     fn dims(&self) -> &[Dim] { &[] }
/// #     fn times(&self) -> Option<&[f64]> { Some(&self.0) }
/// #     fn variables(&self) -> &[DataVariable] { &[] }
/// #     fn read(&self, _: &Window, _: &[usize], _: &[&str]) -> Result<tch::Tensor> { unreachable!() }
/// # }
/// # let series = |times: &[f64]| Series(times.to_vec());
/// assert_eq!(missing_frames(&series(&[0.0, 6.0, 12.0])), None);
/// let found = missing_frames(&series(&[0.0, 6.0, 12.0, 36.0])).unwrap();
/// assert_eq!(found, "series.nc lacks frames between 12 and 36: the gap is 24, the median step 6");
/// ```
pub fn missing_frames(data: &dyn Dataset) -> Option<String> {
    let times = data.uncut_times().or(data.times())?;
    let steps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let usual = median(&steps)?;
    let at = steps.iter().position(|&step| is_gap(step, usual))?;
    let text = |frame: usize| time_text(data.time_unit(), times.get(frame));
    Some(format!(
        "{} lacks frames between {} and {}: the gap is {}, the median step {usual}",
        data.path().display(),
        text(at),
        text(at + 1),
        steps[at]
    ))
}

/// Says how many steps at the end of each trajectory are in no piece, if trajectories are cut; `None` if all are in one.
pub(crate) fn lost_steps(data: &dyn Dataset) -> Option<String> {
    let (all, cut) = (data.uncut_times()?.len().saturating_sub(1), data.times()?.len().saturating_sub(1));
    let lost = all.checked_rem(cut).filter(|lost| *lost > 0)?;
    Some(format!(
        "the last {lost} of {all} steps of each trajectory of {} are left out: segments have {cut} steps; set `cut` to a divisor \
         of {all} to use all",
        data.path().display()
    ))
}

/// Returns the step of ascending times: the one that most frames have, or the mean of steps that differ, such as those of months or of
/// rounded times. `None` for fewer than two frames.
///
/// ```
/// use isobar_data::usual_step;
///
/// assert_eq!(usual_step(&[0.0, 6.0, 12.0, 36.0, 42.0]), Some(6.0));
/// assert_eq!(usual_step(&[0.0, 31.0, 59.0, 90.0, 120.0]), Some(30.0));
/// assert_eq!(usual_step(&[1.0]), None);
/// ```
pub fn usual_step(times: &[f64]) -> Option<f64> {
    let steps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let usual = median(&steps)?;
    let alike = steps.iter().filter(|step| (**step - usual).abs() <= 1e-6 * usual.abs()).count();
    if 2 * alike > steps.len() {
        return Some(usual);
    }
    let regular: Vec<f64> = steps.into_iter().filter(|step| !is_gap(*step, usual)).collect();
    (!regular.is_empty()).then(|| regular.iter().sum::<f64>() / regular.len() as f64)
}

fn median(steps: &[f64]) -> Option<f64> {
    let mut sorted = steps.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tch::Tensor;

    use super::*;
    use crate::dataset::Window;
    use crate::{DataVariable, Dim, Result};

    /// A trajectory of these times, cut into pieces of so many steps.
    #[derive(Debug)]
    struct Cut(Vec<f64>, usize);

    impl Dataset for Cut {
        fn path(&self) -> &Path {
            Path::new("series.nc")
        }
        fn samples(&self) -> usize {
            1
        }
        fn dims(&self) -> &[Dim] {
            &[]
        }
        fn times(&self) -> Option<&[f64]> {
            Some(&self.0[..=self.1])
        }
        fn uncut_times(&self) -> Option<&[f64]> {
            Some(&self.0)
        }
        fn variables(&self) -> &[DataVariable] {
            &[]
        }
        fn read(&self, _: &Window, _: &[usize], _: &[&str]) -> Result<Tensor> {
            unreachable!()
        }
    }

    #[test]
    fn steps_after_the_last_piece_are_counted() {
        let times: Vec<f64> = (0..8).map(f64::from).collect();
        let found = lost_steps(&Cut(times.clone(), 3)).unwrap();
        assert_eq!(
            found,
            "the last 1 of 7 steps of each trajectory of series.nc are left out: segments have 3 steps; set `cut` to a divisor \
             of 7 to use all"
        );
        assert_eq!(lost_steps(&Cut(times, 7)), None);
    }
}
