//! Report on the tensors that hold memory when it runs out.

use std::fmt::Write;

use isobar_collectives::Group;
use isobar_manager::format_bytes;
use isobar_torch::memory;
use tch::{Device, Tensor};

use crate::error::Error;
use crate::optim::Optimizer;
use crate::params::Parameters;

/// Number of tensors that are named.
const SHOWN: usize = 8;

/// Messages of libtorch when it runs out of memory.
const SAYINGS: [&str; 4] =
    ["out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory"];

/// Adds to an error of a rank without memory left what holds it; other errors stay as they are.
pub(crate) fn explained(error: Error, world: &Group, held: &NamedTensors<'_>) -> Error {
    // An error of another rank's memory does not concern this rank.
    let others = error.is_shared() || world.flight().trouble().is_some();
    match others || !says_so(&error) {
        true => error,
        false => Error::OutOfMemory { rank: world.rank(), held: held.text(), source: Box::new(error) },
    }
}

/// The tensors of a run that have names.
pub(crate) struct NamedTensors<'a> {
    pub(crate) params: &'a Parameters,
    pub(crate) buffers: &'a [(String, Tensor)],
    pub(crate) optimizer: Option<&'a dyn Optimizer>,
}

impl NamedTensors<'_> {
    fn named(&self) -> Vec<(String, Tensor)> {
        let mut named = Vec::new();
        for param in self.params {
            named.push((format!("parameter {:?}", param.name), param.tensor.shallow_clone()));
            named.extend(param.grad().map(|grad| (format!("gradient of {:?}", param.name), grad)));
        }
        named.extend(self.buffers.iter().map(|(name, t)| (format!("buffer {name:?}"), t.shallow_clone())));
        if let Some(optimizer) = self.optimizer {
            let state = optimizer.state().tensors.into_iter();
            named.extend(state.map(|t| (format!("{} of {:?}", t.slot, t.param), t.tensor)));
        }
        named
    }

    /// The largest tensors; where the allocator knows them those without names too.
    fn text(&self) -> String {
        let named = self.named();
        let total: usize = named.iter().map(|(_, tensor)| memory::nbytes(tensor)).sum();
        let mut largest: Vec<(usize, String)> = named
            .iter()
            .map(|(name, tensor)| (memory::nbytes(tensor), format!("{name} {:?}", tensor.size())))
            .collect();
        let begins: Vec<usize> =
            named.iter().filter_map(|(_, t)| Some(memory::data_ptr(t).ok()?.addr())).collect();
        // The allocator knows those in host memory.
        let on_host = self.params.iter().all(|param| param.tensor.device() == Device::Cpu);
        let blocks = if on_host { memory::largest_blocks(SHOWN + begins.len()) } else { Vec::new() };
        let unnamed = blocks.iter().filter(|(begin, bytes)| {
            // A block of several named tensors (gradients are views of one) is not without a name.
            !begins.iter().any(|at| (*begin..begin + bytes).contains(at))
        });
        largest.extend(unnamed.map(|(_, bytes)| (*bytes, "of the network's insides or data".to_owned())));
        largest.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        let mut text = String::new();
        for (bytes, what) in largest.iter().take(SHOWN) {
            let _ = write!(
                text,
                "{}{} {what}",
                if text.is_empty() { "" } else { "; " },
                format_bytes(*bytes as u64)
            );
        }
        let live = memory::live_bytes() as usize;
        let _ = write!(
            text,
            "; parameters, gradients and optimizer state together {}",
            format_bytes(total as u64)
        );
        if live > 0 {
            let _ = write!(text, ", all tensors in host memory {}", format_bytes(live as u64));
        }
        text
    }
}

/// Returns whether an error says that memory has run out.
fn says_so(error: &Error) -> bool {
    let text = error.to_string().to_lowercase();
    SAYINGS.iter().any(|saying| text.contains(saying))
}
