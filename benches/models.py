"""Times a training step (forward, mean squared error, backward, fused AdamW) of the models of `benches/models.json` in PyTorch on one
process, as `isobar bench --cases models/NAME` does on one rank: same sizes, float32, same loss and optimizer. Prints one JSON object.

  OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 python benches/models.py [--cases models/afno,…] [--repeats 5]

The loss is the sum over the outputs of their mean squared difference from the input `fields`, or from zero where shapes differ.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
from sources import source

TABLE = json.loads(pathlib.Path(__file__).with_name("models.json").read_text())
WARM_UPS = 2


def make(row):
    torch.manual_seed(0)
    # Evaluation mode, as in `isobar bench`: no dropout, no drop path, running statistics of batch norm.
    return source(":".join(row["peer"]["class"].rsplit(".", 1)))(**row["peer"]["arguments"]).eval()


def outputs_of(result):
    return result if isinstance(result, (tuple, list)) else [result]


def loss_of(outputs, fields):
    def term(output):
        if fields is not None and output.shape == fields.shape:
            return torch.nn.functional.mse_loss(output, fields)
        return (output * output).mean()

    return sum(term(output) for output in outputs)


def step_times(row, repeats):
    model = make(row)
    # The source may take a shape of its own.
    shapes = {name: array["shape"] for name, array in row["inputs"].items()} | row["peer"].get("shapes", {})
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    # An argument is an input, a list of inputs, or none.
    given = lambda name: [inputs[part] for part in name] if isinstance(name, list) else None if name is None else inputs[name]
    arguments = [given(name) for name in row["peer"]["inputs"]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    times = []
    for index in range(WARM_UPS + repeats):
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss_of(outputs_of(model(*arguments)), inputs.get("fields")).backward()
        optimizer.step()
        if index >= WARM_UPS:
            times.append(time.perf_counter() - begun)
    return {
        "median_s": statistics.median(times),
        "min_s": min(times),
        "max_s": max(times),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(f"models/{name}" for name, row in TABLE.items() if "peer" in row))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cases = {}
    for case in options.cases.split(","):
        try:
            cases[case] = step_times(TABLE[case.removeprefix("models/")], options.repeats)
        except Exception as error:  # reported as the case's result; the other cases run
            cases[case] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"system": f"pytorch {torch.__version__}", "world": 1, "cases": cases}))


if __name__ == "__main__":
    main()
