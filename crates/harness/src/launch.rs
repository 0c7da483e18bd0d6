//! One program on several ranks, under `mpirun`, `srun` or with plain environment variables.

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt, fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use isobar_launch::concerns_ranks;
use isobar_rendezvous::FreePort;

use crate::{THREADS, hosts::Hosts, process::wait_within, room, slurm::Slurm, threads};

/// A program to start on several ranks.
///
/// The ranks see the caller's environment less everything by which a launcher speaks to its ranks, so that a test means
/// the same inside a job of SLURM as outside, with `OMP_NUM_THREADS=1` unless the caller's environment sets it. Each rank's
/// output is kept apart.
///
/// # Examples
///
/// ```
/// use isobar_harness::Launch;
///
/// let outcome = Launch::plain(2, "sh").args(["-c", "echo $RANK of $WORLD_SIZE"]).run()?.expect_success();
/// assert_eq!(outcome.ranks[1].stdout, "1 of 2\n");
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Launch {
    launcher: Launcher,
    ranks: usize,
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    folder: Option<PathBuf>,
    deadline: Duration,
    hosts: Option<Placed>,
}

/// Ranks on several hosts.
#[derive(Clone, Debug)]
struct Placed {
    /// The words before a command on each.
    words: [Vec<OsString>; Hosts::COUNT],
    names: [&'static str; Hosts::COUNT],
    first: &'static str,
    interface: &'static str,
    agent: PathBuf,
    slurm: Slurm,
}

/// Outcome of a [`Launch`].
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The command line, for messages.
    pub command: String,
    /// Exit of the launcher; for plain processes, of the first rank that failed.
    pub exit: Exit,
    /// Output of each rank, by rank. Ranks that never started are missing at the end.
    pub ranks: Vec<RankOutput>,
    /// Output of the launcher itself.
    pub launcher: String,
    /// From the start of the launcher to its end.
    pub wall: Duration,
}

/// Exit of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It ended by itself, with this code.
    Code(i32),
    /// A signal ended it.
    Signal,
    /// It was ended at the deadline.
    Deadline,
}

/// Output of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankOutput {
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Of mpirun: seconds between the SIGTERM that it sends to the ranks that are left when one has died, and SIGKILL. Open MPI's
/// own default, 1, leaves little time to ranks that write down what they know; it waits for so long twice, whether they end
/// or not.
const GRACE: &str = "OMPI_MCA_odls_base_sigkill_timeout";

#[derive(Clone, Debug)]
enum Launcher {
    Mpirun,
    Srun { mpi: String },
    Plain,
}

impl Launch {
    /// `mpirun -n RANKS PROGRAM`, not bound to cores.
    pub fn mpirun(ranks: usize, program: impl AsRef<OsStr>) -> Self {
        Self::new(Launcher::Mpirun, ranks, program.as_ref())
    }

    /// `srun -n RANKS --overcommit --mpi=MPI PROGRAM` on the SLURM of this workspace, which is started where it is not
    /// running. `mpi` is a plugin: `pmix` for Open MPI programs, `none` for ranks that MPI is to know nothing of.
    pub fn srun(ranks: usize, mpi: &str, program: impl AsRef<OsStr>) -> Self {
        Self::new(Launcher::Srun { mpi: mpi.to_owned() }, ranks, program.as_ref())
    }

    /// Processes with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`, as torchrun sets them.
    pub fn plain(ranks: usize, program: impl AsRef<OsStr>) -> Self {
        Self::new(Launcher::Plain, ranks, program.as_ref())
    }

    /// Puts the ranks on both hosts, as many on each; an odd one on the second, which srun cannot do. The launcher itself is on
    /// the first. A SLURM of these hosts is started for srun, and ends with them.
    #[must_use]
    pub fn on(mut self, hosts: &Hosts) -> Self {
        self.hosts = Some(Placed {
            words: [hosts.words(0), hosts.words(1)],
            names: [hosts.name(0), hosts.name(1)],
            first: hosts.address(0),
            interface: hosts.interface(),
            agent: hosts.agent(),
            slurm: Slurm::of_hosts(hosts),
        });
        self
    }

    /// Adds an argument of the program.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments of the program.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable for every rank.
    #[must_use]
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((key.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Starts the ranks in this folder.
    #[must_use]
    pub fn current_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Sets the time limit of the whole launch; five minutes by default.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Starts the ranks and waits for all of them. Launches of a process that would be too many ranks for this machine
    /// together wait for each other.
    ///
    /// A program that fails is no error here: see [`Outcome::exit`] and [`Outcome::expect_success`].
    ///
    /// # Errors
    ///
    /// If the launcher is missing or can't be started, or SLURM can't.
    pub fn run(&self) -> Result<Outcome> {
        let outputs = tempfile::tempdir().context("failed to make a folder for the output of the ranks")?;
        // Neither the deadline nor the time counts what other tests take.
        let _room = room::take(self.ranks);
        let start = Instant::now();
        let exit = match &self.launcher {
            Launcher::Mpirun => {
                let mut command = self.cleared_on(0, "mpirun");
                if let Some(hosts) = &self.hosts {
                    hosts.tell_mpirun(&mut command, self.ranks);
                }
                // Ranks may be more than cores, and several jobs may run at once.
                command.args(["--oversubscribe", "--bind-to", "none", "-n", &self.ranks.to_string()]);
                // Open MPI refuses to start ranks as root otherwise.
                command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
                // Of jobs that share a folder, one that ends removes it from under one that begins.
                command.env("OMPI_MCA_orte_tmpdir_base", outputs.path());
                if !self.env.iter().any(|(key, _)| key == GRACE) {
                    command.env(GRACE, "2");
                }
                self.run_launcher(command, outputs.path())?
            }
            Launcher::Srun { mpi } => {
                let slurm = self.hosts.as_ref().map_or_else(Slurm::of_workspace, |hosts| hosts.slurm.clone());
                slurm.start()?;
                let job = format!("isobar-{}", outputs.path().file_name().unwrap_or_default().display());
                let mut command = self.cleared_on(0, "srun");
                if let Some(hosts) = &self.hosts {
                    let on_each = self.ranks / Hosts::COUNT;
                    ensure!(
                        on_each > 0 && self.ranks.is_multiple_of(Hosts::COUNT),
                        "srun puts as many ranks on each of {} hosts, got {}",
                        Hosts::COUNT,
                        self.ranks
                    );
                    command.args([format!("-N{}", Hosts::COUNT), format!("--ntasks-per-node={on_each}")]);
                    hosts.tell_open_mpi(&mut command);
                }
                command.env("SLURM_CONF", slurm.configuration());
                command.args(["--overcommit", "--kill-on-bad-exit=1", &format!("--mpi={mpi}")]);
                command.args([&format!("--job-name={job}"), "-n", &self.ranks.to_string()]);
                let exit = self.run_launcher(command, outputs.path())?;
                if exit == Exit::Deadline {
                    // The ranks are not children of srun.
                    slurm.cancel(&job)?;
                }
                exit
            }
            Launcher::Plain => self.run_plain(outputs.path())?,
        };
        let wall = start.elapsed();
        let read = |name: String| match fs::read(outputs.path().join(name)) {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(_) => None,
        };
        let ranks = (0..self.ranks)
            .map_while(|rank| {
                let stdout = read(format!("stdout.{rank}"))?;
                Some(RankOutput { stdout, stderr: read(format!("stderr.{rank}")).unwrap_or_default() })
            })
            .collect();
        let launcher = read("launcher".to_owned()).unwrap_or_default();
        Ok(Outcome { command: self.to_string(), exit, ranks, launcher, wall })
    }

    fn new(launcher: Launcher, ranks: usize, program: &OsStr) -> Self {
        let program = program.to_owned();
        let deadline = Duration::from_secs(300);
        Self {
            launcher,
            ranks,
            program,
            args: Vec::new(),
            env: Vec::new(),
            folder: None,
            deadline,
            hosts: None,
        }
    }

    fn run_launcher(&self, mut command: Command, outputs: &Path) -> Result<Exit> {
        let log = fs::File::create(outputs.join("launcher"))?;
        command.args(self.wrapped(outputs)).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut child = command.spawn().with_context(|| format!("failed to start {self}"))?;
        Ok(exit(wait_within(&mut child, self.deadline)?))
    }

    fn run_plain(&self, outputs: &Path) -> Result<Exit> {
        ensure!(self.ranks > 0, "no ranks to start");
        let port = FreePort::hold().context("no free port")?;
        let mut children = Vec::new();
        for rank in 0..self.ranks {
            let words = self.wrapped(outputs);
            let (host, local) = match &self.hosts {
                Some(_) => place(rank, self.ranks),
                None => (0, rank),
            };
            let on_host = match &self.hosts {
                Some(_) => (0..self.ranks).filter(|&other| place(other, self.ranks).0 == host).count(),
                None => self.ranks,
            };
            let first = self.hosts.as_ref().map_or("127.0.0.1", |hosts| hosts.first);
            let mut command = self.cleared_on(host, &words[0]);
            command.args(&words[1..]).stdin(Stdio::null());
            let numbers = [("RANK", rank), ("LOCAL_RANK", local), ("WORLD_SIZE", self.ranks)];
            command.envs(numbers.map(|(name, number)| (name, number.to_string())));
            command.env("LOCAL_WORLD_SIZE", on_host.to_string()).env("MASTER_ADDR", first);
            command
                .env("MASTER_PORT", port.port().to_string())
                .envs(self.env.iter().map(|(key, value)| (key, value)));
            children.push(command.spawn().with_context(|| format!("failed to start {self}"))?);
        }
        self.wait_for_all(&mut children)
    }

    fn wait_for_all(&self, children: &mut [Child]) -> Result<Exit> {
        let end = Instant::now() + self.deadline;
        let mut worst = Exit::Code(0);
        for child in children {
            let left = end.saturating_duration_since(Instant::now());
            let exit = exit(wait_within(child, left)?);
            if worst == Exit::Code(0) {
                worst = exit;
            }
        }
        Ok(worst)
    }

    /// Returns the command with a cleared environment, on the given host if there are hosts.
    fn cleared_on(&self, host: usize, program: impl AsRef<OsStr>) -> Command {
        let Some(hosts) = &self.hosts else { return self.cleared(program) };
        let words = &hosts.words[host];
        let mut command = self.cleared(&words[0]);
        command.args(&words[1..]).arg(program);
        command
    }

    /// A command that inherits nothing of a launcher above.
    fn cleared(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        for (key, _) in env::vars_os() {
            if concerns_ranks(&key.to_string_lossy()) {
                command.env_remove(&key);
            }
        }
        command.env(THREADS, threads());
        command.envs(self.env.iter().map(|(key, value)| (key, value)));
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        command
    }

    /// The program behind a shell that sends each rank's output to files of its own: launchers differ in how they do
    /// it, and not all can.
    fn wrapped(&self, outputs: &Path) -> Vec<OsString> {
        const SCRIPT: &str = "rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-${SLURM_PROCID:-$RANK}}}}
            folder=$1; shift; exec \"$@\" >\"$folder/stdout.$rank\" 2>\"$folder/stderr.$rank\"";
        let mut words: Vec<OsString> = ["sh", "-c", SCRIPT, "sh"].map(OsString::from).into();
        words.push(outputs.into());
        words.push(self.program.clone());
        words.extend(self.args.iter().cloned());
        words
    }
}

/// The host of a rank, and which of that host's ranks it is.
fn place(rank: usize, ranks: usize) -> (usize, usize) {
    let on_first = ranks / Hosts::COUNT;
    if rank < on_first { (0, rank) } else { (1, rank - on_first) }
}

impl Placed {
    /// Sets the variables by which ranks that no mpirun has started reach each other.
    fn tell_open_mpi(&self, command: &mut Command) {
        command.envs([("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "tcp,self")]);
        command.env("OMPI_MCA_btl_tcp_if_include", self.interface);
    }

    /// Passes mpirun the ranks' hosts, and makes it probe them: by default it notices a lost host after minutes.
    fn tell_mpirun(&self, command: &mut Command, ranks: usize) {
        let slots = [ranks / Hosts::COUNT, ranks - ranks / Hosts::COUNT];
        let hosts = self.names.iter().zip(slots).filter(|(_, slots)| *slots > 0);
        let hosts: Vec<String> = hosts.map(|(name, slots)| format!("{name}:{slots}")).collect();
        command.args(["-H", &hosts.join(",")]);
        let agent = self.agent.to_string_lossy();
        let options = [
            ("plm_rsh_agent", &*agent),
            ("pml", "ob1"),
            ("btl", "tcp,self"),
            ("btl_tcp_if_include", self.interface),
            ("oob_tcp_if_include", self.interface),
            ("oob_tcp_keepalive_time", "1"),
            ("oob_tcp_keepalive_intvl", "1"),
            ("oob_tcp_keepalive_probes", "2"),
        ];
        for (name, value) in options {
            command.args(["--mca", name, value]);
        }
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.launcher {
            Launcher::Mpirun => write!(f, "mpirun -n {}", self.ranks)?,
            Launcher::Srun { mpi } => write!(f, "srun -n {} --mpi={mpi}", self.ranks)?,
            Launcher::Plain => write!(f, "WORLD_SIZE={}", self.ranks)?,
        }
        write!(f, " {}", self.program.display())?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", arg.display()))
    }
}

impl Outcome {
    /// Returns whether every rank ended with code 0.
    pub fn success(&self) -> bool {
        self.exit == Exit::Code(0)
    }

    /// The outcome, if every rank ended with code 0.
    ///
    /// # Panics
    ///
    /// Otherwise, with all that the ranks and the launcher printed.
    #[must_use]
    pub fn expect_success(self) -> Self {
        assert!(self.success(), "{self}");
        self
    }

    /// The outcome, if the program ended with this code, not 0.
    ///
    /// # Panics
    ///
    /// Otherwise, with all that the ranks and the launcher printed.
    #[must_use]
    pub fn expect_code(self, code: i32) -> Self {
        assert!(self.exit == Exit::Code(code), "expected exit code {code}\n{self}");
        self
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = match self.exit {
            Exit::Code(code) => format!("ended with code {code}"),
            Exit::Signal => "was ended by a signal".to_owned(),
            Exit::Deadline => "was ended at its deadline".to_owned(),
        };
        writeln!(f, "`{}` {ended} after {:.1} s", self.command, self.wall.as_secs_f64())?;
        let sections = self.ranks.iter().enumerate().flat_map(|(rank, output)| {
            [(format!("rank {rank} stdout"), &output.stdout), (format!("rank {rank} stderr"), &output.stderr)]
        });
        for (title, text) in sections.chain([("launcher".to_owned(), &self.launcher)]) {
            if !text.is_empty() {
                writeln!(f, "--- {title}\n{}", text.trim_end())?;
            }
        }
        Ok(())
    }
}

fn exit(status: Option<ExitStatus>) -> Exit {
    match status {
        None => Exit::Deadline,
        Some(status) => status.code().map_or(Exit::Signal, Exit::Code),
    }
}
