"""Classes of the sources of Isobar's models, for `models.py` and `load_weights.py`: those of nvidia-physicsnemo, The Well's CNextU-net, and
Aurora on normalised arrays.
"""

import datetime
import importlib
import pathlib
import sys
import types

import torch


class InDouble:
    """Stands in for `torch` in modules that cast to single precision: its float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def source(path):
    """Returns the class of a path `package.module:Class`."""
    module, name = path.split(":")
    if module.startswith("the_well.benchmark.models."):
        leave_out("the_well.benchmark.models")
    if module == "aurora":
        return aurora_on_arrays()
    return getattr(importlib.import_module(module), name)


def leave_out(package):
    """Lets modules of a package be imported without its `__init__.py`, which imports models that need further packages."""
    parent, name = package.rsplit(".", 1)
    folder = pathlib.Path(next(iter(importlib.import_module(parent).__path__))) / name
    module = sys.modules.setdefault(package, types.ModuleType(package))
    module.__path__ = [str(folder)]


def aurora_on_arrays():
    """Returns Aurora with Isobar's arguments and arrays: channels in one tensor, normalised, and times in hours since 1970. In double
    precision its coordinates are double, too; the package rounds them, which short wavelengths of its expansions amplify.
    """
    import aurora
    from aurora.model import aurora as model
    from aurora.model import decoder, encoder

    # The arrays are normalised.
    aurora.Batch.normalise = aurora.Batch.unnormalise = lambda batch, **_: batch
    single = torch.Tensor.float

    class Aurora(aurora.Aurora):
        def __init__(self, img_size, latitudes, longitudes, atmos_levels, lead_time, **others):
            # The package appends to lists.
            others = {key: tuple(value) if isinstance(value, list) else value for key, value in others.items()}
            super().__init__(use_lora=False, timestep=datetime.timedelta(hours=lead_time), **others)
            ends = zip((latitudes, longitudes), img_size)
            self.lines = [torch.linspace(*line, count, dtype=torch.float64) for line, count in ends]
            self.levels = tuple(atmos_levels)
            self.surface, self.upper, self.statics = (others[f"{kind}_vars"] for kind in ("surf", "atmos", "static"))

        def forward(self, input, t):
            is_double = input.dtype == torch.float64
            for module in (decoder, encoder, model):
                module.torch = InDouble() if is_double else torch
            torch.Tensor.float = torch.Tensor.double if is_double else single
            # Static fields of a batch are those of all samples; here each has its own.
            try:
                return torch.cat([self.one(*sample) for sample in zip(input.split(1), t.flatten().tolist())])
            finally:
                torch.Tensor.float = single

        def one(self, input, hours):
            statics = input[0, -len(self.statics):]
            frames = input[:, : -len(self.statics)].unflatten(1, (self.max_history_size, -1))
            surface, upper = frames.split([len(self.surface), len(self.upper) * len(self.levels)], 2)
            upper = upper.unflatten(2, (len(self.upper), -1))
            time = datetime.datetime.fromtimestamp(3600 * hours, datetime.timezone.utc)
            batch = aurora.Batch(
                surf_vars={name: surface[:, :, at] for at, name in enumerate(self.surface)},
                static_vars=dict(zip(self.statics, statics)),
                atmos_vars={name: upper[:, :, at] for at, name in enumerate(self.upper)},
                metadata=aurora.Metadata(*(line.to(input.dtype) for line in self.lines), (time,), self.levels),
            )
            result = super().forward(batch)
            parts = [result.surf_vars[name] for name in self.surface]
            parts += [result.atmos_vars[name][:, 0] for name in self.upper]
            return torch.cat(parts, 1)

    return Aurora
