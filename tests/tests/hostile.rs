//! Data sets with bytes changed at random: values or an error, in bounded memory and time.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use isobar_data::{DarcyWriter, WellDim, WellMeta, WellWriter};
use isobar_harness::{THREADS, output_within, threads, wait_within, workspace};
use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

const READER: &str = env!("CARGO_BIN_EXE_reader");

/// Copies that are read by one process.
const BATCH: u64 = 512;

/// Time limit of a read: seconds, unless HDF5 loops forever.
const LONGEST: Duration = Duration::from_secs(30);

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

/// Whatever is damaged, Isobar's own code neither panics nor takes memory without bound. HDF5 itself is in C, and some
/// damage makes it crash or go round for ever: that it does so seldom is all that can be held here.
#[rstest]
#[case::darcy("darcy", darcy)]
#[case::well("well", well)]
fn damaged_files_are_values_or_errors(#[case] kind: &str, #[case] write: fn(&Path)) {
    let folder = tempdir().unwrap();
    let [path, log, errors] = ["whole.h5", "log", "errors"].map(|name| folder.path().join(name));
    write(&path);
    let count = std::env::var("PROPTEST_CASES").map_or(BATCH, |cases| cases.parse().unwrap());
    let (mut problems, mut below) = (Vec::new(), Vec::new());
    let mut from = 0;
    while from < count {
        let to = (from + BATCH).min(count);
        let mut command = Command::new(READER);
        command.arg(kind).arg(&path).args(["1", &from.to_string(), &to.to_string()]).env(THREADS, threads());
        command.stdout(File::create(&log).unwrap()).stderr(File::create(&errors).unwrap());
        let status = wait_within(&mut command.spawn().unwrap(), LONGEST).unwrap();
        let said = fs::read_to_string(&log).unwrap();
        let last: Vec<&str> = said.lines().last().unwrap_or_default().split(' ').collect();
        match (status, &last[..]) {
            (Some(status), ["read", _, "memory", memory]) if status.success() => {
                let memory: u64 = memory.parse().unwrap();
                if memory > MEMORY {
                    problems.push(format!("the copies from {from} to {to} took {memory} KiB"));
                }
                from = to;
            }
            (status, [number]) => {
                let complaint = String::from_utf8_lossy(&fs::read(&errors).unwrap()).into_owned();
                let by_rust =
                    ["panicked at", "memory allocation of"].iter().any(|words| complaint.contains(words));
                let crashed = match status.map(|status| status.signal()) {
                    None | Some(Some(7 | 8 | 11)) => true,
                    // By the C library, which found its heap damaged.
                    Some(Some(6)) => !by_rust,
                    Some(_) => false,
                };
                let list = if crashed { &mut below } else { &mut problems };
                list.push(format!("copy {number}: {status:?}: {complaint}"));
                from = number.parse::<u64>().unwrap() + 1;
            }
            _ => panic!("{status:?}: {said}"),
        }
    }
    assert!(problems.is_empty(), "{} of {count}\n{}", problems.len(), problems.join("\n"));
    assert!(below.len() as u64 * 20 <= count, "{} of {count}\n{}", below.len(), below.join("\n"));
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
