//! One step of an operation: blocks of tensors that go to and come from other ranks, all at once.
//!
//! A block is sent as its elements in row-major order, whatever its strides: directly from its memory if the backend
//! supports that, otherwise packed. The choice depends on the block's shape alone, so both sides agree without
//! communication. A block without memory, on the meta device, is counted and not sent.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::discriminant;

use isobar_torch::meta::is_meta;
use tch::{Device, Tensor};

use crate::engine::call::Call;
use crate::engine::fingerprint;
use crate::error::Result;
use crate::local::memory::{copy, empty, nbytes, plain};
use crate::wire::{Carries, Request, Rows, Tag, Transfer};

/// Blocks to exchange in one step, by ranks of the group.
pub(crate) struct Exchange<'a> {
    call: &'a Call,
    step: u8,
    fingerprint: u64,
    sends: Vec<Transfer>,
    receives: Vec<Transfer>,
    /// Tensors sent directly between devices, with the receiver's rank in the group.
    device_sends: Vec<(usize, Tensor)>,
    device_receives: Vec<(usize, Tensor)>,
    unpack: Vec<(Tensor, Tensor)>,
    sent: usize,
    received: usize,
}

impl<'a> Exchange<'a> {
    pub(crate) fn new(call: &'a Call, step: u8) -> Self {
        Self {
            call,
            step,
            fingerprint: 0,
            sends: vec![],
            receives: vec![],
            device_sends: vec![],
            device_receives: vec![],
            unpack: vec![],
            sent: 0,
            received: 0,
        }
    }

    /// Returns the exchange with a fingerprint: only ranks that have the same one take its messages.
    pub(crate) fn with_fingerprint(self, fingerprint: u64) -> Self {
        Self { fingerprint, ..self }
    }

    /// Sends `block` to `peer`. `row_dim` is the dim from which on the receiver's or the sender's memory is in one
    /// piece: the larger of the dims along which the two cut. Both sides name the same.
    pub(crate) fn send(&mut self, peer: usize, block: &Tensor, row_dim: usize) -> Result<()> {
        let bytes = nbytes(block);
        if bytes == 0 {
            return Ok(());
        }
        self.sent += bytes;
        if is_meta(block) {
            return Ok(());
        }
        let block = plain(block)?;
        if self.call.communicator_for(&block).is_some() {
            self.device_sends.push((peer, block.f_contiguous()?));
            return Ok(());
        }
        let block = to_host(&block)?;
        let label = self.label(&block);
        let (tensor, rows) = match self.form(&block, row_dim) {
            Form::AsIs => (block, None),
            Form::InRows => {
                let tensor = match rows(&block, row_dim) {
                    Some(_) => block,
                    None => block.f_contiguous()?,
                };
                let rows = rows(&tensor, row_dim);
                (tensor, rows)
            }
            Form::Packed => (block.f_contiguous()?, None),
        };
        self.sends.push(Transfer { peer: self.call.world_rank(peer), tensor, rows, label });
        Ok(())
    }

    /// Receives from `peer` into `block`, a view of the output.
    pub(crate) fn receive(&mut self, peer: usize, block: &Tensor, row_dim: usize) -> Result<()> {
        let bytes = nbytes(block);
        if bytes == 0 {
            return Ok(());
        }
        self.received += bytes;
        if is_meta(block) {
            return Ok(());
        }
        if self.call.communicator_for(block).is_some() {
            let target = match block.is_contiguous() {
                true => block.shallow_clone(),
                false => {
                    let staged = empty(&block.size(), block.kind(), block.device())?;
                    self.unpack.push((staged.shallow_clone(), block.shallow_clone()));
                    staged
                }
            };
            self.device_receives.push((peer, target));
            return Ok(());
        }
        let label = self.label(block);
        let (tensor, rows) = match self.form(block, row_dim) {
            Form::AsIs => (block.shallow_clone(), None),
            Form::InRows => match (rows(block, row_dim), block.device()) {
                (Some(rows), Device::Cpu) => (block.shallow_clone(), Some(rows)),
                _ => {
                    let tensor = self.stage(block)?;
                    let rows = rows(&tensor, row_dim);
                    (tensor, rows)
                }
            },
            Form::Packed if block.is_contiguous() && block.device() == Device::Cpu => {
                (block.shallow_clone(), None)
            }
            Form::Packed => (self.stage(block)?, None),
        };
        self.receives.push(Transfer { peer: self.call.world_rank(peer), tensor, rows, label });
        Ok(())
    }

    /// Starts it, once the ranks agree on the operation where they are to; what is returned ends when all blocks are where
    /// they belong.
    pub(crate) fn start(self) -> Result<impl Future<Output = Result<()>> + Send + use<>> {
        let call = self.call.clone();
        call.check_alive()?;
        call.count(self.sent, self.received);
        // Between devices no word goes before the data.
        let on_host = call.group().device_communicator().is_none();
        let agreement = if on_host && call.compares() { Some(fingerprint::compare(&call)?) } else { None };
        let mut blocks = Blocks {
            tag: call.tag(self.step),
            sends: self.sends,
            receives: self.receives,
            device_sends: self.device_sends,
            device_receives: self.device_receives,
        };
        let mut pending = Vec::new();
        if agreement.is_none() {
            pending = std::mem::take(&mut blocks).start(&call)?;
        }
        let mut unpack = self.unpack;
        Ok(async move {
            if let Some(agreement) = agreement {
                agreement.await?;
                pending = blocks.start(&call)?;
            }
            for request in pending {
                call.complete(request).await?;
            }
            for (staged, block) in &mut unpack {
                copy(block, staged)?;
            }
            Ok(())
        })
    }

    /// The digest of what the two sides of a message must agree on. (It is the same in all processes of a program.)
    fn label(&self, block: &Tensor) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.call.name_on_both_sides(), self.call.tag(self.step)).hash(&mut hasher);
        (discriminant(&block.kind()), block.size(), self.call.arguments()).hash(&mut hasher);
        (self.fingerprint, self.call.fingerprint).hash(&mut hasher);
        hasher.finish()
    }

    fn form(&self, block: &Tensor, row_dim: usize) -> Form {
        match self.call.backend().carries() {
            Carries::Strided => Form::AsIs,
            Carries::Whole => Form::Packed,
            Carries::Rows { at_least } => {
                let shape = block.size();
                let row: i64 = shape[row_dim.min(shape.len())..].iter().product();
                let single = shape[..row_dim.min(shape.len())].iter().all(|&n| n == 1);
                match !single && row as usize * block.kind().elt_size_in_bytes() >= at_least {
                    true => Form::InRows,
                    false => Form::Packed,
                }
            }
        }
    }

    /// A contiguous buffer in host memory that is copied to `block` in the end.
    fn stage(&mut self, block: &Tensor) -> Result<Tensor> {
        let staged = Tensor::f_empty(block.size(), (block.kind(), Device::Cpu))?;
        let staged =
            if block.device() == Device::Cpu { staged } else { staged.f_pin_memory(block.device())? };
        self.unpack.push((staged.shallow_clone(), block.shallow_clone()));
        Ok(staged)
    }
}

/// Sends and receives of an exchange.
#[derive(Default)]
struct Blocks {
    tag: Tag,
    sends: Vec<Transfer>,
    receives: Vec<Transfer>,
    device_sends: Vec<(usize, Tensor)>,
    device_receives: Vec<(usize, Tensor)>,
}

impl Blocks {
    fn start(self, call: &Call) -> Result<Vec<Box<dyn Request>>> {
        let mut requests = Vec::new();
        if !self.sends.is_empty() || !self.receives.is_empty() {
            requests.push(call.backend().start(self.tag, self.sends, self.receives));
        }
        if !self.device_sends.is_empty() || !self.device_receives.is_empty() {
            let communicator = call.group().device_communicator();
            requests.extend(communicator.map(|c| c.start(self.device_sends, self.device_receives)));
        }
        requests.into_iter().map(|request| request.map_err(|failure| call.broken(failure.0))).collect()
    }
}

enum Form {
    AsIs,
    InRows,
    Packed,
}

/// Returns the memory ranges of the rows of `block` from `row_dim` on; `None` if a row is not contiguous.
fn rows(block: &Tensor, row_dim: usize) -> Option<Rows> {
    let (shape, strides) = (block.size(), block.stride());
    let mut run = 1;
    for (&n, &stride) in shape[row_dim..].iter().zip(&strides[row_dim..]).rev() {
        if n != 1 && stride != run {
            return None;
        }
        run *= n;
    }
    let size = block.kind().elt_size_in_bytes();
    let mut offsets = vec![0_usize];
    for (&n, &stride) in shape[..row_dim].iter().zip(&strides[..row_dim]) {
        offsets = offsets
            .iter()
            .flat_map(|&at| (0..n as usize).map(move |i| at + i * stride as usize * size))
            .collect();
    }
    Some(Rows { offsets, bytes: run as usize * size })
}

/// The tensor in host memory: itself, or a copy through pinned memory.
fn to_host(tensor: &Tensor) -> Result<Tensor> {
    if tensor.device() == Device::Cpu {
        return Ok(tensor.shallow_clone());
    }
    let mut host =
        Tensor::f_empty(tensor.size(), (tensor.kind(), Device::Cpu))?.f_pin_memory(tensor.device())?;
    host.f_copy_(tensor)?;
    Ok(host)
}
