"""Times flash-linear-attention's chunk kernel; `gated_delta.py` runs this file in its environment.

    FLA_PYTHON benchmarks/kernels/peer_fla.py --task '{"batch": 8, "length": 4096, ...}'

Needs only torch with CUDA and flash-linear-attention.
"""

import argparse
import json
import statistics

import fla
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule


def main(task: dict) -> dict:
    """Median and spread of the seconds per call, measured by the device's clock."""
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = (task["batch"], task["length"], task["heads"])

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    key = torch.nn.functional.normalize(normal(*tokens, task["key"]), dim=-1)
    state = (task["batch"], task["heads"], task["key"], task["value"])
    arrays = {
        "q": normal(*tokens, task["key"]),
        "k": key,
        "v": normal(*tokens, task["value"]),
        "g": -0.1 * torch.rand(tokens, generator=generator, device="cuda"),
        "beta": torch.rand(tokens, generator=generator, device="cuda"),
        "initial_state": normal(*state, dtype=torch.float32),
    }
    arrays = {name: x.detach().requires_grad_(task["train"]) for name, x in arrays.items()}
    d_output, d_state = normal(*tokens, task["value"]), normal(*state, dtype=torch.float32)

    def call():
        output, final = chunk_gated_delta_rule(**arrays, output_final_state=True)
        if task["train"]:
            torch.autograd.grad((output, final), tuple(arrays.values()), (d_output, d_state))

    for _ in range(3):
        call()
    seconds = []
    for _ in range(task["repeats"]):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return {
        "seconds": statistics.median(seconds),
        "spread": max(seconds) - min(seconds),
        "dtype": "bfloat16",
        "version": fla.__version__,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=json.loads, required=True)
    print(json.dumps(main(parser.parse_args().task)))
