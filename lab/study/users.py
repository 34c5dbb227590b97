"""Measures what many users remember over one base memory, and what each of them takes.

    fwpkm train recall --data.num_keys 256 --data.num_facts 24 --data.length 320 \\
        --model.fast_weight.rule.num_subkeys 64 --run_dir runs/users
    python -m lab.study.users --run runs/users --out lab/results/users_cpu.json

All users read in one batch, each its own facts into its own overlay (`fwpkm_jax.overlays`). Then
caches and waiting tokens are dropped, and each user is asked, without writing, for its own facts
and for those of the next user. A right answer to the latter would be a leak. The first users do the
same with private memories and must answer alike.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import environment, settings, write_result
from benchmarks.options import parse
from fwpkm_jax.data import RecallData
from fwpkm_jax.evaluation.intervals import wilson
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.overlays import fork_memory, overlay_use, refuse_lost, take_users, to_private
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.run import load_run

_PIECE = 64  # Tokens read per call.


@dataclass(frozen=True, kw_only=True)
class Options:
    """Lets users with overlays of one base learn facts and asks them."""

    run: Path
    """Directory of a run on `RecallData`, with FwPKM."""
    users: int = 100
    """Users, at least 2."""
    facts: int = 100
    """Facts that each user states."""
    filler: int = 2
    """Other tokens before each fact."""
    capacity: int = 2048
    """Slots that a user can write."""
    subkeys: int | None = None
    """Sub-keys per codebook; None: as in the run. Another number takes fresh fast weights."""
    private: int = 4
    """Users who are compared with private memories, which take a whole table each."""
    seed: int = 0
    """Of the facts."""
    out: Path | None = None
    """File for the JSON; None: print it."""


class Facts(NamedTuple):
    """What the users state: for each user and key the value's token, or -1."""

    texts: np.ndarray  # [users, length]
    values: np.ndarray  # [users, keys]


def make_facts(options: Options, data: RecallData) -> Facts:
    """Keys and values drawn anew for each user, in random order, with filler before each fact."""
    if not 1 <= options.facts <= data.num_keys:
        raise ValueError(f"facts={options.facts}: the run has {data.num_keys} keys.")
    rng = np.random.default_rng(options.seed)
    texts, values = [], np.full((options.users, data.num_keys), -1)
    for user in range(options.users):
        keys = rng.permutation(data.num_keys)[: options.facts]
        values[user, keys] = data.first_value + rng.integers(data.num_values, size=options.facts)
        filler = rng.integers(data.num_filler, size=(options.facts, options.filler))
        pairs = np.stack([data.first_key + keys, values[user, keys]], axis=1)
        texts.append(np.concatenate([filler, pairs], axis=1).ravel())
    return Facts(np.array(texts, np.int32), values)


def read_all(model: LanguageModel, memory: dict[str, Memory], texts: np.ndarray) -> Any:
    """The memories after each user's text, all complete pairs written."""
    graphdef, params = nnx.split(model)

    @partial(jax.jit, donate_argnums=1)
    def read(params, stream, piece):
        return nnx.merge(graphdef, params).stream(piece, stream).stream

    stream = model.init_stream(
        jax.tree.map(jnp.copy, memory), batch=len(texts), max_length=texts.shape[1]
    )
    for start in range(0, texts.shape[1], _PIECE):
        stream = read(params, stream, jnp.asarray(texts[:, start : start + _PIECE]))
    memory = jax.jit(model.flush)(stream).memory
    refuse_lost(memory)
    return memory


def answers(model: LanguageModel, memory: dict[str, Memory], data: RecallData) -> np.ndarray:
    """The most likely token after each key, `[users, keys]`, from a stream without a past."""
    graphdef, params = nnx.split(model)
    users = jax.tree.leaves(memory)[0].shape[0]
    rng = np.random.default_rng(0)
    keys = np.broadcast_to(data.first_key + np.arange(data.num_keys), (users, data.num_keys))
    questions = np.stack([rng.integers(data.num_filler, size=keys.shape), keys], axis=-1)
    questions = questions.reshape(users, -1).astype(np.int32)
    stream = model.init_stream(memory, batch=users, max_length=questions.shape[1])

    @jax.jit
    def ask(params, stream, piece):
        out = nnx.merge(graphdef, params).stream(piece, stream, write=False)
        return jnp.argmax(out.logits[:, 1::2], axis=-1), out.stream

    found = []
    for start in range(0, questions.shape[1], _PIECE):
        chosen, stream = ask(params, stream, jnp.asarray(questions[:, start : start + _PIECE]))
        found.append(np.asarray(chosen))
    return np.concatenate(found, axis=1)


def score(right: np.ndarray, asked: np.ndarray) -> dict[str, Any]:
    correct, total = int(right[asked].sum()), int(asked.sum())
    if not total:
        return {"answers": 0}
    return {"share": correct / total, "interval": wilson(correct, total), "answers": total}


def measure(options: Options) -> dict[str, Any]:
    run = load_run(options.run)
    data, model, base = run.experiment.data, run.model, take_users(run.memory, [0])
    if not isinstance(data, RecallData) or not isinstance(model.config.fast_weight.rule, FwPKM):
        raise ValueError(f"{options.run} is no run of FwPKM on RecallData.")
    if options.subkeys is not None:
        rule = dataclasses.replace(model.config.fast_weight.rule, num_subkeys=options.subkeys)
        fast_weight = dataclasses.replace(model.config.fast_weight, rule=rule)
        config = dataclasses.replace(model.config, fast_weight=fast_weight)
        params = nnx.state(model)
        model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
        nnx.update(model, params)
        base = model.init_memory(jax.random.key(0))
    facts = make_facts(options, data)
    fork = fork_memory(model, base, users=options.users, capacity=options.capacity)
    written = read_all(model, fork, facts.texts)
    found, blank = answers(model, written, data), answers(model, base, data)
    some = list(range(options.private))
    private = read_all(model, to_private(take_users(fork, some)), facts.texts[some])
    stated, of_next = facts.values >= 0, np.roll(facts.values, -1, axis=0)
    (name,) = written
    use, rule = overlay_use(written)[name], model.config.fast_weight.rule
    assert isinstance(rule, FwPKM)
    one_key = jax.tree.leaves(base)[0]
    return {
        "own_facts": score(found == facts.values, stated),
        "own_facts_without_reading": score(
            np.broadcast_to(blank, found.shape) == facts.values, stated
        ),
        "next_users_facts_never_stated": score(found == of_next, (of_next >= 0) & ~stated),
        "next_users_facts_stated_otherwise": score(
            found == of_next, (of_next >= 0) & stated & (of_next != facts.values)
        ),
        "chance": 1 / data.num_values,
        "private_memories_answer_alike": bool(
            np.array_equal(answers(model, private, data), found[some])
        ),
        "tokens": facts.texts.shape[1],
        "slots": rule.num_slots,
        "value_dim": rule.value_dim,
        "rows": {"mean": float(use.rows.mean()), "most": int(use.rows.max())},
        "kilobytes": {
            "rows_in_use": float(use.bytes.mean()) / 1e3,
            "rows_of_capacity": use.capacity * float((use.bytes / use.rows).mean()) / 1e3,
            "sub_keys": one_key.nbytes / 1e3,
            "private_table": rule.num_slots * rule.value_dim * one_key.dtype.itemsize / 1e3,
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    result = {"environment": environment(), "options": settings(options), **measure(options)}
    write_result(result, options.out)


if __name__ == "__main__":
    main()
