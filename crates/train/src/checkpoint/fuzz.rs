//! Nothing that a file may hold makes a reader panic, take what was not written, or want more memory than the file is large.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use isobar_collectives::threads;
use proptest::prelude::*;
use safetensors::tensor::Dtype;
use tch::{Device, Kind, Tensor};

use super::manifest::{BoxEntry, FileEntry, Manifest, TensorEntry};
use super::tests::{Model, alone, saved};
use super::*;
use crate::{Parameter, Parameters};

/// A sample of positions of every file, a flip of every bit at each: `verify` finds all of them, and `load` gives what was
/// saved or nothing.
#[test]
fn every_flipped_bit_is_found() {
    let (folder, path, mut model) = saved();
    let want = model.bytes();
    let checkpoints = alone(folder.path(), Keep::ALL);
    for name in ["manifest.json", "rank_00000.safetensors"] {
        let file = path.join(name);
        let good = std::fs::read(&file).unwrap();
        let stride = (good.len() / 97).max(1);
        let ends = (0..12).chain(good.len() - 12..good.len());
        for (count, at) in ends.chain((0..good.len()).step_by(stride)).enumerate() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (count % 8);
            std::fs::write(&file, &bad).unwrap();
            assert!(verify(&path).is_err(), "byte {at} of {name}");
            let mut found = Model::new(7.0);
            let before = found.bytes();
            match checkpoints.load(&CheckpointSelector::Newest, &mut found.contents()) {
                Ok(_) => assert_eq!(found.bytes(), want, "byte {at} of {name}"),
                Err(_) => assert_eq!(found.bytes(), before, "byte {at} of {name}"),
            }
        }
        std::fs::write(&file, &good).unwrap();
    }
    verify(&path).unwrap();
}

/// Flips bits in the files of two ranks with several blocks each, on both sides of the blocks' boundaries and between: every
/// flip is found by a full read.
#[test]
fn every_flipped_bit_is_found_in_large_files() {
    let (rows, columns) = (2, 3 * digest::BLOCK as i64 / 16);
    let model = |world: &Group, fill: f64| {
        let mine = rows / world.size() as i64;
        let part = Tensor::full([mine, columns], fill, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let entry = Parameter::sharded("w", &part, 0, vec![mine; world.size()]);
        Model::of(Parameters::over(vec![entry], world).unwrap())
    };
    let folder = tempfile::tempdir().unwrap();
    let path = threads::run(2, Duration::from_secs(60), |world| {
        let mut model = model(&world, 1.0 + world.rank() as f64);
        model.train();
        let mut checkpoints = Checkpoints::new(folder.path(), Keep::ALL, &world);
        checkpoints.save(&model.contents(), &RunState::default()).unwrap()
    })
    .remove(0);
    let (checkpoints, mut found) = (alone(folder.path(), Keep::ALL), model(&Group::single(), 7.0));
    let before = found.bytes();
    for name in ["manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"] {
        let file = File::options().read(true).write(true).open(path.join(name)).unwrap();
        let bytes = file.metadata().unwrap().len();
        let limits = (1..=bytes / digest::BLOCK).map(|block| block * digest::BLOCK);
        assert_eq!(name != "manifest.json", limits.clone().count() > 1, "{name} has {bytes} bytes");
        let places = limits.flat_map(|limit| [limit - 1, limit]).chain((0..8).map(|part| part * bytes / 8));
        for (count, at) in places.chain([7, 8, bytes - 1]).filter(|at| *at < bytes).enumerate() {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ (1 << (count % 8))], at).unwrap();
            assert!(verify(&path).is_err(), "byte {at} of {name}");
            assert!(
                checkpoints.load(&CheckpointSelector::Newest, &mut found.contents()).is_err(),
                "byte {at} of {name}"
            );
            file.write_all_at(&byte, at).unwrap();
        }
    }
    assert!(found.bytes() == before, "nothing was changed");
    verify(&path).unwrap();
    checkpoints.load(&CheckpointSelector::Newest, &mut found.contents()).unwrap();
}

/// Manifests with a correct digest and contents that no save would write.
#[rstest::rstest]
#[case::endless_shape(|m: &mut Manifest| m.tensors[0].shape = vec![i64::MAX, i64::MAX], "is none")]
#[case::negative_shape(|m: &mut Manifest| m.tensors[0].shape = vec![-1], "is none")]
#[case::large_shape(|m: &mut Manifest| m.tensors[0].shape = vec![1 << 50], "is not within its shape")]
#[case::box_outside(|m: &mut Manifest| m.tensors[0].boxes[0].region.start[0] = i64::MAX, "is not within its shape")]
#[case::no_boxes(|m: &mut Manifest| m.tensors[0].boxes.clear(), "cover 0 of")]
#[case::twice(|m: &mut Manifest| { let part = m.tensors[0].boxes[0].clone(); m.tensors[0].boxes.push(part); }, "overlap")]
#[case::tensor_twice(|m: &mut Manifest| { let tensor = m.tensors[0].clone(); m.tensors.push(tensor); }, "listed twice")]
#[case::no_file(|m: &mut Manifest| m.tensors[0].boxes[0].file = 7, "in file 7, of 1 files")]
#[case::beyond_file(|m: &mut Manifest| m.tensors[0].boxes[0].bytes = [u64::MAX - 24, u64::MAX], "of a file of")]
#[case::backwards(|m: &mut Manifest| m.tensors[0].boxes[0].bytes = [24, 0], "of a file of")]
#[case::shared_bytes(|m: &mut Manifest| { let bytes = m.tensors[5].boxes[0].bytes; m.tensors[6].boxes[0].bytes = bytes; }, "overlap")]
#[case::elsewhere(|m: &mut Manifest| m.files[0].name = "../secret".into(), "no name of its own")]
#[case::absolute(|m: &mut Manifest| m.files[0].name = "/etc/passwd".into(), "no name of its own")]
#[case::blocks(|m: &mut Manifest| m.files[0].digest.bytes = 1 << 40, "blocks, expected")]
#[case::half_bytes(|m: &mut Manifest| m.tensors[0].dtype = Dtype::F4, "no whole bytes")]
fn manifests_that_contradict_themselves_are_refused(#[case] change: fn(&mut Manifest), #[case] words: &str) {
    let (folder, path, _) = saved();
    let mut manifest = Manifest::read(&path).unwrap();
    change(&mut manifest);
    std::fs::write(path.join("manifest.json"), manifest.encode().unwrap()).unwrap();
    let error = alone(folder.path(), Keep::ALL)
        .load(&CheckpointSelector::Newest, &mut Model::new(1.0).contents())
        .unwrap_err();
    assert!(
        error.to_string().contains("it contradicts itself") && error.to_string().contains(words),
        "{error}"
    );
    assert!(verify(&path).is_err() && reshard(&path, &folder.path().join("out"), 2).is_err());
}

fn region() -> impl Strategy<Value = Region> {
    let numbers = || prop::collection::vec(prop_oneof![0i64..5, any::<i64>()], 0..4);
    (numbers(), numbers()).prop_map(|(start, shape)| Region { start, shape })
}

fn tensor() -> impl Strategy<Value = TensorEntry> {
    let dtype = prop::sample::select(vec![Dtype::F32, Dtype::F4, Dtype::C64, Dtype::U64, Dtype::BOOL]);
    let part = (0usize..3, region(), any::<[u64; 2]>());
    let part = part.prop_map(|(file, region, bytes)| BoxEntry { file, key: "k".into(), region, bytes });
    let shape = prop::collection::vec(prop_oneof![0i64..5, any::<i64>()], 0..4);
    ("[a-c]", dtype, shape, prop::collection::vec(part, 0..4))
        .prop_map(|(name, dtype, shape, boxes)| TensorEntry { name, dtype, shape, boxes })
}

proptest! {
    #[test]
    fn no_manifest_makes_a_reader_panic(tensors in prop::collection::vec(tensor(), 0..4), bytes in any::<u64>()) {
        let digest = digest::FileDigest { bytes, blake3: "0".repeat(64), blocks: Vec::new() };
        let manifest = Manifest {
            blake3: String::new(),
            format: manifest::FORMAT.into(),
            version: manifest::VERSION,
            isobar: String::new(),
            libtorch: String::new(),
            nonce: String::new(),
            saved_at: u64::MAX,
            world_size: 1,
            files: vec![FileEntry { name: "f".into(), digest }],
            tensors,
            facts: serde_json::Value::Null,
            state: RunState::default(),
        };
        let encoded = manifest.encode().unwrap();
        if let Ok(read) = Manifest::decode("m".as_ref(), &encoded) {
            prop_assert_eq!(read.tensors, manifest.tensors);
        }
    }

    #[test]
    fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), at in 0usize..400) {
        prop_assert!(Manifest::decode("m".as_ref(), &bytes).is_err());
        let mut begun = br#"{"blake3":""#.to_vec();
        begun.extend(&bytes);
        prop_assert!(Manifest::decode("m".as_ref(), &begun).is_err());

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f.safetensors");
        std::fs::write(&file, &bytes).unwrap();
        let _ = read::tensors_of(&file);
        // A header that is JSON, with a byte of it changed.
        let mut header = br#"{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#.to_vec();
        let at = at % header.len();
        header[at] = *bytes.first().unwrap_or(&b'9');
        let mut all = (header.len() as u64).to_le_bytes().to_vec();
        all.extend(&header);
        all.extend([0; 24]);
        std::fs::write(&file, &all).unwrap();
        if let Ok(tensors) = read::tensors_of(&file) {
            let claimed: u64 = tensors.iter().flat_map(|t| &t.boxes).map(|part| part.bytes[1] - part.bytes[0]).sum();
            prop_assert!(claimed <= 24);
        }
    }
}

/// A header that claims to be longer than the file, or than any may be, is refused before memory is taken for it.
#[test]
fn headers_cannot_ask_for_memory() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("f.safetensors");
    for claimed in [u64::MAX, 1 << 40, 9] {
        let mut bytes = claimed.to_le_bytes().to_vec();
        bytes.extend(b"{}");
        std::fs::write(&file, bytes).unwrap();
        let error = read::tensors_of(&file).unwrap_err().to_string();
        assert!(error.contains(&format!("its header would have {claimed} bytes")), "{error}");
    }
}
