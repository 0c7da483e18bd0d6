//! Random tensors: the values of the global tensor, whatever the layout.

use isobar_array::{Generator, Window};
use tch::{Device, Kind, Tensor};

use super::{operator, refuse, torch};
use crate::error::Result;
use crate::layout::Layout;
use crate::rules::Call;
use crate::tensor::ShardTensor;

/// One draw of a generator for a handler that a program brings: its seed and draws before, with which it can be resumed.
pub(crate) fn drawn(generator: &Generator) -> serde_json::Value {
    let before = serde_json::json!({ "seed": generator.seed(), "draws": generator.draws() });
    generator.next_u64();
    before
}

impl ShardTensor {
    /// Uniform numbers of [0, 1), those of the global tensor: the same for every layout. All ranks of the mesh call, with
    /// generators of equal state, which move on by one call.
    ///
    /// # Errors
    ///
    /// A dtype that is not floating; a partial layout.
    pub fn rand(layout: &Layout, kind: Kind, device: Device, generator: &Generator) -> Result<Self> {
        uniform(layout, 0.0, 1.0, kind, device, generator)
    }

    /// Standard normal numbers; as [`rand`](Self::rand).
    ///
    /// # Errors
    ///
    /// See [`rand`](Self::rand).
    ///
    /// ```
    /// use isobar_array::{Generator, Window};
    /// use isobar_collectives::threads;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
    /// use tch::{Device, Kind};
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
    ///     let layout = Layout::new(&mesh, &[Placement::Shard(0)], &[4, 6], &Sizes::Chunk).unwrap();
    ///     let noise = ShardTensor::randn(&layout, Kind::Float, Device::Cpu, &Generator::new(7)).unwrap();
    ///     // The numbers of one rank.
    ///     let dense = Generator::new(7).normal(&Window::whole(&[4, 6]), 0.0, 1.0, (Kind::Float, Device::Cpu));
    ///     assert_eq!(noise.full_tensor(None).unwrap(), dense.unwrap());
    /// });
    /// ```
    pub fn randn(layout: &Layout, kind: Kind, device: Device, generator: &Generator) -> Result<Self> {
        fill("randn", layout, (kind, device), generator, |g, window| {
            Ok(g.normal(window, 0.0, 1.0, (kind, device))?)
        })
    }

    /// Whole numbers of `low..high`, of dtype `Int64`; as [`rand`](Self::rand).
    ///
    /// # Errors
    ///
    /// An empty range; a partial layout.
    pub fn randint(
        layout: &Layout,
        low: i64,
        high: i64,
        device: Device,
        generator: &Generator,
    ) -> Result<Self> {
        fill("randint", layout, (Kind::Int64, device), generator, |g, window| {
            Ok(g.randint(window, low, high, device)?)
        })
    }

    /// Each element zero with probability `p`, else times 1 / (1 − p): the same ones on every layout. `p` = 0 draws nothing.
    /// All ranks of the mesh call, with generators of equal state.
    ///
    /// # Errors
    ///
    /// `p` outside [0, 1]; a dtype that is not floating.
    pub fn dropout(&self, p: f64, generator: &Generator) -> Result<Self> {
        self.dropout_of(p, generator, &Window::whole(self.shape()))
    }

    /// Applies dropout to a tensor that is the `window` of a larger one, with the mask of the larger one's elements.
    pub(crate) fn dropout_of(&self, p: f64, generator: &Generator, window: &Window) -> Result<Self> {
        let part = (window.global() != window.shape()).then(|| (window.global(), window.offset()));
        let args = args!("p": p, "generator": (p > 0.0).then(|| drawn(generator)), "window": part);
        operator("dropout", &[self], args, || {
            let x = self.resolved()?;
            if p == 0.0 {
                return Ok(x);
            }
            let options = (x.kind(), x.device());
            let mask = fill_window("dropout", (x.layout(), window.clone()), options, generator, |g, w| {
                Ok(g.dropout_mask(w, p, options)?)
            })?;
            Ok(Self::new(torch("dropout", x.local().f_mul(mask.local()))?, x.layout().clone()))
        })
    }

    /// Standard normal numbers in the layout of this tensor, which is the `window` of a larger one.
    pub(crate) fn normal_like_of(&self, generator: &Generator, window: &Window) -> Result<Self> {
        let (layout, options) = (self.layout().without_partial(), (self.kind(), self.device()));
        fill_window("randn", (&layout, window.clone()), options, generator, |g, w| {
            Ok(g.normal(w, 0.0, 1.0, options)?)
        })
    }

    /// Draws uniform numbers in [0, 1) in the layout of this tensor, which is the `window` of a larger one.
    pub(crate) fn uniform_like_of(&self, generator: &Generator, window: &Window) -> Result<Self> {
        let (layout, options) = (self.layout().without_partial(), (self.kind(), self.device()));
        fill_window("rand", (&layout, window.clone()), options, generator, |g, w| {
            Ok(g.uniform(w, 0.0, 1.0, options)?)
        })
    }

    /// Fills the tensor with uniform numbers of `low..high`, in place. It must not be part of a graph.
    ///
    /// # Errors
    ///
    /// An empty interval; a dtype that is not floating; a tensor whose gradient is computed.
    pub fn uniform_(&mut self, low: f64, high: f64, generator: &Generator) -> Result<()> {
        if self.requires_grad() {
            return refuse("uniform_", "the tensor requires a gradient; fill it before");
        }
        let values = uniform(self.layout(), low, high, self.kind(), self.device(), generator)?;
        let mut local = self.local().shallow_clone();
        torch("uniform_", local.f_copy_(values.local()))
    }

    /// The numbers 0 … extent − 1 in random order, in a layout of one dim; of dtype `Int64`. Every rank works the whole order
    /// out and keeps its part: nothing is sent.
    ///
    /// # Errors
    ///
    /// A layout of more or fewer dims than one, or a partial one.
    pub fn randperm(layout: &Layout, device: Device, generator: &Generator) -> Result<Self> {
        if layout.ndim() != 1 || layout.is_partial() {
            return refuse("randperm", format!("expected one dim, not partial, got {layout}"));
        }
        let whole = generator.randperm(layout.shape()[0] as usize, device)?;
        let parts = layout.intervals()[0].iter();
        let parts: Vec<Tensor> = parts
            .map(|part| torch("randperm", whole.f_narrow(0, part.start, part.len)))
            .collect::<Result<_>>()?;
        let local = match &parts[..] {
            [] => Tensor::f_zeros([0], (Kind::Int64, device)),
            many => Tensor::f_cat(many, 0),
        };
        Ok(Self::new(torch("randperm", local)?, layout.clone()))
    }
}

crate::register! {
    /// Zeros with probability `p`, the rest divided by 1 − p.
    "dropout"(input; p, generator, window) Nothing: |call| dropout(call);
}

fn dropout(call: &Call<'_>) -> Result<ShardTensor> {
    let (x, p) = (call.tensor(0)?, call.or("p", 0.5)?);
    match call.generator()? {
        Some(generator) => x.dropout_of(p, &generator, &window(call, x.shape())?),
        None if p == 0.0 => Ok(x.shallow_clone()),
        None => call.refuse("the argument \"generator\", its seed and draws, is missing"),
    }
}

/// Returns the window that the input is of a larger tensor; without one, the full input.
fn window(call: &Call<'_>, shape: &[i64]) -> Result<Window> {
    let Some((global, offset)) = call.optional::<(Vec<i64>, Vec<i64>)>("window")? else {
        return Ok(Window::whole(shape));
    };
    if global.len() != shape.len() || offset.len() != shape.len() {
        return call.refuse(format!("a window of {} dims for {} dims", global.len(), shape.len()));
    }
    let mut place = offset.into_iter().zip(shape).enumerate();
    let window = place.try_fold(Window::whole(&global), |window, (dim, (offset, &extent))| {
        window.narrow(dim, offset, extent)
    });
    Ok(window?)
}

/// Draws uniform numbers of `low..high`.
fn uniform(
    layout: &Layout,
    low: f64,
    high: f64,
    kind: Kind,
    device: Device,
    generator: &Generator,
) -> Result<ShardTensor> {
    fill("rand", layout, (kind, device), generator, |g, window| {
        Ok(g.uniform(window, low, high, (kind, device))?)
    })
}

/// Fills each rank's shard from one draw for the global shape. The generator advances by one draw.
fn fill(
    op: &'static str,
    layout: &Layout,
    options: (Kind, Device),
    generator: &Generator,
    draw: impl Fn(&Generator, &Window) -> Result<Tensor>,
) -> Result<ShardTensor> {
    fill_window(op, (layout, Window::whole(layout.shape())), options, generator, draw)
}

/// Fills a tensor that is itself the window of a larger one.
fn fill_window(
    op: &'static str,
    (layout, window): (&Layout, Window),
    options: (Kind, Device),
    generator: &Generator,
    draw: impl Fn(&Generator, &Window) -> Result<Tensor>,
) -> Result<ShardTensor> {
    if layout.is_partial() {
        return refuse(
            op,
            format!("random values of a partial layout, {layout}; expected shards and replicas"),
        );
    }
    // All blocks are of the same draw.
    let at = generator.clone();
    generator.next_u64();
    let blocks = layout.intervals().into_iter().try_fold(
        vec![(window, Vec::<i64>::new())],
        |windows, part| -> Result<Vec<_>> {
            let mut cut = Vec::new();
            for (window, place) in windows {
                let mut to = 0;
                for interval in part {
                    let narrowed = window.clone().narrow(place.len(), interval.start, interval.len)?;
                    cut.push((narrowed, [&place[..], &[to]].concat()));
                    to += interval.len;
                }
            }
            Ok(cut)
        },
    )?;
    if let [(window, _)] = &blocks[..] {
        return Ok(ShardTensor::new(draw(&at.clone(), window)?, layout.clone()));
    }
    let local = torch(op, Tensor::f_zeros(layout.local_shape(), options))?;
    for (window, place) in &blocks {
        let part = draw(&at.clone(), window)?;
        let mut target = local.shallow_clone();
        for (dim, (&start, &len)) in place.iter().zip(window.shape()).enumerate() {
            target = torch(op, target.f_narrow(dim as i64, start, len))?;
        }
        torch(op, target.f_copy_(&part))?;
    }
    Ok(ShardTensor::new(local, layout.clone()))
}
