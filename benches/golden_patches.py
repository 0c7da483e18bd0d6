"""Writes `crates/models/tests/golden/patches.safetensors`: patches of a grid by nvidia-physicsnemo's `RandomPatching2D` and
`GridPatching2D`, for `crates/models/tests/patching.rs`.

  TORCHDYNAMO_DISABLE=1 python benches/golden_patches.py

Each case has fields `x`, their `patches`, the `global_index` of these, and `fused`, other patches joined to fields. Patches are in
PhysicsNeMo's order: all samples of a patch together. The patches of the case `random` have the coarse fields `whole` interpolated to them
as further channels.
"""

import json
import pathlib

import torch
from physicsnemo.diffusion.multi_diffusion import GridPatching2D, RandomPatching2D
from safetensors.torch import save_file

FILE = pathlib.Path(__file__).parents[1] / "crates/models/tests/golden/patches.safetensors"

# Extents of the grid, of a patch, overlap_pix, boundary_pix.
GRIDS = {
    "even": ([12, 16], [4, 8], 0, 0),
    "overlap": ([13, 10], [6, 5], 2, 0),
    "boundary": ([13, 10], [8, 7], 1, 2),
    "one": ([9, 7], [9, 7], 2, 1),
}


def main():
    generator = torch.Generator().manual_seed(7)
    drawn = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    tensors, cases = {}, {}
    for name, (grid, patch, overlap, boundary) in GRIDS.items():
        patching = GridPatching2D(tuple(grid), tuple(patch), overlap_pix=overlap, boundary_pix=boundary)
        x = drawn(2, 2, *grid)
        patches = patching.apply(x)
        other = drawn(*patches.shape)
        fused = {"other": other, "fused": patching.fuse(other, batch_size=2)}
        of_case = {"x": x, "patches": patches, "global_index": patching.global_index(), **fused}
        tensors |= {f"{name}.{key}": value for key, value in of_case.items()}
        cases[name] = {"grid": grid, "patch": patch, "overlap_pix": overlap, "boundary_pix": boundary}
    grid, patch = [13, 10], [6, 5]
    torch.manual_seed(3)
    patching = RandomPatching2D(tuple(grid), tuple(patch), patch_num=3)
    x, whole = drawn(2, 2, *grid), drawn(2, 1, 9, 8)
    of_case = {"x": x, "whole": whole, "patches": patching.apply(x, additional_input=whole)}
    of_case |= {"global_index": patching.global_index(), "corners": patching.patch_indices}
    tensors |= {f"random.{key}": value for key, value in of_case.items()}
    cases["random"] = {"grid": grid, "patch": patch}
    save_file({key: x.contiguous().clone() for key, x in tensors.items()}, FILE, metadata={"cases": json.dumps(cases)})
    print(f"{len(tensors)} tensors, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
