//! Patches of a grid: against PhysicsNeMo's, and on shards against one rank.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::time::Duration;

use isobar_array::{Array, Generator, Interpolation, Resize, Windowed};
use isobar_collectives::threads;
use isobar_collectives::trace::CommTrace;
use isobar_mesh::DeviceMesh;
use isobar_models::Patching;
use isobar_shard::{Placement, ShardTensor, StateDict, forbid_hidden_communication, read_safetensors};
use rstest::rstest;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// A case that `benches/golden_patches.py` has written: its arguments and tensors.
struct Case {
    name: &'static str,
    arguments: Value,
    tensors: StateDict,
}

impl Case {
    fn read(name: &'static str) -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/patches.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let cases: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()["cases"]).unwrap();
        Self { name, arguments: cases[name].clone(), tensors: read_safetensors(&path).unwrap() }
    }

    fn tensor(&self, name: &str) -> Tensor {
        self.tensors[&format!("{}.{name}", self.name)].shallow_clone()
    }

    /// Patches in the order of this crate: all of a sample together.
    fn patches(&self, name: &str) -> Tensor {
        let (given, count) = (self.tensor(name), self.tensor("global_index").size()[0]);
        let shape = given.size();
        let apart = [&[count, shape[0] / count], &shape[1..]].concat();
        given.view(&apart[..]).transpose(0, 1).reshape(&shape[..])
    }

    fn pair(&self, name: &str) -> [i64; 2] {
        serde_json::from_value(self.arguments[name].clone()).unwrap()
    }

    fn covering(&self) -> Patching {
        let number = |name: &str| self.arguments[name].as_u64().unwrap() as usize;
        Patching::covering(
            self.pair("grid"),
            self.pair("patch"),
            number("overlap_pix"),
            number("boundary_pix"),
        )
        .unwrap()
    }
}

fn difference(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.size(), want.size());
    (got - want).abs().max().double_value(&[])
}

#[rstest]
fn covering_patches_are_those_of_physicsnemo(
    #[values("even", "overlap", "boundary", "one")] name: &'static str,
) {
    let case = Case::read(name);
    let (patching, x) = (case.covering(), case.tensor("x"));
    let patches = patching.apply(&x).unwrap();
    assert_eq!(patches, case.patches("patches"));
    assert_eq!(patching.global_index(&patches).unwrap(), case.tensor("global_index"));
    let fused = patching.fuse(&patching.separate(&case.patches("other")).unwrap(), &x).unwrap();
    assert!(difference(&fused, &case.tensor("fused")) < 1e-14);
}

#[test]
fn random_patches_are_those_of_physicsnemo_at_its_corners() {
    let case = Case::read("random");
    let corners: Vec<[i64; 2]> = Vec::<Vec<i64>>::try_from(case.tensor("corners"))
        .unwrap()
        .iter()
        .map(|pair| [pair[0], pair[1]])
        .collect();
    let patching = Patching::at(case.pair("grid"), case.pair("patch"), &corners).unwrap();
    let patches = patching.apply(&case.tensor("x")).unwrap();
    let size = Resize::Size(case.pair("patch").to_vec());
    let whole = case.tensor("whole").interpolate(&size, Interpolation::Linear, false).unwrap();
    let both = Tensor::cat(&[&patches, &patching.repeat(&whole).unwrap()], 1);
    assert!(difference(&both, &case.patches("patches")) < 1e-14);
    assert_eq!(patching.global_index(&patches).unwrap(), case.tensor("global_index"));
}

#[test]
fn random_patches_are_inside_and_everywhere() {
    let generator = Generator::new(3);
    let patching = Patching::random([9, 6], [8, 3], 200, &generator).unwrap();
    let mut corners = patching.corners().to_vec();
    assert_eq!(corners, Patching::random([9, 6], [8, 3], 200, &Generator::new(3)).unwrap().corners());
    corners.sort_unstable();
    corners.dedup();
    let all: Vec<[i64; 2]> = (0..2).flat_map(|row| (0..4).map(move |column| [row, column])).collect();
    assert_eq!(corners, all);
    assert_ne!(Patching::random([9, 6], [8, 3], 200, &generator).unwrap(), patching);
}

/// Cuts patches and fuses others, and multiplies the places with the patches, so that their layouts must fit.
fn results<A: Array>(patching: &Patching, x: &A, others: &A) -> [A; 4] {
    let patches = patching.apply(x).unwrap();
    let index = patching.global_index(&patches).unwrap();
    let rows = patching.groups(1).len() as i64;
    let placed = patches.narrow(0, 0, rows).unwrap().mul(&index.to_kind(Kind::Double).unwrap()).unwrap();
    let others = patches.mul_scalar(0.0).unwrap().add(others).unwrap();
    let fused = patching.fuse(&patching.separate(&others).unwrap(), x).unwrap();
    [patches, index, placed, fused]
}

#[rstest]
#[case(&[2], &["domain"], &[2])]
#[case(&[3], &["domain"], &[2])]
#[case(&[4], &["domain"], &[3])]
#[case(&[2, 2], &["domain", "domain_y"], &[2, 3])]
#[case(&[2, 3], &["data", "domain"], &[0, 2])]
fn patches_of_shards_are_those_of_one_rank(
    #[case] mesh: &'static [i64],
    #[case] names: &'static [&'static str],
    #[case] dims: &'static [usize],
    #[values("even", "overlap", "boundary", "one")] name: &'static str,
) {
    let case = Case::read(name);
    let want = results(&case.covering(), &case.tensor("x"), &case.patches("other"));
    let ranks = mesh.iter().product::<i64>() as usize;
    let each = threads::run(ranks, Duration::from_secs(60), |group| {
        let case = Case::read(name);
        let mesh = DeviceMesh::new(&group, mesh, names).unwrap();
        let placements: Vec<Placement> = dims.iter().map(|&dim| Placement::Shard(dim)).collect();
        let x = ShardTensor::distribute(&case.tensor("x"), &mesh, &placements).unwrap();
        let whole = vec![Placement::Replicate; dims.len()];
        let others = ShardTensor::distribute(&case.patches("other"), &mesh, &whole).unwrap();
        let _guard = forbid_hidden_communication();
        let got = results(&case.covering(), &x, &others);
        assert_eq!(got[3].layout(), x.layout());
        got.map(|array| array.full_tensor(None).unwrap())
    });
    for got in each {
        for (got, want) in got.iter().zip(&want) {
            assert!(difference(got, want) < 1e-14);
        }
    }
}

/// A rank receives its part of the patches, not the field; places are computed without communication.
#[rstest]
#[case(&[4], &["domain"], &[2])]
#[case(&[2, 2], &["domain", "domain_y"], &[2, 3])]
fn ranks_receive_their_part_of_the_patches(
    #[case] mesh: &'static [i64],
    #[case] names: &'static [&'static str],
    #[case] dims: &'static [usize],
) {
    let received = threads::run(4, Duration::from_secs(60), |group| {
        let mesh = DeviceMesh::new(&group, mesh, names).unwrap();
        let placements: Vec<Placement> = dims.iter().map(|&dim| Placement::Shard(dim)).collect();
        let x = Tensor::zeros([1, 4, 64, 64], (Kind::Double, Device::Cpu));
        let x = ShardTensor::distribute(&x, &mesh, &placements).unwrap();
        let patching = Patching::at([64, 64], [16, 16], &[[0, 0], [40, 40]]).unwrap();
        let trace = CommTrace::start(&group);
        let patches = patching.apply(&x).unwrap();
        let of_patches = trace.received();
        let _ = patching.global_index(&patches).unwrap();
        (of_patches, trace.received() - of_patches)
    });
    let bytes_of_field = 4 * 64 * 64 * 8;
    for (of_patches, of_places) in received {
        assert_eq!(of_places, 0);
        assert!(of_patches * 10 < bytes_of_field, "{of_patches} of {bytes_of_field} bytes");
    }
}

#[rstest]
#[case([8, 8], [9, 4], 0, 0, "patch_shape is [9, 4], expected 1 to 8 rows and 1 to 8 columns")]
#[case([8, 8], [0, 4], 0, 0, "patch_shape is [0, 4]")]
#[case([8, 8], [4, 4], 2, 1, "patch_shape[0] is 4, expected more than overlap_pix + 2 boundary_pix = 4")]
#[case([8, 8], [4, 4], usize::MAX, 0, "overlap_pix is 18446744073709551615")]
fn patches_that_do_not_cover_are_refused(
    #[case] grid: [i64; 2],
    #[case] patch: [i64; 2],
    #[case] overlap: usize,
    #[case] boundary: usize,
    #[case] reason: &str,
) {
    let error = Patching::covering(grid, patch, overlap, boundary).unwrap_err().to_string();
    assert!(error.contains(reason), "{error}");
}

#[test]
fn arrays_of_other_shapes_are_refused() {
    let patching = Patching::at([8, 8], [4, 4], &[[0, 0], [4, 4]]).unwrap();
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Double, Device::Cpu));
    let error = patching.apply(&zeros(&[1, 1, 8, 9])).unwrap_err().to_string();
    assert!(error.contains("expected [sample, channel, 8, 8]"), "{error}");
    let error = patching.separate(&zeros(&[3, 1, 4, 4])).unwrap_err().to_string();
    assert!(error.contains("expected [sample · 2, channel, 4, 4]"), "{error}");
    let two = [zeros(&[1, 1, 4, 4]), zeros(&[1, 1, 4, 4])];
    let error = patching.fuse(&two, &zeros(&[1, 1, 8, 8])).unwrap_err().to_string();
    assert!(error.contains("do not cover the grid"), "{error}");
    let error = Patching::at([8, 8], [4, 4], &[[5, 0]]).unwrap_err().to_string();
    assert!(error.contains("begins at [5, 0], expected inside a grid of [8, 8]"), "{error}");
    let error = Patching::random([8, 8], [4, 4], 0, &Generator::new(1)).unwrap_err().to_string();
    assert!(error.contains("patch_num is 0"), "{error}");
}
