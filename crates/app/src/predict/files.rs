//! The files that a prediction writes.

use std::path::PathBuf;

use anyhow::{Result, bail};
use isobar_data::Parts;

use super::Predict;
use crate::run::Source;
use isobar_command::exit::{Because, Exit};
use isobar_command::outputs;

/// The prediction, and the files that are written beside it.
pub(super) struct Files {
    pub(super) out: PathBuf,
    pub(super) errors: PathBuf,
    pub(super) curves: PathBuf,
    pub(super) metrics: PathBuf,
    pub(super) metric_curves: PathBuf,
    pub(super) spectra: PathBuf,
    pub(super) spectrum_curves: PathBuf,
    pub(super) picture: PathBuf,
}

impl Files {
    /// Names the files beside `out`.
    fn beside(out: PathBuf) -> Self {
        Self {
            errors: out.with_extension("csv"),
            curves: out.with_extension("errors.png"),
            metrics: out.with_extension("metrics.jsonl"),
            metric_curves: out.with_extension("metrics.png"),
            spectra: out.with_extension("spectra.csv"),
            spectrum_curves: out.with_extension("spectra.png"),
            picture: out.with_extension("png"),
            out,
        }
    }
}

impl Predict<'_> {
    /// Names the files to write, and checks that they replace nothing that is read.
    pub(super) fn files(&self, source: &Source) -> Result<Files> {
        let out = self.args.out.clone().unwrap_or_else(|| self.config.run.folder().join("prediction.h5"));
        if ["csv", "png"].iter().any(|other| out.extension().is_some_and(|own| own == *other)) {
            let beside =
                "--out names an HDF5 file, beside which a picture (.png) and errors (.csv) are written";
            bail!(Exit::Usage.because(format!("{beside}; {} would be one of these", out.display())));
        }
        let files = Files::beside(out);
        let Files { out, errors, curves, metrics, metric_curves, spectra, spectrum_curves, picture } = &files;
        let written = [out, errors, curves, metrics, metric_curves, spectra, spectrum_curves, picture];
        outputs::check("--out", &written, &self.inputs(source))?;
        Ok(files)
    }

    /// The files and folders that are read. Those of the run are known by its folder.
    fn inputs(&self, source: &Source) -> Vec<PathBuf> {
        let Parts { train, validation, test, .. } = &source.parts;
        let parts = [Some(train), Some(validation), test.as_ref()].into_iter().flatten();
        let data = parts.flat_map(|part| part.data.files().into_iter().chain(part.targets().files()));
        let named = [
            Some(self.args.config.file().to_owned()),
            self.args.checkpoint.clone().map(PathBuf::from),
            self.config.metrics.climatology.clone(),
        ];
        // Folders are those of runs and checkpoints.
        data.chain(named.into_iter().flatten().filter(|path| path.is_file())).collect()
    }
}
