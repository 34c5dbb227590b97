"""The training of SmolLM2's memory in PyTorch: what `further_training` runs."""

import dataclasses
import json
import os
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fwpkm_jax.core.documents import Documents
from fwpkm_jax.interchange import smollm2
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.io.safetensors import SafetensorsFile
from fwpkm_jax.models.block import ForwardContext
from fwpkm_jax.run.load import load_run
from lab.real_model.further_training import Options
from lab.real_model.made_sessions import VALIDATION
from lab.real_model.peer_layer import CHUNK, RULE, Layer

LAYER = smollm2.LAYER
_SHARPNESS = 8.0
"""Of the address loss, as `training.losses.address_loss` has it for halves of unit length."""
_TEXT = 4
"""One of so many tokens that are no answers is in the loss, with so many times its weight."""


class Frozen:
    """The model, cut at the memory's layer."""

    def __init__(self, base: Path, dtype: torch.dtype) -> None:
        arrays = Weights(load_run(base).params, {}).named()
        config = LlamaConfig.from_json_file(base / "hf" / "config.json")
        config._attn_implementation = "sdpa"
        names = {"mixer": "self_attn", "feed_forward": "mlp"}
        names |= {"mixer_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
        state = {}
        for name, array in arrays.items():
            tensor = torch.tensor(np.asarray(array, np.float32))
            _, *parts = name.split("/")
            if parts[0] == "blocks":
                path = ".".join(("model.layers", parts[1], names[parts[2]], *parts[3:-1]))
                state[f"{path}.weight"] = tensor.T if parts[-1] == "kernel" else tensor
        state["model.embed_tokens.weight"] = torch.tensor(np.asarray(arrays["params/embedding"]))
        state["model.norm.weight"] = torch.tensor(np.asarray(arrays["params/final_norm/weight"]))
        whole = LlamaForCausalLM(config)
        missing = whole.load_state_dict(state, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}, missing
        whole = whole.to(dtype).eval().requires_grad_(False)
        self._model, self._layers, self._norm = whole.model, whole.model.layers, whole.model.norm
        self.embedding = whole.model.embed_tokens.weight
        self.dtype = dtype

    def below(self, tokens: Tensor) -> Tensor:
        """The stream at the memory's entry."""
        self._model.layers, self._model.norm = self._layers[:LAYER], nn.Identity()
        with torch.no_grad():
            return self._model(tokens, use_cache=False).last_hidden_state

    def above(self, stream: Tensor) -> Tensor:
        """What the head reads."""
        self._model.layers, self._model.norm = self._layers[LAYER:], self._norm
        out = self._model(inputs_embeds=stream.to(self.dtype), use_cache=False)
        return out.last_hidden_state


class Rows(NamedTuple):
    """Sessions of two rows, one after the other in `made_sessions`, apart here.

    Attributes:
      told: tokens of the first row, `[sessions, tokens]`.
      real: 1 for its tokens, 0 for padding.
      asked: tokens of the second row.
      weight: of the label at each of its tokens, 0 for padding.
      place: where in the first row each of its tokens was told, as `address_loss` has it; -1.
    """

    told: Tensor
    real: Tensor
    asked: Tensor
    weight: Tensor
    place: Tensor

    def of(self, numbers: Any) -> "Rows":
        """Some sessions, without padding that none of them needs."""
        rows = Rows(*(x[numbers] for x in self))
        told = int((rows.real.sum(0) > 0).sum())
        asked = int((rows.weight.sum(0) > 0).nonzero().max()) + 2
        told = -(-told // CHUNK) * CHUNK
        cut = rows.told[:, :told], rows.real[:, :told]
        return Rows(*cut, *(x[:, :asked] for x in (rows.asked, rows.weight, rows.place)))


def rows_of(files: Sequence[Path]) -> Rows:
    """The sessions of `made_sessions` that have two rows."""
    found: list[tuple[np.ndarray, ...]] = []
    for file in files:
        with np.load(file) as arrays:
            parts = [arrays[x] for x in ("tokens", "segment_ids", "loss_weight", "answer_distance")]
        for tokens, segments, weight, distance in zip(*parts, strict=True):
            if segments.max() != 2:
                continue
            start, end = (segments == 2).nonzero()[0][[0, -1]]
            length = int((segments == 1).sum())
            place = np.arange(len(distance)) - distance.astype(int)
            place = np.where(distance > 0, place, -1)[start : end + 1]
            place[place >= length] = -1
            asked = tokens[start : end + 2]
            found.append((tokens[:length], asked, weight[start : end + 1], place))
    sizes = [-(-max(len(x[0]) for x in found) // CHUNK) * CHUNK, max(len(x[1]) for x in found)]
    rows = Rows(
        torch.zeros(len(found), sizes[0], dtype=torch.int64),
        torch.zeros(len(found), sizes[0]),
        torch.zeros(len(found), sizes[1], dtype=torch.int64),
        torch.zeros(len(found), sizes[1]),
        torch.full((len(found), sizes[1]), -1),
    )
    for number, (told, asked, weight, place) in enumerate(found):
        rows.told[number, : len(told)] = torch.tensor(told)
        rows.real[number, : len(told)] = 1
        rows.asked[number, : len(asked)] = torch.tensor(asked)
        rows.weight[number, : len(weight)] = torch.tensor(weight.astype(np.float32))
        rows.place[number, : len(place)] = torch.tensor(place)
    return rows


class Streams:
    """Streams at the memory's entry, which are computed once for each session.

    Args:
      frozen: the model.
      folder: where they are kept for others; None: nowhere.
    """

    def __init__(self, frozen: Frozen, folder: Path | None) -> None:
        self._frozen, self._folder = frozen, folder
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        """Sessions so far."""
        return len(self._kept)

    def __call__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Of both rows of some sessions, float16 `[sessions, tokens, width]`."""
        lengths = [
            (int(real.sum()), int((weight > 0).nonzero().max()) + 2)
            for real, weight in zip(rows.real, rows.weight, strict=True)
        ]
        names = []
        for told, asked, (first, second) in zip(rows.told, rows.asked, lengths, strict=True):
            tokens = torch.cat((told[:first], asked[:second])).numpy()
            names.append(f"{first}-{zlib.crc32(tokens.tobytes()):08x}.npz")
        new = [at for at, name in enumerate(names) if name not in self._kept]
        if self._folder is not None:
            for at in [at for at in new if (self._folder / names[at]).is_file()]:
                with np.load(self._folder / names[at]) as parts:
                    pair = torch.tensor(parts["told"]), torch.tensor(parts["asked"])
                self._kept[names[at]] = pair
                new.remove(at)
        if new:
            made = [self._frozen.below(x[new]).half() for x in (rows.told, rows.asked)]
            for at, *both in zip(new, *made, strict=True):
                told, asked = (x[:n].clone() for x, n in zip(both, lengths[at], strict=True))
                self._kept[names[at]] = told, asked
                if self._folder is not None:
                    part = self._folder / f"{names[at]}.{os.getpid()}.npz"
                    np.savez(part, told=told.numpy(), asked=asked.numpy())
                    part.rename(self._folder / names[at])
        whole = []
        for which, like in enumerate((rows.told, rows.asked)):
            width = self._frozen.embedding.shape[1]
            padded = torch.zeros(*like.shape, width, dtype=torch.float16)
            for at, name in enumerate(names):
                part = self._kept[name][which]
                padded[at, : len(part)] = part
            whole.append(padded)
        return whole[0], whole[1]


def answered(
    layer: Layer, frozen: Frozen, rows: Rows, streams: tuple[Tensor, Tensor], *, write: bool = True
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Logits, labels and weights of the labels that count, and what the losses need."""
    told, asked = (x.float() for x in streams)
    added, made = layer(told, rows.real, asked, write=write)
    text = (rows.weight > 0) & (rows.weight < 1)
    drawn = text & (torch.rand(text.shape) < 1 / _TEXT)
    counts = (rows.weight == 1) | drawn
    counts[:, -1] = False  # It has no label.
    weights = rows.weight * torch.where(text, _TEXT, 1)
    states = frozen.above(asked + added)[counts]
    return (
        (states.to(frozen.dtype) @ frozen.embedding.T).float(),
        rows.asked.roll(-1, 1)[counts],
        weights[counts],
        made,
    )


def loss_of(
    layer: Layer, frozen: Frozen, rows: Rows, streams: tuple[Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The trained loss, and what of it is logged."""
    logits, labels, weights, made = answered(layer, frozen, rows, streams)
    losses = F.cross_entropy(logits, labels, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    asks = rows.place >= 0
    place = rows.place[asks]
    scores = _SHARPNESS * made["query"] @ made["told"].transpose(1, 2)
    scores = scores.masked_fill(rows.real[:, None] == 0, -1e9)[asks]
    address = F.cross_entropy(scores, place)
    found = made["found"][asks].clamp(min=0)
    share = found.gather(1, place[:, None])[:, 0] / (found.sum(-1) + 0.05)
    table = -torch.log(share + 0.02).mean()
    answers = weights == 1
    shown = {
        "loss": loss,
        "right": (logits.argmax(-1) == labels)[answers].float().mean(),
        "nearest": (scores.argmax(-1) == place).float().mean(),
        "share": share.mean(),
    }
    return loss + 0.5 * address + 0.2 * table, shown


def exact_answers(
    layer: Layer, frozen: Frozen, rows: Rows, *, batch: int, write: bool
) -> list[float]:
    """Share of answers of each session whose tokens are all the most likely ones."""
    shares: list[float] = []
    for first in range(0, len(rows.told), batch):
        some = rows.of(slice(first, first + batch))
        some = some._replace(weight=(some.weight == 1).float())
        with torch.no_grad():
            streams = frozen.below(some.told), frozen.below(some.asked)
            logits, labels, _, _ = answered(layer, frozen, some, streams, write=write)
        right = torch.zeros_like(some.weight, dtype=torch.bool)
        right[some.weight > 0] = logits.argmax(-1) == labels
        for correct, weight in zip(right, some.weight, strict=True):
            ends = ((weight > 0) & (weight.roll(-1) == 0)).nonzero()[:, 0].tolist()
            starts = ((weight > 0) & (weight.roll(1) == 0)).nonzero()[:, 0].tolist()
            # The last token ends the answer.
            answers = [correct[a:b].all().item() for a, b in zip(starts, ends, strict=True)]
            shares.append(float(np.mean(answers)))
    return shares


def check(layer: Layer, options: Options, rows: Rows) -> float:
    """Compares the layer's output for one session with the library's.

    Returns:
      The worst difference, as a share of the largest output.

    Raises:
      SystemExit: it is more than rounding.
    """
    rule = dataclasses.replace(RULE, retention=None)
    memory = dataclasses.replace(smollm2.MEMORY, rule=rule)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        smollm2.with_memory(options.base, start, weights=options.weights, memory=memory)
        run = load_run(start)
    (told, real, asked, weight, _) = (x.numpy() for x in rows)
    assert len(told) == 1
    length = told.shape[1]
    segments = np.concatenate([real, 2 * np.ones_like(weight)], 1).astype(np.int32)
    tokens = np.concatenate([told, asked], 1).astype(np.int32)
    documents = Documents.of(jnp.asarray(segments))
    context = ForwardContext(real=documents.mask(None), starts=documents.starts)
    x = jnp.asarray(run.model.embedding[...])[tokens]
    for block in run.model.blocks[:LAYER]:
        x = block(x, None, context).x
    block = run.model.blocks[LAYER]
    seen = block._mixed(x, None, context)[0]
    empty = jax.tree.map(jnp.asarray, run.memory[f"layer_{LAYER}"])
    y = block.memory(seen, empty, mask=context.real, starts=context.starts)[0]
    expected, streams = np.asarray(y)[:, length:], torch.tensor(np.asarray(x))
    with torch.no_grad():
        found, _ = layer(streams[:, :length], rows.real, streams[:, length:])
    # Its own writes are read in the second row's later chunks by the library alone.
    near = slice(0, CHUNK)
    worst = np.abs(found.numpy() - expected)[:, near].max() / np.abs(expected[:, near]).max()
    if worst > 1e-4:
        raise SystemExit(f"The layer differs from the library's by {worst:.1e} of the largest.")
    return float(worst)


def train(options: Options) -> None:
    """Trains, and writes the average of the weights."""
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True)
    stored = SafetensorsFile(options.weights or smollm2.FOLDER / "memory.safetensors")
    layer = Layer({name: stored.read(name) for name in stored}, delta=options.rule == "sdm")
    rows = rows_of(options.sessions)
    frozen = Frozen(options.base, getattr(torch, options.dtype))
    streams_of = Streams(frozen, options.states)
    asking = (rows.place >= 0).any(1)
    with (options.out / "log.jsonl").open("w", buffering=1) as log:

        def write(**line: Any) -> None:
            log.write(json.dumps(line) + "\n")

        first = int(asking.nonzero()[0])
        differs = None if layer.delta else check(layer, options, rows.of([first]))
        write(check=differs, sessions=len(rows.told))
        valid, train = range(VALIDATION), list(range(VALIDATION, len(rows.told)))

        def report(**line: Any) -> None:
            """Logs the mean of what the validation's sessions show."""
            found: list[dict[str, float]] = []
            with torch.no_grad():
                for begin in range(0, VALIDATION, options.batch):
                    numbers = list(valid[begin : begin + options.batch])
                    batch = rows.of(numbers)
                    shown = loss_of(layer, frozen, batch, streams_of(batch))[1]
                    found.append({name: x.item() for name, x in shown.items()})
            means = {name: round(np.mean([x[name] for x in found]).item(), 4) for name in found[0]}
            write(**line, valid=means)

        report(step=0)
        weights = [x for x in layer.parameters() if x.requires_grad]
        optimizer = torch.optim.Adam(weights, lr=options.rate, betas=(0.9, 0.98))
        average = {name: x.detach().clone() for name, x in layer.named_parameters()}
        began, step, order = time.time(), 0, list[int]()
        while (used := (time.time() - began) / 60 / max(options.minutes, 1e-9)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = options.rate * min((step + 1) / 20, 1, 0.1 + 1.8 * (1 - used))
            if len(order) < options.batch:
                order = [train[at] for at in torch.randperm(len(train)).tolist()]
            numbers, order = order[: options.batch], order[options.batch :]
            batch = rows.of(numbers)
            loss, shown = loss_of(layer, frozen, batch, streams_of(batch))
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            step += 1
            share = max(0.02, 1 / (step + 1))
            for name, x in layer.named_parameters():
                average[name] += share * (x.detach() - average[name])
            seconds = round(time.time() - began)
            line = {name: round(x.item(), 4) for name, x in (shown | {"norm": norm}).items()}
            write(step=step, seconds=seconds, read=len(streams_of), **line)
            if step % 100 == 0:
                save_file(layer.arrays(average), options.out / "memory.safetensors")
        layer.load_state_dict(average)
        report(step=step)
        for test in options.tests:
            asked = rows_of([test])
            asked = asked.of((asked.place >= 0).any(1).nonzero()[:, 0])
            for written in (True, False):
                shares = exact_answers(layer, frozen, asked, batch=options.batch, write=written)
                mean = round(float(np.mean(shares)), 4)
                write(test=test.name, step=step, written=written, exact=mean, by_session=shares)
    save_file(layer.arrays(average), options.out / "memory.safetensors")
