//! The manager of a process, from its set-up to its end, and again.

use std::time::{Duration, Instant};

use isobar_manager::{DistributedManager, Error, SetupOptions, Termination};
use tch::{Device, Kind, Tensor};

// One test, since the manager is the process's.
#[test]
fn is_set_up_once_and_again_after_its_end() {
    assert!(!DistributedManager::is_initialized());
    assert!(matches!(DistributedManager::get(), Err(Error::Uninitialized)));
    let wrong = SetupOptions { rank: 1, ..SetupOptions::default() };
    assert!(matches!(DistributedManager::setup(wrong), Err(Error::Value { name: "rank", .. })));
    assert!(!DistributedManager::is_initialized(), "nothing is left of a start that failed");

    for round in 0..2 {
        let manager = DistributedManager::setup(SetupOptions::default()).unwrap();
        assert_eq!((manager.rank(), manager.world_size(), manager.distributed()), (0, 1, false));
        assert_eq!(DistributedManager::get().unwrap().to_string(), manager.to_string());
        let again = DistributedManager::setup(SetupOptions::default());
        assert!(matches!(again, Err(Error::AlreadyInitialized(_))), "round {round}: {again:?}");
        assert_eq!(DistributedManager::initialize().unwrap().to_string(), manager.to_string());

        let draw = || Tensor::rand([4], (Kind::Float, Device::Cpu));
        manager.seed(7).unwrap();
        let first = draw();
        assert_ne!(draw(), first);
        manager.seed(7).unwrap();
        assert_eq!(draw(), first);

        DistributedManager::cleanup(true).unwrap();
        assert!(!DistributedManager::is_initialized());
        DistributedManager::cleanup(true).unwrap();
    }
}

/// SIGTERM sets the flag of who asked to be told, and ends nothing; nor does another one that comes with it.
#[test]
fn a_process_that_is_asked_to_end_hears_of_it() {
    let termination = Termination::watch().unwrap();
    assert!(!termination.requested());
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGTERM).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while !termination.requested() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(termination.requested());
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGTERM).unwrap();
    std::thread::sleep(Duration::from_millis(200));
}
