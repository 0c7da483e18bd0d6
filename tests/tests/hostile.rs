//! Data sets with bytes changed at random: values or an error, in bounded memory and time.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use isobar_data::{DarcyWriter, WellDim, WellMeta, WellWriter};
use isobar_harness::{Launch, Outcome, THREADS, output_within, threads, wait_within, workspace};
use isobar_tests::has_mpi;
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

const READER: &str = env!("CARGO_BIN_EXE_reader");

/// Copies that are read by one process.
const BATCH: u64 = 256;

/// Time limit of a process, which reads for seconds, and waits longer for each helper that loops.
const LONGEST: Duration = Duration::from_secs(120);

/// Memory limit of a reading process, in KiB: libtorch takes most of it. The files have a few KiB.
const MEMORY: u64 = 1 << 20;

/// Small, so that most of its bytes say what the others are.
fn darcy(path: &Path) {
    let mut writer = DarcyWriter::create(path, 3, 4, 1.0).unwrap();
    for _ in 0..3 {
        writer.append(&[12.0; 16], &[0.5; 16]).unwrap();
    }
    writer.finish().unwrap();
}

fn well(path: &Path) {
    let dim = |name: &str| WellDim {
        name: name.to_owned(),
        coordinates: (0..3).map(f64::from).collect(),
        periodic: true,
    };
    let meta = WellMeta {
        name: "small".to_owned(),
        trajectories: 1,
        times: vec![0.0, 1.0],
        dims: vec![dim("x"), dim("y")],
        fields: vec![("density".to_owned(), 0), ("velocity".to_owned(), 1)],
        parameters: vec![("viscosity".to_owned(), 0.5)],
        ..WellMeta::default()
    };
    let mut writer = WellWriter::create(path, &meta).unwrap();
    for (field, components) in [("density", 1), ("velocity", 2)] {
        let values = Tensor::zeros([2, components, 3, 3], (Kind::Float, Device::Cpu));
        writer.write(field, 0, 0, &values).unwrap();
    }
    writer.finish().unwrap();
}

fn fixture(name: &str) -> PathBuf {
    workspace().join("tests/data/formats").join(name)
}

/// A damaged file yields values, or an error that names it: the reader does not crash, panic, loop or take unbounded memory. A crash of
/// the HDF5 library ends only the helper process. One crash in 2000 files is tolerated, since the library may read out of bounds in the
/// helper unnoticed.
#[rstest]
#[case::darcy("darcy", None, json!({}))]
#[case::well("the_well", None, json!({}))]
#[case::netcdf4("netcdf", Some("netcdf4.nc"), json!({}))]
#[case::hdf5("hdf5", Some("plain.h5"), json!({ "axes": ["sample", "time", "lat", "lon"], "variables": { "u": "run/u" } }))]
#[case::classic("netcdf", Some("classic.nc"), json!({}))]
#[case::npy("npy", Some("u.npy"), json!({ "axes": ["sample", "time", "lat", "lon"] }))]
#[case::npz("npy", Some("deflated.npz"), json!({ "axes": ["sample", "time", "lat", "lon"] }))]
#[case::safetensors("safetensors", Some("arrays.safetensors"), json!({ "axes": ["sample", "time", "lat", "lon"] }))]
#[case::zarr_v2("zarr", Some("zarr/xarray_v2.zarr"), json!({}))]
#[case::zarr_v3("zarr", Some("zarr/xarray_v3.zarr"), json!({}))]
fn damaged_files_are_values_or_errors(#[case] format: &str, #[case] file: Option<&str>, #[case] own: Value) {
    let folder = tempdir().unwrap();
    let [mut path, log, errors] = ["whole.h5", "log", "errors"].map(|name| folder.path().join(name));
    match (file, format) {
        (Some(file), _) => path = fixture(file),
        (None, "darcy") => darcy(&path),
        (None, _) => well(&path),
    }
    let mut config = json!({ "format": format });
    config[format] = own;
    if file.is_some() {
        config["fields"] = json!(["u"]);
    }
    let count = std::env::var("PROPTEST_CASES").map_or(BATCH, |cases| cases.parse().unwrap());
    let mut problems = Vec::new();
    let mut from = 0;
    while from < count {
        let to = (from + BATCH).min(count);
        let mut command = Command::new(READER);
        command.arg(config.to_string()).arg(&path).args(["1", &from.to_string(), &to.to_string()]);
        command.env(THREADS, threads());
        command.stdout(File::create(&log).unwrap()).stderr(File::create(&errors).unwrap());
        let status = wait_within(&mut command.spawn().unwrap(), LONGEST).unwrap();
        let said = fs::read_to_string(&log).unwrap();
        let last: Vec<&str> = said.lines().last().unwrap_or_default().split(' ').collect();
        match (status, &last[..]) {
            (Some(status), ["read", .., "memory", memory]) if status.success() => {
                println!("{format} {file:?} {from}..{to}: {}", last.join(" "));
                let memory: u64 = memory.parse().unwrap();
                if memory > MEMORY {
                    problems.push(format!("the copies from {from} to {to} took {memory} KiB"));
                }
                from = to;
            }
            (status, [number]) if !number.is_empty() => {
                let complaint = String::from_utf8_lossy(&fs::read(&errors).unwrap()).into_owned();
                problems.push(format!("copy {number}: {status:?}: {complaint}"));
                from = number.parse::<u64>().unwrap() + 1;
            }
            _ => panic!("{status:?}: {said}"),
        }
    }
    let by_library = ["darcy", "the_well", "hdf5"].contains(&format) || file == Some("netcdf4.nc");
    let most = if by_library { count / 2000 } else { 0 };
    assert!(problems.len() as u64 <= most, "{} of {count}\n{}", problems.len(), problems.join("\n"));
}

/// A helper reads one file after another, in bounded memory and time, and holds no file of its parent.
#[test]
fn the_helper_is_limited() {
    let inherited = tempfile::tempfile().unwrap();
    // As libraries in C open files: not closed in programs that are started.
    nix::fcntl::fcntl(&inherited, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar-app"));
    command.env("ISOBAR_HDF5_HELPER", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (mut paths, mut answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    for file in [fixture("netcdf4.nc"), fixture("none.nc")] {
        paths.write_all(&[file.as_os_str().as_bytes(), &[0]].concat()).unwrap();
        let mut answer = [0];
        answers.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [0x06], "{file:?}: what is wrong with a file, its reader says");
    }
    let process = Path::new("/proc").join(child.id().to_string());
    let limits = fs::read_to_string(process.join("limits")).unwrap();
    for limit in ["Max cpu time", "Max address space"] {
        let line = limits.lines().find(|line| line.starts_with(limit)).unwrap();
        assert!(!line[limit.len()..].trim_start().starts_with("unlimited"), "{line}");
    }
    let open: Vec<PathBuf> = fs::read_dir(process.join("fd"))
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
        .filter(|file| file.starts_with("/tmp") || file.to_string_lossy().contains("deleted"))
        .collect();
    assert!(open.is_empty(), "{open:?}");
    drop(paths);
    assert!(wait_within(&mut child, LONGEST).unwrap().unwrap().success());
}

/// A file with so many attributes that they have an index, in which one bit is wrong.
fn with_damaged_attributes(path: &Path) {
    let file = unlocked(|| {
        let mut options = hdf5_metno::File::with_options();
        let _ = options.with_fapl(|access| access.libver_latest());
        options.create(path)
    });
    for at in 0..20 {
        file.new_attr::<f64>().create(format!("a{at}").as_str()).unwrap();
    }
    drop(file);
    let mut bytes = fs::read(path).unwrap();
    let leaf = bytes.windows(4).position(|window| window == b"BTLF").unwrap();
    bytes[leaf + 8] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Each rank has a helper, which must not take itself for a rank of the job that mpirun started.
#[test]
fn under_mpirun_a_rejected_file_is_one_error() {
    if !has_mpi() {
        return;
    }
    let folder = tempdir().unwrap();
    let train = |name: &str, data: &Path| {
        let launch = Launch::mpirun(2, env!("CARGO_BIN_EXE_isobar-app")).current_dir(workspace());
        let launch = launch.deadline(LONGEST).args(["train", "configs/darcy_afno.toml"]);
        let sets = [
            format!("data.path={}", data.display()),
            format!("run.output={}", folder.path().display()),
            format!("run.name={name}"),
            "train.epochs=1".to_owned(),
            "distributed.timeout_s=200".to_owned(),
            "data.validation_samples=0".to_owned(),
        ];
        launch.args(sets.iter().flat_map(|set| ["--set", set])).run().unwrap()
    };
    let good = train("good", &workspace().join("tests/data/darcy_excerpt.h5")).expect_success();
    let said = |outcome: &Outcome, words: &str| -> usize {
        outcome.ranks.iter().map(|rank| rank.stderr.matches(words).count()).sum()
    };
    assert_eq!(said(&good, "files are opened without it"), 0, "{good}");

    let path = folder.path().join("damaged.h5");
    with_damaged_attributes(&path);
    let rejected = train("damaged", &path).expect_code(3);
    assert_eq!(said(&rejected, "damaged.h5: the HDF5 library cannot list its attributes"), 1, "{rejected}");
    assert_eq!(said(&rejected, "panicked"), 0, "{rejected}");
}

/// Bytes of deflate, without its end, that unpack to 1.2 GB of zeros.
fn bomb() -> Vec<u8> {
    let piece = vec![0; 16 << 20];
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    let mut ends = [0; 2];
    for end in &mut ends {
        encoder.write_all(&piece).unwrap();
        encoder.flush().unwrap();
        *end = encoder.get_ref().len();
    }
    let all = encoder.get_ref();
    let mut bomb = all[..ends[0]].to_vec();
    (0..75).for_each(|_| bomb.extend(&all[ends[0]..ends[1]]));
    bomb
}

/// Opens a file again. A program that another test has started meanwhile may have inherited the lock of the first handle.
fn unlocked(open: impl Fn() -> hdf5_metno::Result<hdf5_metno::File>) -> hdf5_metno::File {
    for _ in 0..600 {
        match open() {
            Err(error) if error.to_string().contains("unable to lock") => {
                thread::sleep(Duration::from_millis(100));
            }
            opened => return opened.unwrap(),
        }
    }
    panic!("the file stays locked");
}

/// A file of 5000 samples, each in a chunk of its own, of which one unpacks to 1.2 GB. `chunk` is the number of that one.
fn with_bomb(path: &Path, chunk: u64) {
    const SAMPLES: usize = 5000;
    // Written to another file: programs that other tests start meanwhile may inherit its lock.
    let draft = path.with_extension("draft");
    let mut writer = DarcyWriter::create(&draft, SAMPLES, 4, 1.0).unwrap();
    writer.append(&vec![12.0; SAMPLES * 16], &vec![0.5; SAMPLES * 16]).unwrap();
    writer.finish().unwrap();
    let info = {
        let file = unlocked(|| hdf5_metno::File::open_rw(&draft));
        file.unlink("nu").unwrap();
        let builder = file.new_dataset::<f32>().shape((SAMPLES, 4, 4)).chunk((1, 4, 4)).deflate(1);
        let dataset = builder.create("nu").unwrap();
        dataset.write_raw(&vec![12.0_f32; SAMPLES * 16]).unwrap();
        // Chunks have places once they are written.
        file.flush().unwrap();
        (0..).map(|at| dataset.chunk_info(at).unwrap()).find(|info| info.offset[0] == chunk).unwrap()
    }; // The file is complete on disk when its last handle is closed.

    let mut bytes = fs::read(&draft).unwrap();
    // In the tree of chunks the key of a chunk, its packed size, filters and offset, stands before its address.
    let key = [
        &(info.size as u32).to_le_bytes()[..],
        &[0; 4],
        &chunk.to_le_bytes(),
        &[0; 24],
        &info.addr.to_le_bytes(),
    ];
    let key = key.concat();
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    let (bomb, end) = (bomb(), bytes.len() as u64);
    bytes[at..at + 4].copy_from_slice(&(bomb.len() as u32).to_le_bytes());
    bytes[at + key.len() - 8..at + key.len()].copy_from_slice(&end.to_le_bytes());
    bytes.extend(&bomb);
    // The end of the file, in its superblock.
    let length = bytes.len() as u64;
    bytes[40..48].copy_from_slice(&length.to_le_bytes());
    fs::write(path, bytes).unwrap();
}

/// However many chunks a data set has, one that unpacks to more than it should is refused before it is unpacked.
#[test]
fn a_bomb_among_thousands_of_chunks_is_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("bomb.h5");
    with_bomb(&path, 4321);
    let [data, output] =
        [format!("data.path={}", path.display()), format!("run.output={}", folder.path().display())];
    let sets = [
        &data,
        &output,
        "data.validation_samples=0",
        "train.epochs=1",
        "model.inp_shape=[4, 4]",
        "model.patch_size=[2, 2]",
    ];
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar-app"));
    command.current_dir(workspace()).args(["train", "configs/darcy_afno.toml"]).env(THREADS, threads());
    command.args(sets.iter().flat_map(|set| ["--set", set]));
    let output = output_within(&mut command, Duration::from_secs(120)).unwrap().expect("did not end");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains("`nu` is in a chunk at [4321, 0, 0] of ") && said.contains("more than its 64 bytes"),
        "{said}"
    );

    // The others are good.
    let file = isobar_data::DarcyFile::open(&path).unwrap();
    file.read(&[4320, 0], 0..4, 0..4).unwrap();
    assert!(file.read(&[4321], 0..4, 0..4).is_err());
}
