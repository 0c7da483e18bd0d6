//! Life cycle of a manager: creation, lookup and cleanup.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use isobar_collectives::{BackendKind, Fingerprints, Group};
use isobar_launch::{Environment, Launch, Method, TransportOptions, detect, forced_method, token};
use isobar_rendezvous::Token;
use tch::Device;

use super::{DistributedManager, State, exit};
use crate::config::{BackendChoice, DistributedConfig};
use crate::rank_thread::{RankThread, thread_is_rank};
use crate::watchdog::{self, Watchdog};
use crate::{Error, Result, logging, start, terminate};
use isobar_mesh::NamedGroups;
use isobar_mesh::agree;

/// The manager of this process.
static PROCESS: Mutex<Option<DistributedManager>> = Mutex::new(None);

/// True once this process has tried to join other ranks.
static TRIED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The managers of this thread where it is a rank, the innermost last.
    static BOUND: RefCell<Vec<DistributedManager>> = const { RefCell::new(Vec::new()) };
}

/// Options of a program that knows its rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetupOptions {
    /// This rank in the world.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// This rank among those of its host; found by comparing host names where not given.
    pub local_rank: Option<usize>,
    /// Address of rank 0, for gloo.
    pub addr: String,
    /// Port of rank 0, for gloo.
    pub port: u16,
    /// Transport between ranks.
    pub backend: BackendChoice,
    /// Method by which the rank was found, for messages.
    pub method: Method,
    /// Timeout of waits for other ranks.
    pub timeout: Duration,
    /// True if ranks watch each other; the same on all ranks.
    pub watchdog: bool,
    /// Shared secret of the job's ranks, for gloo; by default the value of ISOBAR_DISTRIBUTED_TOKEN.
    pub token: Option<Token>,
}

impl Default for SetupOptions {
    fn default() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            local_rank: None,
            addr: "localhost".to_owned(),
            port: 12355,
            backend: BackendChoice::Auto,
            method: Method::Explicit,
            timeout: Duration::from_secs(300),
            watchdog: true,
            token: None,
        }
    }
}

/// Makes a thread a rank while it lives; see [`DistributedManager::bind_thread`].
#[derive(Debug)]
#[must_use = "the thread is a rank only while this lives"]
pub struct ThreadBinding {
    _thread: RankThread,
}

impl Drop for ThreadBinding {
    fn drop(&mut self) {
        let _ = BOUND.try_with(|bound| bound.borrow_mut().pop());
    }
}

impl DistributedManager {
    /// Sets this process up as its environment says: see [`crate::launch`] for how its rank is found.
    ///
    /// All ranks call. Called again, it warns and returns the manager that is there; on a thread that is a rank
    /// ([`Self::bind_thread`]) it returns that rank's.
    ///
    /// # Errors
    ///
    /// A launch that contradicts itself, ranks that do not find each other, an MPI that counts other ranks than the
    /// launcher. Nothing is left set up then.
    pub fn initialize() -> Result<Self> {
        Self::initialize_with(&DistributedConfig::default())
    }

    /// As [`Self::initialize`], with the choices of a configuration. The mesh and logging of the configuration are the
    /// caller's to set up.
    ///
    /// # Errors
    ///
    /// See [`Self::initialize`].
    pub fn initialize_with(config: &DistributedConfig) -> Result<Self> {
        if let Some(bound) = bound() {
            return Ok(bound);
        }
        let mut process = process();
        if let Some(manager) = &*process {
            tracing::warn!("the distributed manager is already set up ({manager})");
            return Ok(manager.clone());
        }
        let environment = Environment::from_process();
        logging::check(&config.log)?;
        let forced = forced_method(&environment)?.or(config.method.forced());
        let launch = detect(&environment, forced)?;
        let timeout = Duration::try_from_secs_f64(config.timeout_s).ok().filter(|timeout| !timeout.is_zero());
        let timeout = timeout.ok_or_else(|| Error::Value {
            name: "distributed.timeout_s",
            value: config.timeout_s.to_string(),
            expected: "a number of seconds above 0",
        })?;
        let interface = config.interface.clone();
        let options = TransportOptions {
            backend: config.backend,
            addr: config.addr.clone(),
            port: config.port,
            interface: interface.or_else(|| environment.get("GLOO_SOCKET_IFNAME").map(str::to_owned)),
        };
        let size = model_parallel_size(&environment)?.or(config.model_parallel_size.map(i64::from));
        let watch = config.watchdog.then(|| watch_options(config, &launch, &options, timeout)).transpose()?;
        let fingerprints = config.fingerprints.into();
        let token = token(&environment)?;
        let manager =
            Self::start(&launch, &options, token.as_ref(), timeout, size, watch.as_ref(), fingerprints)?;
        manager.set_broadcast_buffers(config.broadcast_buffers);
        manager.set_find_unused_parameters(config.find_unused_parameters);
        if let Some(size) = size {
            manager.create_model_parallel_groups(size).inspect_err(|error| {
                manager.0.world.leave(&error.to_string());
                if let Some(watchdog) = &manager.0.watchdog {
                    let _ = watchdog.fail(&error.to_string(), false);
                    terminate::forget_watchdog();
                }
            })?;
        }
        *process = Some(manager.clone());
        Ok(manager)
    }

    /// Sets this process up as the program says.
    ///
    /// All ranks call.
    ///
    /// # Errors
    ///
    /// A manager that is there already; a rank that is not below the number of ranks; ranks that do not find each
    /// other; a call from a thread that is a rank. Nothing is left set up then.
    pub fn setup(options: SetupOptions) -> Result<Self> {
        if thread_is_rank() {
            return Err(Error::ThreadRank("DistributedManager::setup"));
        }
        let mut process = process();
        if let Some(manager) = &*process {
            return Err(Error::AlreadyInitialized(manager.to_string()));
        }
        if options.rank >= options.world_size {
            return Err(Error::Value {
                name: "rank",
                value: format!("{} of {}", options.rank, options.world_size),
                expected: "a number below the number of ranks",
            });
        }
        let launch = Launch {
            method: options.method,
            rank: options.rank,
            world_size: Some(options.world_size),
            local_rank: options.local_rank,
            addr: Some(options.addr),
            port: Some(options.port),
            // Asked for MPI, MPI itself says whether that is right.
            process_manager: options.backend == BackendChoice::Mpi,
        };
        let transport = TransportOptions { backend: options.backend, ..TransportOptions::default() };
        let watch = watch_options(&DistributedConfig::default(), &launch, &transport, options.timeout)?;
        let watch = options.watchdog.then_some(watch);
        let (timeout, fingerprints) = (options.timeout, Fingerprints::default());
        let token = match options.token {
            Some(token) => Some(token),
            None => token(&Environment::from_process())?,
        };
        let manager =
            Self::start(&launch, &transport, token.as_ref(), timeout, None, watch.as_ref(), fingerprints)?;
        *process = Some(manager.clone());
        Ok(manager)
    }

    /// The manager of the calling thread's rank where it is one ([`Self::bind_thread`]), else the process's.
    ///
    /// Closures that run on other threads, such as those of a backward pass, capture their group and do not call this.
    ///
    /// # Errors
    ///
    /// [`Error::Uninitialized`] before it is set up.
    pub fn get() -> Result<Self> {
        bound().or_else(|| process().clone()).ok_or(Error::Uninitialized)
    }

    /// Returns whether [`Self::get`] would find a manager.
    #[must_use]
    pub fn is_initialized() -> bool {
        Self::get().is_ok()
    }

    /// Makes the calling thread a rank of a world of threads, until the binding is dropped.
    ///
    /// ```
    /// use std::time::Duration;
    /// use isobar_collectives::threads;
    /// use isobar_manager::DistributedManager;
    ///
    /// let ranks = threads::run(2, Duration::from_secs(60), |world| {
    ///     let _rank = DistributedManager::bind_thread(&world);
    ///     DistributedManager::get().map(|manager| manager.rank())
    /// });
    /// assert_eq!(ranks.into_iter().collect::<Result<Vec<_>, _>>()?, [0, 1]);
    /// # Ok::<(), isobar_manager::Error>(())
    /// ```
    pub fn bind_thread(world: &Group) -> ThreadBinding {
        let manager = Self::new(world.clone(), Method::Threads, world.rank(), Device::Cpu, false, None);
        BOUND.with(|bound| bound.borrow_mut().push(manager));
        ThreadBinding { _thread: RankThread::begin() }
    }

    /// Seeds libtorch's generators of this process with `seed` + rank, so that ranks draw different numbers.
    ///
    /// # Errors
    ///
    /// A call from a thread that is a rank: the generators are the process's.
    pub fn seed(&self, seed: i64) -> Result<()> {
        if thread_is_rank() {
            return Err(Error::ThreadRank("the seeding of libtorch's generators"));
        }
        tch::manual_seed(seed.wrapping_add(self.rank() as i64));
        Ok(())
    }

    /// Ends what [`Self::initialize`] began, so that it may be called again (not over MPI, which starts once in a
    /// process). With `barrier` only after all ranks have come here; over MPI that is always so. Nothing where no
    /// manager is set up. On a thread that is a rank only the barrier is made.
    ///
    /// If the program does not call it, it runs when the main thread ends. With the watchdog, rank 0's
    /// process waits at its end until the other processes have exited, for at most about twice the deadline.
    ///
    /// # Errors
    ///
    /// Ranks that do not come by the deadline, or that still communicate. MPI is not ended then: its launcher ends the
    /// job.
    pub fn cleanup(barrier: bool) -> Result<()> {
        if let Some(bound) = bound() {
            return if barrier { Ok(bound.0.world.barrier()?) } else { Ok(()) };
        }
        let Some(manager) = process().take() else { return Ok(()) };
        let (world, watchdog) = (manager.0.world.clone(), manager.0.watchdog.clone());
        drop(manager);
        let mpi = world.backend() == BackendKind::Mpi;
        let several = world.size() > 1;
        // Agreement, and not a barrier, which would meet one that another rank makes in the midst of its work.
        let result = if (barrier || mpi) && several {
            agree(&world, "the end of the program", "the end").map_err(Error::from)
        } else {
            Ok(())
        };
        if let Err(error) = &result {
            world.leave(&error.to_string());
        }
        if let Some(watchdog) = watchdog {
            match &result {
                Ok(()) => watchdog.stop(),
                Err(error) => drop(watchdog.fail(&error.to_string(), false)),
            }
            terminate::forget_watchdog();
        }
        #[cfg(feature = "mpi")]
        if mpi && result.is_ok() {
            isobar_collectives::mpi::finalize();
        }
        logging::flush();
        result
    }

    /// Tells all ranks that this one cannot go on, so that their waits end at once with an error that says why, and
    /// forgets the manager. For the way out after an error. Where ranks watch each other it returns once the report of what
    /// happened is printed, or none is needed, within some seconds; from then on the process has about a second to end.
    ///
    /// Returns whether another rank has printed the same error, or a report that says why this rank gave up;
    /// this rank then need not print anything. [`report_error`](crate::report_error) includes this call.
    pub fn leave(why: &str) -> bool {
        Self::leave_as(why, false)
    }

    /// Leaves the job because of a panic, `panicked at …`.
    pub(crate) fn leave_in_panic(panic: &str) {
        let _ = Self::leave_as(panic, true);
    }

    fn leave_as(why: &str, panicked: bool) -> bool {
        let manager = bound().or_else(|| process().take());
        let Some(manager) = manager else { return false };
        let said = if panicked { format!("its main thread {why}") } else { why.to_owned() };
        manager.0.world.leave(&said);
        manager.0.watchdog.as_ref().is_some_and(|watchdog| watchdog.fail(why, panicked))
    }

    /// Returns whether this process has tried to join other ranks.
    pub(crate) fn has_tried() -> bool {
        TRIED.load(Ordering::Relaxed)
    }

    fn start(
        launch: &Launch,
        options: &TransportOptions,
        token: Option<&Token>,
        timeout: Duration,
        model_parallel_size: Option<i64>,
        watch: Option<&watchdog::Options>,
        fingerprints: Fingerprints,
    ) -> Result<Self> {
        TRIED.store(true, Ordering::Relaxed);
        exit::watch_main_thread();
        let _guard = start::guard(launch, options, timeout)?;
        let (world, local_rank) = start::start(launch, options, token, timeout)?;
        let leave = |error: &Error| world.leave(&error.to_string());
        // All ranks create the following in the same order.
        let groups = model_parallel_size.map_or_else(
            || "no model-parallel groups".to_owned(),
            |size| format!("MODEL_PARALLEL_SIZE {size}"),
        );
        let watched = if watch.is_some() { "a watchdog" } else { "no watchdog" };
        let settings =
            format!("backend {:?}, {watched}, fingerprints {fingerprints:?} and {groups}", options.backend);
        agree(&world, "initialize", &settings).map_err(Error::from).inspect_err(leave)?;
        world.set_fingerprints(fingerprints);
        let device = start::device(local_rank);
        let nccl = start::attach_nccl(&world, device, options.backend).inspect_err(leave)?;
        let watchdog =
            watch.map(|watch| watchdog::start(&world, watch)).transpose().inspect_err(leave)?.flatten();
        if let Some(watchdog) = &watchdog {
            terminate::install(Some(watchdog.clone())).inspect_err(|error| {
                leave(error);
                let _ = watchdog.fail(&error.to_string(), false);
                terminate::forget_watchdog();
            })?;
        }
        Ok(Self::new(world.clone(), launch.method, local_rank, device, nccl, watchdog))
    }

    fn new(
        world: Group,
        method: Method,
        local_rank: usize,
        device: Device,
        nccl: bool,
        watchdog: Option<Watchdog>,
    ) -> Self {
        Self(Arc::new(State {
            world,
            method,
            local_rank,
            device,
            nccl,
            broadcast_buffers: AtomicBool::new(false),
            find_unused_parameters: AtomicBool::new(false),
            groups: Mutex::new(NamedGroups::default()),
            mesh: Mutex::new(None),
            watchdog,
        }))
    }

    fn create_model_parallel_groups(&self, size: i64) -> Result<()> {
        self.create_process_subgroup("model_parallel", size, None, false)?;
        self.create_orthogonal_process_group("data_parallel", "model_parallel", false)?;
        Ok(())
    }
}

/// Folder of flight records in a program without run folders.
const FLIGHT_DIR: &str = "isobar-flight";

fn watch_options(
    config: &DistributedConfig,
    launch: &Launch,
    transport: &TransportOptions,
    timeout: Duration,
) -> Result<watchdog::Options> {
    let silence = Duration::try_from_secs_f64(config.heartbeat_timeout_s).ok();
    let silence =
        silence.filter(|silence| *silence >= Duration::from_secs(1)).ok_or_else(|| Error::Value {
            name: "distributed.heartbeat_timeout_s",
            value: config.heartbeat_timeout_s.to_string(),
            expected: "a number of seconds of at least 1",
        })?;
    Ok(watchdog::Options {
        // A rank sends four signs of life a second.
        heartbeat_timeout: silence.min(timeout).max(Duration::from_secs(1)),
        folder: config.flight_dir.clone().unwrap_or_else(|| FLIGHT_DIR.into()),
        interface: transport.interface.clone(),
        addr: transport.addr.clone().or_else(|| launch.addr.clone()),
    })
}

fn model_parallel_size(environment: &Environment) -> Result<Option<i64>> {
    const NAME: &str = "MODEL_PARALLEL_SIZE";
    let Some(value) = environment.get(NAME) else { return Ok(None) };
    match value.parse() {
        Ok(size) if size >= 1 => Ok(Some(size)),
        _ => {
            let expected = "a number of ranks, 1 or more";
            Err(Error::Value { name: NAME, value: value.to_owned(), expected })
        }
    }
}

fn bound() -> Option<DistributedManager> {
    BOUND.try_with(|bound| bound.borrow().last().cloned()).ok().flatten()
}

fn process() -> MutexGuard<'static, Option<DistributedManager>> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}
