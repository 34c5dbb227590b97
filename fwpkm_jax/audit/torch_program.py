"""A causal language model in PyTorch as a `Program`: called as the transformers library does.

`TorchProgram` reads any model that takes and returns a cache; what the cache keeps of a row counts
as that row's memory. `TorchMemoryProgram` reads a model with memories of its own, through the calls
of the programs that `fwpkm export hf` writes. Needs torch.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fwpkm_jax.lazy_imports import import_extra


class TorchState(NamedTuple):
    """What rows have read.

    Attributes:
      cache: as the model returned it; None: nothing was read yet.
      mask: int `[rows, read]`, 0 for padding.
      begin: memories that a text without a cache begins from; None: the model's own.
      memory: the memories behind the text, of a model that has some.
    """

    cache: Any
    mask: np.ndarray
    begin: Any = None
    memory: Any = None


class TorchProgram:
    """A causal language model of the transformers library's kind as a `Program`.

    `model(ids, use_cache=True, cache=...)`, or `past_key_values=...`, gives logits and the next
    cache; every row is a text of its own.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        names = inspect.signature(model.forward).parameters
        self._cache = "cache" if "cache" in names else "past_key_values"
        self._has_positions = "position_ids" in names
        self.exact = not any("expert" in name for name, _ in model.named_modules())
        """See `causality`."""
        self._can_freeze = "write" in names
        self._torch = import_extra("torch", "Models in PyTorch are called", extra="peers")

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def start(self, rows: int, length: int) -> TorchState:
        del length  # Caches grow.
        return TorchState(None, np.ones((rows, 0), int))

    def read(
        self, state: TorchState, tokens: np.ndarray, *, write: bool, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, TorchState]:
        """See `Program`; `mask` is 1 for real tokens, 0 for padding."""
        if not write and not self._can_freeze:
            raise NotImplementedError("the model's forward takes no write=False.")
        mask = np.ones_like(tokens) if mask is None else mask.astype(int)
        seen = np.concatenate([state.mask, mask], axis=1)
        options: dict[str, Any] = {} if write else {"write": False}
        if not seen.all():
            options["attention_mask"] = self._tensor(seen)
        if self._has_positions:
            positions = np.maximum(seen.cumsum(1) - 1, 0)[:, -tokens.shape[1] :]
            options["position_ids"] = self._tensor(positions)
        # A copy, because a model may change the cache that it is given.
        cache = copy.deepcopy(state.cache)
        if cache is None:
            self.begin(state)
        else:
            options[self._cache] = cache
        with self._torch.no_grad():
            out = self.model(self._tensor(tokens), use_cache=True, **options)
        after = TorchState(out[self._cache_name(out)], seen, memory=self.memories())
        return out.logits.float().cpu().numpy(), after

    def _tensor(self, ids: np.ndarray) -> Any:
        kept = np.ascontiguousarray(ids)  # A reversed text has strides that torch refuses.
        return self._torch.tensor(kept, dtype=self._torch.long, device=self.model.device)

    def _cache_name(self, out: Any) -> str:
        found = [name for name in ("cache", "past_key_values") if out.get(name) is not None]
        if not found:
            raise ValueError("the model returned no cache, so it cannot read on.")
        return found[0]

    def begin(self, state: TorchState) -> None:
        """Called before a text without a cache is read."""

    def memories(self) -> Any:
        """The memories after the model's latest call; None: it has none beside its cache."""

    def memory(self, state: TorchState) -> Any:
        """See `Program`: of a cache the tensors that have a row for each text."""
        layers = getattr(state.cache, "layers", ())
        return [_tensors(vars(layer), len(state.mask)) for layer in layers]

    def restart(self, state: TorchState) -> TorchState:
        raise NotImplementedError("the model's memory is its cache, which cannot be emptied alone.")


def _tensors(value: Any, rows: int) -> Any:
    """The tensors `[rows, ...]` of an object as NumPy arrays."""
    if isinstance(value, dict):
        return {name: _tensors(x, rows) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_tensors(x, rows) for x in value]
    if hasattr(value, "detach") and value.shape[:1] == (rows,):
        return value.detach().float().cpu().numpy()
    return None


class TorchMemoryProgram(TorchProgram):
    """A model with `memory_state`, `load_memory`, `forget` and `write`, as an exported folder has.

    Each row has a memory of its own, `memory_state().layers` `{layer: [memory, ...]}` with tensors
    `keys` and `values`, and waiting tokens `waiting`.
    """

    def begin(self, state: TorchState) -> None:
        if state.begin is None:
            self.model.forget()
        else:
            self.model.load_memory(state.begin)

    def memories(self) -> Any:
        return self.model.memory_state()

    def memory(self, state: TorchState) -> dict[str, dict[str, np.ndarray]]:
        found = state.begin if state.memory is None else state.memory
        return {
            layer: {
                kind: np.stack([getattr(one, kind).float().cpu().numpy() for one in memories])
                for kind in ("keys", "values")
            }
            for layer, memories in found.layers.items()
        }

    def restart(self, state: TorchState) -> TorchState:
        return self.changed(state)

    def changed(
        self,
        state: TorchState,
        change: Callable[[list[Any]], list[Any]] = lambda memories: memories,
    ) -> TorchState:
        """Empty caches and queues, and memories that `change` makes of those of each layer."""
        begin = (state.begin if state.memory is None else state.memory).copy()
        for layer, memories in begin.layers.items():
            begin.layers[layer] = change(memories)
            for one in begin.layers[layer]:
                one.waiting = None
        return TorchState(None, np.ones((len(state.mask), 0), int), begin)


def program_of(model: Any) -> TorchProgram:
    """The program of a model."""
    names = ("memory_state", "load_memory", "forget")
    has_memory = all(hasattr(model, name) for name in names)
    return (TorchMemoryProgram if has_memory else TorchProgram)(model)
