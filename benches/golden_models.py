"""Writes golden cases of models to `crates/models/tests/golden`: weights, inputs, outputs and all gradients of nvidia-physicsnemo's classes
in double precision, for `crates/models/tests`.

  TORCHDYNAMO_DISABLE=1 python benches/golden_models.py [case …]

Noise is left out: with equal uniform numbers, Gumbel noise is the same for all slices, and the softmax does not depend on it. The search
for neighbours is the implementation `torch`, which gives them by their distance.
"""

import functools
import importlib
import json
import pathlib
import sys

import physicsnemo.diffusion.preconditioners.legacy as preconditioners
import physicsnemo.nn.module.ball_query as ball_query
import torch
from safetensors.torch import save_file
from sources import InDouble

FOLDER = pathlib.Path(__file__).parents[1] / "crates/models/tests/golden"
RTOL, ATOL = 1e-10, 1e-11

POINTS = {"n_layers": 2, "n_hidden": 8, "n_head": 2, "mlp_ratio": 2, "slice_num": 3}
GEO = "physicsnemo.models.geotransolver:GeoTransolver"
TRANSOLVER = "physicsnemo.models.transolver:Transolver"
DIT = "physicsnemo.models.dit:DiT"

# Of each case: the operator, the class, its arguments, and the shapes of the inputs; those of streams are lists.
CASES = {
    "transolver_plus": (
        "transolver",
        TRANSOLVER,
        {"functional_dim": 2, "out_dim": 1, "embedding_dim": 2, "plus": True, **POINTS},
        {"fx": [2, 11, 2], "embedding": [2, 11, 2]},
    ),
    "transolver_plus_grid": (
        "transolver",
        TRANSOLVER,
        {"functional_dim": 2, "out_dim": 1, "embedding_dim": 2, "plus": True, "structured_shape": [3, 4], **POINTS},
        {"fx": [2, 12, 2], "embedding": [2, 12, 2]},
    ),
    "geo_transolver_plus": (
        "geo_transolver",
        GEO,
        {"functional_dim": 2, "out_dim": 1, "geometry_dim": 3, "global_dim": 2, "plus": True, "time_input": True, **POINTS},
        {"local_embedding": [2, 9, 2], "global_embedding": [2, 2, 2], "geometry": [2, 7, 3]},
    ),
    "geo_transolver_streams": (
        "geo_transolver",
        GEO,
        {
            "functional_dim": [2, 3],
            "out_dim": [1, 2],
            "geometry_dim": 3,
            "global_dim": 2,
            "include_local_features": True,
            "radii": [0.3, 0.8],
            "neighbors_in_radius": [2, 5],
            "n_hidden_local": 4,
            **POINTS,
        },
        {
            "local_embedding": [[2, 9, 2], [2, 12, 3]],
            "local_positions": [[2, 9, 3], [2, 12, 3]],
            "global_embedding": [2, 2, 2],
            "geometry": [2, 7, 3],
        },
    ),
    "dit_legacy_condition": (
        "dit",
        DIT,
        {
            "input_size": [4, 6],
            "in_channels": 2,
            "patch_size": [2, 2],
            "hidden_size": 8,
            "depth": 1,
            "num_heads": 2,
            "attention_backend": "timm",
            "conditioning_embedder": "edm",
            "conditioning_embedder_kwargs": {"emb_channels": 8, "noise_channels": 4, "legacy_condition_bias": True},
        },
        {"x": [2, 2, 4, 6], "t": [2]},
    ),
}

CASES["dhariwal_unet"] = (
    "dhariwal_unet",
    "physicsnemo.models.diffusion_unets:DhariwalUNet",
    {
        "img_resolution": 8,
        "in_channels": 2,
        "out_channels": 2,
        "label_dim": 3,
        "augment_dim": 2,
        "model_channels": 64,
        "channel_mult": [1, 2],
        "num_blocks": 1,
        "attn_resolutions": [8],
        "dropout": 0.0,
    },
    {"x": [2, 2, 8, 8], "noise_labels": [2], "class_labels": [2, 3], "augment_labels": [2, 2]},
)

CASES["edm_preconditioner_dhariwal_unet"] = (
    "edm_preconditioner",
    "physicsnemo.diffusion.preconditioners.legacy:EDMPrecond",
    {
        "img_resolution": 8,
        "img_channels": 2,
        "img_in_channels": 3,
        "label_dim": 3,
        "model_type": "DhariwalUNet",
        "model_channels": 64,
        "channel_mult": [1, 2],
        "num_blocks": 1,
        "attn_resolutions": [8],
        "dropout": 0.0,
    },
    {"x": [2, 2, 8, 8], "sigma": [2], "class_labels": [2, 3], "condition": [2, 1, 8, 8]},
)

# Arguments of cases whose class has others than the operator.
ARGUMENTS = {
    "edm_preconditioner_dhariwal_unet": {
        "sigma_data": 0.5,
        "model": {
            "type": "dhariwal_unet",
            "img_resolution": 8,
            "in_channels": 3,
            "out_channels": 2,
            "label_dim": 3,
            "model_channels": 64,
            "channel_mult": [1, 2],
            "num_blocks": 1,
            "attn_resolutions": [8],
            "dropout": 0.0,
        },
    },
}

# Weights that are too large to store are sines, and gradients are stored as their sums with sines.
WAVES = ("dhariwal_unet", "edm_preconditioner_dhariwal_unet")


def wave(shape, number):
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 0.37 + number).sin().reshape(shape) * 0.1


def waves(model):
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            of_norm = parameter.dim() == 1 and name.endswith(".weight")
            parameter.copy_(wave(parameter.shape, number) + float(of_norm))


# Positions have no gradient here: the search for neighbours is of no more than their values.
UNTRAINED = ("local_positions", "t", "sigma")


def without_noise():
    torch.rand_like = lambda x, **_: torch.full_like(x, 0.5)
    preconditioners.torch = InDouble()
    ball_query.radius_search = functools.partial(ball_query.radius_search, implementation="torch")


def drawn(name, shape, generator):
    if name.startswith(("local_positions", "geometry", "t", "sigma")):
        return torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def perturbed(model, generator):
    """Makes parameters that start at zero or one count."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def make(name):
    op, path, arguments, shapes = CASES[name]
    module, owner = path.split(":")
    generator = torch.Generator().manual_seed(sum(name.encode()))
    torch.manual_seed(1)
    # Engines of other libraries are refused by name: they are no argument of a case.
    engine = {"use_te": False} if "transolver" in op else {}
    tuples = {key: tuple(value) if key.endswith(("_dim", "_shape", "_size")) and isinstance(value, list) else value
              for key, value in arguments.items()}
    model = getattr(importlib.import_module(module), owner)(**tuples, **engine).double().eval()
    if name in WAVES:
        waves(model)
    else:
        perturbed(model, generator)
    given, tensors = {}, {}
    for key, shape in shapes.items():
        streams = shape if isinstance(shape[0], list) else [shape]
        names = [key] if streams is not shape else [f"{key}.{at}" for at in range(len(streams))]
        for stream, shape in zip(names, streams):
            tensors[stream] = drawn(key, shape, generator).requires_grad_(key not in UNTRAINED)
        given[key] = tuple(tensors[stream] for stream in names) if len(names) > 1 else tensors[names[0]]
    inputs = list(tensors)
    if op == "dit":
        given["condition"] = None
    outputs = model(**given)
    outputs = {"output": outputs} if torch.is_tensor(outputs) else {f"output.{i}": y for i, y in enumerate(outputs)}
    loss = 0
    for key, output in outputs.items():
        tensors[f"grad.{key}"] = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        loss = loss + (output * tensors[f"grad.{key}"]).sum()
    loss.backward()
    gradients = [(key, tensors[key]) for key in inputs] + list(model.named_parameters())
    parameters = dict(model.named_parameters())
    summed = lambda key, grad: (grad * wave(grad.shape, 0)).sum() if name in WAVES and key in parameters else grad
    tensors |= {f"grad.{key}": summed(key, x.grad) for key, x in gradients if x.grad is not None}
    state = {key: x for key, x in model.state_dict().items() if x.is_floating_point()}
    buffers = {key: x for key, x in state.items() if key not in parameters}
    tensors |= outputs | (buffers if name in WAVES else state)
    arguments = ARGUMENTS.get(name, arguments)
    case = {"op": op, "attrs": arguments, "inputs": inputs, "outputs": list(outputs), "params": list(state), "rtol": RTOL, "atol": ATOL}
    if name in WAVES:
        case["waves"] = True
    contiguous = {key: x.detach().contiguous().clone() for key, x in tensors.items()}
    save_file(contiguous, FOLDER / f"{name}.safetensors", metadata={"case": json.dumps(case)})
    size = (FOLDER / f"{name}.safetensors").stat().st_size
    print(f"{name}: {len(state)} parameters, {size} bytes, |output| ≤ {max(y.abs().max() for y in outputs.values()):.3g}")


if __name__ == "__main__":
    without_noise()
    for chosen in sys.argv[1:] or CASES:
        make(chosen)
