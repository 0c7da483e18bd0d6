//! The samples of a run, and what they are scaled by.

use anyhow::{Result, bail};
use isobar_data::{DarcyFile, InMemory, Normalizer, split_validation};
use isobar_train::ModelConfig;
use tch::{Device, Kind};

use crate::config::Config;
use crate::exit::Exit;

/// Samples in memory.
pub(crate) struct Fields {
    pub(crate) train: InMemory,
    pub(crate) validation: InMemory,
    /// Of the coefficients, over the training samples.
    pub(crate) input: Normalizer,
    /// Of the solutions, over the training samples.
    pub(crate) target: Normalizer,
}

impl Fields {
    /// Reads the file that the configuration names; every rank by itself.
    pub(crate) fn read(config: &Config, device: Device) -> Result<Self> {
        let file = DarcyFile::open(&config.data.path)?;
        fits(&config.model, &file)?;
        let (mut train, validation) = split_validation(file.len(), config.data.validation_samples)?;
        if let Some(asked) = config.data.train_samples {
            if asked == 0 || asked > train.end {
                bail!(Exit::Usage.because(format!(
                    "data.train_samples is {asked}, expected 1 to {}: {} has {} samples, of which {} are for validation",
                    train.end,
                    file.path().display(),
                    file.len(),
                    validation.len()
                )));
            }
            train.end = asked;
        }
        let statistics = file.statistics(train.clone())?;
        let load = |samples| -> Result<InMemory> {
            let loaded = InMemory::load(&file, samples)?;
            Ok(InMemory::new(loaded.samples().to(device, Kind::Float)?)?)
        };
        Ok(Self {
            input: Normalizer::from_statistics(&statistics.nu)?,
            target: Normalizer::from_statistics(&statistics.u)?,
            train: load(train)?,
            validation: load(validation)?,
        })
    }
}

/// Checks that the model takes the file's fields, before anything is made.
fn fits(model: &ModelConfig, file: &DarcyFile) -> Result<()> {
    let fields = [file.rows(), file.cols()];
    let (shape, channels) = match model {
        ModelConfig::Afno(afno) => (afno.inp_shape, [afno.in_channels, afno.out_channels]),
        ModelConfig::DistributedAfno(afno) => {
            (afno.inp_shape, [afno.in_channels, afno.out_channels.unwrap_or(afno.in_channels)])
        }
        ModelConfig::FullyConnected(network) => (fields, [network.in_features, network.out_features]),
    };
    if shape != fields {
        bail!(Exit::Usage.because(format!(
            "model.inp_shape is {shape:?}, but the fields of {} are {fields:?}; set model.inp_shape={fields:?}",
            file.path().display()
        )));
    }
    if channels != [1, 1] {
        bail!(Exit::Usage.because(format!(
            "the model takes {} channels and gives {}; Darcy flow has 1 of each",
            channels[0], channels[1]
        )));
    }
    Ok(())
}
