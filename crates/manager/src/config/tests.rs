use isobar_config::{Sources, load, reference_toml};

use super::DistributedConfig;

#[test]
fn the_reference_of_the_manager_names_every_key_and_loads_to_the_defaults() {
    let text = reference_toml::<DistributedConfig>().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("distributed.toml");
    std::fs::write(&file, &text).unwrap();
    assert_eq!(
        load::<DistributedConfig>(&Sources::default().file(file)).unwrap().value,
        DistributedConfig::default()
    );
    insta::assert_snapshot!(text, @r###"
# Rendezvous of the ranks, and their mesh.

# Transport between ranks.
# ("auto" | "mpi" | "gloo" | "nccl" | "single")
#   "auto": MPI where an MPI launcher started the ranks, gloo elsewhere, none for a single process.
#   "mpi": MPI.
#   "gloo": libtorch's gloo, over TCP, without MPI.
#   "nccl": NCCL for CUDA tensors, with a GPU for each rank.
#   "single": One process alone.
backend = "auto"

# Method by which a process finds its rank. The variable ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD overrides it.
# ("auto" | "env" | "slurm" | "openmpi" | "pmix" | "intelmpi" | "mpich" | "pmi" | "single")
#   "auto": The first of env, slurm, openmpi, intelmpi, mpich, pmi and pmix whose variables are set, else single.
#   "env": RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them.
#   "slurm": The variables of a step of srun.
#   "openmpi": The variables of Open MPI's mpirun.
#   "pmix": The variables of a PMIx server.
#   "intelmpi": The variables of Intel MPI's mpirun.
#   "mpich": The variables of MPICH's mpirun.
#   "pmi": The variables of a PMI server.
#   "single": One process alone, whatever the environment says.
method = "auto"

# Address of rank 0, for gloo; by default what the launcher says (MASTER_ADDR, SLURM_LAUNCH_NODE_IPADDR), else
# 127.0.0.1 where all ranks are on one host.
# (a string, unset by default)
# addr =

# Port of rank 0, for gloo; by default MASTER_PORT, else one derived from the job's number.
# (an integer from 1 to 65535, unset by default)
# port =

# Network interface of the connections between ranks, of gloo, of the store at which its ranks meet and of the watchdog
# (`eth0`); by default GLOO_SOCKET_IFNAME, else that on the way to the other ranks.
# (a string, unset by default)
# interface =

# Seconds that any wait for another rank may take.
# (a number from 0.1 to 1000000000)
timeout_s = 300.0

# Collectives that ranks compare before they exchange data, so that different calls are an error that names both sides.
# ("off" | "sample" | "always")
#   "off": None.
#   "sample": One of every 64 of a group, at negligible cost.
#   "always": All: for finding a fault.
fingerprints = "sample"

# Lets ranks watch each other, so that a killed or stopped rank soon ends the job, with a report.
# (true or false)
watchdog = true

# Seconds without a sign of life after which a rank is taken for lost; at most `timeout_s` counts.
# (a number from 1 to 1000000000)
heartbeat_timeout_s = 10.0

# Folder of the flight records that ranks write when one is lost, `flight_rank_<rank>.json`; by default `flight` in the
# folder of the run, and `isobar-flight` without one.
# (a string, unset by default)
# flight_dir =

# Reaction to problems of the environment before a run: mixed-up launchers, ranks that share a GPU, a folder that not all
# ranks see.
# ("on" | "warn" | "off")
#   "on": Problems that would lose results end the run before it starts; the others are warnings.
#   "warn": All problems are warnings.
#   "off": No checks.
checks = "on"

# Number of consecutive ranks that share one model. Creates the groups `model_parallel` and `data_parallel`; short for a
# mesh. The variable MODEL_PARALLEL_SIZE overrides it; a mesh that contradicts it is an error.
# (an integer of at least 1, unset by default)
# model_parallel_size =

# Data parallel broadcasts buffers (running statistics) from rank 0 before each forward pass.
# (true or false)
broadcast_buffers = false

# Parameters that the loss does not use get zero gradients; otherwise they are an error.
# (true or false)
find_unused_parameters = false

# The mesh of all ranks.
[mesh]
# Ranks along each axis, the last axis fastest; one may be -1 and is derived from the number of ranks.
# (a list, each an integer)
shape = [-1]

# Names of the axes.
# (a list, each a string)
names = ["data"]

# Messages to the terminal and to files.
[log]
# Log filter of rank 0's terminal, in the syntax of RUST_LOG, which overrides it: `info`, `isobar_collectives=debug`.
# (a string)
terminal = "info"

# Log filter of each rank's own file of JSON lines.
# (a string)
file = "debug"

# Folder of the files `rank-<rank>.jsonl`; by default `logs` in the folder of the run, and no files without one.
# (a string, unset by default)
# folder =
"###);
}
