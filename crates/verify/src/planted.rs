//! Planted gathers: an operator whose input is gathered on all ranks and split again gives the same numbers, and must exceed the
//! budget of its case.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use isobar_array::Elementwise;
use isobar_collectives::threads;
use isobar_shard::rules::{Call, register_sharded_op};
use isobar_shard::{Placement, ShardTensor};
use rstest::rstest;
use serde_json::{Value, json};

use super::operator::{Rank, find};
use crate::case::Case;
use crate::check;
use crate::layout::Sizes;
use crate::made::{self, Input};
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

/// Returns the file of a golden case.
fn golden(case: &str) -> PathBuf {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let folders = ["tests/golden", "tests/golden_own", "crates/models/tests/golden"];
    let mut places = folders.map(|folder| root.join(folder).join(format!("{case}.safetensors"))).into_iter();
    places.find(|path| path.exists()).unwrap()
}

/// Returns the problems of a case on 4 ranks, or of another operator on its tensors.
fn problems(case: &Path, op: Option<&'static str>, acts: bool) -> Vec<String> {
    problems_on("4", Sizes::Chunk, case, op, acts)
}

/// Returns the problems of a case on the layouts of a mesh of 4 ranks that have these sizes.
fn problems_on(
    mesh: &'static str,
    sizes: Sizes,
    case: &Path,
    op: Option<&'static str>,
    acts: bool,
) -> Vec<String> {
    let path = case.to_owned();
    let reports = threads::run(4, Duration::from_secs(120), move |group| {
        ACTS.set(acts);
        let mut case = Case::read(&path).unwrap();
        if let Some(op) = op {
            op.clone_into(&mut case.header.op);
        }
        let mesh: Mesh = mesh.parse().unwrap();
        let rank = Rank::new(&group, &mesh).unwrap();
        let operator = find(&case.header.op).unwrap();
        let layouts = operator.layouts(&case.header, &mesh).unwrap();
        let layouts = layouts.iter().enumerate().filter(|(_, layout)| layout.sizes == sizes);
        let run = |(n, layout)| check::layout(&rank, operator, &case, layout, n, None).unwrap();
        layouts.filter_map(run).flat_map(|report| report.problems).collect::<Vec<_>>()
    });
    reports.into_iter().flatten().collect()
}

/// Inputs of models without a golden case.
const FIELDS: Input<'static> = ("input", &[2, 2, 16, 24], &[0, 2, 3]);
const NOISY: Input<'static> = ("x", &[2, 2, 8, 8], &[0, 2, 3]);
const LEVELS: Input<'static> = ("noise_labels", &[2], &[0]);

/// One at a time: an operator that is replaced while ranks of another test run is another one on some of them.
static PLANTING: Mutex<()> = Mutex::new(());

/// Checks that a case keeps to its budgets with uneven shards.
#[track_caller]
fn assert_kept(mesh: &'static str, case: &Path) {
    let _one = PLANTING.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(problems_on(mesh, Sizes::Uneven, case, None, false), Vec::<String>::new());
}

#[track_caller]
fn assert_found(case: &Path, op: &'static str) {
    let _one = PLANTING.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(problems(case, None, false), Vec::<String>::new());
    plant(op);
    let found = problems(case, None, true);
    assert!(found.iter().any(|problem| problem.contains("more than the operator's")), "{found:?}");
    // Nothing else is wrong.
    assert!(found.iter().all(|problem| problem.contains("bytes")), "{found:?}");
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
    assert_found(&golden(case), op);
}

#[rstest]
#[case("afno_small", "linear")]
#[case("fno2d_small", "linear")]
#[case("model_mod_afno_complex", "linear")]
#[case("aurora", "linear")]
#[case("edm_precond_positions", "conv2d")]
#[case("edm_precond_super_resolution_positions", "conv2d")]
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
#[case("model_pangu_even", "conv2d")]
#[case("model_pangu_even", "conv3d")]
#[case("model_pix2pix_reflect2d", "conv2d")]
#[case("model_song_unet_ddpmpp", "conv2d")]
#[case("model_sr_res_net_x2", "conv3d")]
#[case("song_unet_pos_embd_linear", "conv2d")]
#[case("song_unet_pos_lt_embd_eval", "conv2d")]
#[case("sphere_cnext_unet_2d", "conv2d")]
#[case("sphere_edm_sampler_solver", "add")]
#[case("model_swin_rnn_tiny", "linear")]
#[case("model_transolver_irregular_time", "linear")]
#[case("model_transolver_structured2d", "linear")]
#[case("model_unet_group_norm", "conv3d")]
fn a_gather_in_a_model_exceeds_its_budget(#[case] case: &str, #[case] op: &'static str) {
    assert_found(&golden(case), op);
}

/// Models without a golden case, or with one that has no weights.
#[rstest]
#[case::conv_net("conv_net", json!({ "in_channels": 2, "out_channels": 1, "hidden_channels": 4, "depth": 2 }), &[FIELDS], "conv2d")]
#[case::dhariwal_unet(
    "dhariwal_unet",
    json!({
        "img_resolution": 8, "in_channels": 2, "out_channels": 2, "model_channels": 64, "channel_mult": [1], "num_blocks": 1,
        "attn_resolutions": [8], "dropout": 0.0
    }),
    &[NOISY, LEVELS],
    "conv2d"
)]
#[case::vit(
    "vit",
    json!({
        "inp_shape": [16, 24], "in_channels": 2, "out_channels": 2, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2
    }),
    &[FIELDS],
    "linear"
)]
fn a_gather_in_a_made_model_exceeds_its_budget(
    #[case] model: &str,
    #[case] attrs: Value,
    #[case] inputs: &[Input<'_>],
    #[case] op: &'static str,
) {
    let folder = tempfile::tempdir().unwrap();
    let case = made::write(folder.path(), model, &attrs, inputs);
    assert_found(&case, op);
    assert_kept("2x2", &case);
}

/// Neighbours within a radius are searched among points of all ranks.
#[rstest]
fn a_search_for_neighbours_keeps_to_its_budget(#[values("4", "2x2")] mesh: &'static str) {
    let attrs = json!({
        "functional_dim": 2, "out_dim": 1, "geometry_dim": 3, "include_local_features": true, "radii": [0.8],
        "neighbors_in_radius": [3], "n_hidden_local": 4, "n_layers": 1, "n_hidden": 8, "n_head": 2, "mlp_ratio": 2, "slice_num": 3
    });
    let inputs: [Input<'_>; 3] = [
        ("local_embedding", &[2, 24, 2], &[0, 1]),
        ("local_positions", &[2, 24, 3], &[0, 1]),
        ("geometry", &[2, 16, 3], &[0, 1]),
    ];
    let folder = tempfile::tempdir().unwrap();
    let case = made::write(folder.path(), "geo_transolver", &attrs, &inputs);
    assert_kept(mesh, &case);
}

/// Golden cases on uneven shards, some with sharded parameters.
#[rstest]
fn models_keep_to_their_budgets_with_uneven_shards(
    #[values(
        "aurora",
        "edm_precond_positions",
        "edm_precond_super_resolution_lead_time",
        "song_unet_pos_embd_learnable",
        "song_unet_pos_embd_learnable_patches",
        "song_unet_pos_lt_embd_patches",
        "song_unet_pos_lt_embd_train"
    )]
    case: &str,
    #[values("4", "2x2")] mesh: &'static str,
) {
    assert_kept(mesh, &golden(case));
}

#[rstest]
fn a_gather_in_an_operator_of_a_program_exceeds_its_budget(
    #[values("own_nothing", "own_halo", "own_bytes")] op: &'static str,
) {
    // Its ranks, too, would take an operator that is planted meanwhile.
    let _one = PLANTING.lock().unwrap_or_else(PoisonError::into_inner);
    let case = golden("unary_gelu");
    assert_eq!(problems(&case, Some(op), false), Vec::<String>::new());
    let found = problems(&case, Some(op), true);
    assert!(found.iter().any(|problem| problem.contains("more than the operator's")), "{found:?}");
}
