#!/usr/bin/env python3
"""Times windows of files read by zarr-python, netCDF4 and h5py, as JSON.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 data.py [--cases a,b] [--repeats 7]

Each file holds `u`, float32 [time 384, y 240, x 480], compressed in chunks; the first run writes them into `.peers/data`. A
step reads 16 windows of two frames: each rank its rows, all columns. Each step reads other windows than the last, so that no
cache of chunks (netCDF4's has 64 MiB) holds them. One rank needs no torchrun, and no PyTorch.
Slowest rank, median over the repeats after two warm-ups.
"""
import argparse
import json
import os
import pathlib
import statistics
import time

import h5py
import netCDF4
import numpy as np
import zarr

SHAPE = (384, 240, 480)
FRAMES = 2
WINDOWS = 16
FOLDER = pathlib.Path(__file__).resolve().parents[1] / ".peers" / "data"


def values():
    rng = np.random.default_rng(0)
    t, y, x = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    waves = sum(np.sin(0.03 * k * x + 0.05 * k * y + 0.2 * k * t + k) / k for k in range(1, 6))
    return np.round(waves + 1e-2 * rng.standard_normal(SHAPE), 3).astype(np.float32)


def write_zarr(path):
    array = zarr.create_array(
        path, name="u", shape=SHAPE, chunks=(4, 120, 240), dtype="float32", dimension_names=["time", "y", "x"],
        compressors=zarr.codecs.ZstdCodec(level=3),
    )
    array[...] = values()


def write_netcdf(path):
    with netCDF4.Dataset(path, "w") as file:
        for name, extent in zip(["time", "y", "x"], SHAPE):
            file.createDimension(name, extent)
        u = file.createVariable("u", "f4", ("time", "y", "x"), zlib=True, complevel=4, chunksizes=(1, *SHAPE[1:]))
        u[...] = values()


def write_hdf5(path):
    with h5py.File(path, "w") as file:
        u = file.create_dataset("u", data=values(), chunks=(8, 60, 120), compression="gzip", shuffle=True)
        u.attrs["axes"] = ["time", "y", "x"]


CASES = {
    "data/zarr_windows": ("u.zarr", write_zarr, lambda path: zarr.open_group(path, mode="r")["u"]),
    "data/netcdf_windows": ("u.nc", write_netcdf, lambda path: netCDF4.Dataset(path)["u"]),
    "data/hdf5_windows": ("u.h5", write_hdf5, lambda path: h5py.File(path, "r")["u"]),
}


def make():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, write, _ in CASES.values():
        target, draft = FOLDER / name, FOLDER / f"draft-{name}"
        if not target.exists():
            write(draft)
            draft.rename(target)


def step(array, rows, count):
    for at in range(count * WINDOWS, (count + 1) * WINDOWS):
        first = at * 37 % (SHAPE[0] - FRAMES)
        window = np.asarray(array[first : first + FRAMES, rows, :], dtype=np.float32)
        assert window.shape[0] == FRAMES


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")

    def slowest(seconds):
        if world == 1:
            return seconds
        slow = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slow, dist.ReduceOp.MAX)
        return slow.item()

    if rank == 0:
        make()
    slowest(0.0)
    rows = slice(SHAPE[1] * rank // world, SHAPE[1] * (rank + 1) // world)
    cases = {}
    for name in args.cases.split(","):
        file, _, open_array = CASES[name]
        array, times = open_array(FOLDER / file), []
        for count in range(args.repeats + 2):
            slowest(0.0)
            start = time.perf_counter()
            step(array, rows, count)
            times.append(slowest(time.perf_counter() - start))
        cases[name] = {"median_s": statistics.median(times[2:])}
    if rank == 0:
        versions = f"zarr {zarr.__version__}, netCDF4 {netCDF4.__version__}, h5py {h5py.__version__}"
        print(json.dumps({"system": versions, "world": world, "cases": cases}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
