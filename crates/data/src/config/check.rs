//! Checks of `[data]` that need no file.

use super::DataConfig;
use crate::{Error, Result};

impl DataConfig {
    /// Checks the keys that need no file: rejects empty paths, and keys that do not fit together.
    ///
    /// # Errors
    ///
    /// [`Error::Config`], with the key and a `--set`.
    ///
    /// ```
    /// use isobar_data::DataConfig;
    ///
    /// let config = DataConfig { path: "".into(), ..DataConfig::default() };
    /// assert!(config.check().unwrap_err().to_string().starts_with("data.path is \"\""));
    /// ```
    pub fn check(&self) -> Result<()> {
        let target = self.target.as_ref();
        let paths = [
            ("path", Some(&self.path)),
            ("validation_path", self.validation_path.as_ref()),
            ("test_path", self.test_path.as_ref()),
            ("target.path", target.and_then(|target| target.path.as_ref())),
            ("target.validation_path", target.and_then(|target| target.validation_path.as_ref())),
            ("target.test_path", target.and_then(|target| target.test_path.as_ref())),
        ];
        if let Some((key, _)) = paths.into_iter().find(|(_, path)| path.is_some_and(|path| path.has_empty()))
        {
            return Err(Error::Config(format!(
                "data.{key} is \"\", expected a file, a folder or a pattern; --set data.{key}=PATH"
            )));
        }
        self.check_keys()
    }

    /// Rejects keys that do not fit together.
    fn check_keys(&self) -> Result<()> {
        if self.train_times.is_some() && self.validation_times.is_none() && self.validation_path.is_none() {
            return Err(Error::Config(
                "data.train_times is set without data for validation: set data.validation_times or \
                 data.validation_path, or select times of both with data.times"
                    .to_owned(),
            ));
        }
        for (key, times, path) in [
            ("validation", &self.validation_times, &self.validation_path),
            ("test", &self.test_times, &self.test_path),
        ] {
            if times.is_some() && path.is_none() && self.train_times.is_none() {
                return Err(Error::Config(format!(
                    "data.{key}_times is set without data.train_times: training would see the {key} frames; set both, or \
                     data.{key}_path"
                )));
            }
        }
        if self.history == 0 {
            return Err(Error::Config(
                "data.history is 0, expected 1 or more input frames; --set data.history=1".to_owned(),
            ));
        }
        if !self.fill.is_finite() {
            return Err(Error::Config(format!(
                "data.fill is {}, expected a finite number; --set data.fill=0",
                self.fill
            )));
        }
        Ok(())
    }

    /// Returns the tables of formats that the run does not read, such as `data.hdf5`.
    ///
    /// # Errors
    ///
    /// Those of [`DataConfig::open`] for an unknown format.
    pub fn unread_tables(&self) -> Result<Vec<String>> {
        let resolved = self.with_folders()?;
        let (own, targets) = (resolved.format_name(), self.of_targets()?);
        let (target, of_targets) = (self.target.as_ref(), targets.as_ref().map(Self::format_name));
        let is_read = |name: &str| name == own || Some(name) == of_targets;
        let tables = self.own.names().map(|name| ("data", name));
        let of_target = target.iter().flat_map(|target| target.own.names());
        let tables = tables.chain(of_target.map(|name| ("data.target", name)));
        Ok(tables.filter(|(_, name)| !is_read(name)).map(|(table, name)| format!("{table}.{name}")).collect())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[rstest]
    #[case::plain(json!({}), None)]
    #[case::path(json!({ "path": "" }), Some("data.path is \"\", expected a file, a folder or a pattern; --set data.path=PATH"))]
    #[case::one_of_several(json!({ "path": ["a.h5", ""] }), Some("data.path is \"\""))]
    #[case::validation(json!({ "validation_path": "" }), Some("data.validation_path is \"\""))]
    #[case::target(json!({ "target": { "path": "" } }), Some("data.target.path is \"\""))]
    fn empty_paths_are_refused(#[case] table: serde_json::Value, #[case] error: Option<&str>) {
        let config: DataConfig = serde_json::from_value(table).unwrap();
        let found = config.check().err().map(|error| error.to_string());
        match error {
            None => assert_eq!(found, None),
            Some(error) => assert!(found.as_ref().is_some_and(|found| found.starts_with(error)), "{found:?}"),
        }
    }

    #[rstest]
    #[case::own(json!({ "format": "hdf5", "hdf5": { "time": "t" } }), &[])]
    #[case::of_the_targets(json!({ "format": "hdf5", "netcdf": {}, "target": { "format": "netcdf" } }), &[])]
    #[case::other_format(json!({ "format": "the_well", "hdf5": { "time": "t" } }), &["data.hdf5"])]
    #[case::other_format_of_the_targets(json!({ "format": "hdf5", "target": { "npy": {} } }), &["data.target.npy"])]
    fn tables_of_other_formats_are_found(#[case] table: serde_json::Value, #[case] expected: &[&str]) {
        let config: DataConfig = serde_json::from_value(table).unwrap();
        assert_eq!(config.unread_tables().unwrap(), expected);
    }
}
