//! Checks of a run's settings that need nothing else.

use serde_json::{Value, json};

use super::{FitConfig, best};
use crate::config::{CheckpointConfig, TrainConfig};
use crate::error::{Error, Result};
use crate::optim::exponent;
use crate::schedule::{self, check_lr};

impl FitConfig {
    /// Checks all settings that can be checked without data, model or ranks. [`fit`](super::fit) calls it
    /// first; a program that reads data before `fit` can call it earlier.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the first setting out of its range, with a valid value.
    ///
    /// ```
    /// use isobar_train::{FitConfig, config::TrainConfig};
    ///
    /// let train = TrainConfig { batch_size: 8, accumulate: 9, ..TrainConfig::default() };
    /// let error = FitConfig { train, ..FitConfig::default() }.check().unwrap_err();
    /// assert!(error.to_string().starts_with("train.accumulate is 9, expected 1 to 8"));
    /// ```
    pub fn check(&self) -> Result<()> {
        train(&self.train)?;
        best::check(self)?;
        check_lr(self.optimizer.lr())?;
        self.optimizer.check()?;
        schedule::check(&self.schedule)?;
        self.data_parallel.check()?;
        if self.checkpoint.init.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
            let expected = "the folder of a checkpoint or of a run, or a safetensors file; --set checkpoint.init=runs/NAME, or leave it out";
            return Err(Error::invalid("checkpoint.init", "\"\"", expected));
        }
        let minutes = self.checkpoint.every_minutes;
        match std::time::Duration::try_from_secs_f64(minutes * 60.0) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::setting("checkpoint.every_minutes", minutes, "a number of 0 or more", 30)),
        }
    }
}

impl FitConfig {
    /// Returns the settings that all ranks must share, by their keys in a configuration. Places of files are not among them: hosts
    /// may have copies elsewhere.
    pub(crate) fn shared(&self) -> Value {
        let checkpoint = CheckpointConfig { init: None, ..self.checkpoint.clone() };
        let mut shared = self.data_parallel.by_key();
        shared["seed"] = self.seed.into();
        shared["train"] = json!(self.train);
        shared["optimizer"] = json!(self.optimizer);
        shared["schedule"] = json!(self.schedule);
        shared["checkpoint"] = json!(checkpoint);
        shared["task"] = self.task.clone();
        shared["data"] = self.data.clone();
        shared["metrics"] = json!({ "every_steps": self.metrics.every_steps, "report": self.metrics.report });
        shared
    }
}

fn train(train: &TrainConfig) -> Result<()> {
    for (key, value) in
        [("train.batch_size", train.batch_size as u64), ("train.validate_every", train.validate_every)]
    {
        if value == 0 {
            return Err(Error::invalid(key, 0, format!("1 or more; --set {key}=1")));
        }
    }
    if !(1..=train.batch_size).contains(&train.accumulate) {
        let most = train.batch_size;
        let expected = format!(
            "1 to {most}, as a micro-batch has a sample of the batch at least (train.batch_size); --set train.accumulate={}",
            train.accumulate.clamp(1, most)
        );
        return Err(Error::invalid("train.accumulate", train.accumulate, expected));
    }
    if let Some(norm) = train.clip_norm.filter(|norm| norm.is_nan() || *norm <= 0.0) {
        return Err(Error::invalid("train.clip_norm", norm, "a number above 0; --set train.clip_norm=1.0"));
    }
    if let Some(decay) = train.average_decay.filter(|decay| !(0.0..1.0).contains(decay)) {
        let expected = "a number in [0, 1); --set train.average_decay=0.999";
        return Err(Error::invalid("train.average_decay", decay, expected));
    }
    if let Some(width) = train.average_widths.iter().find(|width| exponent(**width).is_err()) {
        let expected = "numbers above 0, and at most 0.2886; --set train.average_widths=[0.05,0.1]";
        return Err(Error::invalid("train.average_widths", width, expected));
    }
    let mut widths = train.average_widths.clone();
    widths.sort_by(f64::total_cmp);
    if let Some(pair) = widths.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::invalid("train.average_widths", pair[0], "each width once"));
    }
    train.loss.check()?;
    train.weights.check(&train.loss)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::config::OptimizerKind;
    use crate::loss::Huber;
    use crate::optim::{AdamWConfig, LionConfig, MuonConfig, SgdConfig};
    use crate::schedule::{Constant, Cosine};

    #[rstest]
    #[case::accumulate(|c: &mut FitConfig| c.train.accumulate = usize::MAX, "--set train.accumulate=16")]
    #[case::no_accumulation(|c: &mut FitConfig| c.train.accumulate = 0, "--set train.accumulate=1")]
    #[case::batch(|c: &mut FitConfig| c.train.batch_size = 0, "train.batch_size is 0")]
    #[case::validation(|c: &mut FitConfig| c.train.validate_every = 0, "train.validate_every is 0")]
    #[case::clip(|c: &mut FitConfig| c.train.clip_norm = Some(-1.0), "--set train.clip_norm=1.0")]
    #[case::averages(|c: &mut FitConfig| c.train.average_decay = Some(1.0), "--set train.average_decay=0.999")]
    #[case::equal_widths(|c: &mut FitConfig| c.train.average_widths = vec![0.1, 0.1], "each width once")]
    #[case::widths(|c: &mut FitConfig| c.train.average_widths = vec![0.1, 0.3], "train.average_widths is 0.3")]
    #[case::rate(
        |c: &mut FitConfig| c.optimizer = OptimizerKind::from(SgdConfig { lr: -0.001, ..SgdConfig::default() }),
        "optimizer.lr is -0.001, expected a finite number above 0; for instance --set optimizer.lr=0.001"
    )]
    #[case::beta(
        |c: &mut FitConfig| c.optimizer = OptimizerKind::from(LionConfig { beta1: 1.5, ..LionConfig::default() }),
        "optimizer.beta1 is 1.5, expected a number in [0, 1); --set optimizer.beta1=0.9"
    )]
    #[case::warm_up(|c: &mut FitConfig| c.schedule = Constant { warmup_epochs: f64::NAN }.into(), "schedule.warmup_epochs is NaN, expected a finite number of epochs, 0 or more; --set schedule.warmup_epochs=0.0")]
    #[case::loss(|c: &mut FitConfig| c.train.loss = Huber { delta: -1.0 }.into(), "train.loss.delta is -1, expected a finite number above 0; --set train.loss.delta=1.0")]
    #[case::buckets(|c: &mut FitConfig| c.data_parallel.bucket_mb = 0.0, "data_parallel.bucket_mb is 0, expected a finite number of MiB above 0; --set data_parallel.bucket_mb=4")]
    #[case::minutes(|c: &mut FitConfig| c.checkpoint.every_minutes = 1e300, "checkpoint.every_minutes is 1e300, expected a number of 0 or more; --set checkpoint.every_minutes=30")]
    #[case::init(|c: &mut FitConfig| c.checkpoint.init = Some("".into()), "checkpoint.init is \"\", expected the folder of a checkpoint")]
    #[case::eps(
        |c: &mut FitConfig| c.optimizer = OptimizerKind::from(AdamWConfig { eps: 0.0, ..AdamWConfig::default() }),
        "optimizer.eps is 0, expected a finite number above 0; --set optimizer.eps=1e-8"
    )]
    #[case::decay(
        |c: &mut FitConfig| c.optimizer = OptimizerKind::from(SgdConfig { weight_decay: -1.0, ..SgdConfig::default() }),
        "--set optimizer.weight_decay=0.0"
    )]
    #[case::decay_of_muon(
        |c: &mut FitConfig| c.optimizer = OptimizerKind::from(MuonConfig { weight_decay: -1.0, ..MuonConfig::default() }),
        "optimizer.weight_decay is -1, expected a finite number of 0 or more"
    )]
    #[case::beta_of_muon(
        |c: &mut FitConfig| c.optimizer = OptimizerKind::from(MuonConfig { beta1: 2.0, ..MuonConfig::default() }),
        "optimizer.beta1 is 2, expected a number in [0, 1)"
    )]
    #[case::eps_of_muon(
        |c: &mut FitConfig| c.optimizer = OptimizerKind::from(MuonConfig { eps: 0.0, ..MuonConfig::default() }),
        "optimizer.eps is 0, expected a finite number above 0"
    )]
    #[case::share(
        |c: &mut FitConfig| c.schedule = Cosine { warmup_epochs: 0.0, min_factor: 2.0 }.into(),
        "--set schedule.min_factor=1.0"
    )]
    fn settings_out_of_range(#[case] change: fn(&mut FitConfig), #[case] words: &str) {
        let mut config = FitConfig::default();
        config.check().unwrap();
        change(&mut config);
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
