//! Buffers that are computed, not stored.

use std::fmt;
use std::sync::Arc;

use isobar_array::Window;
use tch::{Device, Kind, Tensor};

use crate::dense::named;
use crate::error::Result;

/// Function that computes the values of a box of a buffer, of the shape of the box, on the CPU.
pub type BufferValues = Arc<dyn Fn(&Window) -> isobar_array::Result<Tensor> + Send + Sync>;

/// Most elements that are compared at once.
const COMPARED: i64 = 1 << 20;

/// A buffer whose values follow from the model's configuration, such as the mask of shifted windows.
///
/// Nothing stores it: the model computes the values of its own shards when it needs them. It belongs to the state dict: state dicts
/// and checkpoints contain it, and loading compares given values with the computed ones.
///
/// ```
/// use std::sync::Arc;
/// use isobar_array::{Generator, Window};
/// use isobar_shard::{ParamStore, Params};
/// use tch::{Device, Kind, Tensor};
///
/// let mut store = ParamStore::new(Generator::new(1));
/// let ones = |part: &Window| Ok(Tensor::ones(part.shape(), (Kind::Float, Device::Cpu)));
/// store.computed_buffer("mask", &[4, 2], Arc::new(ones))?;
/// let part = Window::whole(&[4, 2]).narrow(0, 1, 3)?;
/// assert_eq!(store.computed_buffers()[0].values(&part)?.size(), [3, 2]);
/// assert_eq!(store.state_dict()?["mask"].size(), [4, 2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ComputedBuffer {
    pub(super) name: String,
    pub(super) shape: Vec<i64>,
    pub(super) kind: Kind,
    pub(super) compute: BufferValues,
}

impl fmt::Debug for ComputedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, shape, kind, .. } = self;
        write!(f, "ComputedBuffer({name:?} {kind:?} {shape:?})")
    }
}

impl ComputedBuffer {
    /// Name in the state dict.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape of the full tensor.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Dtype in the state dict.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Computes the values of the box `part`, on the CPU.
    ///
    /// # Errors
    ///
    /// Memory does not suffice.
    pub fn values(&self, part: &Window) -> Result<Tensor> {
        let values = (self.compute)(part)?;
        named("computed_buffer", &[&values], values.f_to_kind(self.kind))
    }

    /// Returns whether `given`, the values of the box `part` from a state dict, are the computed ones up to rounding. Computes a few
    /// rows at a time.
    ///
    /// # Errors
    ///
    /// Memory does not suffice.
    pub fn agrees(&self, part: &Window, given: &Tensor) -> Result<bool> {
        if given.size() != part.shape() {
            return Ok(false);
        }
        let tolerance = match given.kind() {
            Kind::Half | Kind::BFloat16 => 1e-2,
            _ => 1e-5,
        };
        let dim = part.shape().iter().position(|&extent| extent > 1).unwrap_or(0);
        let Some(&extent) = part.shape().get(dim) else { return self.close(part, given, tolerance) };
        let step = (COMPARED * extent / (part.numel() as i64).max(1)).max(1);
        for start in (0..extent).step_by(step as usize) {
            let rows = step.min(extent - start);
            let own = part.clone().narrow(dim, start, rows)?;
            let given = named("narrow", &[given], given.f_narrow(dim as i64, start, rows))?;
            if !self.close(&own, &given, tolerance)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn close(&self, part: &Window, given: &Tensor, tolerance: f64) -> Result<bool> {
        let own = self.values(part)?;
        let close = given.f_to_device(Device::Cpu).and_then(|given| {
            let (own, given) = (own.f_to_kind(Kind::Double)?, given.f_to_kind(Kind::Double)?);
            own.f_allclose(&given, tolerance, tolerance, false)
        });
        named("allclose", &[given], close)
    }
}
