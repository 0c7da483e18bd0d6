//! The samples of a run, and what they are scaled by.

use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_data::{DarcyFields, DarcyFile, InMemory, Normalizer, WellFile, split_validation};
use isobar_models::{FnoConfig, UNetConfig};
use isobar_train::config::{DataConfig, DataFormat};
use isobar_train::{FieldLayout, ModelConfig};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::config::Config;
use crate::exit::{self, Exit};

/// Samples in memory: this rank's window of them.
pub(crate) struct Fields {
    pub(crate) train: InMemory,
    pub(crate) validation: InMemory,
    /// Of trajectories, for validation over several steps.
    pub(crate) rollouts: Option<InMemory>,
    /// Of the inputs, over the training samples.
    pub(crate) input: Normalizer,
    /// Of the targets, over the training samples.
    pub(crate) target: Normalizer,
    /// The window, a range for each spatial dim.
    window: Vec<Range<usize>>,
}

impl Fields {
    /// Reads the file that the configuration names, and lays the fields out by their extents. Every rank calls and reads its
    /// own window by itself, maybe of a file of its own; all must find the same samples.
    pub(crate) fn read_alike<L: FieldLayout>(
        config: &Config,
        device: Device,
        world: &Group,
        lay_out: impl FnOnce(&[usize]) -> Result<L>,
    ) -> Result<(Self, L)> {
        let own = Source::open(&config.data).and_then(|source| {
            source.fits(&config.model)?;
            let layout = lay_out(&source.extents())?;
            let fields = source.read(&config.data, layout.window(&source.extents())?, device)?;
            Ok((fields.fingerprint()?, (fields, layout)))
        });
        let told = own.as_ref().map(|(fingerprint, _)| fingerprint).map_err(exit::text);
        let all = world.all_gather_bytes(&serde_json::to_vec(&told)?);
        let ((first, fields), all) = (own?, all?);
        for (rank, bytes) in all.iter().enumerate() {
            let other: Result<Fingerprint, String> = serde_json::from_slice(bytes)?;
            let other =
                other.map_err(|error| Exit::Lost.because(format!("rank {rank} cannot go on: {error}")))?;
            if !other.agrees_with(&first) {
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

    fn fingerprint(&self) -> Result<Fingerprint> {
        let (train, validation) = (&self.train, &self.validation);
        let mut hasher = DefaultHasher::new();
        for field in [train.inputs(), train.targets(), validation.inputs(), validation.targets()] {
            for row in 0..field.size().first().copied().unwrap_or(0) {
                let row = field.f_select(0, row)?.f_to_device(Device::Cpu)?.f_contiguous()?;
                let mut bytes = vec![0; row.numel() * Kind::Float.elt_size_in_bytes()];
                row.f_copy_data_u8(&mut bytes, row.numel())?;
                hasher.write(&bytes);
            }
        }
        let words = format!(
            "{} + {} samples with targets of mean {:.6e} and standard deviation {:.6e}",
            train.len(),
            validation.len(),
            self.target.mean()[0],
            self.target.std()[0],
        );
        Ok(Fingerprint { words, window: self.window.clone(), digest: hasher.finish() })
    }
}

/// Samples in words, and a number that tells the values of a window apart.
#[derive(Debug, Serialize, Deserialize)]
struct Fingerprint {
    words: String,
    window: Vec<Range<usize>>,
    digest: u64,
}

impl Fingerprint {
    fn agrees_with(&self, other: &Self) -> bool {
        self.words == other.words && (self.window != other.window || self.digest == other.digest)
    }
}

/// An open data file.
enum Source {
    Darcy(DarcyFile),
    Well { file: WellFile, fields: Vec<String> },
}

impl Source {
    fn open(config: &DataConfig) -> Result<Self> {
        Ok(match config.format {
            DataFormat::Darcy => {
                if config.train_steps != 1 || config.validation_steps != 1 {
                    bail!(Exit::Usage.because(format!(
                        "data.train_steps is {} and data.validation_steps {}, but Darcy flow has no steps; set both to 1",
                        config.train_steps, config.validation_steps
                    )));
                }
                Self::Darcy(DarcyFile::open(&config.path)?)
            }
            DataFormat::TheWell => {
                let file = WellFile::open(&config.path)?;
                if config.fields.is_empty() {
                    let there: Vec<&str> = file.fields().iter().map(|field| field.name()).collect();
                    bail!(Exit::Usage.because(format!(
                        "data.fields names no field; {} has {there:?}",
                        file.path().display()
                    )));
                }
                Self::Well { file, fields: config.fields.clone() }
            }
        })
    }

    /// Points along each spatial dim.
    fn extents(&self) -> Vec<usize> {
        match self {
            Self::Darcy(file) => vec![file.rows(), file.cols()],
            Self::Well { file, .. } => file.grid().to_vec(),
        }
    }

    fn path(&self) -> std::path::Display<'_> {
        match self {
            Self::Darcy(file) => file.path().display(),
            Self::Well { file, .. } => file.path().display(),
        }
    }

    /// Samples, or trajectories.
    fn samples(&self) -> usize {
        match self {
            Self::Darcy(file) => file.len(),
            Self::Well { file, .. } => file.trajectories(),
        }
    }

    /// Channels in and out.
    fn channels(&self) -> Result<[usize; 2]> {
        match self {
            Self::Darcy(_) => Ok([1, 1]),
            Self::Well { file, fields } => {
                let mut channels = 0;
                for name in fields {
                    channels += file.field(name)?.components();
                }
                Ok([channels; 2])
            }
        }
    }

    /// Checks that the model takes the file's fields, before anything is made.
    fn fits(&self, model: &ModelConfig) -> Result<()> {
        let (path, extents) = (self.path(), self.extents());
        let own = &extents[..];
        let (shape, channels) = match model {
            ModelConfig::Afno(afno) => (&afno.inp_shape[..], [afno.in_channels, afno.out_channels]),
            ModelConfig::DistributedAfno(afno) => {
                (&afno.inp_shape[..], [afno.in_channels, afno.out_channels.unwrap_or(afno.in_channels)])
            }
            ModelConfig::Fno(FnoConfig { dimension, .. })
            | ModelConfig::UNet(UNetConfig { dimension, .. })
                if *dimension != extents.len() =>
            {
                bail!(Exit::Usage.because(format!(
                    "model.dimension is {dimension}, but the fields of {path} have {0}; set model.dimension={0}",
                    extents.len()
                )))
            }
            ModelConfig::Fno(fno) => (own, [fno.in_channels, fno.out_channels]),
            ModelConfig::UNet(unet) => (own, [unet.in_channels, unet.out_channels]),
            ModelConfig::FullyConnected(network) => (own, [network.in_features, network.out_features]),
        };
        if shape != own {
            bail!(Exit::Usage.because(format!(
                "model.inp_shape is {shape:?}, but the fields of {path} are {own:?}; set model.inp_shape={own:?}"
            )));
        }
        let [inputs, outputs] = self.channels()?;
        if channels != [inputs, outputs] {
            bail!(Exit::Usage.because(format!(
                "the model takes {} channels and gives {}; the fields of {path} have {inputs} and {outputs}",
                channels[0], channels[1]
            )));
        }
        Ok(())
    }

    fn read(&self, config: &DataConfig, window: Vec<Range<usize>>, device: Device) -> Result<Fields> {
        let (mut train, validation) = split_validation(self.samples(), config.validation_samples)?;
        if let Some(asked) = config.train_samples {
            if asked == 0 || asked > train.end {
                bail!(Exit::Usage.because(format!(
                    "data.train_samples is {asked}, expected 1 to {}: {} has {} samples, of which {} are for validation",
                    train.end,
                    self.path(),
                    self.samples(),
                    validation.len()
                )));
            }
            train.end = asked;
        }
        match self {
            Self::Darcy(file) => {
                let statistics = file.statistics(train.clone())?;
                let load = |samples: Range<usize>| -> Result<InMemory> {
                    let samples: Vec<usize> = samples.collect();
                    let DarcyFields { nu, u } = file.read(&samples, window[0].clone(), window[1].clone())?;
                    Ok(InMemory::pairs(nu, u)?.to(device, Kind::Float)?)
                };
                Ok(Fields {
                    input: Normalizer::from_statistics(&statistics.nu)?,
                    target: Normalizer::from_statistics(&statistics.u)?,
                    train: load(train)?,
                    validation: load(validation)?,
                    rollouts: None,
                    window,
                })
            }
            Self::Well { file, fields } => {
                let names: Vec<&str> = fields.iter().map(String::as_str).collect();
                let normalizer = Normalizer::of_channels(&file.statistics(&names, train.clone())?)?;
                let load = |trajectories: Range<usize>| -> Result<Tensor> {
                    let read = |trajectory| file.read(&names, trajectory, 0..file.frames(), &window);
                    let all = trajectories.map(read).collect::<isobar_data::Result<Vec<_>>>()?;
                    Ok(Tensor::f_stack(&all, 0)?.f_to_device(device)?)
                };
                let (train, validation) = (load(train)?, load(validation)?);
                let steps = config.validation_steps;
                let rollouts =
                    (steps > 1).then(|| InMemory::rollouts(&validation, steps, steps)).transpose()?;
                Ok(Fields {
                    input: normalizer.clone(),
                    target: normalizer,
                    train: InMemory::rollouts(&train, config.train_steps, 1)?,
                    validation: InMemory::rollouts(&validation, 1, 1)?,
                    rollouts,
                    window,
                })
            }
        }
    }
}
