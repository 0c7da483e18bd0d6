"""Loads weights of Isobar into the classes of its models' sources and compares the outputs, in double precision.

`cargo xtask bench --weights` runs it on all cases of models. Prints a table in Markdown, and exits with 1 if weights do not load or outputs differ. PhysicsNeMo computes
AFNO in single precision. With `--run RUN OUT.safetensors`, loads the file that `isobar checkpoint export RUN OUT.safetensors` has written
into the class of the run's model, strictly, and prints the number of tensors.
"""

import argparse
import json
import pathlib
import sys
import tomllib
import warnings

import torch
from golden_models import without_noise
from safetensors import safe_open
from safetensors.torch import load_file
from sources import source

warnings.filterwarnings("ignore")

# Of each model: the class, the names of its arguments that it knows otherwise, and fixed ones.
CLASSES = {
    "afno": ("physicsnemo.models.afno:AFNO", {}),
    "aurora": ("aurora:Aurora", {}),
    "cnext_unet": ("the_well.benchmark.models.unet_convnext:UNetConvNext", {}),
    "dhariwal_unet": ("physicsnemo.models.diffusion_unets:DhariwalUNet", {}),
    "dit": ("physicsnemo.models.dit:DiT", {"attention_backend": "timm"}),
    "dlwp": ("physicsnemo.models.dlwp:DLWP", {}),
    "edm_precond": ("physicsnemo.diffusion.preconditioners.legacy:EDMPrecond", {}),
    "edm_precond_super_resolution": ("physicsnemo.diffusion.preconditioners.legacy:EDMPrecondSuperResolution", {}),
    "edm_preconditioner": ("physicsnemo.diffusion.preconditioners:EDMPreconditioner", {}),
    "fengwu": ("physicsnemo.models.fengwu:Fengwu", {}),
    "flare": ("physicsnemo.models.flare:FLARE", {"use_te": False}),
    "fno": ("physicsnemo.models.fno:FNO", {}),
    "fully_connected": ("physicsnemo.models.mlp:FullyConnected", {}),
    "geo_transolver": ("physicsnemo.models.geotransolver:GeoTransolver", {"use_te": False}),
    "healpix_unet": ("physicsnemo.models.dlwp_healpix:HEALPixUNet", {}),
    "mod_afno": ("physicsnemo.models.afno:ModAFNO", {}),
    "pangu": ("physicsnemo.models.pangu:Pangu", {}),
    "pix2pix": ("physicsnemo.models.pix2pix:Pix2Pix", {}),
    "song_unet": ("physicsnemo.models.diffusion_unets:SongUNet", {}),
    "song_unet_pos_embd": ("physicsnemo.models.diffusion_unets:SongUNetPosEmbd", {}),
    "song_unet_pos_lt_embd": ("physicsnemo.models.diffusion_unets:SongUNetPosLtEmbd", {}),
    "sr_res_net": ("physicsnemo.models.srrn:SRResNet", {}),
    "swin_rnn": ("physicsnemo.models.swinvrnn:SwinRNN", {}),
    "transolver": ("physicsnemo.models.transolver:Transolver", {"use_te": False}),
    "unet": ("physicsnemo.models.unet:UNet", {}),
}
# Filters that are in single precision, whatever the dtype of the weights.
SINGLE = ("afno", "mod_afno")
# Tolerance of the outputs, relative to their largest value: of sources that compute in single precision or amplify rounding, and of others.
BOUNDS = {"afno": 1e-5, "aurora": 1e-7, "fno": 1e-6, "mod_afno": 1e-5}
BOUND = 1e-12
# Arguments without which forward functions fail.
ABSENT = {"dit": ["condition"], "song_unet": ["noise_labels", "class_labels"], "song_unet_pos_embd": ["noise_labels", "class_labels"]}
# Arguments of Isobar alone.
OWN = {"type", "tiles", "gradient_checkpointing", "checkpoint_level", "upsampling"}
TUPLES = ("_dim", "_shape", "_size", "_resolution", "num_heads")


def make(op, arguments):
    path, fixed = CLASSES[op]
    own = {key: value for key, value in arguments.items() if key not in OWN}
    # Lists of these stand for tuples; those of others are lists there, too.
    own = {key: tuple(value) if isinstance(value, list) and key.endswith(TUPLES) else value for key, value in own.items()}
    if op == "edm_preconditioner":
        network = dict(own["model"])
        kind = network.pop("op", None) or network.pop("type")
        if kind == "dhariwal_unet":
            return dhariwal_denoiser(network)
        own["model"] = make(kind, network)
    return source(path)(**{**fixed, **own}).to(dtype_of(op)).eval()


def dhariwal_denoiser(network):
    """Returns the class that scales the input and output of a DhariwalUNet."""
    channels = {"img_channels": network.pop("out_channels"), "img_in_channels": network.pop("in_channels")}
    path = "physicsnemo.diffusion.preconditioners.legacy:EDMPrecond"
    return source(path)(model_type="DhariwalUNet", **channels, **network).double().eval()


def dtype_of(op):
    return torch.float32 if op in SINGLE else torch.float64


def load(model, weights):
    """Loads weights, strictly: further names of a tensor are filled in, and integer tables are the class's own."""
    own = model.state_dict(keep_vars=True)
    known = {own[name].data_ptr(): weights[name] for name in weights if name in own and own[name].numel()}
    for name, tensor in own.items():
        if name not in weights:
            shared = known.get(tensor.data_ptr())
            if shared is None and tensor.is_floating_point() and tensor.numel():
                raise KeyError(f"Isobar lacks {name} {list(tensor.shape)}")
            weights[name] = tensor if shared is None else shared
    model.load_state_dict({name: x.reshape(own[name].shape) if name in own else x for name, x in weights.items()}, strict=True)


def outputs_of(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def arguments_of(inputs):
    """Inputs by name; those with a number after a point are parts of a list."""
    given = {}
    for name, tensor in inputs.items():
        stem, _, number = name.partition(".")
        given.setdefault(stem, {})[number] = tensor
    return {stem: next(iter(parts.values())) if "" in parts else tuple(parts[key] for key in sorted(parts))
            for stem, parts in given.items()}


def compare(path):
    with safe_open(path, "pt") as file:
        case = json.loads(file.metadata()["case"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    part = lambda kind: {name.removeprefix(kind): x for name, x in tensors.items() if name.startswith(kind)}
    inputs, weights, ours = part("input:"), part("weight:"), part("output:")
    if case["op"] not in CLASSES:
        raise LookupError(f"PhysicsNeMo has no {case['op']}")
    attrs = {key: value for key, value in case["attrs"].items() if key not in ("tied", "training")}
    torch.manual_seed(0)
    model = make(case["op"], attrs)
    count = len(weights)
    load(model, weights)
    own = lambda x: x.to(dtype_of(case["op"])) if x.is_floating_point() else x
    given = arguments_of({name: own(inputs[name]) for name in case["inputs"]})
    for name in ABSENT.get(case["op"], []):
        # Networks without an embedding of the noise level ignore it.
        given.setdefault(name, torch.zeros(1, dtype=torch.float64) if name == "noise_labels" else None)
    with torch.no_grad():
        if set(given) == {"input"} or case["op"] == "healpix_unet":
            theirs = model(list(*given.values()) if case["op"] == "healpix_unet" else given["input"])
        else:
            theirs = model(**given)
    pairs = list(zip(outputs_of(theirs), [ours[name] for name in sorted(ours)], strict=True))
    error = max(((got - want).abs().max() / want.abs().max()).item() for got, want in pairs)
    return case["op"], count, sum(x.numel() for x in weights.values()), error


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path, nargs="?")
    parser.add_argument("--run", type=pathlib.Path, nargs=2, metavar=("RUN", "WEIGHTS"))
    options = parser.parse_args()
    without_noise()
    if options.run:
        run, weights = options.run
        table = tomllib.loads((run / "config.toml").read_text())["model"]
        tensors = load_file(weights)
        load(make(table["type"], table), tensors)
        print(f"{len(tensors)} tensors of {table['type']} loaded")
        return
    print("| case | model | tensors | numbers | largest difference |\n|---|---|---|---|---|")
    failed = []
    paths = sorted(options.folder.glob("*.safetensors"))
    if not paths:
        sys.exit(f"{options.folder} has no cases")
    for path in paths:
        try:
            op, tensors, numbers, error = compare(path)
            print(f"| {path.stem} | {op} | {tensors} | {numbers} | {error:.1e} |")
            if not error <= BOUNDS.get(op, BOUND):
                failed.append(path.stem)
        except Exception as error:  # reported as the case's result; the others follow
            print(f"| {path.stem} | | | | {type(error).__name__}: {str(error).splitlines()[0][:150]} |")
            failed.append(path.stem)
    if failed:
        sys.exit(f"loading failed, or outputs differ, for: {', '.join(failed)}")


if __name__ == "__main__":
    main()
