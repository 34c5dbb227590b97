"""A generation's state as a saved memory, and back."""

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.config_json import to_json
from fwpkm_jax.generation.state import GenerationState, grow, init_generation
from fwpkm_jax.io.untrusted import OutsideFileError, shown
from fwpkm_jax.io.untrusted import reading as parsing
from fwpkm_jax.memories import file, rows, store
from fwpkm_jax.memories.places import changing, path_of, reading
from fwpkm_jax.memories.store import Description
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.outputs import StreamDocument
from fwpkm_jax.models.sharding import beside
from fwpkm_jax.overlays import to_private
from fwpkm_jax.storage.addresses import address_of
from fwpkm_jax.training.runs.run_directory import differences
from fwpkm_jax.training.state import named_leaves

Keep = Literal["all", "memory"]
"""What is saved. all: everything, so that a conversation goes on as if it had never stopped.
memory: fast weights and the tokens that wait to be written; the next conversation starts at
position 0, with empty caches."""


_MOST_READ = 2**30
"""Tokens that a sequence may have read: positions are int32."""


def save(
    folder: str | Path,
    name: str,
    state: GenerationState,
    *,
    model: LanguageModel,
    keep: Keep = "all",
    origin: str = "",
    note: Any = None,
) -> None:
    """Saves a conversation's memory under a name; `state` can go on being used.

    A memory that is there is replaced. A fork stores what differs from its base.

    Args:
      folder: of the memories; it is made. It may lie in a bucket.
      name: of the memory: letters, digits and . _ @ + -.
      state: from `generate` or `init_generation`; on one process. Overlays are saved as private
        memories, whose rows that differ from the base's are stored if it is a fork.
      model: whose slow weights wrote it.
      keep: see `Keep`.
      origin: a text that errors quote, such as the run and its step.
      note: a JSON value that is kept with it, which `describe` gives back.

    Raises:
      ValueError: the name cannot be one, a number in the memory is not finite, or the memory of
        this name belongs to other weights.
      RunInUseError: another process holds the memory.
      OSError: it cannot be written; what was saved before is unchanged.

    Example:
      >>> from flax import nnx
      >>> from fwpkm_jax import LanguageModel, ModelConfig, init_generation, memories
      >>> config = ModelConfig(vocab_size=32, model_dim=8, mlp_dim=8, mixers=("retnet",))
      >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> state = init_generation(model, {}, batch=1, max_length=16)
      >>> memories.save("memories", "alice", state, model=model)
      >>> memories.names("memories")
      ('alice',)
      >>> memories.load("memories", "alice", model).num_read.shape
      (1,)
    """
    if keep not in get_args(Keep):
        raise ValueError(f"keep={keep!r} is none of {list(get_args(Keep))}.")
    path_of(folder, name)  # Refused before anything is computed.
    model_json, weights = to_json(model.config), fingerprint(model)
    num_read = np.asarray(state.num_read).tolist()
    state = to_private(state)
    arrays = _arrays(state if keep == "all" else _without_caches(state))
    _check_finite(name, arrays)
    with changing(folder, name) as (here, held):
        path, base, shared = path_of(here, name), None, {}
        if path.exists():
            old, _ = file.read_facts(path)
            _check_belongs(path, old, model_json, weights)
            base = store.base_of(old)
            try:
                shared = {} if base is None else store.read_base(here, base, path)
            except ValueError:
                base = None  # It is damaged; this memory is stored whole.
        stored = {key: rows.stored(key, x, shared.get(key)) for key, x in arrays.items()}
        facts = {
            "origin": origin,
            "note": note,
            "saved": store.now(),
            "keep": keep,
            "num_read": num_read,
            "documents": state.stream.document is not None,
            "model": model_json,
            "weights": weights,
            "base": base,
            "parts": {key: part.part for key, part in stored.items()},
            "rows": {
                key: [part.rows, rows.num_rows(arrays[key].shape)] for key, part in stored.items()
            },
        }
        own = {key: x for part in stored.values() for key, x in part.arrays.items()}
        file.write(path, own, facts, check=held.check)


def load(
    folder: str | Path, name: str, model: LanguageModel, *, max_length: int | None = None
) -> GenerationState:
    """The state that was saved under a name, bit for bit, on the first device.

    Args:
      folder: of the memories.
      name: of the memory.
      model: with the slow weights that it was saved with.
      max_length: most tokens that full attention keeps, if that is more than it was; a memory
        without caches needs it.

    Raises:
      FileNotFoundError: there is no such memory; the error names some of those that are.
      ValueError: it is damaged, or belongs to another model or other weights.

    Example:
      >>> from fwpkm_jax import load_run, memories
      >>> run = load_run("runs/books_tiny")  # doctest: +SKIP
      >>> state = memories.load("memories", "alice", run.model)  # doctest: +SKIP
    """
    with reading(folder, name) as here:
        path = store.existing(here, name)
        facts, arrays = store.read_arrays(here, path)
        _check_belongs(path, facts, to_json(model.config), fingerprint(model))
        if facts["keep"] == "memory":
            if max_length is None:
                raise ValueError(
                    f"{path} was saved without caches (keep='memory'); pass max_length, the most "
                    "tokens that full attention keeps."
                )
            return _with_empty_caches(model, path, facts, arrays, max_length)
        state = _filled(_template(model, path, facts, arrays), path, arrays)
    state = beside(model.embedding, state)
    return state if max_length is None else grow(model, state, max_length=max_length)


def describe(folder: str | Path, name: str, *, forks: bool = True) -> Description:
    """What is known of a memory without reading its arrays.

    Args:
      forks: whether its forks are looked for, in the files of all memories; False: none are given.

    Raises:
      FileNotFoundError: there is no such memory; the error names some of those that are.
      ValueError: it is damaged.

    Example:
      >>> from fwpkm_jax import memories
      >>> memories.describe("memories", "alice").base  # doctest: +SKIP
      'start-600'
    """
    with reading(folder, headers=None if forks else [name]) as here:
        return _described(here, name, store.forks_of(here, name) if forks else ())


def describe_all(folder: str | Path) -> dict[str, Description | str]:
    """What is known of every memory in a folder, by name; of a damaged one what is wrong with it.

    Example:
      >>> from fwpkm_jax import memories
      >>> memories.describe_all("memories")
      {}
    """
    found: dict[str, Description | str] = {}
    forks: dict[str | None, list[str]] = {}
    with reading(folder, headers=None) as here:
        for name in store.names(here):
            try:
                found[name] = one = _described(here, name, ())
            except ValueError as error:
                found[name] = str(error).replace(str(here), address_of(folder))
            except FileNotFoundError:
                continue  # Deleted meanwhile.
            else:
                if one.base != name:
                    forks.setdefault(one.base, []).append(name)
    return {
        name: one if isinstance(one, str) else one._replace(forks=tuple(forks.get(name, ())))
        for name, one in found.items()
    }


def written_rows(
    folder: str | Path, name: str, state: GenerationState
) -> dict[str, tuple[int, int]]:
    """How many rows of each fast weight are not as in a saved memory, and how many there are.

    Args:
      name: of the memory to compare with.
      state: what to compare; of the same model and number of sequences.

    Returns:
      For each array, as `layer_1/values`: rows that differ, all rows. A slot is a row of `values`.

    Raises:
      FileNotFoundError: there is no such memory; the error names some of those that are.
      ValueError: it is damaged, or has arrays of other shapes.

    Example:
      >>> from fwpkm_jax import memories
      >>> memories.written_rows("memories", "alice", state)["layer_1/values"]  # doctest: +SKIP
      (37, 262144)
    """
    with reading(folder, name) as here:
        path = store.existing(here, name)
        _, saved = store.read_arrays(here, path)
        found = {}
        for key, x in _arrays(state.stream.memory).items():
            old = saved.get(f"stream/memory/{key}")
            if old is None or (old.shape, old.dtype) != (x.shape, x.dtype):
                raise ValueError(
                    f"{path} has no {key} of {x.dtype}{list(x.shape)}; pass its own state."
                )
            found[key] = len(rows.changed_rows(x, old)), rows.num_rows(x.shape)
        return found


def _described(folder: Path, name: str, forks: tuple[str, ...]) -> Description:
    path = store.existing(folder, name)
    facts, _ = file.read_facts(path)
    base = store.base_of(facts)
    return Description(
        name=name,
        saved=facts["saved"],
        origin=facts["origin"],
        note=facts["note"],
        keep=facts["keep"],
        num_read=tuple(facts["num_read"]),
        base=None if base is None else base["name"],
        forks=forks,
        num_bytes=path.stat().st_size,
        rows={key: (own, total) for key, (own, total) in facts["rows"].items()},
    )


def fingerprint(model: LanguageModel) -> str:
    """sha256 over the paths and bytes of a model's slow weights, as 64 hex digits."""
    total = hashlib.sha256()
    for name, x in named_leaves(nnx.state(model)).items():
        total.update(file.checksum({name: np.asarray(x)}).encode())
    return total.hexdigest()


def _arrays(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in _named(tree).items()}


def _without_caches(state: GenerationState) -> Any:
    """The parts of a state that outlast its positions."""
    layers = {
        name: layer._replace(cache=None, memory_cache=None)
        for name, layer in state.stream.layers.items()
    }
    return {"stream": state.stream._replace(layers=layers), "num_drawn": state.num_drawn}


def _template(
    model: LanguageModel, path: Path, facts: Mapping[str, Any], arrays: Mapping[str, Any]
) -> Any:
    """A state of the structure, shapes and dtypes that a file's arrays must have.

    What they may choose is the number of sequences and of memories, and the length of caches.
    """
    with parsing(path, problem="is damaged", otherwise="delete it, or put back a copy"):
        batch = len(arrays["num_drawn"])
        groups = max(
            [1, *(len(x) for name, x in arrays.items() if name.startswith("stream/memory/"))]
        )

        def start(max_length: int) -> GenerationState:
            memory = model.init_memory(jax.random.key(0), groups=groups)
            state = init_generation(model, memory, batch=batch, max_length=max_length)
            if not facts["documents"]:
                return state
            number = jnp.zeros((batch,), jnp.int32)
            return state._replace(
                stream=state.stream._replace(document=StreamDocument(number, number))
            )

        def shapes(max_length: int) -> Any:
            return jax.eval_shape(lambda: start(max_length))

        short, longer = (_named(shapes(length)) for length in (1, 2))
        lengths = [
            has
            for name, x in arrays.items()
            if name in short and x.ndim == len(short[name].shape)
            for has, one, two in zip(x.shape, short[name].shape, longer[name].shape, strict=True)
            if one != two
        ]
        return shapes(max([1, *lengths]))


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): leaf for path, leaf in leaves}


def _filled(template: Any, path: Path, arrays: Mapping[str, np.ndarray]) -> Any:
    """The template with a file's arrays; each gets memory of its own, so that it can be donated."""
    expected = _named(template)
    lost = [name for name in expected if name not in arrays]
    other = [name for name in arrays if name not in expected]
    if lost or other:
        problem = "was saved by a version with another layout: it has " + (
            f"no {lost[0]}" if lost else f"{shown(other[0], 100)}, which this version has not"
        )
        raise OutsideFileError(path, problem, otherwise="delete it, or use that version")
    for name, leaf in expected.items():
        found = arrays[name]
        if (found.dtype, found.shape) != (leaf.dtype, leaf.shape):
            problem = (
                f"is {found.dtype}{list(found.shape)}, and this version's is {leaf.dtype}"
                f"{list(leaf.shape)}"
            )
            raise OutsideFileError(path, problem, name, "delete it, or use that version")
    limits = {"num_read": _MOST_READ}
    for name in expected:
        queue, _, last = name.rpartition("/")
        if last == "num_waiting":  # The stream writes chunks until fewer tokens wait than one has.
            tokens = [x for other, x in expected.items() if other.startswith(f"{queue}/tokens")]
            limits[name] = 1 + tokens[0].shape[2]
    for name, limit in limits.items():
        found = arrays.get(name, np.zeros(1))
        if not np.all((found >= 0) & (found < limit)):
            raise OutsideFileError(path, "is out of range", name, "delete it, or put back a copy")
    return jax.tree.unflatten(
        jax.tree.structure(template), [jnp.array(arrays[name]) for name in expected]
    )


def _with_empty_caches(
    model: LanguageModel,
    path: Path,
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    max_length: int,
) -> GenerationState:
    """A state at position 0 with a file's memories and waiting tokens."""
    saved = _filled(_without_caches(_template(model, path, facts, arrays)), path, arrays)
    stream, batch = saved["stream"], len(arrays["num_drawn"])
    fresh = init_generation(model, stream.memory, batch=batch, max_length=max_length)
    layers = {
        name: layer._replace(cache=new.cache, memory_cache=new.memory_cache)
        for (name, layer), new in zip(
            stream.layers.items(), fresh.stream.layers.values(), strict=True
        )
    }
    stream = model.reset_caches(stream._replace(layers=layers), pending=False)
    return fresh._replace(stream=stream, num_drawn=saved["num_drawn"])


def _check_finite(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    for key, x in arrays.items():
        # Caches may hold infinities on purpose.
        if not key.startswith("stream/memory/") or not jnp.issubdtype(x.dtype, np.inexact):
            continue
        if not np.all(np.isfinite(x)):
            raise ValueError(
                f"The memory {name!r} is not saved, because {key} holds NaN or infinity; go back "
                "to one that was saved before."
            )


def _check_belongs(path: Path, facts: Mapping[str, Any], model: Any, weights: str) -> None:
    """Raises ValueError unless a file's memory belongs to this model and these weights."""
    origin = f", of {shown(facts['origin'], 200)}" if facts["origin"] else ""
    changed = differences(facts["model"], model)
    if changed:
        problem = f"belongs to another model{origin}: {shown(changed[0])}"
        raise OutsideFileError(path, problem, otherwise="use that one, or another name")
    if facts["weights"] != weights:
        problem = f"belongs to other weights{origin}"
        raise OutsideFileError(path, problem, otherwise="use those, or another name")
