"""The product-key memory's whole pass in plain NumPy, to check the package against.

Written from the paper alone and for clarity alone: every slot is scored, every token is visited,
and gradients come from complex steps: for an analytic f, f'(x) = Im f(x + ih) / h to machine
precision for tiny h. Nothing here is shared with the package.

References: Zhao and Jones 2026, arXiv:2601.00671, sections 2 and 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_STEP = 1e-30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A memory, how its stream is cut, and how many memories stand side by side."""

    num_subkeys: int
    num_heads: int
    top_k: int
    lookahead: int
    score: str
    chunk_size: int
    groups: int = 1


class Inputs(NamedTuple):
    """Fast weights before the first token, the same in every group, and what comes in."""

    keys: np.ndarray  # [heads, 2, subkeys, half]
    values: np.ndarray  # [slots, value]
    query: np.ndarray  # [batch, length, heads, key]
    value: np.ndarray  # [batch, length, value]
    gate: np.ndarray  # [batch, length]
    mask: np.ndarray  # [batch, length]


class Read(NamedTuple):
    slot_ids: np.ndarray  # [tokens, heads * top_k]
    slot_weights: np.ndarray  # the same
    output: np.ndarray  # [tokens, value]
    sub_key_ids: np.ndarray  # [tokens, heads, 2, top_k]
    margin: float  # Least difference of scores that the choice and order of slots rest on.


class Run(NamedTuple):
    output: np.ndarray  # [batch, length, value]
    slot_ids: np.ndarray  # [batch, length, heads * top_k]
    slot_weights: np.ndarray  # the same
    addressing_loss: np.ndarray  # [groups, chunks]
    keys: np.ndarray  # [groups, heads, 2, subkeys, half]
    values: np.ndarray  # [groups, slots, value]
    margin: float


class Streamed(NamedTuple):
    output: np.ndarray  # [batch, length, value]
    keys: np.ndarray  # [groups, ...], after the last token
    values: np.ndarray
    flushed_keys: np.ndarray  # and after a flush
    flushed_values: np.ndarray
    margin: float


def sub_key_scores(query: np.ndarray, keys: np.ndarray, score: str) -> np.ndarray:
    """`[tokens, heads, 2, subkeys]`; keys may be complex."""
    tokens, heads, key = query.shape
    halves = query.reshape(tokens, heads, 2, 1, key // 2)
    if score == "idw":
        return -np.log(1e-3 + np.sum((halves - keys) ** 2, axis=-1))
    return np.sum(halves * keys, axis=-1)


def read(query: np.ndarray, keys: np.ndarray, values: np.ndarray, settings: Settings) -> Read:
    scores = sub_key_scores(query, keys, settings.score)
    tokens, heads, _, subkeys = scores.shape
    top_k = settings.top_k
    slot_ids = np.zeros((tokens, heads, top_k), np.int64)
    slot_scores = np.zeros((tokens, heads, top_k))
    sub_key_ids = np.zeros((tokens, heads, 2, top_k), np.int64)
    margin = np.inf

    def best(numbers: np.ndarray) -> np.ndarray:
        nonlocal margin
        order = np.argsort(-numbers, kind="stable")
        margin = min(margin, np.min(-np.diff(numbers[order[: top_k + 1]]), initial=np.inf))
        return order[:top_k]

    for t, h in np.ndindex(tokens, heads):
        every_slot = np.add.outer(scores[t, h, 0], scores[t, h, 1]).reshape(subkeys**2)
        slot_ids[t, h] = best(every_slot)
        slot_scores[t, h] = every_slot[slot_ids[t, h]]
        for codebook in range(2):
            sub_key_ids[t, h, codebook] = best(scores[t, h, codebook])
    exponentials = np.exp(slot_scores.reshape(tokens, -1))
    weights = exponentials / exponentials.sum(axis=1, keepdims=True)
    slot_ids = slot_ids.reshape(tokens, -1)
    output = np.zeros((tokens, values.shape[1]))
    for t, place in np.ndindex(slot_ids.shape):
        output[t] += weights[t, place] * values[slot_ids[t, place]]
    return Read(slot_ids, weights, output, sub_key_ids, float(margin))


def addressing_loss(
    query: np.ndarray, keys: np.ndarray, sub_key_ids: np.ndarray, real: np.ndarray, score: str
) -> complex:
    """Negative entropy of the average access, both codebooks; 0 without real tokens."""
    if not np.any(real):
        return 0.0
    scores = sub_key_scores(query, keys, score)
    tokens, heads, _, subkeys = scores.shape
    loss = 0.0
    for codebook in range(2):
        average = np.zeros(subkeys, scores.dtype)
        for t, h in np.ndindex(tokens, heads):
            chosen = sub_key_ids[t, h, codebook]
            exponentials = np.exp(scores[t, h, codebook, chosen])
            average[chosen] += real[t] * exponentials / exponentials.sum()
        average = average / (heads * real.sum())
        loss = loss + np.sum(average * np.log(average + 1e-8))
    return loss


def gradient(function: Callable[[np.ndarray], complex], x: np.ndarray) -> np.ndarray:
    result = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        stepped = x.astype(np.complex128)
        stepped[index] += 1j * _STEP
        result[index] = np.imag(function(stepped)) / _STEP
    return result


def write(
    query: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    real: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    settings: Settings,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Keys and values after one chunk of tokens, and the addressing loss before."""
    access = read(query, keys, values, settings)

    def memory_loss(values: np.ndarray) -> complex:
        outputs = np.einsum("tp,tpv->tv", access.slot_weights, values[access.slot_ids])
        return 0.5 * np.sum(weight[:, None] * (outputs - target) ** 2)

    def entropy(keys: np.ndarray) -> complex:
        return addressing_loss(query, keys, access.sub_key_ids, real, settings.score)

    reads = np.zeros(len(values))
    for t, place in np.ndindex(access.slot_ids.shape):
        reads[access.slot_ids[t, place]] += real[t]
    step = settings.num_heads * settings.top_k / np.maximum(reads, 1)
    new_values = values - step[:, None] * gradient(memory_loss, values)
    return keys - gradient(entropy, keys), new_values, float(np.real(entropy(keys)))


def run(inputs: Inputs, settings: Settings) -> Run:
    """Whole sequences, chunk by chunk; pairs do not cross the ends of chunks."""
    batch, length = inputs.gate.shape
    members = np.split(np.arange(batch), settings.groups)
    places = settings.num_heads * settings.top_k
    output = np.zeros_like(inputs.value)
    slot_ids = np.zeros((batch, length, places), np.int64)
    slot_weights = np.zeros((batch, length, places))
    all_keys, all_values, losses, margin = [], [], [], np.inf
    for group in members:
        keys, values, group_losses = inputs.keys, inputs.values, []
        for start in range(0, length, settings.chunk_size):
            end = min(start + settings.chunk_size, length)
            tokens = [(b, t) for b in group for t in range(start, end)]
            rows = tuple(np.array(tokens).T)
            query, real = inputs.query[rows], inputs.mask[rows]
            got = read(query, keys, values, settings)
            output[rows], slot_ids[rows] = got.output, got.slot_ids
            slot_weights[rows], margin = got.slot_weights, min(margin, got.margin)
            target, weight = np.zeros_like(got.output), np.zeros(len(tokens))
            for index, (b, t) in enumerate(tokens):
                later = t + settings.lookahead
                if later < end:
                    target[index] = inputs.value[b, later]
                    weight[index] = inputs.gate[b, t] * inputs.mask[b, t] * inputs.mask[b, later]
            keys, values, loss = write(query, target, weight, real, keys, values, settings)
            group_losses.append(loss)
        all_keys.append(keys)
        all_values.append(values)
        losses.append(group_losses)
    return Run(
        output,
        slot_ids,
        slot_weights,
        np.array(losses),
        np.stack(all_keys),
        np.stack(all_values),
        float(margin),
    )


def stream(inputs: Inputs, settings: Settings) -> Streamed:
    """The same tokens one at a time; a chunk is written when its last target has come."""
    batch, length = inputs.gate.shape
    output = np.zeros_like(inputs.value)
    after: dict[str, list[np.ndarray]] = {name: [] for name in ("k", "v", "fk", "fv")}
    margin = np.inf

    def write_tokens(group, first, last, keys, values):
        tokens = [(b, t) for b in group for t in range(first, last)]
        rows = tuple(np.array(tokens).T)
        later = (rows[0], rows[1] + settings.lookahead)
        weight = inputs.gate[rows] * inputs.mask[rows] * inputs.mask[later]
        keys, values, _ = write(
            inputs.query[rows],
            inputs.value[later],
            weight,
            inputs.mask[rows],
            keys,
            values,
            settings,
        )
        return keys, values

    for group in np.split(np.arange(batch), settings.groups):
        keys, values, first = inputs.keys, inputs.values, 0
        for t in range(length):
            got = read(inputs.query[group, t], keys, values, settings)
            output[group, t], margin = got.output, min(margin, got.margin)
            if t + 1 - first == settings.chunk_size + settings.lookahead:
                keys, values = write_tokens(group, first, first + settings.chunk_size, keys, values)
                first += settings.chunk_size
        after["k"].append(keys)
        after["v"].append(values)
        if length - settings.lookahead > first:
            keys, values = write_tokens(group, first, length - settings.lookahead, keys, values)
        after["fk"].append(keys)
        after["fv"].append(values)
    return Streamed(output, *(np.stack(x) for x in after.values()), float(margin))


def sample(settings: Settings, *, batch: int, length: int, seed: int, masked: bool) -> Inputs:
    """Random inputs, exact in float32; key and value width 6 and 4."""
    rng = np.random.default_rng(seed)
    half, value = 3, 4
    shape = (settings.num_heads, 2, settings.num_subkeys, half)
    mask = rng.uniform(size=(batch, length)) < 0.75 if masked else np.ones((batch, length))
    arrays = Inputs(
        keys=rng.uniform(-1, 1, size=shape) / np.sqrt(2 * half),
        values=rng.normal(size=(settings.num_subkeys**2, value)) / np.sqrt(value),
        query=rng.normal(size=(batch, length, settings.num_heads, 2 * half)) / 2,
        value=rng.normal(size=(batch, length, value)),
        gate=rng.uniform(size=(batch, length)),
        mask=mask,
    )
    return Inputs(*(x.astype(np.float32).astype(np.float64) for x in arrays))
