//! Memory of a step of a sharded model, compared with the dense one, and of fully sharded with data-parallel training.

use isobar_array::{Conv, Elementwise, Generator, Padding, Reduce};
use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_models::{
    Afno, AfnoConfig, Fno, FnoConfig, FullyConnected, FullyConnectedConfig, ModAfno, ModAfnoConfig,
    ModEmbedConfig, Mode, PerDim, SrResNet, SrResNetConfig, UNet, UNetConfig,
};
use isobar_shard::{MeshParams, ParamStore, Placement, ShardTensor};
use isobar_torch::memory;
use isobar_train::optim::{AdamW, AdamWConfig, Optimizer};
use isobar_train::{DataParallel, DataParallelConfig, FullySharded, Parameters, ShardedParameters};
use tch::{Device, Kind, Tensor};

type Failure = Box<dyn std::error::Error>;

const OPTIONS: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Compares the peak of bytes live in libtorch's allocator in the third step of a model: dense, and sharded along the height over
/// all ranks. Weights and inputs count. Of the dense peak, a rank of four may have three tenths for `convolutions`, and four
/// for the models.
///
/// # Errors
///
/// More than is allowed on four ranks; a model of another name; what an operator or the exchange refuses.
pub fn run(model: &str, group: &Group) -> Result<String, String> {
    memory::install_caching_allocator();
    let (limit, prepare): (f64, Prepare) = match model {
        "convolutions" => (0.3, convolutions),
        "afno" => (0.4, afno),
        "mod_afno" => (0.4, mod_afno),
        "fno" => (0.4, fno),
        "sr_res_net" => (0.4, sr_res_net),
        "unet" => (0.4, unet),
        "unet2d" => (0.4, unet_of_images),
        other => return Err(format!("there is no model {other}")),
    };
    let peak = |group: &Group| peak(prepare(&DeviceMesh::new(group, &[group.size() as i64], &["domain"])?)?);
    let compare = || within(limit, peak(&Group::single())?, peak(group)?, group);
    compare().map_err(|failure| failure.to_string())
}

/// Compares the peak in the third step of training with AdamW a model whose parameters are nearly all that it needs:
/// data-parallel, and fully sharded. Parameters, gradients and the two moments of a rank of four are a quarter each, and a few
/// units of parameters and gradients are whole for a while: three tenths of data parallelism's peak are allowed.
///
/// # Errors
///
/// More than is allowed on four ranks; what an operator or the exchange refuses.
pub fn training(group: &Group) -> Result<String, String> {
    memory::install_caching_allocator();
    let mesh = || DeviceMesh::new(group, &[group.size() as i64], &["shard"]);
    let compare = || within(0.3, peak(adamw(&mesh()?, false)?)?, peak(adamw(&mesh()?, true)?)?, group);
    compare().map_err(|failure| failure.to_string())
}

fn within(limit: f64, whole: u64, sharded: u64, group: &Group) -> Result<String, Failure> {
    let ratio = sharded as f64 / whole as f64;
    if group.size() == 4 && ratio > limit {
        return Err(format!("{sharded} bytes of {whole} are {ratio:.3}, more than {limit}").into());
    }
    Ok(format!("{ratio:.3} of the peak of {whole} bytes"))
}

/// A step, and the weights whose gradients it gives.
type Step = Box<dyn FnMut() -> Result<(), Failure>>;
type Prepare = fn(&DeviceMesh) -> Result<Step, Failure>;

/// The peak of the third step.
fn peak(mut step: Step) -> Result<u64, Failure> {
    step()?;
    step()?;
    memory::reset_peak();
    step()?;
    Ok(memory::peak_bytes())
}

/// This rank's part of ones.
fn input(mesh: &DeviceMesh, shape: &[i64]) -> Result<ShardTensor, Failure> {
    let whole = Tensor::f_ones(shape, OPTIONS)?;
    let part = ShardTensor::distribute(&whole, mesh, &[Placement::Shard(2)])?;
    let own = part.local().f_contiguous()?.f_detach_copy()?;
    Ok(ShardTensor::from_parts(&own, part.layout())?)
}

/// Three convolutions.
fn convolutions(mesh: &DeviceMesh) -> Result<Step, Failure> {
    let input = input(mesh, &[1, 16, 256, 256])?;
    let weight = || -> Result<ShardTensor, Failure> {
        let whole = Tensor::f_full([16, 16, 3, 3], 0.01, OPTIONS)?;
        Ok(ShardTensor::distribute(&whole, mesh, &[Placement::Replicate])?.set_requires_grad(true)?)
    };
    let mut weights = [weight()?, weight()?, weight()?];
    let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
    Ok(Box::new(move || {
        weights.iter_mut().for_each(ShardTensor::zero_grad);
        let first = input.conv(&weights[0], None, &conv)?.gelu()?;
        let second = first.conv(&weights[1], None, &conv)?.gelu()?;
        Ok(second.conv(&weights[2], None, &conv)?.mean()?.backward()?)
    }))
}

/// A step of a model that `make` gives its parameters.
fn of_model<M: 'static>(
    mesh: &DeviceMesh,
    shape: &[i64],
    make: impl FnOnce(&mut MeshParams<'_>) -> isobar_models::Result<M>,
    forward: fn(&M, &ShardTensor) -> isobar_models::Result<ShardTensor>,
) -> Result<Step, Failure> {
    let input = input(mesh, shape)?;
    let mut store = ParamStore::new(Generator::new(1));
    let model = make(&mut MeshParams::new(&mut store, mesh))?;
    Ok(Box::new(move || {
        store.zero_grad()?;
        Ok(forward(&model, &input)?.mean()?.backward()?)
    }))
}

fn afno(mesh: &DeviceMesh) -> Result<Step, Failure> {
    let sizes = AfnoConfig::new([256, 256], 2, 2);
    let config = AfnoConfig { patch_size: [4, 4], embed_dim: 64, depth: 4, num_blocks: 8, ..sizes };
    of_model(mesh, &[1, 2, 256, 256], |p| Afno::new(&config, p), |model, x| model.forward(x, Mode::Eval))
}

/// One group of features and one sample: only the modes can be split.
fn mod_afno(mesh: &DeviceMesh) -> Result<Step, Failure> {
    let embed_model = ModEmbedConfig { dim: 64, ..ModEmbedConfig::default() };
    let sizes =
        ModAfnoConfig { patch_size: [4, 4], embed_dim: 64, mod_dim: 64, ..ModAfnoConfig::new([256, 256]) };
    let config =
        ModAfnoConfig { in_channels: 2, out_channels: 2, depth: 4, num_blocks: 1, embed_model, ..sizes };
    let placements = vec![Placement::Replicate; mesh.ndim()];
    let time = ShardTensor::distribute(&Tensor::f_ones([1, 1], OPTIONS)?, mesh, &placements)?;
    of_model(
        mesh,
        &[1, 2, 256, 256],
        |p| Ok((ModAfno::new(&config, p)?, time)),
        |(model, time), x| model.forward(x, time, Mode::Eval),
    )
}

fn sr_res_net(mesh: &DeviceMesh) -> Result<Step, Failure> {
    let sizes = SrResNetConfig { conv_layer_size: 8, large_kernel_size: 3, ..SrResNetConfig::new(2, 2) };
    let config = SrResNetConfig { n_resid_blocks: 2, scaling_factor: 2, ..sizes };
    of_model(
        mesh,
        &[2, 2, 32, 24, 24],
        |p| SrResNet::new(&config, p),
        |model, x| model.forward(x, Mode::Eval),
    )
}

fn fno(mesh: &DeviceMesh) -> Result<Step, Failure> {
    let config = FnoConfig { num_fno_modes: PerDim::All(8), ..FnoConfig::new(2, 2) };
    of_model(mesh, &[1, 2, 256, 256], |p| Fno::new(&config, p), Fno::forward)
}

fn unet(mesh: &DeviceMesh) -> Result<Step, Failure> {
    let channels = vec![16, 16, 32, 32];
    let config = UNetConfig { model_depth: 2, feature_map_channels: channels, ..UNetConfig::new(2, 2) };
    of_model(mesh, &[1, 2, 32, 48, 48], |p| UNet::new(&config, p), |model, x| model.forward(x, Mode::Eval))
}

fn unet_of_images(mesh: &DeviceMesh) -> Result<Step, Failure> {
    let channels = vec![16, 16, 32, 32, 64, 64];
    let config =
        UNetConfig { dimension: 2, model_depth: 3, feature_map_channels: channels, ..UNetConfig::new(2, 2) };
    of_model(mesh, &[1, 2, 256, 256], |p| UNet::new(&config, p), |model, x| model.forward(x, Mode::Eval))
}

/// Steps of AdamW for layers of a MiB each, which are units of their own.
fn adamw(mesh: &DeviceMesh, sharded: bool) -> Result<Step, Failure> {
    let watch = ShardedParameters::default();
    let mut store = ParamStore::new(Generator::new(1));
    let params = MeshParams::new(&mut store, mesh).pending();
    let mut params = if sharded { params.watched(watch.watch()) } else { params };
    let config = FullyConnectedConfig { num_layers: 24, ..FullyConnectedConfig::default() };
    let model = FullyConnected::new(&config, &mut params)?;
    let (whole, _) = Parameters::from_store(&store, &Group::single())?;
    drop(store);
    let rows = Tensor::f_ones([4 * mesh.size() as i64, 512], OPTIONS)?;
    let x = ShardTensor::distribute(&rows, mesh, &[Placement::Shard(0)])?;
    let config = DataParallelConfig { bucket_mb: 1.0, ..DataParallelConfig::default() };
    let loss = move || -> Result<Tensor, Failure> { Ok(model.forward(&x)?.mse_loss(&x)?.full_tensor(None)?) };
    if sharded {
        let parallel = FullySharded::new(watch, &whole, &[], mesh, &config)?;
        let mut optimizer = AdamW::new(parallel.parameters(), &AdamWConfig::default())?;
        return Ok(Box::new(move || {
            parallel.zero_grad()?;
            parallel.backward(&loss()?)?;
            Ok(optimizer.step(1e-3)?)
        }));
    }
    let parallel = DataParallel::new(&whole, &[], &mesh.group_along(&[0])?, &config)?;
    let mut optimizer = AdamW::new(&whole, &AdamWConfig::default())?;
    Ok(Box::new(move || {
        parallel.zero_grad()?;
        parallel.backward(Some(&loss()?), 1, 1)?;
        Ok(optimizer.step(1e-3)?)
    }))
}
