//! The caching allocator as libtorch's own. Tests of one process share it, so they are one test.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use isobar_torch::memory;
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const MIB: u64 = 1 << 20;

fn floats(mebibytes: i64) -> Tensor {
    let mut tensor = Tensor::f_empty([mebibytes << 18], CPU).unwrap();
    tensor.f_fill_(1.5).unwrap()
}

#[test]
fn it_counts_keeps_and_gives_back() {
    let before = floats(8);
    assert!(!memory::is_installed());
    memory::install_caching_allocator();
    memory::install_caching_allocator();
    assert!(memory::is_installed());

    // Memory allocated before the installation is freed by its own allocator, and not counted.
    let live = memory::live_bytes();
    drop(before);
    assert_eq!((memory::live_bytes(), memory::cached_bytes()), (live, 0));

    // Small and large, with their exact sizes, and the peak.
    memory::reset_peak();
    let small = Tensor::f_empty([10], CPU).unwrap();
    let large = floats(16);
    assert_eq!(memory::live_bytes(), live + 40 + 16 * MIB);
    let address = memory::data_ptr(&large).unwrap();
    assert!(address.addr().is_multiple_of(64) && memory::data_ptr(&small).unwrap().addr().is_multiple_of(64));
    drop((small, large));
    assert_eq!((memory::live_bytes(), memory::peak_bytes()), (live, live + 40 + 16 * MIB));
    memory::reset_peak();
    assert_eq!(memory::peak_bytes(), live);

    // A freed block comes back, also to another thread, and for vectors lent to torch nothing is kept.
    assert_eq!(memory::cached_bytes(), 16 * MIB);
    let again = std::thread::spawn(|| floats(16)).join().unwrap();
    assert_eq!(memory::data_ptr(&again).unwrap(), address);
    let lent = memory::from_vec(vec![0u8; MIB as usize], &[MIB as i64]).unwrap();
    assert_eq!(memory::live_bytes(), live + 17 * MIB);
    drop((again, lent));
    memory::empty_cache();
    assert_eq!((memory::live_bytes(), memory::cached_bytes()), (live, 0));

    // A size that cannot be had is an error, not an abort, and leaves the rest in order.
    assert!(Tensor::f_empty([1 << 50], CPU).is_err());
    assert!(Tensor::f_empty([0], CPU).is_ok());

    // Many threads at once, small and large.
    std::thread::scope(|scope| {
        for seed in 0..4i64 {
            scope.spawn(move || {
                for i in 0..200 {
                    let len = if (i + seed) % 3 == 0 { 300_000 + 1000 * i } else { 10 * i };
                    let tensor = Tensor::f_full([len], seed as f64, CPU).unwrap();
                    let sum = tensor.f_sum(Kind::Double).unwrap().f_double_value(&[]).unwrap();
                    assert_eq!(sum, (len * seed) as f64);
                }
            });
        }
    });
    assert_eq!(memory::live_bytes(), live);
}
