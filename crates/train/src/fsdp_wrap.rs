//! Sharded models among plain tensors.

use isobar_array::Local;
use isobar_manager::DeviceMesh;
use isobar_shard::{MeshParams, ParamStore, ShardTensor};
use tch::Tensor;

use crate::fields::{FieldLayout, ShardedFields};
use crate::fully_sharded::ShardedParameters;
use crate::task::BoxError;

/// Parameters of a model that computes with fields split over the mesh's domain axes, and that is then trained fully sharded
/// over its axis `shard`: they are replicated along all axes until [`FullySharded::new`](crate::FullySharded::new), with what is
/// given back beside them, cuts them. PhysicsNeMo's name; see [`wrap_for_fsdp`] for the model itself. Does not communicate.
pub fn distribute_over_domain_for_fsdp<'a>(
    store: &'a mut ParamStore,
    mesh: &DeviceMesh,
) -> (MeshParams<'a>, ShardedParameters) {
    let sharded = ShardedParameters::default();
    (MeshParams::new(store, mesh).pending().watched(sharded.watch()), sharded)
}

/// A model over sharded fields as one over plain tensors: of this rank's own samples its own window, as `fields` lays them out,
/// and the number of samples of all ranks, to its window of the result. What surrounds it (data, losses, metrics) is code of one
/// rank that knows nothing of meshes; halos, reductions and transforms are the model's affair.
///
/// A loss over windows is a rank's summand of the loss over fields: of the mean over all elements, the sum over its own ones by
/// the number of all. Gradients flow through, to the input too; those of parameters are summed by
/// [`FullySharded::backward`](crate::FullySharded::backward) or, of parameters that are left
/// [pending](MeshParams::pending), by [`DataParallel::backward`](crate::DataParallel::backward) of 1 sample of 1.
///
/// All ranks of the mesh call what it gives, in the same order.
///
/// ```
/// use isobar_collectives::{Group, threads};
/// use isobar_manager::DeviceMesh;
/// use isobar_array::{Conv2d, Generator, Linear};
/// use isobar_shard::{Init, ParamStore, Params, Placement, ShardTensor};
/// use isobar_train::{
///     DataParallelConfig, FullySharded, Parameters, ShardedFields, distribute_over_domain_for_fsdp, wrap_for_fsdp,
/// };
/// use tch::{Device, Kind, Tensor};
///
/// threads::run(2, std::time::Duration::from_secs(30), |group| {
///     let mesh = DeviceMesh::new(&group, &[1, 2], &["shard", "domain"]).unwrap();
///     let mut store = ParamStore::new(Generator::new(1));
///     let (mut params, sharded) = distribute_over_domain_for_fsdp(&mut store, &mesh);
///     let weight = params.param("weight", &[1, 1, 3, 3], Init::Constant(1.0), Placement::Replicate).unwrap();
///     let same = Conv2d { padding: [1, 1], ..Conv2d::default() };
///     let fields = ShardedFields::new(&mesh, &[8, 8]).unwrap();
///     let model = wrap_for_fsdp(&fields, move |x: &ShardTensor| Ok(x.conv2d(&weight, None, &same)?));
///     let (whole, _) = Parameters::from_store(&store, &Group::single()).unwrap();
///     let parallel = FullySharded::new(sharded, &whole, &[], &mesh, &DataParallelConfig::default()).unwrap();
///
///     let window = Tensor::ones([2, 1, 4, 8], (Kind::Float, Device::Cpu)); // half of the rows of both samples
///     let y = model(&window, 2).unwrap();
///     assert_eq!((y.size(), y.double_value(&[0, 0, 3 - 3 * group.rank() as i64, 4])), (vec![2, 1, 4, 8], 9.0));
///     parallel.zero_grad().unwrap();
///     parallel.backward(&(y.sum(Kind::Float) / 128.0)).unwrap();
/// });
/// ```
pub fn wrap_for_fsdp<F>(
    fields: &ShardedFields,
    forward: F,
) -> impl Fn(&Tensor, usize) -> Result<Tensor, BoxError>
where
    F: Fn(&ShardTensor) -> Result<ShardTensor, BoxError>,
{
    let fields = fields.clone();
    move |window, samples| {
        let x = fields.array(window, samples)?;
        let y = forward(&x)?;
        // A result of the input's shape has its layout; of another one that which `fields` gives such a shape.
        let y = if y.shape() == x.shape() { y.redistribute_like(&x)? } else { fields.laid_out(&y)? };
        Ok(y.to_local(None)?)
    }
}
