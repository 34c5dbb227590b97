"""Trains the memory of SmolLM2 alone, in PyTorch: its bfloat16 is the faster one on a processor.

    python -m lab.real_model.peer_training MODEL BOOKS_JSONL OUT

MODEL is the model as a folder of the transformers library (with its tokenizer.json). Needs torch,
transformers and safetensors. OUT gets `memory.safetensors`, the weights under the library's names,
and `log.jsonl`. The memory is the library's to rounding (float32: 1e-6 of outputs near 1): the same
slots, weights and writes, but reads are sums over slots that question and statement share, so that
no table is made.

What decides how fast it learns:

- the layers under the memory are frozen: hidden states of many sessions are computed once;
- values begin as a linear code of the token that was read, and the output as the map from that code
  to the direction that makes the frozen layers above say the token (the mean Jacobian);
- queries read the words before them through an attention layer, whose output only the memory reads;
- an address loss on the cosine of queries, and one on the share of a read that is the right one;
- the gate is shown where values begin.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from lab.real_model.grammar import Fact, Grammar, sentences

LAYER, CHUNK, TOP_K, SUBKEYS, KEY, VALUE, MODEL = 22, 64, 16, 128, 128, 256, 576
TOLD, ASKED, QUESTIONS, ANSWER = 256, 160, 12, 5
HEADS, HEAD, WINDOW, TURNED = 4, 32, 32, 8
SESSIONS, WIDE, BATCH, MINUTES, RATE = 5600, 0.3, 8, 60, 1e-3
PAIRS = 450  # Steps of the address loss alone, before all else.
SIZE = 8.0  # Of the attention's first output beside states whose root mean square is about 12.
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
SYSTEM += "<|im_end|>\n"
USER, END, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"


def unit(x, scale=1.0, eps=1e-5):
    """At unit root mean square, times a scale."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale


def shared(ids, weights, other_ids, other_weights):
    """Sums of products of weights over shared slots, `[batch, tokens, others]`."""
    total = 0
    for place in range(TOP_K):
        same = ids[:, :, place, None] == other_ids.flatten(1)[:, None]
        same = same.view(*ids.shape[:2], -1, TOP_K)
        total = total + weights[:, :, place, None] * (same * other_weights[:, None]).sum(-1)
    return total


class Attention(nn.Module):
    """The library's: gated, queries and keys normed by head, a part of each head rotated."""

    def __init__(self):
        super().__init__()
        width = HEADS * HEAD
        self.norm = nn.Parameter(torch.ones(MODEL))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(HEAD)), nn.Parameter(torch.ones(HEAD))
        self.q, self.k = nn.Linear(MODEL, 2 * width, False), nn.Linear(MODEL, width, False)
        self.v, self.o = nn.Linear(MODEL, width, False), nn.Linear(width, MODEL, False)
        for layer in (self.q, self.k, self.v, self.o):
            nn.init.normal_(layer.weight, std=0.02)

    def rotated(self, x):
        speeds = 10_000.0 ** (-torch.arange(0, TURNED, 2) / TURNED)
        angle = torch.arange(x.shape[1])[:, None] * speeds
        cosine, sine = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x[..., :TURNED].chunk(2, -1)
        turned = first * cosine - second * sine, second * cosine + first * sine
        return torch.cat([*turned, x[..., TURNED:]], -1)

    def forward(self, x):
        x, shape = unit(x, self.norm), (*x.shape[:2], HEADS, -1)
        query, gate = self.q(x).view(shape).chunk(2, -1)
        key, value = self.k(x).view(shape), self.v(x).view(shape)
        query = self.rotated(unit(query, self.q_norm))
        key = self.rotated(unit(key, self.k_norm))
        place = torch.arange(x.shape[1])
        back = place[:, None] - place
        mask = (back >= 0) & (back < WINDOW)
        heads = [y.transpose(1, 2) for y in (query, key, value)]
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)
        return SIZE * self.o((out * gate.sigmoid()).flatten(2))


class Memory(nn.Module):
    """FwPKM with still keys and an empty table, behind an attention layer of its own."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.spared = torch.zeros(MODEL, 0)  # Directions in which the attention adds nothing.
        for name in ("query", "value", "gate"):
            self.register_parameter(f"{name}_scale", nn.Parameter(torch.ones(MODEL)))
        self.out_scale = nn.Parameter(torch.ones(VALUE))
        self.query, self.value = nn.Linear(MODEL, KEY), nn.Linear(MODEL, VALUE)
        self.gate, self.out = nn.Linear(MODEL, 8), nn.Linear(VALUE, MODEL)
        for layer in (self.query, self.value, self.gate, self.out):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.gate.bias, 2.0)
        self.register_buffer("keys", torch.zeros(2, SUBKEYS, KEY // 2))

    def seen(self, x):
        """The stream with what the attention adds."""
        added = self.attention(x)
        return x + added - (added @ self.spared) @ self.spared.T

    def spare(self):
        """Keeps the attention out of what values and gates read, so that these stay."""
        with torch.no_grad():
            gate = (self.gate.weight * self.gate_scale).mean(0, keepdim=True)
            rows = torch.cat([self.value.weight * self.value_scale, gate])
            self.spared = torch.linalg.qr(rows.T)[0]

    def join(self):
        """Ends `spare` with the same outputs, so that all can learn together."""
        with torch.no_grad():
            weight = self.attention.o.weight
            weight.copy_(weight - self.spared @ (self.spared.T @ weight))
            self.spared = torch.zeros(MODEL, 0)

    def queries(self, x):
        """Halves of unit length, of what is seen."""
        halves = self.query(unit(x, self.query_scale)).unflatten(-1, (2, -1))
        return (halves * torch.rsqrt(halves.pow(2).sum(-1, keepdim=True) + 1e-6)).flatten(-2)

    def signals(self, x):
        value = self.value(unit(x, self.value_scale))
        value = value - value.mean(-1, keepdim=True)
        value = value / (value.std(-1, keepdim=True) + 1e-6)
        gate = torch.sigmoid(self.gate(unit(x, self.gate_scale)).mean(-1))
        return self.queries(x), value, gate

    def slots(self, query):
        """Slots and weights of each token, `[batch, tokens, top_k]`."""
        halves = query.unflatten(-1, (2, -1))
        with torch.no_grad():
            products = torch.einsum("btpk,psk->btps", halves, self.keys)
            near = halves.pow(2).sum(-1)[..., None] + self.keys.pow(2).sum(-1) - 2 * products
            ids = torch.topk(near, TOP_K, dim=-1, largest=False).indices
        chosen = torch.stack([self.keys[half][ids[..., half, :]] for half in (0, 1)], -3)
        scores = -torch.log(1e-3 + ((halves[..., None, :] - chosen) ** 2).sum(-1))
        pairs = (scores[..., 0, :, None] + scores[..., 1, None, :]).flatten(-2)
        slots = (ids[..., 0, :, None] * SUBKEYS + ids[..., 1, None, :]).flatten(-2)
        best = torch.topk(pairs, TOP_K, dim=-1).indices
        return slots.gather(-1, best), pairs.gather(-1, best).softmax(-1)

    def forward(self, told, told_mask, asked, *, write=True):
        """What the layer adds to the asking row, and what it was made of."""
        query, value, gate = self.signals(self.seen(asked))
        ids, weights = self.slots(query)
        read, made = torch.zeros_like(value), {"gate": gate, "query": query}
        if write:
            told_query, told_value, told_gate = self.signals(self.seen(told))
            told_ids, told_weights = self.slots(told_query)
            real, length = told_mask.float(), told.shape[1]
            place = torch.arange(length)
            paired = (place + 1 < ((place // CHUNK + 1) * CHUNK).clamp(max=length)).float()
            weight = told_gate * paired * real * F.pad(real, (0, 1))[:, 1:]
            target = F.pad(told_value, (0, 0, 0, 1))[:, 1:]
            errors, steps = [], []
            for first in range(0, length, CHUNK):
                here = slice(first, min(first + CHUNK, length))
                with torch.no_grad():
                    flat = told_ids[:, here].flatten(1)
                    same = flat[:, :, None] == flat[:, None]
                    counts = (same * real[:, here].repeat_interleave(TOP_K, 1)[:, None]).sum(-1)
                    counts = counts.view(len(told), -1, TOP_K).clamp(min=1)
                error = target[:, here]
                if first:
                    seen = shared(
                        told_ids[:, here],
                        told_weights[:, here],
                        told_ids[:, :first],
                        torch.cat(steps, 1),
                    )
                    error = error - seen @ torch.cat(errors, 1)
                errors.append(weight[:, here, None] * error)
                steps.append(TOP_K * told_weights[:, here] / counts)
            found = shared(ids, weights, told_ids, torch.cat(steps, 1))
            read = found @ torch.cat(errors, 1)
            made |= {"told_gate": told_gate, "told_query": told_query}
            made["found"] = found * weight[:, None]
        mixed = gate[..., None] * read + (1 - gate[..., None]) * value
        return gate[..., None] * self.out(unit(mixed, self.out_scale)), made

    def named(self):
        """The weights under the library's names."""
        layer, arrays = f"params/blocks/{LAYER}/memory", {}
        for name in ("query", "value", "gate", "out"):
            linear = getattr(self, name)
            arrays[f"{layer}/{name}_proj/kernel"] = linear.weight.detach().numpy().T
            arrays[f"{layer}/{name}_proj/bias"] = linear.bias.detach().numpy()
            # The library multiplies by 1 + weight.
            scale = getattr(self, f"{name}_scale").detach().numpy()
            arrays[f"{layer}/{name}_norm/weight"] = scale - 1
        arrays[f"memory/layer_{LAYER}/keys"] = self.keys.numpy()[None, None]
        attention = self.attention
        arrays[f"{layer}_mixer_norm/weight"] = attention.norm.detach().numpy()
        for name, size in (("q", 1.0), ("k", 1.0), ("v", 1.0), ("o", SIZE)):
            weight = getattr(attention, name).weight.detach().numpy().T * size
            arrays[f"{layer}_mixer/{name}_proj/kernel"] = weight
        arrays[f"{layer}_mixer/q_norm/weight"] = attention.q_norm.detach().numpy()
        arrays[f"{layer}_mixer/k_norm/weight"] = attention.k_norm.detach().numpy()
        return {name: np.ascontiguousarray(x.astype(np.float16)) for name, x in arrays.items()}


class Sessions:
    """Rows of sessions as tokens, with places of answers and of what they were told behind."""

    def __init__(self, tokenizer, grammar, split):
        self._tokenizer, self._grammar, self._split = tokenizer, grammar, split

    def _encode(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)

    def __call__(self, number):
        rng = random.Random(f"{self._split}-{number}")
        while True:
            session = self._grammar.session(rng, facts=rng.randint(9, 14), asked=12, chat=0.5)
            if (rows := self._rows(session, rng)) is not None:
                return rows

    def _rows(self, session, rng):
        text, places, left = SYSTEM if session.told_in_chat else "", {}, 0
        for number, one in enumerate(session.told):
            if session.told_in_chat and not left:
                text, left = text + USER, rng.randint(1, 3)
            elif text:
                text += " "
            if isinstance(one, Fact):
                text += f"{one.before} "
                places[number] = len(text)
                text += one.value + one.after
            else:
                text += one
            left -= 1
            if session.told_in_chat and (not left or one is session.told[-1]):
                text, left = text + END + ASSISTANT + "OK." + END, 0
        told = self._encode(text)
        if len(told.ids) > TOLD:
            return None
        asked = self._encode(SYSTEM).ids if session.asked_in_chat and rng.random() < 0.6 else []
        answers = np.full((QUESTIONS, ANSWER), -1)
        statements, ends, count = answers.copy(), np.full(QUESTIONS, -1), 0
        for question in session.asked:
            value, place = self._encode(f" {question.answer}").ids, places[question.fact]
            first = next(i for i, (_, end) in enumerate(told.offsets) if end > place)
            if len(value) > ANSWER or told.ids[first : first + len(value)] != value:
                continue
            if session.asked_in_chat:
                before, after = USER + question.text + END + ASSISTANT, END
            else:
                before, after = ("\n" if asked else "") + question.text, "."
            before, after = self._encode(before).ids, self._encode(after).ids
            if len(asked) + len(before + value + after) > ASKED or count >= QUESTIONS:
                break
            asked = asked + before
            steps = np.arange(len(value))
            answers[count, steps] = len(asked) - 1 + steps
            statements[count, steps] = first - 1 + steps
            ends[count] = len(asked) - 1 + len(value)
            asked, count = asked + value + after, count + 1
        return (told.ids, asked, answers, statements, ends) if count >= 4 else None


def batch_of(sessions, numbers):
    """Arrays of sessions."""
    rows = [sessions(number) for number in numbers]
    batch = {}
    for name, column, length in (("told", 0, TOLD), ("asked", 1, ASKED)):
        tokens, mask = torch.zeros(len(rows), length).long(), torch.zeros(len(rows), length)
        for number, row in enumerate(rows):
            tokens[number, : len(row[column])] = torch.tensor(row[column])
            mask[number, : len(row[column])] = 1
        batch[name], batch[f"{name}_mask"] = tokens, mask
    for name, column in (("answers", 2), ("statements", 3), ("ends", 4)):
        batch[name] = torch.as_tensor(np.stack([row[column] for row in rows]))
    return batch


class Frozen:
    """The model, cut at the memory's layer."""

    def __init__(self, folder):
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        for weight in whole.parameters():
            weight.requires_grad_(False)
        self.above, self._layers = whole.model, whole.model.layers
        self._norm = whole.model.norm
        self.embedding = whole.model.embed_tokens.weight.float()

    def states_below(self, batch):
        """Adds hidden states at the memory's entry, float16."""
        self.above.layers, self.above.norm = self._layers[:LAYER], nn.Identity()
        with torch.no_grad():
            for name in ("told", "asked"):
                states = self.above(batch[name], use_cache=False).last_hidden_state
                batch[f"{name}_states"] = states.half()
        return batch

    def final(self, states):
        """What the head reads, from states at the memory's entry."""
        self.above.layers, self.above.norm = self._layers[LAYER:], self._norm
        out = self.above(inputs_embeds=states.bfloat16(), use_cache=False)
        return out.last_hidden_state.float()


def gathered(x, places):
    """Rows of `[batch, tokens, ...]` at places `[batch, n]`; -1 gives the first."""
    return torch.gather(x, 1, places.clamp(min=0)[..., None].expand(-1, -1, x.shape[-1]))


def begin_values(memory, frozen, batches, size=500.0):
    """Values that code the token read, and the output that makes the frozen layers say it."""
    total, count = torch.zeros(MODEL, MODEL), 0
    for batch in batches:
        states = batch["asked_states"].float().requires_grad_(True)
        drawn = torch.randn_like(states) * batch["asked_mask"][..., None]
        (slope,) = torch.autograd.grad((frozen.final(states) * drawn).sum(), states)
        real = batch["asked_mask"] > 0
        slope = slope[real] * states.detach()[real].norm(dim=1, keepdim=True)
        usual = slope.norm(dim=1) < 4 * slope.norm(dim=1).median()
        total, count = total + drawn[real][usual].T @ slope[usual], count + int(usual.sum())
    wanted = (frozen.embedding - frozen.embedding.mean(0)) @ (total / count)
    wanted = wanted / wanted.norm(dim=1, keepdim=True)
    centred = wanted - wanted.mean(0)
    code = centred @ torch.linalg.svd(centred, full_matrices=False)[2][:VALUE].T
    code = code - code.mean(1, keepdim=True)
    code = code / code.norm(dim=1, keepdim=True) * VALUE**0.5
    states = torch.cat([b["told_states"][b["told_mask"] > 0].float() for b in batches])
    tokens = torch.cat([b["told"][b["told_mask"] > 0] for b in batches])
    inputs = torch.cat([unit(states), torch.ones(len(states), 1)], 1)
    rarity = torch.bincount(tokens, minlength=len(wanted)).float()[tokens] ** -0.7
    weighted = inputs * rarity[:, None]
    ridge = 1e-3 * rarity.sum()
    value = torch.linalg.solve(
        weighted.T @ inputs + ridge * torch.eye(MODEL + 1), weighted.T @ code[tokens]
    )
    read = inputs @ value
    read = read - read.mean(1, keepdim=True)
    read = read / read.norm(dim=1, keepdim=True) * VALUE**0.5
    weighted = read * rarity[:, None]
    out = torch.linalg.solve(
        weighted.T @ read + ridge * torch.eye(VALUE), weighted.T @ wanted[tokens]
    )
    out = out / (read @ out).norm(dim=1).mean()
    with torch.no_grad():
        memory.value.weight.copy_(value[:MODEL].T)
        memory.value.bias.copy_(value[MODEL])
        memory.out.weight.copy_(out.T * size)


def fit_keys(memory, batch, rounds=12):
    """Sub-keys at the centres of the halves of queries."""
    with torch.no_grad():
        seen = memory.seen(batch["told_states"].float())
        query = memory.queries(seen)[batch["told_mask"] > 0]
        query = query[torch.randperm(len(query))[:14000]].unflatten(-1, (2, -1))
        for half in (0, 1):
            points = query[:, half]
            centres = points[torch.randperm(len(points))[:SUBKEYS]].clone()
            for _ in range(rounds):
                nearest = torch.cdist(points, centres).argmin(1)
                sums = torch.zeros_like(centres).index_add_(0, nearest, points)
                counts = torch.bincount(nearest, minlength=SUBKEYS).float()[:, None]
                centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
            memory.keys[half] = centres


def queries_of(memory, batch):
    """Queries of both rows, without a read."""
    rows = (batch["told_states"], batch["asked_states"])
    return [memory.queries(memory.seen(states.float())) for states in rows]


def address_loss(told, asked, batch, sharpness=7.5):
    """Cross-entropy of the statement among told queries by cosines, and how often it is nearest."""
    answers, statements = batch["answers"].flatten(1), batch["statements"].flatten(1)
    asks = answers >= 0
    scores = sharpness * gathered(asked, answers) @ told.transpose(1, 2)
    scores = scores.masked_fill(batch["told_mask"][:, None] == 0, -1e9)[asks]
    nearest = (scores.argmax(-1) == statements[asks]).float().mean()
    return F.cross_entropy(scores, statements[asks]), nearest


def answer_logits(memory, frozen, batch, *, write=True):
    """Logits and labels of answers and of what follows them."""
    told, asked = batch["told_states"].float(), batch["asked_states"].float()
    added, made = memory(told, batch["told_mask"], asked, write=write)
    places = torch.cat([batch["answers"], batch["ends"][..., None]], -1).flatten(1)
    real = places >= 0
    states = gathered(frozen.final(asked + added), places)[real]
    labels = torch.gather(batch["asked"], 1, (places + 1).clamp(min=0, max=ASKED - 1))[real]
    return states @ frozen.embedding.T, labels, real, made


def open_loss(gate, places, mask):
    """Cross-entropy of a gate that should be open at places and shut elsewhere."""
    wanted = torch.zeros_like(gate)
    wanted.scatter_reduce_(1, places.clamp(min=0), (places >= 0).float(), "amax")
    gate, real = gate.clamp(1e-5, 1 - 1e-5), mask > 0
    shut = (1 - wanted)[real]
    opened = -(torch.log(gate) * wanted)[real].sum() / wanted[real].sum()
    return opened - (torch.log(1 - gate)[real] * shut).sum() / shut.sum()


def loss_of(memory, frozen, batch):
    """The trained loss, and what of it is logged."""
    logits, labels, real, made = answer_logits(memory, frozen, batch)
    kinds = torch.full((len(real), QUESTIONS, ANSWER + 1), 0.7)
    kinds[..., 0], kinds[..., ANSWER] = 1.0, 0.3
    weights = kinds.flatten(1)[real]
    losses = F.cross_entropy(logits, labels, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    address, nearest = address_loss(made["told_query"], made["query"], batch)
    answers, statements = batch["answers"].flatten(1), batch["statements"].flatten(1)
    found = gathered(made["found"], answers).clamp(min=0)
    right = torch.gather(found, 2, statements.clamp(min=0)[..., None])[..., 0]
    share = (right / (found.sum(-1) + 0.05))[answers >= 0]
    table = -torch.log(share + 0.02).mean()
    gates = open_loss(made["gate"], answers, batch["asked_mask"])
    gates = gates + open_loss(made["told_gate"], statements, batch["told_mask"])
    first = weights == 1.0
    exact = (logits.argmax(-1) == labels)[first].float().mean()
    shown = {"loss": loss, "first": exact, "nearest": nearest, "share": share.mean()}
    return loss + 0.5 * (address + table) + 0.3 * gates, shown


def asked_exactly(memory, frozen, batch):
    """Shares of exact answers with the memory written and not written."""
    shares = {}
    with torch.no_grad():
        for write in (True, False):
            logits, labels, real, _ = answer_logits(memory, frozen, batch, write=write)
            right = torch.ones_like(real)
            right[real] = logits.argmax(-1) == labels
            right = right.unflatten(1, (QUESTIONS, -1))[..., :ANSWER].all(-1)
            asks = batch["answers"][..., 0] >= 0
            share = (right & asks).sum() / asks.sum()
            shares["written" if write else "not written"] = round(share.item(), 4)
    return shares


def picked(data, numbers):
    return {name: x[numbers] for name, x in data.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "books", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    options.out.mkdir(parents=True)
    log = (options.out / "log.jsonl").open("w", buffering=1)
    file = options.model / "tokenizer.json"
    tokenizer, books = Tokenizer.from_file(str(file)), sentences(options.books)
    frozen, memory = Frozen(options.model), Memory()

    def made(split, number, **new):
        sessions = Sessions(tokenizer, Grammar(file, books, **new), split)
        parts = [
            frozen.states_below(batch_of(sessions, range(first, first + BATCH)))
            for first in range(0, number, BATCH)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    test = made("test", 4 * BATCH, new_forms=True, new_words=True)
    data = made("train", SESSIONS, new_forms=False, new_words=False, wide=WIDE)
    number = len(data["told"])
    several = [
        picked(data, torch.arange(first, first + BATCH))
        for first in range(0, min(number, 10 * BATCH), BATCH)
    ]
    begin_values(memory, frozen, several)
    memory.spare()
    address = [memory.query.weight, memory.query.bias, memory.query_scale]
    address += memory.attention.parameters()
    optimizer = torch.optim.AdamW(address, lr=3e-3, weight_decay=0.01)
    for step in range(PAIRS):
        optimizer.param_groups[0]["lr"] = 3e-3 * min((step + 1) / 20, 2 * (1 - step / PAIRS), 1)
        batch = picked(data, torch.randint(number, (16,)))
        loss, _ = address_loss(*queries_of(memory, batch), batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(address, 1.0)
        optimizer.step()
    memory.join()
    fit_keys(memory, picked(data, torch.randperm(number)[:96]))
    rates = [
        (address, 0.5),
        ([memory.value.weight, memory.value.bias, memory.value_scale], 0.3),
        ([memory.gate.weight, memory.gate.bias, memory.gate_scale], 3.0),
        ([memory.out_scale], 1.0),
        ([memory.out.weight, memory.out.bias], 5.0),
    ]
    groups = [{"params": weights, "factor": factor} for weights, factor in rates]
    optimizer = torch.optim.Adam(groups, lr=RATE, betas=(0.9, 0.98))
    start, step, order = time.time(), 0, []
    while (used := (time.time() - start) / 60 / MINUTES) < 1:
        for group in optimizer.param_groups:
            decay = min(1, (step + 1) / 20) * min(1, (1 - used) / 0.4 + 0.02)
            group["lr"] = RATE * group["factor"] * decay
        if len(order) < BATCH:
            order = torch.randperm(number).tolist()
        batch = picked(data, torch.tensor([order.pop() for _ in range(BATCH)]))
        loss, shown = loss_of(memory, frozen, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(memory.parameters(), 1.0)
        optimizer.step()
        step += 1
        line = {name: round(x.item(), 4) for name, x in shown.items()}
        log.write(json.dumps({"step": step, "seconds": round(time.time() - start), **line}) + "\n")
    log.write(json.dumps({"step": step, "test": asked_exactly(memory, frozen, test)}) + "\n")
    save_file(memory.named(), options.out / "memory.safetensors")


if __name__ == "__main__":
    main()
