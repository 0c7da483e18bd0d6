//! Check that ranks which should hold the same parameters do.

use std::collections::HashMap;

use isobar_collectives::Group;
use tch::{Device, Kind, Tensor};

use crate::error::{Context, Error, Result};
use crate::params::{Parameter, Parameters};

/// Compares parameters between the ranks of a group that hold copies of them, or of the same part of them, to the last bit: by
/// digests, of which each rank sends two a parameter, of its part's place and of its values. Every rank of the group calls. It
/// reads every parameter once.
///
/// Copies stay equal as long as every rank's optimizer does the same with the same gradients. A rank that fails to (a kernel whose
/// order of sums varies, faulty memory, code that treats ranks differently) trains another model from then on, and nothing else
/// shows it.
///
/// # Errors
///
/// [`Error::ReplicasDiffer`] on every rank, with the first parameter and the ranks that differ from the first with the same part;
/// the errors of the communication.
///
/// ```
/// use isobar_collectives::threads;
/// use isobar_train::{Parameter, Parameters, check_replicas};
/// use tch::Tensor;
///
/// threads::run(3, std::time::Duration::from_secs(30), |group| {
///     let x = Tensor::from_slice(&[1.0f32, if group.rank() == 2 { 0.5 } else { 2.0 }]).set_requires_grad(true);
///     let params = Parameters::new(vec![Parameter::replicated("x", &x)]).unwrap();
///     let error = check_replicas(&params, &group).unwrap_err().to_string();
///     assert!(error.contains("\"x\"") && error.contains("[2]"), "{error}");
/// });
/// ```
pub fn check_replicas(params: &Parameters, group: &Group) -> Result<()> {
    if group.size() == 1 {
        return Ok(());
    }
    let digests = params.iter().map(|param| digest(param, params.model_group())).collect::<Result<Vec<_>>>();
    let own = digests.as_ref().map(|digests| digests.concat()).unwrap_or_default();
    let all = group.all_gather_bytes(&own)?;
    digests?;
    for (at, param) in params.iter().enumerate() {
        // By the place of a part, the values of the first rank that has it.
        let mut first = HashMap::new();
        let mut differs = |rank: usize| {
            let Some(digests) = all[rank].get(at * DIGESTS..(at + 1) * DIGESTS) else { return true };
            let (place, values) = digests.split_at(DIGEST);
            *first.entry(place).or_insert(values) != values
        };
        let ranks: Vec<usize> = (0..all.len()).filter(|&rank| differs(rank)).collect();
        if !ranks.is_empty() {
            let (name, group) = (param.name.clone(), group.name().to_owned());
            return Err(Error::ReplicasDiffer { name, ranks, group });
        }
    }
    Ok(())
}

/// Enough of it that equal ones are no chance.
const DIGEST: usize = 16;

/// That of a part's place in the whole parameter, and that of its values.
const DIGESTS: usize = 2 * DIGEST;

fn digest(param: &Parameter, model: &Group) -> Result<[u8; DIGESTS]> {
    let size = param.tensor.size();
    let place = format!("{:?} {size:?}", param.placement.place(&size, model));
    let _no_grad = tch::no_grad_guard();
    let bytes = || {
        let host = param.tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?.f_view(-1)?;
        let real = if host.f_is_complex()? { host.f_view_as_real()?.f_view(-1)? } else { host };
        real.f_view_dtype(Kind::Uint8)
    };
    let bytes = bytes().context(|| format!("reading parameter {:?}", param.name))?;
    let mut hasher = blake3::Hasher::new();
    let mut block = vec![0_u8; BLOCK];
    let count = bytes.numel();
    for start in (0..count).step_by(BLOCK) {
        let length = BLOCK.min(count - start);
        let part: Tensor = bytes.f_narrow(0, start as i64, length as i64).context(|| param.name.clone())?;
        part.f_copy_data_u8(&mut block[..length], length).context(|| param.name.clone())?;
        hasher.update(&block[..length]);
    }
    let mut digest = [0; DIGESTS];
    digest[..DIGEST].copy_from_slice(&blake3::hash(place.as_bytes()).as_bytes()[..DIGEST]);
    digest[DIGEST..].copy_from_slice(&hasher.finalize().as_bytes()[..DIGEST]);
    Ok(digest)
}

const BLOCK: usize = 1 << 20;
