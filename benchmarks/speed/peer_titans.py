"""Times the neural memory of titans-pytorch; `layer.py` runs this file in the peer's environment.

    TITANS_PYTHON benchmarks/speed/peer_titans.py --task '{"width": 512, "chunk_size": 512, ...}'

This file contains none of its code. Needs only torch and titans-pytorch.
"""

import argparse
import json
import statistics
import time
from importlib import metadata
from pathlib import Path

import torch
from titans_pytorch import NeuralMemory


def measure(task: dict) -> dict:
    """Seconds per call, and the peak memory of this process."""
    torch.manual_seed(0)
    device, training = task["device"], task["pass"] == "train"
    # Written once per `write_every` tokens, by gradients of `chunk_size` tokens each, towards the
    # next token's value. Network, momentum and norms are the package's defaults.
    layer = NeuralMemory(
        dim=task["width"],
        chunk_size=task["chunk_size"],
        batch_size=task["write_every"],
        store_with_lookahead_value=True,
    ).to(device)
    shape = (task["batch"], task["tokens"] // task["batch"], task["width"])
    x = torch.randn(shape, device=device, requires_grad=training)
    parameters = list(layer.parameters())

    def call():
        if not training:
            with torch.no_grad():
                return layer(x)[0]
        loss = torch.sum(layer(x)[0] ** 2)
        return torch.autograd.grad(loss, [x, *parameters], allow_unused=True)

    call()
    times = []
    cpu_start = time.process_time()
    for _ in range(task["repeats"]):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    cpu_seconds = (time.process_time() - cpu_start) / task["repeats"]
    on_gpu = device != "cpu"
    return {
        "fast_weights": sum(p.numel() for p in layer.memory_model.parameters()),
        "ms_per_token": 1e3 * statistics.median(times) / task["tokens"],
        "ms_per_token_spread": 1e3 * (max(times) - min(times)) / task["tokens"],
        "cpu_ms_per_token": 1e3 * cpu_seconds / task["tokens"],
        "peak_megabytes": peak_host_megabytes(),
        "peak_device_megabytes": torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None,
        "torch": torch.__version__,
        "titans_pytorch": metadata.version("titans-pytorch"),
        "threads": torch.get_num_threads(),
    }


def peak_host_megabytes() -> float:
    """Most memory this process has held; `ru_maxrss` would start at its parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=json.loads, required=True, help="what to do, as JSON")
    print(json.dumps(measure(parser.parse_args().task)))
