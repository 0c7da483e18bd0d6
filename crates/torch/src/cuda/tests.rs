use tch::{Device, Kind, Tensor};

use super::*;
use crate::error::Error;
use crate::memory;

#[test]
fn it_is_there_or_says_that_it_is_not() {
    if is_available() {
        assert!(device_count() > 0 && Stream::current(0).is_ok());
        return;
    }
    assert_eq!(device_count(), 0);
    fn refused<T>(result: crate::Result<T>) {
        assert!(matches!(result.map(drop), Err(Error::NoCuda { .. })));
    }
    refused(Stream::current(0));
    refused(Stream::from_pool(0, true));
    refused(Event::new(true));
    refused(pinned(&[3], Kind::Float));
    // Whatever was asked, the CPU's work goes on.
    assert_eq!(Tensor::ones([3], (Kind::Float, Device::Cpu)).sum(Kind::Float).double_value(&[]), 3.0);
}

#[test]
fn loading_is_idempotent() {
    assert_eq!(load().map_err(|e| e.to_string()), load().map_err(|e| e.to_string()));
}

#[test]
fn streams_and_events_order_work() {
    if !is_available() {
        return isobar_harness::skip("no GPU");
    }
    let main = Stream::current(0).unwrap();
    let side = Stream::from_pool(0, true).unwrap();
    assert_ne!(main, side);
    let host = pinned(&[1 << 20], Kind::Float).unwrap();
    let _ = host.shallow_clone().fill_(3.0);
    let device = Tensor::empty([1 << 20], (Kind::Float, Device::Cuda(0)));
    let [start, end] = [Event::new(true).unwrap(), Event::new(true).unwrap()];
    {
        let _guard = StreamGuard::new(&side).unwrap();
        assert_eq!(Stream::current(0).unwrap(), side);
        assert!(!side.handle().unwrap().is_null());
        start.record(&side).unwrap();
        memory::copy_no_grad(&device, &host, true).unwrap();
        end.record(&side).unwrap();
    }
    assert_eq!(Stream::current(0).unwrap(), main);
    end.block(&main).unwrap();
    record_stream(&device, &main).unwrap();
    assert_eq!(device.sum(Kind::Float).double_value(&[]), 3.0 * f64::from(1 << 20));
    end.synchronize().unwrap();
    assert!(end.query().unwrap() && side.query().unwrap() && start.elapsed_ms(&end).unwrap() >= 0.0);
    side.synchronize().unwrap();
    assert!(Stream::current(device_count()).unwrap_err().to_string().contains("was asked for"));
}
