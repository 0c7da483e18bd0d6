//! Checkpoints whose files are not what they seem: in another's place, endless, or no regular files.

use std::os::unix::fs::FileTypeExt;

use nix::sys::stat::Mode;

use super::tests::{Model, alone, saved};
use super::*;

fn fifo(path: &Path) {
    let _ = std::fs::remove_file(path);
    nix::unistd::mkfifo(path, Mode::from_bits_truncate(0o600)).unwrap();
}

/// The errors of all that reads a checkpoint.
fn errors(root: &Path, path: &Path) -> Vec<String> {
    let mut model = Model::new(7.0);
    let at = CheckpointSelector::At(path.to_owned());
    vec![
        verify(path).unwrap_err().to_string(),
        export(path, &root.join("out.safetensors")).unwrap_err().to_string(),
        reshard(path, &root.join("out"), 2).unwrap_err().to_string(),
        alone(root, Keep::ALL).load(&at, &mut model.contents()).unwrap_err().to_string(),
    ]
}

#[test]
fn checkpoints_in_each_others_folders_are_refused() {
    let (folder, first, mut model) = saved();
    let mut checkpoints = alone(folder.path(), Keep::ALL);
    let second = checkpoints.save(&model.contents(), &RunState { step: 2, ..RunState::default() }).unwrap();
    let aside = folder.path().join("aside");
    std::fs::rename(&first, &aside).unwrap();
    std::fs::rename(&second, &first).unwrap();
    std::fs::rename(&aside, &second).unwrap();
    for (path, step) in [(&first, 2), (&second, 1)] {
        let words = format!("it is of step {step}; expected the name step_0000000{step}");
        for error in errors(folder.path(), path) {
            assert!(error.contains(&words), "{error}");
        }
    }
    assert!(list(folder.path()).unwrap().iter().all(|listed| listed.found.is_err()));
    let error = checkpoints.load(&CheckpointSelector::Newest, &mut model.contents()).unwrap_err().to_string();
    assert!(error.contains("it is of step 2") && error.contains("it is of step 1"), "{error}");
    // Under a name that says nothing of a step, a copy is as good as the original.
    std::fs::rename(&first, &aside).unwrap();
    assert_eq!(verify(&aside).unwrap().step, 2);
}

#[test]
fn a_checkpoint_is_not_resharded_into_the_folder_of_another_step() {
    let (folder, path, _) = saved();
    let out = folder.path().join("step_00000007");
    let error = reshard(&path, &out, 2).unwrap_err().to_string();
    assert!(error.contains("is step 7, expected step 1; call it step_00000001"), "{error}");
    assert!(!out.exists());
}

/// Six gigabytes, of which the disk has none.
#[test]
fn a_manifest_that_is_too_long_is_not_read() {
    let (folder, path, _) = saved();
    let file = std::fs::File::options().write(true).open(path.join("manifest.json")).unwrap();
    file.set_len(6 << 30).unwrap();
    for error in errors(folder.path(), &path) {
        assert!(error.contains("it has 6442450944 bytes, expected at most 536870912"), "{error}");
    }
}

#[test]
fn a_file_that_is_longer_than_its_digests_is_not_read() {
    let (folder, path, _) = saved();
    let file = std::fs::File::options().write(true).open(path.join("rank_00000.safetensors")).unwrap();
    file.set_len(1 << 40).unwrap();
    for error in errors(folder.path(), &path) {
        assert!(error.contains("torn: it has 1099511627776 bytes"), "{error}");
    }
}

#[rstest::rstest]
fn special_files_are_refused(
    #[values("manifest.json", "rank_00000.safetensors")] name: &str,
    #[values(false, true)] device: bool,
) {
    let (folder, path, _) = saved();
    let file = path.join(name);
    fifo(&file);
    if device {
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
    }
    let words = if device { "it is a device" } else { "it is a FIFO" };
    for error in errors(folder.path(), &path) {
        // A folder whose manifest is no file is none of a checkpoint.
        assert!(error.contains(words) || error.contains("no checkpoint in"), "{error}");
    }
    assert!(
        name == "manifest.json" || errors(folder.path(), &path).iter().all(|error| error.contains(words))
    );
}

#[test]
fn an_export_replaces_regular_files_only() {
    let (folder, path, _) = saved();
    let out = folder.path().join("out.safetensors");
    fifo(&out);
    let error = export(&path, &out).unwrap_err().to_string();
    assert!(error.contains("it is a FIFO, expected a regular file"), "{error}");
    assert!(std::fs::symlink_metadata(&out).unwrap().file_type().is_fifo());
    let target = folder.path().join("target");
    std::fs::write(&target, "mine").unwrap();
    std::fs::remove_file(&out).unwrap();
    std::os::unix::fs::symlink(&target, &out).unwrap();
    let error = export(&path, &out).unwrap_err().to_string();
    assert!(error.contains("it is a symbolic link"), "{error}");
    assert_eq!(std::fs::read(&target).unwrap(), b"mine");
    std::fs::remove_file(&out).unwrap();
    assert_eq!(export(&path, &out).unwrap().tensors, 5);
}
