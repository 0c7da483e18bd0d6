//! Planted gathers: an operator whose input is gathered on all ranks and split again gives the same numbers, and must exceed the
//! budget of its case.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use isobar_array::Elementwise;
use isobar_collectives::threads;
use isobar_shard::rules::{Call, register_sharded_op};
use isobar_shard::{Placement, ShardTensor};
use rstest::rstest;

use super::operator::{Rank, find};
use crate::case::Case;
use crate::check;
use crate::layout::Sizes;
use crate::mesh::Mesh;

thread_local! {
    /// True on ranks on which the planted gathers act; operators of other tests in this process are as ever.
    static ACTS: Cell<bool> = const { Cell::new(false) };
}

/// Replaces an operator by itself behind a gather of its first tensor.
fn plant(op: &'static str) {
    register_sharded_op(op, move |inputs, attrs| {
        let Some((first, others)) = inputs.split_first() else {
            return Ok(ShardTensor::op(op, inputs, attrs)?);
        };
        if !ACTS.get() {
            return Ok(ShardTensor::op(op, inputs, attrs)?);
        }
        let again = gathered(first)?;
        let inputs: Vec<&ShardTensor> = [&again].into_iter().chain(others.iter().copied()).collect();
        Ok(ShardTensor::op(op, &inputs, attrs)?)
    });
}

isobar_shard::register! {
    /// A program's own operator that receives nothing.
    "own_nothing"(input; approximate) Nothing: |call| own_gelu(call);
    /// A program's own operator whose windows are the shards.
    "own_halo"(input; approximate) Halo(|_, side| Ok(side.shard)): |call| own_gelu(call);
    /// A program's own operator with a bound of its own.
    "own_bytes"(input; approximate) Bytes("a number", |_| Ok(8)): |call| own_gelu(call);
}

/// GELU of the case `unary_gelu`, after a gather if the planted one is active.
fn own_gelu(call: &Call<'_>) -> isobar_shard::Result<ShardTensor> {
    let x = call.tensor(0)?;
    Ok(if ACTS.get() { gathered(x)? } else { x.shallow_clone() }.gelu()?)
}

/// Gathers the tensor on all ranks.
fn gathered(x: &ShardTensor) -> isobar_shard::Result<ShardTensor> {
    let replicated = vec![Placement::Replicate; x.placements().len()];
    x.redistribute(None, &replicated)?.to_layout(&x.layout().without_partial())
}

/// The problems of a case on 4 ranks.
fn problems(case: &str, acts: bool) -> Vec<String> {
    problems_of(case, None, acts)
}

/// Returns the problems of a case, or of another operator on its tensors.
fn problems_of(case: &str, op: Option<&'static str>, acts: bool) -> Vec<String> {
    let tests = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests"));
    let places =
        ["golden", "golden_own"].map(|folder| tests.join(folder).join(format!("{case}.safetensors")));
    let path = places.iter().find(|path| path.exists()).unwrap().clone();
    let reports = threads::run(4, Duration::from_secs(120), move |group| {
        ACTS.set(acts);
        let mut case = Case::read(&path).unwrap();
        if let Some(op) = op {
            op.clone_into(&mut case.header.op);
        }
        let mesh: Mesh = "4".parse().unwrap();
        let rank = Rank::new(&group, &mesh).unwrap();
        let operator = find(&case.header.op).unwrap();
        let layouts = operator.layouts(&case.header, &mesh).unwrap();
        let chunks = layouts.iter().enumerate().filter(|(_, layout)| layout.sizes == Sizes::Chunk);
        let run = |(n, layout)| check::layout(&rank, operator, &case, layout, n, None).unwrap();
        chunks.filter_map(run).flat_map(|report| report.problems).collect::<Vec<_>>()
    });
    reports.into_iter().flatten().collect()
}

/// One at a time: an operator that is replaced while ranks of another test run is another one on some of them.
static PLANTING: Mutex<()> = Mutex::new(());

#[track_caller]
fn assert_found(case: &str, op: &'static str) {
    let _one = PLANTING.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(problems(case, false), Vec::<String>::new(), "{case}");
    plant(op);
    let found = problems(case, true);
    assert!(found.iter().any(|problem| problem.contains("more than the operator's")), "{case}: {found:?}");
    // Nothing else is wrong.
    assert!(found.iter().all(|problem| problem.contains("bytes")), "{case}: {found:?}");
}

#[rstest]
#[case("conv2d_k3p1", "conv2d")]
#[case("conv2d_circular", "conv2d")]
#[case("conv2d_reflect", "conv2d")]
#[case("conv_transpose2d_k2s2", "conv_transpose2d")]
#[case("max_pool2d_k2s2", "max_pool2d")]
#[case("interpolate_bilinear", "interpolate")]
#[case("pad_constant", "pad")]
#[case("pad_circular", "pad")]
#[case("pad_reflect", "pad")]
#[case("pad_replicate", "pad")]
#[case("where", "where")]
#[case("layer_norm_hw", "layer_norm")]
#[case("group_norm", "group_norm")]
#[case("softmax", "softmax")]
#[case("cumsum", "cumsum")]
#[case("reduce_sum", "sum")]
#[case("matmul", "matmul")]
#[case("linear", "linear")]
#[case("sdpa", "scaled_dot_product_attention")]
#[case("view_split", "view")]
#[case("view_merge", "view")]
#[case("permute", "permute")]
#[case("slice", "slice")]
#[case("unbind", "unbind")]
#[case("cat", "cat")]
#[case("stack", "stack")]
#[case("index_select", "index_select")]
#[case("gather", "gather")]
#[case("index_add", "index_add")]
#[case("sort", "sort")]
#[case("knn", "knn")]
#[case("cdist", "cdist")]
#[case("topk", "topk")]
#[case("roll", "roll")]
#[case("flip", "flip")]
#[case("adaptive_avg_pool2d_out5x3", "adaptive_avg_pool2d")]
#[case("batch_norm_train", "batch_norm")]
#[case("rfft2_even", "rfft2")]
#[case("unary_gelu", "gelu")]
#[case("add_broadcast", "add")]
fn a_gather_in_an_operator_exceeds_its_budget(#[case] case: &str, #[case] op: &'static str) {
    assert_found(case, op);
}

#[rstest]
#[case("afno_small", "linear")]
#[case("fno2d_small", "linear")]
#[case("model_mod_afno_complex", "linear")]
#[case("model_dit_timm", "linear")]
#[case("model_dlwp_cube", "conv2d")]
#[case("model_edm_loss_song", "conv2d")]
#[case("model_edm_preconditioner_song", "conv2d")]
#[case("model_fengwu_tiny", "linear")]
#[case("model_flare_irregular", "linear")]
#[case("model_fully_connected_skip", "linear")]
#[case("model_geo_transolver_irregular", "linear")]
#[case("model_healpix_unet_avg", "conv2d")]
#[case("model_pangu_even", "linear")]
#[case("model_pix2pix_reflect2d", "conv2d")]
#[case("model_song_unet_ddpmpp", "conv2d")]
#[case("model_sr_res_net_x2", "conv3d")]
#[case("sphere_edm_sampler_solver", "add")]
#[case("model_swin_rnn_tiny", "linear")]
#[case("model_transolver_irregular_time", "linear")]
#[case("model_transolver_structured2d", "linear")]
#[case("model_unet_group_norm", "conv3d")]
fn a_gather_in_a_model_exceeds_its_budget(#[case] case: &str, #[case] op: &'static str) {
    assert_found(case, op);
}

#[rstest]
fn a_gather_in_an_operator_of_a_program_exceeds_its_budget(
    #[values("own_nothing", "own_halo", "own_bytes")] op: &'static str,
) {
    // Its ranks, too, would take an operator that is planted meanwhile.
    let _one = PLANTING.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(problems_of("unary_gelu", Some(op), false), Vec::<String>::new());
    let found = problems_of("unary_gelu", Some(op), true);
    assert!(found.iter().any(|problem| problem.contains("more than the operator's")), "{found:?}");
}
