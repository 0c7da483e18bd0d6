//! Roles of the channels of stored frames in a rollout: prognostic, diagnostic and forcing.

use isobar_data::{Batch, Computed, Normalizer};
use isobar_models::BatchPart;
use tch::{Device, Kind, Tensor};

/// Result whose error the engine passes on.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Roles of the channels of stored frames `[sample, channel, x, …]`, whose channels are, in this order: prognostic (inputs and
/// outputs), diagnostic (outputs only), forcing (inputs only).
///
/// The input of a step is, along the channels: the prognostic channels of the last `history` frames, the oldest frame first; the
/// forcings at the time of the newest of them, stored ones before computed ones; the positions and static fields. Its output is
/// the prognostic and the diagnostic channels of the next frame.
///
/// A sample of `n` steps is stored as `history` + `n` consecutive frames: of [`InMemory::rollouts`](isobar_data::InMemory::rollouts)
/// with `history - 1 + n` steps.
#[derive(Debug, Clone)]
pub struct Roles {
    /// Number of input frames, at least 1.
    pub history: usize,
    /// Number of prognostic channels.
    pub prognostic: usize,
    /// Number of diagnostic channels.
    pub diagnostic: usize,
    /// Normalisation of the stored forcings, if there are some.
    pub forcing: Option<Normalizer>,
    /// Forcings that are computed from the times of the frames.
    pub computed: Option<Computed>,
}

/// Values from which a rollout starts, in physical units: this rank's window of its own samples.
#[derive(Debug)]
pub struct Start {
    /// Prognostic channels of the input frames, the oldest first: each `[sample, channel, x, …]`.
    pub frames: Vec<Tensor>,
    /// Stored forcings for each step, `[sample, channel, x, …]`; empty without.
    pub forcings: Vec<Tensor>,
    /// For each step, the times of the frames that it starts from; empty for data without times.
    pub times: Vec<Vec<f64>>,
    /// Number of steps.
    pub steps: usize,
    /// Part of all samples of an evaluation that these are, so that a denoiser draws other noise for each; `None` means that they
    /// are all.
    pub part: Option<BatchPart>,
}

/// A sample: the start of a rollout and the frames to compare it with.
#[derive(Debug)]
pub struct Sample {
    /// Start of the rollout.
    pub start: Start,
    /// The newest input frame, with the channels of outputs.
    pub last: Tensor,
    /// The frame after each step, with the channels of outputs.
    pub targets: Vec<Tensor>,
}

impl Start {
    /// A start from one frame, without forcings.
    pub fn of_frame(frame: &Tensor, steps: usize, times: &[Vec<f64>]) -> Self {
        Self {
            frames: vec![frame.shallow_clone()],
            forcings: Vec::new(),
            times: times.to_vec(),
            steps,
            part: None,
        }
    }
}

impl Roles {
    /// Number of steps of a sample that is stored with so many steps.
    pub fn steps(roles: Option<&Self>, stored: usize) -> usize {
        stored.saturating_sub(roles.map_or(0, |roles| roles.history.saturating_sub(1)))
    }

    /// Splits stored frames by role. Without roles all channels are prognostic, and the history is one frame.
    ///
    /// # Errors
    ///
    /// Fewer frames than the history and one step, or another number of channels than the roles have.
    pub fn arrange(roles: Option<&Self>, batch: Batch) -> Result<Sample> {
        if let Some(roles) = roles
            && batch.targets.len() < roles.history
        {
            return Err(format!(
                "a sample has {} frames, expected more than the {} of the history",
                1 + batch.targets.len(),
                roles.history
            )
            .into());
        }
        Self::arrange_forecast(roles, batch)
    }

    /// Splits stored frames by role, like [`arrange`](Self::arrange), for a forecast: there may be no frame after the history to
    /// compare with.
    ///
    /// # Errors
    ///
    /// Fewer frames than the history, or another number of channels than the roles have.
    pub fn arrange_forecast(roles: Option<&Self>, batch: Batch) -> Result<Sample> {
        let Batch { input, targets, times } = batch;
        let Some(roles) = roles else {
            let start = Start::of_frame(&input, targets.len(), &times);
            return Ok(Sample { start, last: input, targets });
        };
        let frames: Vec<Tensor> = std::iter::once(input).chain(targets).collect();
        let channels = frames[0].size().get(1).copied().unwrap_or(0) as usize;
        let forcings = roles.forcing.as_ref().map_or(0, |forcing| forcing.mean().len());
        if channels != roles.prognostic + roles.diagnostic + forcings {
            return Err(format!(
                "stored frames have {channels} channels, expected {} prognostic, {} diagnostic and {forcings} forcing ones",
                roles.prognostic, roles.diagnostic
            )
            .into());
        }
        if roles.history == 0 || frames.len() < roles.history {
            return Err(format!(
                "a forecast starts from {} frames, expected the {} of the history",
                frames.len(),
                roles.history
            )
            .into());
        }
        let part = |frame: &Tensor, first: usize, count: usize| frame.f_narrow(1, first as i64, count as i64);
        let outputs = roles.prognostic + roles.diagnostic;
        let newest = roles.history - 1;
        let known = &frames[newest..];
        let start = Start {
            frames: frames[..=newest]
                .iter()
                .map(|frame| part(frame, 0, roles.prognostic))
                .collect::<std::result::Result<_, _>>()?,
            forcings: match forcings {
                0 => Vec::new(),
                count => known
                    .iter()
                    .map(|frame| part(frame, outputs, count))
                    .collect::<std::result::Result<_, _>>()?,
            },
            times: times.get(newest..).map(<[Vec<f64>]>::to_vec).unwrap_or_default(),
            steps: known.len() - 1,
            part: None,
        };
        let targets =
            known[1..].iter().map(|frame| part(frame, 0, outputs)).collect::<std::result::Result<_, _>>()?;
        Ok(Sample { start, last: part(&known[0], 0, outputs)?, targets })
    }

    /// Normalised forcings of a step, `[sample, channel, x, …]`, stored ones first; `None` where there are none.
    ///
    /// # Errors
    ///
    /// A step whose forcings are not known.
    pub(crate) fn forcings(
        &self,
        start: &Start,
        at: usize,
        (kind, device): (Kind, Device),
    ) -> Result<Option<Tensor>> {
        let mut all = Vec::new();
        if let Some(normalizer) = &self.forcing {
            let stored = start.forcings.get(at).ok_or_else(|| {
                format!("the forcings of step {} are not known: there are {}", at + 1, start.forcings.len())
            })?;
            all.push(normalizer.encode(stored)?);
        }
        if let Some(computed) = &self.computed {
            let times = start.times.get(at).ok_or_else(|| format!("step {} has no times", at + 1))?;
            all.push(computed.at(times)?.f_to_device(device)?.f_to_kind(kind)?);
        }
        Ok(match all.len() {
            0 => None,
            _ => Some(Tensor::f_cat(&all, 1)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forecast_starts_from_the_last_frames() {
        let roles = Roles { history: 2, prognostic: 1, diagnostic: 1, forcing: None, computed: None };
        let frame = |value: f64| Tensor::full([1, 2, 3], value, (Kind::Double, Device::Cpu));
        let batch = |frames: &[f64]| Batch {
            input: frame(frames[0]),
            targets: frames[1..].iter().copied().map(frame).collect(),
            times: Vec::new(),
        };
        let error = Roles::arrange(Some(&roles), batch(&[1.0, 2.0])).unwrap_err().to_string();
        assert_eq!(error, "a sample has 2 frames, expected more than the 2 of the history");
        let Sample { start, last, targets } =
            Roles::arrange_forecast(Some(&roles), batch(&[1.0, 2.0])).unwrap();
        assert_eq!((start.frames.len(), start.steps, targets.len()), (2, 0, 0));
        assert_eq!((last.size(), last.double_value(&[0, 0, 0])), (vec![1, 2, 3], 2.0));
        let error = Roles::arrange_forecast(Some(&roles), batch(&[1.0])).unwrap_err().to_string();
        assert_eq!(error, "a forecast starts from 1 frames, expected the 2 of the history");
    }
}
