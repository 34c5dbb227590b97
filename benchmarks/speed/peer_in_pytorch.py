"""Times decoding of an exported folder in PyTorch; `in_pytorch.py` runs this file.

    TORCH_PYTHON benchmarks/speed/peer_in_pytorch.py --task '{"folder": "exported", ...}'

Needs only torch and transformers.
"""

import argparse
import json
import time

import torch
import transformers

CACHES = ("cache", "past_key_values")
"""What the library calls a cache, the newest name first."""


class Decoder:
    """A model and the cache of what it has decoded."""

    def __init__(self, folder: str, *, programs: bool):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=programs, dtype=torch.float32
        )
        self.token, self.kept = torch.arange(4)[None], {}

    @torch.no_grad()
    def decode(self, tokens: int) -> list[float]:
        """Decodes so many tokens greedily; seconds, and processor seconds."""
        began = time.perf_counter(), time.process_time()
        for _ in range(tokens):
            out = self.model(self.token, use_cache=True, **self.kept)
            self.token = out.logits[:, -1:].argmax(-1)
            name = next(name for name in CACHES if out.get(name) is not None)
            self.kept = {name: out[name]}
        return [time.perf_counter() - began[0], time.process_time() - began[1]]


def measure(task: dict) -> dict:
    torch.set_num_threads(task["threads"])
    decoders = {
        "with memories": Decoder(task["folder"], programs=True),
        "base": Decoder(task["folder"], programs=False),
    }
    seconds = {name: [] for name in decoders}
    for decoder in decoders.values():
        decoder.decode(task["block"])  # Warms up.
    for _ in range(task["blocks"]):
        for name, decoder in decoders.items():
            seconds[name].append(decoder.decode(task["block"]))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"seconds": seconds, "versions": versions}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True, help="what to do, as JSON")
    print(json.dumps(measure(json.loads(parser.parse_args().task))))
