//! Embeddings of indices and of patches of fields.

use isobar_array::Array;
use isobar_shard::{Init, Params, Placement, Result};

use crate::check::{divisible, extent, refuse};
use crate::layer::layers_without_mode;

/// A table of vectors, looked up by index (`torch.nn.Embedding`).
///
/// Shapes: input `[…]` of dtype `Int64`, output `[…, embedding_dim]`. State dict: `weight` `[num_embeddings,
/// embedding_dim]`, standard normal at first.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::Embedding;
/// use isobar_shard::ParamStore;
/// use tch::Tensor;
///
/// let table = Embedding::new(10, 4, &mut ParamStore::new(Generator::new(1)))?;
/// let y = table.forward(&Tensor::from_slice2(&[[1i64, 9], [0, 1]]))?;
/// assert_eq!(y.size(), [2, 2, 4]);
/// assert_eq!(y.get(0).get(0), y.get(1).get(1));
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Embedding<A> {
    weight: A,
}

impl<A: Array> Embedding<A> {
    /// Makes the table.
    ///
    /// # Errors
    ///
    /// A size below 1, or a parameter that `params` refuses.
    pub fn new(num_embeddings: i64, embedding_dim: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        const OP: &str = "Embedding";
        let shape =
            [extent(OP, "num_embeddings", num_embeddings)?, extent(OP, "embedding_dim", embedding_dim)?];
        let normal = Init::Normal { mean: 0.0, std: 1.0 };
        Ok(Self { weight: params.param("weight", &shape, normal, Placement::Replicate)? })
    }

    /// Returns the rows that `indices` `[…]`, of dtype `Int64`, name: `[…, embedding_dim]`.
    ///
    /// # Errors
    ///
    /// Indices out of range or of another dtype than `Int64`.
    pub fn forward(&self, indices: &A) -> Result<A> {
        Ok(self.weight.embedding(indices)?)
    }
}

/// Cuts fields into patches and maps each to a vector (`timm.layers.PatchEmbed`): a convolution whose stride is its kernel,
/// computed as one matrix product.
///
/// Shapes: input `[batch, in_chans, extents…]`, output `[batch, tokens, embed_dim]`, tokens in row-major order. State dict:
/// `proj.weight` `[embed_dim, in_chans, patch extents…]` and `proj.bias` `[embed_dim]`, as of a convolution. The patch has an extent
/// for each dim of the fields.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::PatchEmbed;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let embed = PatchEmbed::new([4, 2], 3, 16, &mut ParamStore::new(Generator::new(1)))?;
/// let x = Tensor::ones([2, 3, 8, 6], (Kind::Float, Device::Cpu));
/// assert_eq!(embed.forward(&x)?.size(), [2, 6, 16]);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct PatchEmbed<A> {
    patch: Vec<i64>,
    inputs: i64,
    weight: A,
    bias: A,
}

impl<A: Array> PatchEmbed<A> {
    const OP: &'static str = "PatchEmbed";

    /// Makes the layer with PyTorch's initial values.
    ///
    /// # Errors
    ///
    /// A size below 1, or a parameter that `params` refuses.
    pub fn new(
        patch_size: impl Into<Vec<i64>>,
        in_chans: i64,
        embed_dim: i64,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let patch_size = patch_size.into();
        let area = patch_size.iter().fold(1i64, |area, &extent| area.saturating_mul(extent));
        let fan = || Init::FanIn(in_chans.saturating_mul(area));
        Self::with_init(patch_size, [in_chans, embed_dim], [fan(), fan()], params)
    }

    /// Makes the layer from `[in_chans, embed_dim]` with other initial values of weight and bias.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn with_init(
        patch_size: impl Into<Vec<i64>>,
        [in_chans, embed_dim]: [i64; 2],
        [weight, bias]: [Init<A>; 2],
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let inputs = extent(Self::OP, "in_chans", in_chans)?;
        let width = extent(Self::OP, "embed_dim", embed_dim)?;
        let patch = patch_size.into();
        for &side in &patch {
            extent(Self::OP, "an extent of the patch", side)?;
        }
        let params = &mut params.scope("proj");
        let shape = [&[width, inputs], &patch[..]].concat();
        let weight = params.param("weight", &shape, weight, Placement::Replicate)?;
        let bias = params.param("bias", &[width], bias, Placement::Replicate)?;
        Ok(Self { patch, inputs, weight, bias })
    }

    /// Computes `[batch, tokens, embed_dim]` from `x` `[batch, in_chans, extents…]`.
    ///
    /// # Errors
    ///
    /// Another number of channels, extents that are not divisible by the patch, or an exchange that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        let (tokens, dims) = (self.forward_grid(x)?, self.patch.len() as i64);
        let order: Vec<i64> = [dims].into_iter().chain(0..dims).chain([dims + 1]).collect();
        let tokens = tokens.permute(&order)?;
        let shape = tokens.shape();
        let count = shape[1..=dims as usize].iter().product();
        Ok(tokens.reshape(&[shape[0], count, shape[dims as usize + 1]])?)
    }

    /// Computes the tokens on their grid, `[grid…, batch, embed_dim]`. In this order, transforms over the grid and products over
    /// features are plain matrix products.
    ///
    /// # Errors
    ///
    /// See [`forward`](Self::forward).
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_nn::PatchEmbed;
    /// use isobar_shard::ParamStore;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let embed = PatchEmbed::new([4, 2], 3, 16, &mut ParamStore::new(Generator::new(1)))?;
    /// let x = Tensor::ones([2, 3, 8, 6], (Kind::Float, Device::Cpu));
    /// assert_eq!(embed.forward_grid(&x)?.size(), [2, 3, 2, 16]);
    /// # Ok::<(), isobar_nn::Error>(())
    /// ```
    pub fn forward_grid(&self, x: &A) -> Result<A> {
        let (shape, dims) = (x.shape(), self.patch.len());
        let names = dim_names(dims);
        if shape.len() != dims + 2 || shape[1] != self.inputs {
            let want = format!("[batch, {}, {}]", self.inputs, names.join(", "));
            return refuse(Self::OP, format!("input of shape {shape:?}, expected {want}"));
        }
        let (mut split, mut grid) = (shape[..2].to_vec(), Vec::new());
        for ((&extent, &patch), name) in shape[2..].iter().zip(&self.patch).zip(&names) {
            divisible(Self::OP, (name, extent), ("that of the patch", patch))?;
            split.extend([extent / patch, patch]);
            grid.push(extent / patch);
        }
        let (of_grid, of_patch) =
            (0..dims as i64).map(|dim| (2 + 2 * dim, 3 + 2 * dim)).unzip::<_, _, Vec<_>, Vec<_>>();
        let order = [&of_grid[..], &[0, 1], &of_patch].concat();
        let size = self.patch.iter().product::<i64>() * self.inputs;
        grid.extend([shape[0], size]);
        let patches = x.reshape(&split)?.permute(&order)?.reshape(&grid)?;
        let weight = self.weight.reshape(&[self.weight.extent(0)?, size])?;
        Ok(patches.linear(&weight, Some(&self.bias))?)
    }
}

layers_without_mode!(Embedding, PatchEmbed);

/// Names of the spatial dims in errors.
fn dim_names(dims: usize) -> Vec<String> {
    const NAMES: [&str; 3] = ["depth", "height", "width"];
    match NAMES.len().checked_sub(dims) {
        Some(first) => NAMES[first..].iter().map(|name| (*name).to_owned()).collect(),
        None => (0..dims).map(|dim| format!("extent {dim}")).collect(),
    }
}
