//! Adapters: data sets made of others, and fields computed from coordinates and times.
//!
//! An adapter knows no format. [`DataConfig::parts`](crate::DataConfig::parts) applies those that a configuration names.

mod computed;
mod filled;
mod frames;
mod stills;
mod sun;

pub use self::computed::Computed;
pub(crate) use self::filled::{Filled, Training};
pub use self::frames::Frames;
pub(crate) use self::frames::{time_text, times_in};
pub(crate) use self::stills::Stills;
