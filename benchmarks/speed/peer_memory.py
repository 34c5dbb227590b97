"""Times the authors' PyTorch memory; `memory.py` runs this file in the peer's environment.

    TORCH_PYTHON benchmarks/speed/peer_memory.py --task '{"peer": "CHECKOUT", ...}'

The class is loaded from a checkout of the authors' repository; this file contains none of their
code. On a CPU a gather and a weighted sum replace their embedding bag, a CUDA kernel, at run time.
Needs only torch and numpy.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch


def embedding_bag(indices, weight, per_sample_weights):
    """Weighted sums of rows, `[bags, width]`, differentiable twice."""
    rows = torch.nn.functional.embedding(indices, weight)
    return torch.sum(rows * per_sample_weights.unsqueeze(-1), dim=1)


def load_memory_class(checkout: Path, device: str):
    """The authors' memory, without the model around it."""
    package = types.ModuleType("peer")
    package.__path__ = [str(checkout / "src" / "models" / "fwpkm")]
    sys.modules["peer"] = package
    if device == "cpu":
        name = "peer.xformer_embeddingbag_grad_wrapper"
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].xformers_embedding_bag = embedding_bag
    return importlib.import_module("peer.fwpkm").FastWeightProductKeyMemory


def make_memory(task: dict, subkeys: int):
    cls = load_memory_class(Path(task["peer"]), task["device"])
    memory = cls(
        mem_k_dim=task["dim"], mem_v_dim=task["dim"], mem_topk=task["top_k"], mem_n_subkeys=subkeys
    )
    memory.reset_parameters()
    return memory.to(task["device"])


def run(memory, task: dict, query, value, gate, mask=None):
    return memory(query, value, gate, task["chunk_size"], loss_mask=mask)


def measure(task: dict) -> dict:
    """Seconds per call, and the peak memory of this process."""
    torch.manual_seed(0)
    device, training = task["device"], task["pass"] == "train"
    shape = (task["batch"], task["tokens"] // task["batch"])
    memory = make_memory(task, task["subkeys"]).train(training)
    query, value, cotangent = (torch.randn(*shape, task["dim"], device=device) for _ in range(3))
    gate = torch.rand(*shape, device=device)
    inputs = [x.requires_grad_(training) for x in (query, value, gate)]

    def call():
        if not training:
            with torch.no_grad():
                return run(memory, task, *inputs)["output"]
        loss = torch.sum(run(memory, task, *inputs)["output"] * cotangent)
        # Gradients of the inputs alone, without the dense gradient of the initial table.
        return torch.autograd.grad(loss, inputs)

    times = []
    for _ in range(task["repeats"] + 1):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    times = times[1:]  # The first call warms up.
    on_gpu = device != "cpu"
    return {
        "seconds": statistics.median(times),
        "spread": max(times) - min(times),
        "peak_megabytes": peak_host_megabytes(),
        "peak_device_megabytes": torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def peak_host_megabytes() -> float:
    """Most memory this process has held; `ru_maxrss` would start at its parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def agree(task: dict) -> dict:
    """Runs on the arrays in `task["arrays"]`; saves output, memory and gradients."""
    arrays = dict(np.load(task["arrays"]))
    memory = make_memory(task, task["subkeys"]).train()
    # float64 parameters are cast to float32 copies; float32 ones would be overwritten by the last
    # chunk's memory before the backward pass reads them.
    memory = memory.double()
    tensors = {name: torch.from_numpy(x).to(task["device"]) for name, x in arrays.items()}
    memory.keys.data.copy_(tensors["keys"].reshape(memory.keys.shape))
    memory.values.data.copy_(tensors["values"])
    inputs = [tensors[name].requires_grad_() for name in ("query", "value", "gate")]
    # With a mask the authors' code averages over pairs, without one over tokens.
    out = run(memory, task, *inputs, mask=torch.ones_like(tensors["gate"]))["output"]
    gradients = torch.autograd.grad(torch.sum(out * tensors["cotangent"]), inputs)
    results = (out, memory.keys, memory.values, *gradients)
    names = ("output", "keys", "values", "d_query", "d_value", "d_gate")
    result = {name: x.detach().cpu().numpy() for name, x in zip(names, results, strict=True)}
    np.savez(task["results"], **result)
    return {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True, help="what to do, as JSON")
    task = json.loads(parser.parse_args().task)
    print(json.dumps(agree(task) if task["pass"] == "agree" else measure(task)))
