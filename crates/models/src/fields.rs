//! Description of the data that a model is trained on, and checks against it.

use crate::error::{Error, Result};

/// Shape of a data set's samples: what [`Architecture::check`](crate::Architecture::check) compares a configuration with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldSpec {
    /// Name of the data set in error messages, such as its path.
    pub source: String,
    /// Number of points along each spatial dim.
    pub extents: Vec<usize>,
    /// Number of points along each spatial dim of the targets, if they are on another grid than the inputs.
    pub target_extents: Option<Vec<usize>>,
    /// Extents of the patches, for a network that is built for the extents of the fields and
    /// [reads patches](crate::Architecture::reads_patches); otherwise `None`.
    pub patch_extents: Option<Vec<usize>>,
    /// Channels of the inputs that come from the data.
    pub in_channels: usize,
    /// Further input channels with the positions of the points and static fields.
    pub position_channels: usize,
    /// Channels of the targets.
    pub out_channels: usize,
    /// Channels of the array `conditions`, fields that a denoiser is given beside the noisy ones; 0 for none.
    pub condition_channels: usize,
    /// Names of the arrays that a batch has besides the fields, such as `time`.
    pub arrays: Vec<String>,
}

impl FieldSpec {
    /// Checks a model's number of spatial dims.
    ///
    /// # Errors
    ///
    /// Another number than the fields', with the setting that fits.
    pub fn check_dimension(&self, model: &'static str, dimension: usize) -> Result<()> {
        let dims = self.extents.len();
        ensure(model, dimension == dims, || {
            format!(
                "model.dimension is {dimension}, but the fields of {} have {dims}; --set model.dimension={dims}",
                self.source
            )
        })
    }

    /// Checks the key that says for which extents a model is made.
    ///
    /// # Errors
    ///
    /// Other extents than the fields', with the setting that fits.
    pub fn check_extents(&self, model: &'static str, key: &str, extents: &[usize]) -> Result<()> {
        let own = &self.extents;
        ensure(model, extents == own, || {
            format!(
                "model.{key} is {extents:?}, but the fields of {} are {own:?}; --set 'model.{key}={own:?}'",
                self.source
            )
        })
    }

    /// Checks the grid of a model's outputs, if the targets have one of their own; `mend` says how to get outputs on it.
    ///
    /// # Errors
    ///
    /// Another grid than the targets'.
    pub(crate) fn check_target_extents(
        &self,
        model: &'static str,
        outputs: &[usize],
        mend: impl FnOnce(&[usize]) -> String,
    ) -> Result<()> {
        match &self.target_extents {
            None => Ok(()),
            Some(targets) => self.check_outputs(model, (&self.extents, outputs), targets, || mend(targets)),
        }
    }

    /// Checks that a model's outputs for inputs of these extents are on the grid of the targets; `mend` says how to get them there.
    ///
    /// # Errors
    ///
    /// Another grid than the targets'.
    pub(crate) fn check_outputs(
        &self,
        model: &'static str,
        (inputs, outputs): (&[usize], &[usize]),
        targets: &[usize],
        mend: impl FnOnce() -> String,
    ) -> Result<()> {
        ensure(model, outputs == targets, || {
            format!(
                "for inputs of {inputs:?} points the model's outputs have {outputs:?}, but the targets of {} have {targets:?}; {}",
                self.source,
                mend()
            )
        })
    }

    /// Factor by which the targets' grid is finer than the inputs', along all dims; `None` if there is no such integer.
    pub(crate) fn target_scale(&self) -> Option<usize> {
        let targets = self.target_extents.as_ref().unwrap_or(&self.extents);
        let factor = targets.first()?.checked_div(*self.extents.first()?)?;
        let pairs = self.extents.iter().zip(targets);
        pairs.into_iter().all(|(from, to)| from.checked_mul(factor) == Some(*to)).then_some(factor)
    }

    /// Checks the numbers of channels, each given with its key: the same key twice, if the model has one number for both.
    ///
    /// # Errors
    ///
    /// Other numbers than the data's, with the settings that fit.
    ///
    /// ```
    /// use isobar_models::FieldSpec;
    ///
    /// let fields = FieldSpec { source: "waves.h5".into(), in_channels: 1, out_channels: 1, ..FieldSpec::default() };
    /// let channels = ("channels", 2);
    /// let error = fields.check_channels("mix", channels, channels).unwrap_err().to_string();
    /// assert!(error.contains("model.channels is 2, but the inputs of waves.h5 have 1 channels"));
    /// assert!(error.ends_with("; --set model.channels=1"));
    /// ```
    pub fn check_channels(
        &self,
        model: &'static str,
        inputs: (&str, usize),
        outputs: (&str, usize),
    ) -> Result<()> {
        let wanted = [self.in_channels + self.position_channels, self.out_channels];
        let given = [inputs, outputs];
        ensure(model, inputs.1 == wanted[0] && outputs.1 == wanted[1], || {
            let positions = match self.position_channels {
                0 => String::new(),
                channels => {
                    format!(
                        ", and {channels} more for positions and static fields (data.positions, data.statics)"
                    )
                }
            };
            let differing = given.iter().zip(wanted).filter(|((_, given), wanted)| given != wanted);
            let settings: Vec<String> =
                differing.map(|((key, _), wanted)| format!("--set model.{key}={wanted}")).collect();
            let (own, settings) = match inputs.0 == outputs.0 {
                false => {
                    let own = format!(
                        "model.{} is {} and model.{} is {}",
                        inputs.0, inputs.1, outputs.0, outputs.1
                    );
                    (own, settings.join(" "))
                }
                true => (format!("model.{} is {}", inputs.0, inputs.1), one_number(inputs.0, wanted)),
            };
            format!(
                "{own}, but the inputs of {} have {} channels{positions}, and the targets {}; {settings}",
                self.source, self.in_channels, self.out_channels,
            )
        })
    }

    /// Checks the data of a model that has no pair of keys for its numbers of channels; `mend` says how to fix a mismatch.
    ///
    /// # Errors
    ///
    /// Other numbers than the model's.
    pub(crate) fn check_fixed_channels(
        &self,
        model: &'static str,
        [inputs, outputs]: [usize; 2],
        mend: &str,
    ) -> Result<()> {
        let own = [self.in_channels + self.position_channels, self.out_channels];
        ensure(model, own == [inputs, outputs], || {
            format!(
                "the model takes {inputs} channels and gives {outputs}, but the inputs of {} have {}, and the targets {}; {mend}",
                self.source, own[0], own[1]
            )
        })
    }

    /// Checks that batches have an array that the model reads.
    ///
    /// # Errors
    ///
    /// Data without such an array.
    pub fn check_array(&self, model: &'static str, name: &str) -> Result<()> {
        ensure(model, self.arrays.iter().any(|array| array == name), || {
            let there = match self.arrays.as_slice() {
                [] => "have nothing besides fields".to_owned(),
                arrays => format!("have {}", arrays.join(", ")),
            };
            format!(
                "the model reads the array \"{name}\", but the samples of {} {there}; choose other data or another model.type",
                self.source
            )
        })
    }
}

/// The mend for a key that is the number of channels of inputs and of targets.
fn one_number(key: &str, [inputs, targets]: [usize; 2]) -> String {
    match inputs == targets {
        true => format!("--set model.{key}={inputs}"),
        false => {
            "the model has as many outputs as inputs; choose data.targets with as many channels, or another model.type".to_owned()
        }
    }
}

fn ensure(model: &'static str, holds: bool, reason: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Config { model, reason: reason() }) }
}
