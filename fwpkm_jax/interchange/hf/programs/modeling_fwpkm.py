"""A causal language model with fast-weight memories, read and written in PyTorch.

`fwpkm export hf` puts this file into every folder whose memories are FwPKM. With
`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` the memories named in
`config.json` stand before their layers: of a model of the transformers library, or of the hybrids
in `modeling_fwpkm_hybrid.py`. Tokens are read at once and wait in a queue; a chunk is written when
it and its lookahead are complete, so that any cut of a text gives the same results.

Not here, but in fwpkm_jax: kernels for GPUs and TPUs, several documents in one row, training.

References: Zhao and Jones 2026, arXiv:2601.00671 (FwPKM; numbers of equations are its own); Yang et
al. 2024, arXiv:2412.06464 (Gated DeltaNet); Lample et al. 2019, arXiv:1907.05242 (PKM).
"""

import hashlib
import inspect
import json
import os
import time
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import cached_file

MEMORIES, FORMAT = "fwpkm_memories.safetensors", "fwpkm_jax memory 1"
TOKENS = ("query", "value", "gate", "mask")  # What waits: [members, tokens, ...] each.
_NAMES = inspect.signature(CausalLMOutputWithPast).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"  # Its name before transformers 5.24.


def rms_norm(x, weight, eps, offset):
    """`x` at unit root mean square times `offset + weight`, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight)


def best_slots(query, keys, top_k, score):
    """The best sub-keys of queries `[tokens, heads, 2, half]` (Eqs. 5, 6, 20) and slots (Eq. 7).

    Returns ids and scores of sub-keys `[tokens, heads, 2, top_k]` and of slots
    `[tokens, heads, top_k]`. `keys` are `[heads, 2, subkeys, half]`.
    """
    scores = torch.einsum("thps,hpks->thpk", query, keys)
    if score == "idw":
        norms = query.square().sum(-1, keepdim=True) + keys.square().sum(-1)
        scores = -torch.log(1e-3 + (norms - 2 * scores).clamp(min=0))
    best, ids = scores.topk(top_k)
    pairs = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).flatten(2)
    slots = (ids[:, :, 0, :, None] * keys.shape[2] + ids[:, :, 1, None, :]).flatten(2)
    slot_scores, places = pairs.topk(top_k)
    return ids, best, slots.gather(2, places), slot_scores


def weighted_rows(table, slots, weights):
    """The sum of a table's rows `[tokens, places]` by their weights (Eq. 11)."""
    return F.embedding_bag(slots, table, per_sample_weights=weights, mode="sum")


class Memory:
    """One memory of a layer, and the tokens of its sequences that wait to be written.

    `keys` are `[heads, 2, subkeys, half]`, `values` `[slots, value]`, both at least float32. Copies
    share arrays until one of them is written.
    """

    def __init__(self, settings, keys, values, waiting=None):
        self.settings, self.keys, self.values, self.waiting = settings, keys, values, waiting
        self.rule, self.chunk_size, self.own = settings["rule"], settings["chunk_size"], False

    def copy(self):
        self.own = False
        return Memory(self.settings, self.keys, self.values, self.waiting)

    @property
    def num_waiting(self):
        return 0 if self.waiting is None else self.waiting[0].shape[1]

    def address(self, query):
        """Sub-keys, slots and read weights of queries `[members, length, heads, key]`."""
        query = query.flatten(0, 1).unflatten(-1, (2, -1))
        *found, slots, scores = best_slots(query, self.keys, self.rule["top_k"], self.rule["score"])
        return query, *found, slots.flatten(1), scores.flatten(1).div(self.rule["temperature"])

    def read(self, query):
        """What queries read, `[members, length, value]`."""
        *_, slots, scores = self.address(query)
        read = weighted_rows(self.values, slots, scores.softmax(-1))
        return read.unflatten(0, query.shape[:2])

    def push(self, tokens):
        """Reads tokens (see `TOKENS`), and writes each chunk that is complete with its lookahead.

        Tokens up to the one that completes a chunk read the memory from before its write.
        """
        length, limit = tokens[0].shape[1], self.chunk_size + self.rule["lookahead"]
        if self.waiting is None:
            self.waiting = [x[:, :0].detach() for x in tokens]
        reads, start = [], 0
        while start < length or self.num_waiting >= limit:
            room = limit - self.num_waiting
            if room <= 0:
                self.write([x[:, :limit] for x in self.waiting])
                self.waiting = [x[:, self.chunk_size :] for x in self.waiting]
                continue
            piece = [x[:, start : start + room] for x in tokens]
            reads.append(self.read(piece[0]))
            both = zip(self.waiting, piece, strict=True)
            self.waiting = [torch.cat((old, new.detach()), 1) for old, new in both]
            start += room
        return torch.cat(reads, 1)

    @torch.no_grad()
    def write(self, tokens):
        """Writes the first `chunk_size` of the tokens; targets may stand behind them."""
        rule, size, ahead = self.rule, self.chunk_size, self.rule["lookahead"]
        query, value, gate, mask = tokens
        paired = mask[:, ahead:][:, :size] * mask[:, :size]
        weight, counted = (gate[:, :size] * paired).flatten(), mask[:, :size].flatten()
        target = value[:, ahead:][:, :size].flatten(0, 1)
        query, ids, best, slots, scores = self.address(query[:, :size])
        weights = scores.softmax(-1)

        # Values: a slot moves by the mean error of its readers (Eqs. 13 to 17).
        errors = weight[:, None] * (weighted_rows(self.values, slots, weights) - target)
        counts = counted.new_zeros(len(self.values))
        counts.index_add_(0, slots.flatten(), counted.repeat_interleave(slots.shape[1]))
        step = rule["value_step"]
        step = rule["learning_rate"] * (slots.shape[1] if step is None else step)
        moves = (-step * weights / counts[slots].clamp(min=1))[..., None] * errors[:, None]
        if not self.own:
            self.values, self.own = self.values.clone(), True
        self.values.index_add_(0, slots.flatten(), moves.flatten(0, 1))

        # Keys: a step on the negative entropy of the mean access to the sub-keys (Eq. 18).
        heads, _, subkeys, half = self.keys.shape
        share = best.softmax(-1)
        in_mean = (counted / (heads * counted.sum()).clamp(min=1e-20))[:, None, None, None]
        at = ids + subkeys * torch.arange(2, device=ids.device)[:, None]
        mean = share.new_zeros(2 * subkeys)
        mean.index_add_(0, at.flatten(), (share * in_mean).flatten())
        slope = ((mean + 1e-8).log() + mean / (mean + 1e-8))[at]
        pull = in_mean * share * (slope - (share * slope).sum(-1, keepdim=True))
        if rule["score"] == "idw":
            pull = 2 * pull * best.exp()  # best.exp() is 1 / (1e-3 + distance).
        at = at + 2 * subkeys * torch.arange(heads, device=ids.device)[:, None, None]
        moved = torch.zeros_like(self.keys).view(-1, half)
        moved.index_add_(0, at.flatten(), (pull[..., None] * query[..., None, :]).reshape(-1, half))
        if rule["score"] == "idw":
            total = pull.new_zeros(len(moved)).index_add_(0, at.flatten(), pull.flatten())
            moved -= total[:, None] * self.keys.view(-1, half)
        step = rule["learning_rate"] * rule["addressing_weight"]
        self.keys = self.keys - step * moved.view_as(self.keys)


class MemoryState:
    """Memories after the tokens read so far: `{layer: [Memory, ...]}`, `num_read` `[sequences]`.

    `members` neighbours in the batch share a memory.
    """

    def __init__(self, layers, num_read, members=1):
        self.layers, self.num_read, self.members = layers, num_read, members

    def copy(self, groups=None, members=None):
        """A copy, or of one memory one for each of the groups."""
        layers, num_read, members = self.layers, self.num_read, members or self.members
        if groups is not None and groups * members != len(num_read):
            layers = {name: x * (groups // len(x)) for name, x in layers.items()}
            num_read = num_read[:1].repeat(groups * members)
        layers = {name: [memory.copy() for memory in x] for name, x in layers.items()}
        return MemoryState(layers, num_read.clone(), members)


class MemoryLayer(nn.Module):
    """Projections, gate and output around the memories of a layer; adds to the residual stream.

    Buffers are what the exported file has: `keys` and `values` `[memories, ...]`, norms and maps.
    """

    def __init__(self, settings, eps, tensors):
        super().__init__()
        self.settings, self.eps = settings, eps
        for name, x in tensors.items():
            self.register_buffer(name.replace("/", "_"), x, persistent=False)

    def project(self, name, x, dtype):
        parts = ("norm_weight", "proj_kernel", "proj_bias")
        norm, kernel, bias = (getattr(self, f"{name}_{part}") for part in parts)
        return rms_norm(x, norm, self.eps, 1.0).to(dtype) @ kernel.to(dtype) + bias.to(dtype)

    def normed(self, kind, x):
        if kind == "standardize":
            x = x - x.mean(-1, keepdim=True)
            return x / (x.square().sum(-1, keepdim=True).div(x.shape[-1] - 1).sqrt() + 1e-6)
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if kind == "l2" else x

    def forward(self, x, memories, mask, write):
        """`x` `[batch, length, model]` with what the memories add; `mask` 0 for padding or None."""
        settings, heads = self.settings, self.settings["rule"]["num_heads"]
        wide = torch.promote_types(x.dtype, torch.float32)
        query = self.project("query", x, x.dtype).to(wide).unflatten(-1, (2, -1))
        query = self.normed(settings["query_norm"], query).flatten(2).unflatten(2, (heads, -1))
        value = self.normed(settings["value_norm"], self.project("value", x, x.dtype).to(wide))
        ones = value.new_ones(value.shape[:2])
        has_gate = hasattr(self, "gate_proj_kernel")
        gate = self.project("gate", x, x.dtype).to(wide).mean(-1).sigmoid() if has_gate else ones
        real = ones if mask is None else mask.to(wide)
        tokens = [query, value, gate if settings["weight_by_gate"] else ones, real]
        read = []
        for memory, *own in zip(memories, *(x.chunk(len(memories)) for x in tokens), strict=True):
            # Positions where all sequences of a memory have padding do not exist for it.
            there = slice(None) if mask is None else own[-1].bool().any(0)
            own = [x[:, there] for x in own]
            read.append(torch.zeros_like(value[: len(own[0])]))
            if own[0].shape[1]:
                read[-1][:, there] = memory.push(own) if write else memory.read(own[0])
        read, gate = torch.cat(read), gate[..., None]
        mixed = gate * read + (1 - gate) * value if settings["gate_output"] else read + value
        output = self.project("out", mixed, x.dtype)  # Eq. 12
        output = gate * output if settings["gate_residual"] else output
        if settings["full_read"] is not None:
            size = read.square().mean(-1, keepdim=True) / settings["full_read"] ** 2
            output = output * size.clamp(max=1)
        return x + output.to(x.dtype)


class WithMemories:
    """What a causal model gets: memories before its layers, their state in its cache."""

    _is_stateful = True  # No assisted generation: a write cannot be taken back.

    def put_memories(self, tensors):
        """Puts memory layers before the model's layers, from tensors by their exported names."""
        note, self.reading = self.config.fwpkm_jax, None
        settings, layers = note["model"]["fast_weight"], self.get_decoder().layers
        self.memory_layers = nn.ModuleDict()
        for index in note["model"]["memory_layers"]:
            name, layer = f"layer_{index}", layers[index]
            own = {}
            for start in (f"params/blocks/{index}/memory/", f"memory/{name}/"):
                own |= {k[len(start) :]: x for k, x in tensors.items() if k.startswith(start)}
            memory = MemoryLayer(settings, note["model"]["norm_eps"], own)
            self.memory_layers[name] = memory.to(next(layer.parameters()).device)
            layer.register_forward_pre_hook(partial(self.read_and_write, name))
        self.forget()

    def forget(self):
        """New texts start from the exported memory again; of several, the first."""
        self.begin = self.latest = None

    def exported(self):
        settings = self.config.fwpkm_jax["model"]["fast_weight"]
        layers = {}
        for name, layer in self.memory_layers.items():
            wide = torch.promote_types(layer.keys.dtype, torch.float32)
            layers[name] = [Memory(settings, layer.keys[0].to(wide), layer.values[0].to(wide))]
        return MemoryState(layers, torch.zeros(1, dtype=torch.int32))

    def read_and_write(self, name, layer, args):
        (state, mask, write), memory = self.reading, self.memory_layers[name]
        x, mask = (x if x is None else x.to(memory.keys.device) for x in (args[0], mask))
        return memory(x, state.layers[name], mask, write), *args[1:]

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, cache=None,
        past_key_values=None, inputs_embeds=None, use_cache=None, logits_to_keep=0, write=True,
        groups=None, **kwargs,
    ):  # fmt: skip
        """The base model's forward; every text without a cache starts from the memory of `begin`.

        Args:
          attention_mask: `[batch, all tokens]`, 0 for padding.
          write: False reads the memories without writing to them.
          groups: memories, each shared by neighbours in the batch; None: one for each sequence.
        """
        if self.training:
            raise ValueError("model.training=True: train with fwpkm_jax, or call model.eval().")
        cache = past_key_values if cache is None else cache
        x = inputs_embeds if input_ids is None else input_ids
        mask = attention_mask if attention_mask is None else attention_mask[:, -x.shape[1] :]
        if mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"attention_mask has {mask.ndim} axes; give [batch, tokens].")
        state = getattr(cache, "memories", None)
        if state is None and cache is not None and cache.get_seq_length():
            raise ValueError("The cache was filled without memories; begin with an empty one.")
        state = self.started(len(x), groups) if state is None else state
        if len(state.num_read) != len(x):
            raise ValueError(f"{len(x)} sequences, and the memories are of {len(state.num_read)}.")
        read = torch.full((len(x),), x.shape[1]) if mask is None else mask.sum(1).cpu()
        self.reading = state, None if mask is None or mask.all() else mask, write
        given = {"use_cache": use_cache, "logits_to_keep": logits_to_keep, CACHE: cache}
        out = super().forward(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **given, **kwargs
        )
        state.num_read += read.int()
        if getattr(out, CACHE) is not None:
            getattr(out, CACHE).memories = state
        self.reading, self.latest = None, state
        return out

    def started(self, batch, groups):
        """The state of a new text."""
        begin = self.begin or self.exported()
        found = len(begin.num_read) // begin.members
        groups = groups or (batch if found == 1 else found)
        waits = any(x.num_waiting for memories in begin.layers.values() for x in memories)
        if batch % groups or found not in (1, groups):
            raise ValueError(f"{groups} memories for {batch} sequences, beginning with {found}.")
        if waits and batch // groups != begin.members:
            raise ValueError(
                f"groups={groups} of {batch} sequences: tokens of {begin.members} a memory wait."
            )
        return begin.copy(groups, batch // groups)

    def memory_state(self):
        """The memories after the latest call, for `load_memory`."""
        return (self.latest or self.exported()).copy()

    def load_memory(self, source):
        """New texts start from a `MemoryState`, or a file of `save_memory` or fwpkm_jax.

        Of a file saved with caches only memories and waiting tokens are taken.
        """
        found = isinstance(source, MemoryState)
        self.begin = self.latest = source.copy() if found else self.read_file(Path(source))

    def read_file(self, path):
        facts, arrays = saved_arrays(path)
        if facts["weights"] != self.config.fwpkm_jax["weights"]:
            raise ValueError(f"{path} belongs to other weights {facts['origin']}; use those.")
        layers = {}
        for name, (memory,) in self.exported().layers.items():
            place, fast = f"stream/layers/{name}/pending", f"stream/memory/{name}"
            counts = arrays[f"{place}/num_waiting"].tolist()
            names = (f"{fast}/keys", f"{fast}/values", *(f"{place}/tokens/{x}" for x in TOKENS))
            keys, values, *tokens = (arrays[x].to(memory.keys) for x in names)
            made = layers[name] = []
            for i, count in enumerate(counts):
                waiting = [x[i, :, :count] for x in tokens] if count else None
                made.append(Memory(memory.settings, keys[i], values[i], waiting))
        num_read = torch.tensor(facts["num_read"], dtype=torch.int32)
        return MemoryState(layers, num_read, len(num_read) // len(counts))

    def save_memory(self, path, note=None):
        """Saves `memory_state` in a file that `load_memory` and `fwpkm_jax.memories` read."""
        state, config, arrays = self.memory_state(), self.config.fwpkm_jax, {}
        for name, memories in state.layers.items():
            rule, place = memories[0].rule, f"stream/layers/{name}/pending"
            counts = [memory.num_waiting for memory in memories]
            room = max(memories[0].chunk_size + rule["lookahead"], *counts)
            widths = ((rule["num_heads"], rule["key_dim"]), (rule["value_dim"],), (), ())
            for i, (kind, width) in enumerate(zip(TOKENS, widths, strict=True)):
                x = arrays[f"{place}/tokens/{kind}"] = torch.zeros(
                    len(memories), state.members, room, *width, dtype=torch.float32
                )
                for memory, count, own in zip(memories, counts, x, strict=True):
                    if count:
                        own[:, :count] = memory.waiting[i].cpu()
            arrays[f"{place}/num_waiting"] = torch.tensor(counts, dtype=torch.int32)
            for kind in ("keys", "values"):
                x = torch.stack([getattr(memory, kind) for memory in memories])
                arrays[f"stream/memory/{name}/{kind}"] = x.float().cpu()
        arrays["num_drawn"] = torch.zeros(len(state.num_read), dtype=torch.int32)
        facts = {
            "origin": config["origin"], "note": note, "keep": "memory", "documents": False,
            "saved": time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime()), "base": None,
            "num_read": state.num_read.tolist(), "weights": config["weights"],
            "model": config["model"] | {"lora": config["lora"]},
            "parts": dict.fromkeys(arrays, "whole"),
            "rows": {k: [x.shape[:-1].numel()] * 2 for k, x in arrays.items()},
        }  # fmt: skip
        text = json.dumps(facts, sort_keys=True, ensure_ascii=False, allow_nan=False)
        metadata = {"format": FORMAT, "checksum": checksum(arrays, text), "facts": text}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, f"{path}.tmp", metadata)
        os.replace(f"{path}.tmp", path)

    def save_pretrained(self, *_, **__):
        raise NotImplementedError("Copy the exported folder; save_memory saves what was written.")

    def _reorder_cache(self, *_):
        raise NotImplementedError("Beams would exchange their memories; set num_beams=1.")


def checksum(arrays, text):
    """sha256 of a saved memory, as fwpkm_jax computes it."""
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        x = arrays[name].contiguous()
        kind = str(x.dtype).removeprefix("torch.")
        total.update(f"\n{name} {kind} {tuple(x.shape)}\n".encode())
        total.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def saved_arrays(path, expected=None):
    """Facts and arrays of a saved memory; a fork's rows are put over those of its base."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        own = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = checksum(own, metadata.get("facts", ""))
    right = found == metadata.get("checksum") and expected in (None, found)
    if metadata.get("format") != FORMAT or not right:
        raise ValueError(f"{path} is damaged, or no memory of this version; put back a copy.")
    facts = json.loads(metadata["facts"])
    if facts["base"] is not None:
        bases = path.parent if path.parent.name == "bases" else path.parent / "bases"
        name = facts["base"]["checksum"]
        _, shared = saved_arrays(bases / f"{name}.safetensors", name)
    arrays = {}
    for name, part in facts["parts"].items():
        arrays[name] = own[name] if part == "whole" else shared[name]
        if part == "rows":
            rows = arrays[name].view(-1, arrays[name].shape[-1])
            rows[own[f"{name}//rows"]] = own[f"{name}//values"]
    return facts, arrays


class FwPKMForCausalLM:
    """What `AutoModelForCausalLM` finds in `auto_map`: the base model's class with memories."""

    @classmethod
    def register_for_auto_class(cls, auto_class):
        """The class of a model depends on its base, so that none is registered."""

    @classmethod
    def base_of(cls, config):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    @classmethod
    def from_pretrained(cls, name, *args, config, **kwargs):
        """The model of an exported folder or of the hub, with its memories."""
        base = with_memories(cls.base_of(config))
        model = base.from_pretrained(name, *args, config=config, **kwargs)
        of_file = ("cache_dir", "revision", "token", "local_files_only", "subfolder")
        tensors = {}
        if config.fwpkm_jax["model"]["memory_layers"]:
            options = {key: kwargs[key] for key in of_file if kwargs.get(key) is not None}
            tensors = load_file(cached_file(name, MEMORIES, **options))
        model.put_memories(tensors)
        return model


@cache
def with_memories(base):
    """A subclass of a causal model's class that has memories."""
    return type(f"FwPKM{base.__name__}", (WithMemories, base), {"__module__": __name__})
