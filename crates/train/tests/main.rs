//! Training: gradients, the loop, run folders, and parameters in shards.

mod announce;
mod builder;
mod change;
mod common;
mod conditions;
mod data_parallel;
mod exported;
mod fit;
mod fully_sharded;
mod gradients;
mod grids;
mod losses;
mod missing;
mod non_finite;
mod objectives;
mod one_variable;
mod patches;
mod rollout;
mod run_folder;
mod scored;
mod settings;
mod streamed;
mod two_stages;
mod weights;
