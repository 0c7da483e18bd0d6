//! Adapters: data sets made of others, and fields computed from coordinates and times.
//!
//! An adapter knows no format. [`DataConfig::parts`](crate::DataConfig::parts) applies those that a configuration names.

/// Methods of `Dataset` that an adapter shares with the data set in its field `data`.
macro_rules! forward_to_data {
    () => {
        fn path(&self) -> &std::path::Path {
            self.data.path()
        }

        fn name(&self) -> String {
            self.data.name()
        }

        fn files(&self) -> Vec<std::path::PathBuf> {
            self.data.files()
        }

        fn attributes(&self) -> $crate::TextAttributes {
            self.data.attributes()
        }

        fn parameters(&self) -> Vec<(String, f64)> {
            self.data.parameters()
        }

        fn dims(&self) -> &[$crate::Dim] {
            self.data.dims()
        }

        fn variables(&self) -> &[$crate::DataVariable] {
            self.data.variables()
        }

        fn default_pair(&self) -> Option<[&str; 2]> {
            self.data.default_pair()
        }
    };
}

mod computed;
mod filled;
mod frames;
mod stills;
mod sun;

pub use self::computed::Computed;
pub(crate) use self::filled::{Filled, Fills};
pub use self::frames::Frames;
pub(crate) use self::frames::{meta_for, time_text, times_in};
pub(crate) use self::stills::Stills;
