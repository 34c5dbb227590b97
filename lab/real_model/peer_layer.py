"""The memory's layer of SmolLM2 in PyTorch: what questions read of what statements write."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fwpkm_jax.interchange import smollm2

CHUNK = smollm2.MEMORY.chunk_size
RULE, MIXER = smollm2.MEMORY.rule, smollm2.MEMORY_MIXER


def unit(x: Tensor, scale: Any = 1.0, eps: float = 1e-5) -> Tensor:
    """At unit root mean square, times a scale."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale


class Layer(nn.Module):
    """The memory and its attention layer, under the library's names; the table begins empty."""

    def __init__(self, arrays: dict[str, np.ndarray], *, delta: bool = False) -> None:
        """Args: `arrays` of `memory.safetensors`, and whether Sparse Delta Memory writes."""
        super().__init__()
        self.delta = delta
        self.names = {f"w{number}": name for number, name in enumerate(arrays)}
        for own, name in self.names.items():
            array = torch.tensor(arrays[name], dtype=torch.float32)
            self.register_parameter(own, nn.Parameter(array, requires_grad="/keys" not in name))
        self._own = {name: own for own, name in self.names.items()}

    def get(self, name: str) -> Tensor:
        """A weight by the end of its name."""
        (own,) = (own for full, own in self._own.items() if full.endswith(f"/{name}"))
        return getattr(self, own)

    def arrays(self, weights: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """Weights under the library's names, float16."""
        return {name: weights[own].numpy().astype(np.float16) for own, name in self.names.items()}

    def map(self, x: Tensor, name: str) -> Tensor:
        """A normed linear map of the memory, whose norm multiplies by one more than its weight."""
        x = unit(x, 1 + self.get(f"memory/{name}_norm/weight"))
        kernel = self.get(f"memory/{name}_proj/kernel")
        return x @ kernel + self.get(f"memory/{name}_proj/bias")

    def seen(self, x: Tensor) -> Tensor:
        """The stream with what the attention layer adds."""
        shape = (*x.shape[:2], MIXER.num_heads, -1)
        normed = unit(x, self.get("memory_mixer_norm/weight"))

        def heads(name: str) -> Tensor:
            return (normed @ self.get(f"memory_mixer/{name}_proj/kernel")).view(shape)

        query, gate = heads("q").chunk(2, -1)
        turned = int(MIXER.head_dim * MIXER.rotary_fraction) // 2 * 2
        speeds = MIXER.rope_theta ** (-torch.arange(0, turned, 2) / turned)
        angle = torch.arange(x.shape[1])[:, None] * speeds
        cosine, sine = angle.cos()[:, None], angle.sin()[:, None]

        def placed(y: Tensor, name: str) -> Tensor:
            y = unit(y, self.get(f"memory_mixer/{name}_norm/weight"))
            first, second = y[..., :turned].chunk(2, -1)
            both = first * cosine - second * sine, second * cosine + first * sine
            return torch.cat([*both, y[..., turned:]], -1)

        place = torch.arange(x.shape[1])
        back = place[:, None] - place
        parts = placed(query, "q"), placed(heads("k"), "k"), heads("v")
        mask = (back >= 0) & (back < MIXER.window)
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in parts), attn_mask=mask)
        out = (out.transpose(1, 2) * gate.sigmoid()).flatten(2)
        return x + out @ self.get("memory_mixer/o_proj/kernel")

    def queries(self, seen: Tensor) -> Tensor:
        """Halves of unit length, `[batch, tokens, 2, half]`."""
        halves = self.map(seen, "query").unflatten(-1, (2, -1))
        return halves * torch.rsqrt(halves.pow(2).sum(-1, keepdim=True) + 1e-6)

    def signals(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, values and gates of the stream."""
        seen = self.seen(x)
        value = self.map(seen, "value")
        value = value - value.mean(-1, keepdim=True)
        value = value / (value.std(-1, keepdim=True) + 1e-6)
        gate = torch.sigmoid(self.map(seen, "gate").mean(-1))
        return self.queries(seen), value, gate

    def slots(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and weights of each token, `[batch, tokens, top_k]`."""
        keys = self.get("keys")[0, 0]
        with torch.no_grad():
            products = torch.einsum("btpk,psk->btps", query, keys)
            near = query.pow(2).sum(-1)[..., None] + keys.pow(2).sum(-1) - 2 * products
            ids = torch.topk(near, RULE.top_k, dim=-1, largest=False).indices
        chosen = torch.stack([keys[half][ids[..., half, :]] for half in (0, 1)], -3)
        scores = -torch.log(1e-3 + ((query[..., None, :] - chosen) ** 2).sum(-1))
        pairs = (scores[..., 0, :, None] + scores[..., 1, None, :]).flatten(-2)
        slots = (ids[..., 0, :, None] * RULE.num_subkeys + ids[..., 1, None, :]).flatten(-2)
        best = torch.topk(pairs, RULE.top_k, dim=-1).indices
        return slots.gather(-1, best), pairs.gather(-1, best).softmax(-1)

    def forward(
        self, told: Tensor, real: Tensor, asked: Tensor, *, write: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the layer adds to the second row, and what the losses need.

        Args:
          told: the stream of the first row, `[batch, tokens, model]`, a multiple of chunks.
          real: 1 for its tokens, 0 for padding.
          asked: the stream of the second row.
          write: False reads an empty table.
        """
        query, value, gate = self.signals(asked)
        read, made = torch.zeros_like(value), {"query": query.flatten(-2)}
        if write:
            told_query, told_value, told_gate = self.signals(told)
            ids, weights = self.slots(told_query)
            own, at, counts = _dense(ids, weights, *self.slots(query), real)
            place = torch.arange(told.shape[1])
            paired = ((place + 1) % CHUNK > 0) * real * F.pad(real, (0, 1))[:, 1:]
            target = F.pad(told_value, (0, 0, 0, 1))[:, 1:]
            strength = told_gate * paired
            if self.delta:
                found, written = _delta(own, at, strength, target)
            else:
                found, written = _write(own, at, counts, strength, target)
            read = found @ written
            made |= {"told": told_query.flatten(-2), "found": found * strength[:, None]}
        mixed = gate[..., None] * read + (1 - gate[..., None]) * value
        size = read.pow(2).mean(-1, keepdim=True) / smollm2.MEMORY.full_read**2
        return gate[..., None] * size.clamp(max=1) * self.map(mixed, "out"), made


def _write(
    own: Tensor, at: Tensor, counts: Tensor, strength: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """FwPKM's chunks: how much each token asked reads of each told one, and what these wrote."""
    errors: list[Tensor] = []
    steps = RULE.top_k * own / counts.clamp(min=1)
    for first in range(0, own.shape[1], CHUNK):
        here = slice(first, first + CHUNK)
        error = target[:, here]
        if first:
            shared = own[:, here] @ steps[:, :first].transpose(1, 2)
            error = error - shared @ torch.cat(errors, 1)
        errors.append(strength[:, here, None] * error)
    return at @ steps.transpose(1, 2), torch.cat(errors, 1)


def _delta(own: Tensor, at: Tensor, strength: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same of Sparse Delta Memory, whose tokens write one after the other."""
    own, at = (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) for x in (own, at))
    before = torch.tril(own @ own.transpose(1, 2), -1) * strength[..., None]
    eye = torch.eye(own.shape[1])
    errors = strength[..., None] * target
    written = torch.linalg.solve_triangular(before + eye, errors, upper=False, unitriangular=True)
    return at @ own.transpose(1, 2), written


def _dense(
    ids: Tensor, weights: Tensor, asked_ids: Tensor, asked_weights: Tensor, real: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of both rows' tokens on the slots that the first row writes, `[batch, tokens, n]`,
    and how many tokens of its chunk use each."""
    sessions = len(ids)
    slots = [torch.unique(ids[number]) for number in range(sessions)]
    width = max(len(one) for one in slots)
    own, at = [], []
    for number, one in enumerate(slots):
        zeros = torch.zeros(ids.shape[1], width)
        own.append(zeros.scatter_add(1, torch.searchsorted(one, ids[number]), weights[number]))
        places = torch.searchsorted(one, asked_ids[number]).clamp(max=len(one) - 1)
        known = one[places] == asked_ids[number]
        zeros = torch.zeros(asked_ids.shape[1], width)
        at.append(zeros.scatter_add(1, places, asked_weights[number] * known))
    table = torch.stack(own)
    with torch.no_grad():
        uses = ((table > 0) * real[..., None]).float()
        counts = uses.unflatten(1, (-1, CHUNK)).sum(2).repeat_interleave(CHUNK, 1)
    return table, torch.stack(at), counts
