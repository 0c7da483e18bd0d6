//! From environment variables to a [`Launch`].

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use isobar_registry::nearest;

use crate::Environment;
use crate::error::MOST_RANKS;
use crate::slurm::{Step, in_slurm_step};
use crate::{Launch, LaunchError, Method};

const FORCE: &str = "ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD";
const FORCE_PHYSICSNEMO: &str = "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD";

/// The launch that the environment describes; by `forced` only where given.
///
/// # Errors
///
/// Variables of a method that are half set, no numbers, out of range, or contradict another launcher's.
pub fn detect(environment: &Environment, forced: Option<Method>) -> Result<Launch, LaunchError> {
    let read = Reader { environment, forced: forced.is_some() };
    let method = match forced {
        Some(method) => method,
        None => read.method()?,
    };
    match method {
        Method::Env => read.env(),
        Method::Slurm => read.slurm(),
        Method::OpenMpi => read.openmpi(),
        Method::Pmix => read.pmix(),
        Method::IntelMpi | Method::Mpich | Method::Pmi => read.pmi(method),
        Method::Single | Method::Explicit | Method::Threads => Ok(Launch::single()),
    }
}

/// The method that `ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD`, or PhysicsNeMo's variable of that name, forces.
///
/// # Errors
///
/// An unknown method; two variables that disagree.
pub fn forced_method(environment: &Environment) -> Result<Option<Method>, LaunchError> {
    let parse = |variable: &'static str| -> Result<Option<Method>, LaunchError> {
        let Some(value) = environment.get(variable) else { return Ok(None) };
        value.parse().map(Some).map_err(|()| {
            let near = nearest(value, Method::FORCEABLE.into_iter().map(Method::name));
            let help = near.map_or_else(String::new, |name| format!("; did you mean {name}?"));
            LaunchError::UnknownMethod { variable, value: value.to_owned(), help }
        })
    };
    match (parse(FORCE)?, parse(FORCE_PHYSICSNEMO)?) {
        (Some(isobar), Some(other)) if isobar != other => {
            Err(LaunchError::TwoMethods { isobar: isobar.to_string(), physicsnemo: other.to_string() })
        }
        (isobar, other) => Ok(isobar.or(other)),
    }
}

fn env_mend() -> String {
    format!(
        "set all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or none; or force another method by {FORCE}"
    )
}

struct Reader<'a> {
    environment: &'a Environment,
    forced: bool,
}

impl Reader<'_> {
    fn method(&self) -> Result<Method, LaunchError> {
        let has = |name| self.environment.has(name);
        let openmpi = has("OMPI_COMM_WORLD_RANK") || has("OMPI_COMM_WORLD_SIZE");
        if has("RANK") || has("WORLD_SIZE") {
            return Ok(Method::Env);
        }
        if in_slurm_step(self.environment) && !(openmpi && self.openmpi_started()) {
            return Ok(Method::Slurm);
        }
        if openmpi {
            return Ok(Method::OpenMpi);
        }
        if has("PMI_RANK") || has("PMI_SIZE") {
            let intel = self.environment.iter().any(|(name, _)| name.starts_with("I_MPI_"));
            let mpich = has("MPI_LOCALRANKID") || has("MPI_LOCALNRANKS") || has("HYDI_CONTROL_FD");
            return Ok(if intel {
                Method::IntelMpi
            } else if mpich {
                Method::Mpich
            } else {
                Method::Pmi
            });
        }
        if has("PMIX_RANK") {
            return Ok(Method::Pmix);
        }
        if has("LOCAL_RANK") {
            return Err(LaunchError::Missing {
                method: Method::Env,
                present: "LOCAL_RANK".to_owned(),
                missing: "RANK",
                mend: env_mend(),
            });
        }
        Ok(Method::Single)
    }

    /// Returns whether Open MPI's variables are of this process, and SLURM's are of an outer one.
    fn openmpi_started(&self) -> bool {
        let get = |name| self.environment.get(name);
        let by_slurm = get("PMIX_NAMESPACE").is_some_and(|name| name.starts_with("slurm."));
        let agree = get("OMPI_COMM_WORLD_RANK") == get("SLURM_PROCID")
            && get("OMPI_COMM_WORLD_SIZE") == get(Step::read(self.environment).size_variable);
        !by_slurm && !agree
    }

    fn env(&self) -> Result<Launch, LaunchError> {
        let method = Method::Env;
        let mend = env_mend();
        let (rank, size) = self.rank_and_size(method, "RANK", "WORLD_SIZE", &mend)?;
        self.other_launchers_agree(rank, size)?;
        let addr = self.environment.get("MASTER_ADDR").map(str::to_owned);
        let port = self.port(method)?.map(|port| self.port_beside_agent().unwrap_or(port));
        if size > 1 {
            for (variable, missing) in [("MASTER_ADDR", addr.is_none()), ("MASTER_PORT", port.is_none())] {
                if missing {
                    return Err(LaunchError::Missing {
                        method,
                        present: "RANK".to_owned(),
                        missing: variable,
                        mend,
                    });
                }
            }
        }
        let local_rank = match (self.number(method, "LOCAL_RANK")?, addr.as_deref()) {
            (Some(local), _) => Some(local),
            (None, Some("localhost" | "127.0.0.1" | "::1")) => Some(rank),
            (None, _) => (size == 1).then_some(0),
        };
        Ok(Launch { method, rank, world_size: Some(size), local_rank, addr, port, process_manager: false })
    }

    fn slurm(&self) -> Result<Launch, LaunchError> {
        let method = Method::Slurm;
        let mend = "start the ranks by `srun -n RANKS program`".to_owned();
        // A forced method also takes the variables of a job's shell, which is in no step.
        let step = Step::read(self.environment);
        let (rank, size) = self.rank_and_size(method, "SLURM_PROCID", step.size_variable, &mend)?;
        let local_rank = self.number(method, "SLURM_LOCALID")?;
        let missing =
            |missing| LaunchError::Missing { method, present: "SLURM_PROCID".to_owned(), missing, mend };
        let local_rank = Some(match (local_rank, size) {
            (Some(local), _) => local,
            (None, 1) => 0,
            (None, _) => return Err(missing("SLURM_LOCALID")),
        });
        let addr =
            self.environment.get("MASTER_ADDR").or_else(|| self.environment.get("SLURM_LAUNCH_NODE_IPADDR"));
        let job = self.environment.get("SLURM_JOB_ID");
        let port = self.port(method)?.or_else(|| port_of(&[job, step.id]));
        Ok(Launch {
            method,
            rank,
            world_size: Some(size),
            local_rank,
            addr: addr.map(str::to_owned),
            port,
            // Of the plugins pmix and pmi2; an MPI that does not know the latter counts one rank, which is an error then.
            process_manager: ["PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK"]
                .iter()
                .any(|name| self.environment.has(name)),
        })
    }

    fn openmpi(&self) -> Result<Launch, LaunchError> {
        let method = Method::OpenMpi;
        let mend = "start the ranks by `mpirun -n RANKS program`".to_owned();
        let (rank, size) =
            self.rank_and_size(method, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", &mend)?;
        let local_rank = self.number(method, "OMPI_COMM_WORLD_LOCAL_RANK")?;
        let one_host = self.number(method, "OMPI_COMM_WORLD_LOCAL_SIZE")? == Some(size);
        let addr = self.environment.get("MASTER_ADDR").or(one_host.then_some("127.0.0.1"));
        let port =
            self.port(method)?.or_else(|| self.derived_port(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]));
        Ok(Launch {
            method,
            rank,
            world_size: Some(size),
            local_rank: local_rank.or((size == 1).then_some(0)),
            addr: addr.map(str::to_owned),
            port,
            process_manager: true,
        })
    }

    fn pmix(&self) -> Result<Launch, LaunchError> {
        let method = Method::Pmix;
        let mend = "start the ranks by a launcher with a PMIx server".to_owned();
        let Some(rank) = self.number(method, "PMIX_RANK")? else {
            return Err(LaunchError::NotLaunched { method, missing: "PMIX_RANK", mend });
        };
        Ok(Launch {
            method,
            rank,
            world_size: None,
            local_rank: self.number(method, "PMIX_LOCAL_RANK")?,
            addr: self.environment.get("MASTER_ADDR").map(str::to_owned),
            port: self.port(method)?.or_else(|| self.derived_port(&["PMIX_NAMESPACE"])),
            process_manager: true,
        })
    }

    fn pmi(&self, method: Method) -> Result<Launch, LaunchError> {
        let mend = "start the ranks by `mpiexec -n RANKS program`".to_owned();
        let (rank, size) = self.rank_and_size(method, "PMI_RANK", "PMI_SIZE", &mend)?;
        let local = self.number(method, "MPI_LOCALRANKID")?.or(self.number(method, "PMI_LOCAL_RANK")?);
        let local_size = self.number(method, "MPI_LOCALNRANKS")?.or(self.number(method, "PMI_LOCAL_SIZE")?);
        let addr = self.environment.get("MASTER_ADDR").or((local_size == Some(size)).then_some("127.0.0.1"));
        let port = self.port(method)?.or_else(|| self.derived_port(&["PMI_JOBID", "PMI_ID", "PMI_PORT"]));
        Ok(Launch {
            method,
            rank,
            world_size: Some(size),
            local_rank: local.or((size == 1).then_some(0)),
            addr: addr.map(str::to_owned),
            port,
            process_manager: true,
        })
    }

    fn rank_and_size(
        &self,
        method: Method,
        rank_variable: &'static str,
        size_variable: &'static str,
        mend: &str,
    ) -> Result<(usize, usize), LaunchError> {
        let rank = self.number(method, rank_variable)?;
        let size = self.number(method, size_variable)?;
        let missing = |present: &str, missing| {
            let (present, mend) = (present.to_owned(), mend.to_owned());
            LaunchError::Missing { method, present, missing, mend }
        };
        match (rank, size) {
            (Some(_), Some(size)) if !(1..=MOST_RANKS).contains(&size) => {
                Err(LaunchError::SizeOutOfRange { method, variable: size_variable, size })
            }
            (Some(rank), Some(size)) if rank >= size => {
                Err(LaunchError::RankOutOfRange { method, variable: rank_variable, rank, size })
            }
            (Some(rank), Some(size)) => Ok((rank, size)),
            (Some(_), None) => Err(missing(rank_variable, size_variable)),
            (None, Some(_)) => Err(missing(size_variable, rank_variable)),
            (None, None) => {
                Err(LaunchError::NotLaunched { method, missing: rank_variable, mend: mend.to_owned() })
            }
        }
    }

    /// `WORLD_SIZE` that was left by something else would make every rank of mpirun or srun think it is alone.
    fn other_launchers_agree(&self, rank: usize, size: usize) -> Result<(), LaunchError> {
        if self.forced || self.environment.has("TORCHELASTIC_RUN_ID") {
            return Ok(());
        }
        let openmpi = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", Method::OpenMpi);
        let slurm =
            Step::of(self.environment).map(|step| (step.size_variable, "SLURM_PROCID", Method::Slurm));
        for (other_size, other_rank, method) in std::iter::once(openmpi).chain(slurm) {
            let pairs = [("WORLD_SIZE", size, other_size), ("RANK", rank, other_rank)];
            for (variable, value, other) in pairs {
                if let Some(other_value) = self.number(method, other)?
                    && other_value != value
                    && self.number(method, other_size)? != Some(1)
                {
                    return Err(LaunchError::Disagreement {
                        variable,
                        value: value.to_string(),
                        other: other.to_owned(),
                        other_value: other_value.to_string(),
                        mend: format!(
                            "unset RANK and WORLD_SIZE, or choose by {FORCE}=ENV or {FORCE}={method}"
                        ),
                    });
                }
            }
        }
        Ok(())
    }

    fn port(&self, method: Method) -> Result<Option<u16>, LaunchError> {
        let Some(value) = self.environment.get("MASTER_PORT") else { return Ok(None) };
        match value.parse() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(LaunchError::NotANumber {
                method,
                variable: "MASTER_PORT",
                value: value.to_owned(),
                expected: "a port from 1 to 65535",
            }),
        }
    }

    /// torchrun's agent keeps a store of its own at `MASTER_PORT`, and says so: ranks meet at another port then. Agents count
    /// restarts each on its own: the count is not part of the port.
    fn port_beside_agent(&self) -> Option<u16> {
        let agent = self.environment.get("TORCHELASTIC_USE_AGENT_STORE");
        agent.filter(|agent| agent.eq_ignore_ascii_case("true"))?;
        self.derived_port(&["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"])
    }

    /// The port of a job by the variables that name it.
    fn derived_port(&self, job: &[&str]) -> Option<u16> {
        port_of(&job.iter().map(|name| self.environment.get(name)).collect::<Vec<_>>())
    }

    fn number(&self, method: Method, variable: &'static str) -> Result<Option<usize>, LaunchError> {
        let Some(value) = self.environment.get(variable) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| LaunchError::NotANumber {
            method,
            variable,
            value: value.to_owned(),
            expected: "a number from 0",
        })
    }
}

/// A port below the ephemeral ones that two jobs on one host seldom share; none where nothing names the job.
fn port_of(job: &[Option<&str>]) -> Option<u16> {
    let parts: Vec<&str> = job.iter().copied().flatten().collect();
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    (!parts.is_empty()).then(|| 15_000 + (hasher.finish() % 15_000) as u16)
}
