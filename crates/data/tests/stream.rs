//! Streamed samples: the same bits as in memory, in bounded memory, each rank its own window.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use isobar_data::{
    Account, DataConfig, DataPortion, DataVariable, Dataset, Dim, Error, HaloWindow, HostMemory, InMemory,
    Reader, ReaderOptions, Request, Result, Sampler, Samples, Statistics, StreamOptions, Streamed,
    TrainSteps, Window, check_window, choose, part,
};
use proptest::prelude::*;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::excerpt;

/// Trajectories, or pairs, whose every value is another number, with a record of what was read.
#[derive(Debug)]
struct Numbers {
    samples: usize,
    times: Option<Vec<f64>>,
    dims: Vec<Dim>,
    variables: Vec<DataVariable>,
    reads: Mutex<Vec<(Window, Vec<usize>)>>,
    /// Sample that cannot be read, and whether reading it panics.
    bad: Option<(usize, bool)>,
    pause: Duration,
    reading: AtomicUsize,
}

impl Numbers {
    fn new(samples: usize, frames: Option<usize>, extents: [usize; 2]) -> Self {
        let dim = |(name, extent): (&str, usize)| Dim {
            name: name.to_owned(),
            unit: None,
            coordinates: (0..extent).map(|at| at as f64).collect(),
            periodic: false,
        };
        Self {
            samples,
            times: frames.map(|frames| (0..frames).map(|frame| frame as f64 * 0.5).collect()),
            dims: ["x", "y"].into_iter().zip(extents).map(dim).collect(),
            variables: ["a", "b"].map(DataVariable::scalar).to_vec(),
            reads: Mutex::default(),
            bad: None,
            pause: Duration::ZERO,
            reading: AtomicUsize::new(0),
        }
    }

    /// Bytes that were read.
    fn bytes(&self) -> u64 {
        let of = |(window, samples): &(Window, Vec<usize>)| {
            let points: usize = window.points.iter().map(Range::len).product();
            (samples.len() * window.frames.len() * points * 4) as u64
        };
        self.reads.lock().unwrap().iter().map(of).sum()
    }

    /// How often each frame of each sample was read.
    fn visits(&self) -> BTreeMap<(usize, usize), usize> {
        let mut visits = BTreeMap::new();
        for (window, samples) in &*self.reads.lock().unwrap() {
            for &sample in samples {
                window.frames.clone().for_each(|frame| *visits.entry((sample, frame)).or_default() += 1);
            }
        }
        visits
    }
}

impl Dataset for Numbers {
    fn path(&self) -> &Path {
        Path::new("numbers")
    }

    fn samples(&self) -> usize {
        self.samples
    }

    fn dims(&self) -> &[Dim] {
        &self.dims
    }

    fn times(&self) -> Option<&[f64]> {
        self.times.as_deref()
    }

    fn variables(&self) -> &[DataVariable] {
        &self.variables
    }

    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        let chosen = choose(self, variables)?;
        check_window(self, window, samples)?;
        self.reading.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.pause);
        if let Some((_, panics)) = self.bad.filter(|(bad, _)| samples.contains(bad)) {
            assert!(!panics, "out of paper");
            let (path, dataset) = (self.path().to_owned(), chosen[0].name.clone());
            return Err(Error::NotFinite { path, dataset, index: vec![3, 1], value: f64::NAN });
        }
        let mut values = Vec::new();
        for &sample in samples {
            for frame in window.frames.clone() {
                for variable in &chosen {
                    self.reads.lock().unwrap().push((
                        Window { frames: frame..frame + 1, points: window.points.clone() },
                        vec![sample],
                    ));
                    let channel = if variable.name == "a" { 1 } else { 2 };
                    for x in window.points[0].clone() {
                        let of = |y| (((channel * 31 + sample) * 17 + frame) * 13 + x) * 11 + y;
                        values.extend(window.points[1].clone().map(|y| of(y) as f32));
                    }
                }
            }
        }
        let shape = [samples.len(), window.frames.len(), chosen.len()].into_iter();
        let shape = shape.chain(window.points.iter().map(Range::len)).map(|extent| extent as i64);
        Ok(Tensor::f_from_slice(&values)?.f_reshape(shape.collect::<Vec<_>>())?)
    }
}

/// Reads a part of a data set into memory, with the halo of the options.
fn in_memory(data: &dyn Dataset, samples: Range<usize>, options: &StreamOptions) -> Result<InMemory> {
    let names = |names: &[String]| names.to_vec();
    let (inputs, targets) = (names(&options.inputs), names(&options.targets));
    let samples: Vec<usize> = samples.collect();
    let read = |frames: Range<usize>, names: &[String]| {
        let halo = if options.halo.is_empty() { vec![0; options.window.len()] } else { options.halo.clone() };
        let window = HaloWindow::new(data, &Window { frames, points: options.window.clone() }, &halo)?;
        window.read(data, &samples, &names.iter().map(String::as_str).collect::<Vec<_>>())
    };
    match data.times() {
        None => InMemory::pairs(read(0..1, &inputs)?.select(1, 0), read(0..1, &targets)?.select(1, 0)),
        Some(times) => {
            let all = read(0..times.len(), &inputs)?;
            InMemory::rollouts(&all, options.steps.most(), options.stride)?
                .with_times(times)?
                .with_steps(options.steps.clone())
        }
    }
}

#[track_caller]
fn assert_same(streamed: &dyn Samples, memory: &InMemory, request: &Request) {
    let (got, expected) =
        (streamed.take(request).unwrap(), memory.batch_of(&request.samples, request.steps).unwrap());
    let same = |a: &Tensor, b: &Tensor| a.size() == b.size() && a.kind() == b.kind() && a.equal(b);
    assert!(same(&got.input, &expected.input), "{request:?}");
    assert_eq!(got.targets.len(), expected.targets.len());
    assert!(got.targets.iter().zip(&expected.targets).all(|(a, b)| same(a, b)), "{request:?}");
    assert_eq!(got.times, expected.times);
}

fn options(window: &[Range<usize>], pairs: bool, steps: usize) -> StreamOptions {
    let (inputs, targets) = if pairs { (&["a"][..], &["b"][..]) } else { (&["b", "a"][..], &["b", "a"][..]) };
    StreamOptions { steps: steps.into(), ..StreamOptions::new(window, inputs, targets) }
}

fn reader(bytes: u64, workers: usize, keep: bool) -> Arc<Reader> {
    Arc::new(Reader::new(ReaderOptions { host_memory: HostMemory::new(bytes), workers, keep }).unwrap())
}

/// The halo around the ends of a periodic dim and that within the field are read with the window, and counted as memory.
#[rstest]
fn batches_have_the_halo_that_is_asked_for(
    #[values(false, true)] pairs: bool,
    #[values(false, true)] keep: bool,
    #[values([1, 2], [0, 0], [7, 9])] halo: [usize; 2],
) {
    let mut numbers = Numbers::new(3, (!pairs).then_some(4), [5, 6]);
    numbers.dims[0].periodic = true;
    let data: Arc<dyn Dataset> = Arc::new(numbers);
    let options = StreamOptions { halo: halo.to_vec(), ..options(&[0..2, 2..4], pairs, 1) };
    let memory = in_memory(&*data, 0..3, &options).unwrap();
    let reader = reader(1 << 20, 1, keep);
    let streamed = Streamed::new(&reader, (data.clone(), 0..3), &options).unwrap();
    let request = Request { samples: vec![2, 0], steps: 1 };
    streamed.announce(vec![request.clone()]);
    assert_same(&streamed, &memory, &request);
    let extents = [2 + 2 * halo[0], (4 + halo[1]).min(6) - 2_usize.saturating_sub(halo[1])];
    let batch = streamed.take(&request).unwrap();
    assert_eq!(batch.input.size()[2..], extents.map(|extent| extent as i64));
    assert_eq!(batch.targets[0].size()[2..], batch.input.size()[2..]);
    assert_eq!(reader.account().read % (extents[0] * extents[1]) as u64, 0);

    let wrong = StreamOptions { halo: vec![1], ..options };
    let error = Streamed::new(&reader, (data, 0..3), &wrong).unwrap_err().to_string();
    assert!(error.contains("halo widths [1] were given for 2 spatial dims"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Ranks that share samples and fields read, from any place of an epoch on, each sample of the rest once, in their windows
    /// alone, in the memory that they were given; on another number of ranks from there on.
    #[test]
    fn ranks_together_read_the_permutation(
        (samples, batch, pairs) in (1_usize..14, 1_usize..6, any::<bool>()),
        (steps, workers, keep) in (1_usize..3, 0_usize..4, any::<bool>()),
        (ranks, later, domain) in (1_usize..4, 1_usize..4, 1_usize..4),
        (seed, epoch, at, extra) in (any::<u64>(), 0_u64..9, 0.0..1.0, 0_u64..4000),
    ) {
        let frames = if pairs { None } else { Some(4) };
        let steps = if pairs { 1 } else { steps };
        let rows = 3;
        let of_rank = |rank: usize| rows * rank / domain..rows * (rank + 1) / domain;
        let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
        for domain_rank in 0..domain {
            let window = [of_rank(domain_rank), 0..5];
            let options = options(&window, pairs, steps);
            let memory = in_memory(&Numbers::new(samples, frames, [rows, 5]), 0..samples, &options).unwrap();
            let sampler = Sampler::new(memory.len(), batch, seed, true).unwrap();
            let batches = sampler.epoch(epoch);
            let stop = (batches.len() as f64 * at) as usize;
            for (ranks, own) in [(ranks, &batches[..stop]), (later, &batches[stop..])] {
                for rank in 0..ranks {
                    let data = Arc::new(Numbers::new(samples, frames, [rows, 5]));
                    let requests: Vec<Request> = own
                        .iter()
                        .map(|batch| Request { samples: part(batch, rank, ranks).to_vec(), steps })
                        .collect();
                    let most = requests.iter().map(|request| request.samples.len()).max().unwrap_or(0) as u64;
                    let row = (window[0].len() * 5 * 4 * 2) as u64;
                    let budget = 2 * most * row * if pairs { 1 } else { steps as u64 + 1 } + extra;
                    let reader = reader(budget, workers, keep);
                    let streamed = Streamed::new(&reader, (data.clone(), 0..samples), &options).unwrap();
                    prop_assert_eq!(streamed.len(), memory.len());
                    streamed.announce(requests.clone());
                    for request in &requests {
                        assert_same(&streamed, &memory, request);
                        if domain_rank == 0 {
                            request.samples.iter().for_each(|sample| *seen.entry(*sample).or_default() += 1);
                        }
                    }
                    let account: Account = reader.account();
                    prop_assert!(account.peak <= budget, "{:?} of {}", account, budget);
                    prop_assert_eq!(account.queued, 0);
                    // No frame of another sample, no point of another rank.
                    let needed: u64 = requests.iter().flat_map(|request| &request.samples).count() as u64;
                    let of_one = row * if pairs { 1 } else { steps as u64 + 1 };
                    // What was read ahead and given up for lack of room is read again.
                    if extra == 0 || workers < 2 {
                        prop_assert!(account.read <= needed * of_one, "{} of {}", account.read, needed * of_one);
                    }
                    prop_assert_eq!(account.read, data.bytes());
                    let reads = data.reads.lock().unwrap();
                    prop_assert!(reads.iter().all(|(read, _)| read.points == window));
                }
            }
        }
        prop_assert_eq!(seen.len(), if pairs { samples } else { samples * (4 - steps) });
        prop_assert!(seen.values().all(|count| *count == 1));
    }
}

/// Pieces that overlap within a batch are read once.
#[test]
fn overlapping_pieces_are_read_once() {
    let data = Arc::new(Numbers::new(3, Some(6), [2, 2]));
    let reader = reader(1 << 20, 1, false);
    let options = options(&[0..2, 0..1], false, 2);
    let streamed = Streamed::new(&reader, (data.clone(), 1..3), &options).unwrap();
    // Trajectory 1 from frames 0, 1 and 3 on, trajectory 2 from frame 1 on.
    let request = Request { samples: vec![1, 0, 5, 3], steps: 2 };
    assert_same(&streamed, &in_memory(&Numbers::new(3, Some(6), [2, 2]), 1..3, &options).unwrap(), &request);
    let visits = data.visits();
    assert!(visits.values().all(|count| *count == 2), "once for each variable: {visits:?}");
    let frames: Vec<_> = visits.into_keys().collect();
    assert_eq!(frames, [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1), (2, 2), (2, 3)]);
}

/// Later epochs have longer samples; reads follow, and the samples stay as many.
#[test]
fn reads_follow_the_schedule_of_steps() {
    let steps: TrainSteps =
        serde_json::from_str(r#"[{"epoch": 0, "steps": 1}, {"epoch": 2, "steps": 3}]"#).unwrap();
    let data = Arc::new(Numbers::new(2, Some(6), [2, 2]));
    let options = StreamOptions { steps, ..options(&[0..2, 0..2], false, 1) };
    let reader = reader(1 << 20, 2, false);
    let streamed = Streamed::new(&reader, (data.clone(), 0..2), &options).unwrap();
    let memory = in_memory(&Numbers::new(2, Some(6), [2, 2]), 0..2, &options).unwrap();
    assert_eq!((streamed.len(), memory.len(), streamed.steps()), (6, 6, 3));
    let row = 2 * 2 * 2 * 4;
    let mut read = 0;
    for epoch in 0..4 {
        let steps = streamed.steps_in(epoch);
        assert_eq!((steps, memory.steps_in(epoch)), if epoch < 2 { (1, 1) } else { (3, 3) });
        let request = Request { samples: vec![5, 0], steps };
        streamed.announce(vec![request.clone()]);
        assert_same(&streamed, &memory, &request);
        read += 2 * (steps as u64 + 1) * row;
        assert_eq!(reader.account().read, read);
    }
    let error = streamed.take(&Request { samples: vec![0], steps: 4 }).unwrap_err().to_string();
    assert_eq!(error, memory.batch_of(&[0], 4).unwrap_err().to_string());
}

/// With room for all, what was read stays; with room for some, some does; the memory holds.
#[rstest]
#[case::all(1 << 20, 1)]
#[case::some(2 * 1000, 2)]
#[case::none(2 * 160, 3)]
fn what_was_read_stays_as_far_as_memory_allows(#[case] budget: u64, #[case] epochs_read: u64) {
    let data = Arc::new(Numbers::new(20, None, [2, 5]));
    let options = options(&[0..2, 0..5], true, 1);
    let reader = reader(budget, 1, true);
    let streamed = Streamed::new(&reader, (data.clone(), 0..20), &options).unwrap();
    let memory = in_memory(&Numbers::new(20, None, [2, 5]), 0..20, &options).unwrap();
    let sampler = Sampler::new(20, 2, 5, true).unwrap();
    for epoch in 0..3 {
        let batches = sampler.epoch(epoch).into_iter();
        let requests: Vec<Request> = batches.map(|samples| Request { samples, steps: 1 }).collect();
        streamed.announce(requests.clone());
        requests.iter().for_each(|request| assert_same(&streamed, &memory, request));
    }
    let (account, all) = (reader.account(), 20 * 2 * 10 * 4);
    assert!(account.peak <= budget && account.peak > 0, "{account:?}");
    let most = if epochs_read == 2 { 3 * all - 1 } else { epochs_read * all };
    let least = if epochs_read == 2 { all + 1 } else { epochs_read * all };
    assert!((least..=most).contains(&account.read), "{account:?}, all are {all}");
}

/// Samples that nobody announced, requests that are left out, and samples of several kinds share the threads.
#[rstest]
fn any_order_is_served(#[values(0, 1, 3)] workers: usize, #[values(false, true)] keep: bool) {
    let data = Arc::new(Numbers::new(9, Some(5), [2, 3]));
    let options = options(&[0..2, 1..3], false, 1);
    let memory = |samples| in_memory(&Numbers::new(9, Some(5), [2, 3]), samples, &options).unwrap();
    let reader = reader(2 * 3 * 2 * 32, workers, keep);
    let train = Streamed::new(&reader, (data.clone(), 0..6), &options).unwrap();
    let validation = Streamed::new(&reader, (data.clone(), 6..9), &options).unwrap();
    let (all, held_out) = (memory(0..6), memory(6..9));
    let request = |first: usize| Request { samples: vec![first, first + 2], steps: 1 };
    train.announce((0..10).map(request).collect());
    validation.announce((0..4).map(request).collect());
    assert_same(&train, &all, &request(0));
    assert_same(&train, &all, &request(17));
    assert_same(&train, &all, &request(1));
    assert_same(&train, &all, &request(4));
    assert_same(&validation, &held_out, &request(1));
    assert_same(&train, &all, &request(5));
    assert_same(&validation, &held_out, &Request { samples: Vec::new(), steps: 1 });
    assert_same(&validation, &held_out, &request(7));
    train.announce(Vec::new());
    assert_same(&train, &all, &request(9));
    assert!(reader.account().peak <= reader.host_memory().bytes());
    // A thread may still be reading what was announced and never asked for.
    let deadline = Instant::now() + Duration::from_secs(60);
    while reader.account().read != data.bytes() {
        assert!(Instant::now() < deadline, "{:?}, {} bytes were read", reader.account(), data.bytes());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until so many bytes were read, and checks that no more are.
#[track_caller]
fn wait_for(reader: &Reader, bytes: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while reader.account().read < bytes {
        assert!(Instant::now() < deadline, "{:?}, expected {bytes} bytes", reader.account());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(reader.account().read, bytes);
}

/// While nothing is asked for, the next epoch is read behind validation, once: announcing it again keeps what was read.
#[test]
fn the_next_epoch_does_not_start_cold() {
    let data = Arc::new(Numbers::new(9, None, [2, 5]));
    let options = options(&[0..2, 0..5], true, 1);
    let memory = |samples| in_memory(&Numbers::new(9, None, [2, 5]), samples, &options).unwrap();
    let (all, held_out) = (memory(0..6), memory(6..9));
    let reader = reader(1 << 20, 4, false);
    let train = Streamed::new(&reader, (data.clone(), 0..6), &options).unwrap();
    let validation = Streamed::new(&reader, (data.clone(), 6..9), &options).unwrap();
    let request = |sample: &usize| Request { samples: vec![*sample], steps: 1 };
    let requests = |samples: &[usize]| samples.iter().map(request).collect::<Vec<_>>();
    let sampler = Sampler::new(6, 1, 3, true).unwrap();
    let epoch = |epoch: u64| sampler.epoch(epoch).concat();
    let row = 2 * 5 * 4 * 2;
    for number in 0..4 {
        train.announce(requests(&epoch(number)));
        validation.announce(requests(&[0, 1, 2]));
        train.announce_after(requests(&epoch(number + 1)));
        requests(&epoch(number)).iter().for_each(|own| assert_same(&train, &all, own));
        // Eight requests are read ahead: the three of validation, and five of the next epoch.
        let before = number * 9;
        wait_for(&reader, (before + 6 + 3 + 5) * row);
        validation.announce(requests(&[0, 1, 2]));
        requests(&[0, 1, 2]).iter().for_each(|own| assert_same(&validation, &held_out, own));
        wait_for(&reader, (before + 6 + 3 + 6) * row);
    }
    assert!(data.visits().values().all(|visits| *visits <= 2 * 5), "no row is read twice for an epoch");
}

/// With little memory, several epochs with validation between are the values in memory, within the budget.
#[rstest]
fn epochs_and_validation_share_the_memory(
    #[values(1, 2, 5, 100)] room: u64,
    #[values(0, 1, 3)] workers: usize,
    #[values(false, true)] keep: bool,
) {
    let data = Arc::new(Numbers::new(12, Some(4), [2, 3]));
    let options = options(&[0..2, 0..2], false, 2);
    let memory = |samples| in_memory(&Numbers::new(12, Some(4), [2, 3]), samples, &options).unwrap();
    let (all, held_out) = (memory(0..7), memory(7..12));
    // A request has two samples of three frames of two variables on four points, counted twice while it is read.
    let budget = room * 2 * 2 * 3 * 2 * 4 * 4;
    let reader = reader(budget, workers, keep);
    let train = Streamed::new(&reader, (data.clone(), 0..7), &options).unwrap();
    let validation = Streamed::new(&reader, (data.clone(), 7..12), &options).unwrap();
    let requests = |batches: Vec<Vec<usize>>| -> Vec<Request> {
        batches.into_iter().map(|samples| Request { samples, steps: 2 }).collect()
    };
    let sampler = Sampler::new(14, 2, 3, true).unwrap();
    let validated = || requests((0..5).map(|first| vec![2 * first, 2 * first + 1]).collect());
    for epoch in 0..4 {
        let own = requests(sampler.epoch(epoch));
        train.announce(own.clone());
        validation.announce(validated());
        train.announce_after(requests(sampler.epoch(epoch + 1)));
        own.iter().for_each(|request| assert_same(&train, &all, request));
        validation.announce(validated());
        validated().iter().for_each(|request| assert_same(&validation, &held_out, request));
    }
    assert!(reader.account().peak <= budget, "{:?} of {budget}", reader.account());
}

/// Errors are those of reading into memory, on the call that asks for what cannot be read.
#[rstest]
fn errors_come_where_they_belong(#[values(0, 2)] workers: usize, #[values(false, true)] panics: bool) {
    let data = Arc::new(Numbers { bad: Some((3, panics)), ..Numbers::new(5, None, [2, 2]) });
    let reader = reader(1 << 20, workers, false);
    let options = options(&[0..2, 0..2], true, 1);
    let streamed = Streamed::new(&reader, (data.clone(), 0..5), &options).unwrap();
    let request = |sample: usize| Request { samples: vec![sample], steps: 1 };
    streamed.announce([0, 3, 4].map(request).to_vec());
    let take = |sample| streamed.take(&request(sample)).map(drop).map_err(|error| error.to_string());
    assert_eq!(take(0), Ok(()));
    let error = take(3).unwrap_err();
    match panics {
        true => assert_eq!(error, "reading numbers panicked: out of paper"),
        false => assert_eq!(error, in_memory(&*data, 0..5, &options).unwrap_err().to_string()),
    }
    assert_eq!((take(4), reader.account().queued), (Ok(()), 0));
    assert_eq!(take(5).unwrap_err(), "sample 5 is out of range: there are 5");
}

#[test]
fn memory_that_does_not_hold_a_batch_is_an_error() {
    let data: Arc<dyn Dataset> = Arc::new(Numbers::new(5, Some(4), [64, 64]));
    let streamed = |host_memory: &str, workers| {
        let reader = Arc::new(Reader::new(ReaderOptions {
            host_memory: host_memory.parse().unwrap(),
            workers,
            keep: false,
        })?);
        Streamed::new(&reader, (data.clone(), 0..5), &options(&[0..64, 0..64], false, 3))
    };
    let tight = streamed("1MiB", 2).unwrap();
    let request = |samples: Range<usize>| Request { samples: samples.collect(), steps: 3 };
    tight.take(&request(0..4)).unwrap();
    let error = tight.take(&request(0..5)).unwrap_err().to_string();
    assert!(
        error.contains("takes 2MiB of host memory on this rank, but data.host_memory is 1MiB"),
        "{error}"
    );
    assert_eq!((tight.needed(5).bytes(), tight.needed(4).bytes()), (5 << 18, 4 << 18));
    tight.take(&request(1..3)).unwrap();
    let error = streamed("1MiB", 1 << 40).unwrap_err().to_string();
    assert!(error.contains("data.workers") && error.contains("expected 0 to 64"), "{error}");
}

/// Threads end with what they read, though much was announced; and one that reads is waited for.
#[test]
fn threads_end_when_the_reader_does() {
    let data = Arc::new(Numbers { pause: Duration::from_millis(20), ..Numbers::new(500, None, [2, 2]) });
    let reader = reader(1 << 20, 3, false);
    let streamed = Streamed::new(&reader, (data.clone(), 0..500), &options(&[0..2, 0..2], true, 1)).unwrap();
    streamed.announce((0..500).map(|sample| Request { samples: vec![sample], steps: 1 }).collect());
    streamed.take(&Request { samples: vec![0], steps: 1 }).unwrap();
    drop((streamed, reader));
    assert_eq!(Arc::strong_count(&data), 1, "no thread holds the data");
    let read = data.reading.load(Ordering::Relaxed);
    assert!(read <= 20, "{read} of 1000 reads: two times six were read ahead at most");
}

/// A file of HDF5: all its samples, in both precisions, with windows that are empty too.
#[rstest]
fn files_are_read_alike(
    #[values(0..64, 3..20, 7..7)] rows: Range<usize>,
    #[values(Kind::Float, Kind::Double)] kind: Kind,
) {
    let config = DataConfig { path: excerpt().into(), ..DataConfig::default() };
    let data: Arc<dyn Dataset> = config.open().unwrap().into();
    let options =
        StreamOptions { options: (kind, Device::Cpu), ..StreamOptions::new(&[rows, 1..63], &["nu"], &["u"]) };
    let memory = in_memory(&*data, 1..7, &options).unwrap().to(Device::Cpu, kind).unwrap();
    let reader = reader(1 << 20, 2, true);
    let streamed = Streamed::new(&reader, (data, 1..7), &options).unwrap();
    let requests = [vec![5, 0, 3], vec![1, 1], vec![2, 4]].map(|samples| Request { samples, steps: 1 });
    streamed.announce(requests.to_vec());
    requests.iter().for_each(|request| assert_same(&streamed, &memory, request));
    let (mean, expected) = (streamed.mean_target().unwrap(), memory.mean_target().unwrap());
    assert_eq!((mean.size(), mean.kind()), (expected.size(), kind));
    assert!(mean.allclose(&expected, 1e-6, 1e-9, false));
}

/// On any portions that ranks read, the merged statistics are the same numbers; and those of all samples but for rounding.
#[test]
fn statistics_of_portions_are_those_of_all() {
    let config = DataConfig { path: excerpt().into(), ..DataConfig::default() };
    let data = config.open().unwrap();
    let names = ["nu", "u"];
    let portions = isobar_data::portions(&*data, &names, 1..8).unwrap();
    assert_eq!(
        portions,
        [DataPortion { samples: 1..8, frames: 0..1 }],
        "small data are one portion, so that its statistics are exactly those of all"
    );
    let all = data.statistics(&names, 1..8).unwrap();
    assert_eq!(isobar_data::merge_channels(std::slice::from_ref(&all)).unwrap(), all);
    let each: Vec<_> = (1..8).map(|sample| data.statistics(&names, sample..sample + 1).unwrap()).collect();
    for (merged, all) in isobar_data::merge_channels(&each).unwrap().iter().zip(&all) {
        let (merged, all) = (merged.unwrap(), all.unwrap());
        assert_eq!((merged.count, merged.min, merged.max), (all.count, all.min, all.max));
        assert!((merged.mean / all.mean - 1.0).abs() < 1e-12 && (merged.std / all.std - 1.0).abs() < 1e-12);
    }
    let large = Numbers::new(40, Some(20), [1024, 100]);
    let portions = isobar_data::portions(&large, &["a"], 2..40).unwrap();
    let [first, .., last] = &portions[..] else { panic!("{portions:?}") };
    assert_eq!((portions.len(), &first.samples, &last.samples), (5, &(2..10), &(34..40)));
    assert!(portions.iter().all(|portion| portion.frames == (0..20)));
}

/// One long series is cut along its frames, so that ranks share it; no change between portions is lost.
#[test]
fn portions_of_a_long_series_are_of_frames() {
    let series: Arc<dyn Dataset> = Arc::new(Numbers::new(1, Some(5), [2048, 4096]));
    let portions = isobar_data::portions(&*series, &["a"], 0..1).unwrap();
    let frames: Vec<_> = portions.iter().map(|portion| portion.frames.clone()).collect();
    assert_eq!(frames, [0..2, 2..4, 4..5]);
    let merged = |of: &dyn Fn(&DataPortion) -> Vec<Option<Statistics>>| {
        isobar_data::merge_channels(&portions.iter().map(of).collect::<Vec<_>>()).unwrap()[0].unwrap()
    };
    let values = merged(&|portion| portion.statistics(&series, &["a"]).unwrap());
    let changes = merged(&|portion| portion.change_statistics(&series, &["a"]).unwrap());
    let all = [series.statistics(&["a"], 0..1), series.change_statistics(&["a"], 0..1)];
    for (merged, all) in [values, changes].into_iter().zip(all.map(|all| all.unwrap()[0].unwrap())) {
        assert_eq!((merged.count, merged.min, merged.max), (all.count, all.min, all.max));
        assert!((merged.mean - all.mean).abs() <= 1e-12 * all.mean.abs().max(1.0), "{merged:?} {all:?}");
        assert!((merged.std - all.std).abs() <= 1e-12 * all.std.max(1.0), "{merged:?} {all:?}");
    }
}

/// Data sets with other values, times or names have another digest.
#[test]
fn digests_tell_data_sets_apart() {
    let digest = |data: &Numbers| isobar_data::digest(data, &["a", "b"], 0..data.samples).unwrap();
    let first = digest(&Numbers::new(7, Some(5), [9, 20]));
    assert_eq!(digest(&Numbers::new(7, Some(5), [9, 20])), first);
    for other in [
        Numbers::new(8, Some(5), [9, 20]),
        Numbers::new(7, Some(4), [9, 20]),
        Numbers::new(7, Some(5), [9, 21]),
    ] {
        assert_ne!(digest(&other), first);
    }
    let read = Numbers::new(1000, Some(50), [256, 256]);
    digest(&read);
    assert_eq!(read.bytes(), 8 * 8 * 8 * 2 * 4, "eight points along each dim of eight frames");
}
