"""Times flash-linear-attention's chunk kernel; `gated_delta.py` runs this file in its environment.

    FLA_PYTHON benchmarks/kernels/peer_fla.py --task '{"batch": 8, "length": 4096, ...}'

Needs only torch with CUDA and flash-linear-attention. Prints one line of JSON when it is ready, and
then, after each line that it reads, the time of one block of calls.
"""

import argparse
import json
import sys
import time

import fla
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule


def talk(task: dict):
    """Yields the seconds per call of each block, of each pass in turn.

    The calls of a block are replays of one CUDA graph, so that neither Python nor Triton's launcher
    is timed; where a pass cannot be recorded, its calls are queued and the first row says why. A
    pass that raises has its reason under `refused` in the first row, and no blocks.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = (task["batch"], task["length"], task["heads"])

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    key = torch.nn.functional.normalize(normal(*tokens, task["key"]), dim=-1)
    state = (task["batch"], task["heads"], task["key"], task["value"])
    given = {
        "q": normal(*tokens, task["key"]),
        "k": key,
        "v": normal(*tokens, task["value"]),
        "g": -0.1 * torch.rand(tokens, generator=generator, device="cuda"),
        "beta": torch.rand(tokens, generator=generator, device="cuda"),
        "initial_state": normal(*state, dtype=torch.float32),
    }
    d_output, d_state = normal(*tokens, task["value"]), normal(*state, dtype=torch.float32)

    def prepare(train: bool):
        arrays = {name: x.detach().clone().requires_grad_(train) for name, x in given.items()}

        def call():
            output, final = chunk_gated_delta_rule(**arrays, output_final_state=True)
            if train:
                torch.autograd.grad((output, final), tuple(arrays.values()), (d_output, d_state))

        for _ in range(3):
            call()
        torch.cuda.synchronize()
        run, how = recorded(call)
        return run, how, max(1, round(task["block_s"] / seconds(run, 5)))

    prepared, refused = {}, {}
    for which in task["passes"]:
        try:
            prepared[which] = prepare(which == "train")
        except Exception as error:  # Some versions of Triton have no backward pass on Hopper.
            refused[which] = f"{type(error).__name__}: {str(error)[:300]}"
    facts = {"dtype": "bfloat16", "version": fla.__version__, "torch": torch.__version__}
    yield facts | {"refused": refused} | {which: how for which, (_, how, _) in prepared.items()}
    for run, how, calls in prepared.values():
        for _ in range(task["repeats"]):
            yield {"seconds": seconds(run, calls), "how": how}


def recorded(call):
    """What replays a call as one CUDA graph, and how the calls are made."""
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        return call, f"calls, no graph: {type(error).__name__}: {str(error)[:200]}"
    return graph.replay, "replays of a graph"


def seconds(run, calls: int) -> float:
    """Seconds per call of so many calls in a row."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=json.loads, required=True)
    for line in talk(parser.parse_args().task):
        print(json.dumps(line), flush=True)
        if not sys.stdin.readline():
            break
