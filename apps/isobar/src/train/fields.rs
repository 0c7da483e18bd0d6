//! The samples of a run, and what they are scaled by.

use std::hash::{DefaultHasher, Hasher};

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_data::{DarcyFile, InMemory, Normalizer, split_validation};
use isobar_models::{FnoConfig, UNetConfig};
use isobar_train::ModelConfig;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::config::Config;
use crate::exit::{self, Exit};

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
    /// Reads the file that the configuration names. Every rank calls and reads by itself, maybe a file of its own; all must
    /// find the same samples.
    pub(crate) fn read_alike(config: &Config, device: Device, world: &Group) -> Result<Self> {
        let own = Self::read(config, device).and_then(|fields| Ok((fields.fingerprint()?, fields)));
        let told = own.as_ref().map(|(fingerprint, _)| fingerprint).map_err(exit::text);
        let all = world.all_gather_bytes(&serde_json::to_vec(&told)?);
        let ((first, fields), all) = (own?, all?);
        for (rank, bytes) in all.iter().enumerate() {
            let other: Result<Fingerprint, String> = serde_json::from_slice(bytes)?;
            let other =
                other.map_err(|error| Exit::Lost.because(format!("rank {rank} cannot go on: {error}")))?;
            if other != first {
                let (own, words) = (&first.words, &other.words);
                let difference = match own == words {
                    true => format!("{own} on both, but of other values"),
                    false => format!("{own} here, {words} there"),
                };
                bail!(Exit::Mismatch.because(format!(
                    "ranks {} and {rank} read different data: {difference}; give all ranks the same file as data.path",
                    world.rank()
                )));
            }
        }
        Ok(fields)
    }

    fn read(config: &Config, device: Device) -> Result<Self> {
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

    fn fingerprint(&self) -> Result<Fingerprint> {
        let (train, validation) = (self.train.samples(), self.validation.samples());
        let mut hasher = DefaultHasher::new();
        for field in [&train.nu, &train.u, &validation.nu, &validation.u] {
            for sample in 0..field.size().first().copied().unwrap_or(0) {
                let sample = field.f_select(0, sample)?.f_to_device(Device::Cpu)?.f_contiguous()?;
                let mut bytes = vec![0; sample.numel() * Kind::Float.elt_size_in_bytes()];
                sample.f_copy_data_u8(&mut bytes, sample.numel())?;
                hasher.write(&bytes);
            }
        }
        let (_, rows, cols) = train.sizes()?;
        let words = format!(
            "{} + {} samples of {rows} x {cols} with solutions of mean {:.6e} and standard deviation {:.6e}",
            self.train.len(),
            self.validation.len(),
            self.target.mean(),
            self.target.std(),
        );
        Ok(Fingerprint { words, digest: hasher.finish() })
    }
}

/// Samples in words, and a number that tells their values apart.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Fingerprint {
    words: String,
    digest: u64,
}

/// Checks that the model takes the file's fields, before anything is made.
fn fits(model: &ModelConfig, file: &DarcyFile) -> Result<()> {
    let fields = [file.rows(), file.cols()];
    let (shape, channels) = match model {
        ModelConfig::Afno(afno) => (afno.inp_shape, [afno.in_channels, afno.out_channels]),
        ModelConfig::DistributedAfno(afno) => {
            (afno.inp_shape, [afno.in_channels, afno.out_channels.unwrap_or(afno.in_channels)])
        }
        ModelConfig::Fno(fno) if fno.dimension == 2 => (fields, [fno.in_channels, fno.out_channels]),
        ModelConfig::UNet(unet) if unet.dimension == 2 => (fields, [unet.in_channels, unet.out_channels]),
        ModelConfig::Fno(FnoConfig { dimension, .. }) | ModelConfig::UNet(UNetConfig { dimension, .. }) => {
            bail!(Exit::Usage.because(format!(
                "model.dimension is {dimension}, but the fields of {} have 2; set model.dimension=2",
                file.path().display()
            )))
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
