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
/// two times differ by more than 1.5 times the median step.
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
    let times = data.times()?;
    let steps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let mut sorted = steps.clone();
    sorted.sort_by(f64::total_cmp);
    let usual = *sorted.get(sorted.len() / 2)?;
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
