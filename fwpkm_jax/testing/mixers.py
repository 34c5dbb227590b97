"""The contract of a token mixer as properties that `check_mixer` runs."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.layers.mixers.base import AbstractMixer, AbstractMixerConfig
from fwpkm_jax.testing.properties import (
    Property,
    cast_floats,
    distance,
    require,
    require_close,
    require_equal,
    require_finite,
    require_near,
    require_same_types,
    run_properties,
)

_LENGTH, _BATCH = 15, 2
_PIECES, _MASKED_PIECES = (1, 7), (1, 3)
"""Lengths of a stream's pieces, without and with a mask: one token, and more than a short window or
convolution. They are few, so that each is compiled once for all cuts."""
_CUTS = 6
_DOCUMENTS, _PIECE = 5, 5
_EXACT, _SINGLE = 1e-12, 1e-6  # Of the norm: packed documents in double and single precision.
_LOOSE = {"rtol": 1e-9, "atol": 1e-11}


def check_mixer(
    config: AbstractMixerConfig,
    *,
    model_dim: int = 6,
    init_std: float = 0.5,
    properties: Iterable[str] | None = None,
) -> None:
    """Checks that a token mixer keeps the contract of `layers.mixers.base`.

    Outputs and streams are compared in double precision, in which a mixer must compute when its
    input is float64. Choose the smallest sizes that exercise every branch, and a window or chunk
    of fewer than 7 tokens.

    Args:
      config: the mixer's configuration.
      model_dim: width of input and output.
      init_std: standard deviation of initial weights; choose it so large that every branch affects
        the output.
      properties: names of the properties to check, from `MIXER_PROPERTIES`; None: all.

    Raises:
      AssertionError: a property is broken; the message has one line for each of them.
      ValueError: a name in `properties` is unknown.
      TypeError: `config` is not an `AbstractMixerConfig`.

    Example:
      >>> from fwpkm_jax.layers import LaCTConfig
      >>> from fwpkm_jax.testing import check_mixer
      >>> check_mixer(LaCTConfig(), properties=["config_is_a_frozen_value"])
    """
    if not isinstance(config, AbstractMixerConfig):
        raise TypeError(f"config is {config!r}; check_mixer takes an AbstractMixerConfig.")
    case = MixerCase(config, model_dim, init_std)
    run_properties(type(config).__name__, case, MIXER_PROPERTIES, properties)


class MixerCase:
    """A mixer with sampled tokens; its call is compiled once for each piece length."""

    def __init__(self, config: AbstractMixerConfig, model_dim: int, init_std: float):
        self.config, self.model_dim, self.init_std = config, model_dim, init_std

    def build(self, dtype: Any = None, *, scale: float = 1.0) -> AbstractMixer:
        """A new mixer, its weights drawn with `scale` times `init_std`; the same in every call."""
        std = scale * self.init_std
        return self.config.build(
            self.model_dim, norm_eps=1e-5, init_std=std, dtype=dtype, rngs=nnx.Rngs(0)
        )

    def sample(self, length: int = _LENGTH, *, seed: int = 0, dtype: Any = np.float64) -> jax.Array:
        """Random tokens `[batch, length, model]`."""
        rng = np.random.default_rng(seed)
        return jnp.asarray(rng.normal(size=(_BATCH, length, self.model_dim)), dtype)

    @functools.cached_property
    def mixer(self) -> AbstractMixer:
        return self.build()

    @functools.cached_property
    def call(self) -> Callable[..., tuple[jax.Array, Any]]:
        """`mixer(x, mask=, cache=)`, compiled for each shape."""
        mixer = self.mixer
        return jax.jit(lambda x, mask, cache: mixer(x, mask=mask, cache=cache))

    @functools.cached_property
    def whole(self) -> np.ndarray:
        """The output of the sampled tokens."""
        return np.asarray(self.call(self.sample(), None, None)[0])

    def stream(
        self, x: Any, lengths: Iterable[int], mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[Any]]:
        """Concatenated outputs of a stream's pieces, and the caches: initial, then after each."""
        x = np.asarray(x)  # Cut on the host, which compiles nothing.
        cache = self.mixer.init_cache(len(x), max_length=_LENGTH, dtype=x.dtype)
        outputs, caches, start = [], [cache], 0
        for length in lengths:
            piece = slice(start, start + length)
            output, cache = self.call(x[:, piece], None if mask is None else mask[:, piece], cache)
            outputs.append(np.asarray(output))
            caches.append(cache)
            start += length
        return np.concatenate(outputs, axis=1), caches


def config_is_a_frozen_value(case: MixerCase) -> None:
    require(hash(case.config) == hash(case.config), "the configuration is not hashable")
    require(
        type(case.config).__dataclass_params__.frozen,  # pyright: ignore
        "a field can be assigned; use @dataclass(frozen=True)",
    )


def parameters_are_float32_and_share_no_buffer(case: MixerCase) -> None:
    """Checks parameters' dtype and buffers; a training step cannot donate a shared buffer."""
    leaves = jax.tree.leaves(nnx.state(case.build(), nnx.Param))
    require(leaves, "the mixer has no parameters")
    require(all(x.dtype == jnp.float32 for x in leaves), "a parameter is not float32")
    buffers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    require(len(buffers) == len(leaves), "two parameters share a buffer")


def parameter_axes_have_the_parameters_ranks(case: MixerCase) -> None:
    """Checks that `parameter_axes` gives matching parameters one axis for each dimension."""
    mixer = case.build()
    shapes = {
        "/".join(str(part) for part in path): leaf.shape
        for path, leaf in nnx.to_flat_state(nnx.state(mixer, nnx.Param))
    }
    for pattern, axes in type(mixer).parameter_axes.items():
        for name, shape in shapes.items():
            if axes is not None and re.fullmatch(pattern, name):
                require(
                    len(axes) == len(shape),
                    f"parameter_axes gives {name}{list(shape)} the axes {axes}",
                )


def stream_cut_anywhere_equals_the_whole(case: MixerCase) -> None:
    """Checks that outputs and final cache do not depend on how a stream is cut into pieces."""
    x = case.sample()
    none = case.call(x, None, None)[1]
    require(none is None, "a call without a cache returns one")
    _, by_token = case.stream(x, [1] * _LENGTH)
    rng = np.random.default_rng(0)
    for _ in range(_CUTS):
        lengths = _random_cut(rng, _PIECES)
        pieces, caches = case.stream(x, lengths)
        require_close(pieces, case.whole, f"the output in pieces of {lengths}", **_LOOSE)
        require_close(caches[-1], by_token[-1], f"the cache after pieces of {lengths}", **_LOOSE)


def padding_anywhere_changes_no_token_and_no_cache(case: MixerCase) -> None:
    """Checks that differently padded sequences give the results of their tokens without padding."""
    rng = np.random.default_rng(1)
    for cut in range(_CUTS):
        mask = rng.uniform(size=(_BATCH, _LENGTH)) < (0.2, 0.5, 0.8)[cut % 3]
        clean = np.asarray(case.sample(seed=cut))
        x = np.where(mask[:, :, None], clean, 1e3)  # Large values at padding must not matter.
        whole = np.asarray(case.call(x, mask, None)[0])
        require_equal(whole[~mask], np.zeros_like(whole[~mask]), "the output at padding")
        lengths = _random_cut(rng, _MASKED_PIECES)
        pieces, caches = case.stream(x, lengths, mask.astype(np.float64))
        require_close(pieces, whole, f"the output of padded pieces of {lengths}", **_LOOSE)
        # The tokens of each sequence, moved to its beginning, one by one.
        alone = np.stack([_to_front(x[row], mask[row]) for row in range(_BATCH)])
        expected, after = case.stream(alone, [1] * int(mask.sum(axis=1).max(initial=1)))
        for row in range(_BATCH):
            number = int(mask[row].sum())
            require_close(
                whole[row, mask[row]], expected[row, :number], "a token beside padding", **_LOOSE
            )
            own, last = (_row(cache, row) for cache in (caches[-1], after[number]))
            require_close(own, last, "the cache of padded pieces", **_LOOSE)


def packed_documents_equal_separate_rows(case: MixerCase) -> None:
    """Checks that packed documents give the same outputs and gradients as separate rows.

    Boundaries are random; some documents have one token. The same rows are also read as a stream
    with padding, in pieces that cut documents, so that the carried state is checked too, and a
    document may be longer than a piece. The difference is at most 1e-12 of the norm, in double
    precision, parameters included. A mixer that does not support documents must raise a ValueError
    that names it.
    """
    if not case.mixer.takes_documents:
        _require_documents_refused(case)
        return
    _compare_documents(case, np.float64, _EXACT)


def packed_documents_equal_separate_rows_in_single_precision(case: MixerCase) -> None:
    """Checks the same in float32: at most 1e-6 of the norm.

    Where separate rows are further than a quarter of that from their results in double precision,
    four times their distance is allowed instead: no order of sums could do better. Weights are
    drawn with a fifth of `init_std`: large ones amplify rounding, in separate rows too.
    """
    if case.mixer.takes_documents:
        _compare_documents(case, np.float32, _SINGLE, scale=0.2)


def _compare_documents(
    case: MixerCase, dtype: Any, tolerance: float, *, scale: float = 1.0
) -> None:
    mixer = case.build(scale=scale)
    graphdef, params = nnx.split(mixer)
    params = cast_floats(params, dtype)
    rng = np.random.default_rng(2)
    cotangents = jnp.asarray(rng.normal(size=(_BATCH, _LENGTH, case.model_dim)), dtype)

    @jax.jit
    def piece(x: jax.Array, mask: jax.Array, starts: jax.Array, cache: Any) -> Any:
        return nnx.merge(graphdef, params)(x, mask=mask, starts=starts, cache=cache)

    @jax.jit
    def gradients(params: Any, x: jax.Array, c: jax.Array, **documents: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            output, _ = nnx.merge(graphdef, params)(x, **documents)
            return jnp.sum(output * c), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    def alone(x: np.ndarray, ends: list[list[int]], real: np.ndarray, dtype: Any = dtype) -> Any:
        """Outputs and gradients with one document per row, moved back; zeros at padding."""
        rows, place = _separate_rows(ends, real)
        used = (rows >= 0)[..., None]
        apart = [
            jnp.asarray(np.where(used, np.asarray(a).reshape(-1, a.shape[-1])[rows], 0), dtype)
            for a in (x, cotangents)
        ]
        mask = jnp.asarray(used[..., 0], dtype)
        (d_params, d_x), output = gradients(cast_floats(params, dtype), *apart, mask=mask)
        back = [
            np.asarray(a).reshape(-1, a.shape[-1])[place].reshape(x.shape) for a in (output, d_x)
        ]
        return *(np.where(real[..., None], a, 0) for a in back), d_params

    def tolerances(x: np.ndarray, ends: list[list[int]], real: np.ndarray, found: Any) -> list:
        """Of outputs and gradients: in single precision, never below what rounding takes."""
        if dtype == np.float64:
            return [tolerance] * len(found)
        exact = alone(x, ends, real, np.float64)
        return [max(tolerance, 4 * distance(*pair)) for pair in zip(found, exact, strict=True)]

    for trial in range(_CUTS):
        x = np.asarray(case.sample(seed=trial, dtype=dtype))
        ends = [_random_ends(rng, trial) for _ in range(_BATCH)]
        starts = np.stack([_starts_of(row) for row in ends])
        where = f"of documents that end at {ends}"
        (d_params, d_x), packed = gradients(params, jnp.asarray(x), cotangents, starts=starts)
        everything = np.ones(starts.shape, bool)
        expected = alone(x, ends, everything)
        allowed = tolerances(x, ends, everything, expected)
        names = ("output", "gradient", "gradients")
        for index, found in enumerate((packed, d_x, d_params)):
            what = f"{names[index]} {where}"
            require_near(found, expected[index], what=what, tolerance=allowed[index])
        # A stream with padding: a start at padding moves to the document's next token.
        real = rng.uniform(size=starts.shape) < (1.0, 0.7)[trial % 2]
        cache = mixer.init_cache(_BATCH, max_length=_LENGTH, dtype=x.dtype)
        for first in range(0, _LENGTH, _PIECE):
            at = slice(first, first + _PIECE)
            tokens = np.where(real[..., None], x, dtype(1e3))[:, at]
            output, cache = piece(tokens, real[:, at], starts[:, at], cache)
            if first == 0:
                expected = alone(x, ends, real)
                allowed = tolerances(x, ends, real, expected)
            what = f"stream {where}"
            require_near(output, expected[0][:, at], what=what, tolerance=allowed[0])


def _require_documents_refused(case: MixerCase) -> None:
    x, name = case.sample(3), type(case.mixer).__name__
    try:
        case.mixer(x, starts=jnp.ones((_BATCH, 3), bool))
    except ValueError as error:
        require(name in str(error), f"the refusal of documents does not name {name}: {error}")
        return
    raise AssertionError("documents are neither taken nor refused")


def _random_ends(rng: np.random.Generator, trial: int) -> list[int]:
    """Ends of at most `_DOCUMENTS` documents that fill a row; some have one token."""
    number = (1, 2, _DOCUMENTS)[trial % 3]
    inner = rng.choice(np.arange(1, _LENGTH), size=number - 1, replace=False)
    if number > 2:
        inner[1] = inner[0] + 1 if inner[0] + 1 < _LENGTH else inner[0] - 1
    return sorted({*map(int, inner), _LENGTH})


def _starts_of(ends: list[int]) -> np.ndarray:
    starts = np.zeros(_LENGTH, bool)
    starts[[0, *ends[:-1]]] = True
    return starts


def _separate_rows(ends: list[list[int]], real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flat indices of real tokens, one row per document, then -1; each token's place in them."""
    rows = np.full((_BATCH * _DOCUMENTS, _LENGTH), -1)
    place = np.zeros(_BATCH * _LENGTH, int)
    for row, of_row in enumerate(ends):
        for number, (first, end) in enumerate(zip([0, *of_row[:-1]], of_row, strict=True)):
            tokens = first + np.flatnonzero(real[row, first:end])
            own = row * _DOCUMENTS + number
            rows[own, : len(tokens)] = row * _LENGTH + tokens
            place[row * _LENGTH + tokens] = own * _LENGTH + np.arange(len(tokens))
    return rows, place


def padding_alone_gives_zeros_and_keeps_the_cache(case: MixerCase) -> None:
    x = case.sample(3)
    _, caches = case.stream(x, [1, 1, 1])
    output, same = case.call(x, jnp.zeros((_BATCH, 3)), caches[-1])
    require_equal(np.asarray(output), np.zeros(output.shape), "the output of padding alone")
    require_equal(same, caches[-1], "the cache after padding alone")


def later_tokens_do_not_reach_earlier_outputs(case: MixerCase) -> None:
    after = np.asarray(case.call(case.sample().at[:, 7:].add(1), None, None)[0])
    require_close(after[:, :7], case.whole[:, :7], "an earlier output", rtol=1e-12)
    moved = np.max(np.abs(after - case.whole), axis=(0, 2))[7:]
    require(np.min(moved) > 1e-4, f"an output moves by {np.min(moved):.1e} with its own token")


def sequences_of_a_batch_are_independent(case: MixerCase) -> None:
    x = np.asarray(case.sample()).copy()
    x[0] *= -2.0
    other = np.asarray(case.call(x, None, None)[0])
    require_close(other[1], case.whole[1], "a sequence beside another", rtol=1e-11, atol=1e-13)
    require(np.any(other[0] != case.whole[0]), "the first sequence is not read")


@jax.enable_x64(False)  # The setting in which models run.
def gradients_of_bfloat16_tokens_are_finite_and_reach_every_parameter(case: MixerCase) -> None:
    graphdef, params = nnx.split(case.build(jnp.bfloat16))
    x = case.sample(9, dtype=jnp.bfloat16)
    mask = jnp.ones((_BATCH, 9)).at[1].set(0)

    @jax.jit
    def gradients(params: Any, x: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            output, _ = nnx.merge(graphdef, params)(x, mask=mask)
            return jnp.sum(jnp.square(output.astype(jnp.float32))), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    (d_params, d_x), output = gradients(params, x)
    require(output.dtype == jnp.bfloat16, f"bfloat16 tokens come back as {output.dtype}")
    for path, leaf in nnx.to_flat_state(d_params):
        name = "/".join(str(part) for part in path)
        leaf = jnp.asarray(leaf[...])
        require(leaf.dtype == jnp.float32, f"the gradient of {name} is {leaf.dtype}")
        require_finite(leaf, f"the gradient of {name}")
        require(np.any(np.asarray(leaf) != 0), f"no gradient reaches {name}")
    require_finite(d_x, "the gradient of the tokens")


@jax.enable_x64(False)
def bfloat16_stream_keeps_the_caches_dtypes(case: MixerCase) -> None:
    mixer = case.build(jnp.bfloat16)
    cache = mixer.init_cache(_BATCH, max_length=8, dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((_BATCH, 3, case.model_dim), jnp.bfloat16)
    output, after = jax.eval_shape(lambda x, cache: mixer(x, cache=cache), x, cache)
    require(output.dtype == jnp.bfloat16, f"bfloat16 tokens come back as {output.dtype}")
    require_same_types(after, cache, "the cache of a bfloat16 stream")


def reset_cache_gives_the_first_one(case: MixerCase) -> None:
    mixer = case.mixer
    start = mixer.init_cache(_BATCH, max_length=_LENGTH, dtype=jnp.float64)
    _, caches = case.stream(case.sample(), [7])
    require_equal(mixer.reset_cache(caches[-1]), start, "reset_cache")
    require(
        mixer.capacity(start) in (None, _LENGTH),
        f"capacity is {mixer.capacity(start)} for max_length={_LENGTH}",
    )
    if type(mixer).grow_cache is not AbstractMixer.grow_cache:
        longer = mixer.init_cache(_BATCH, max_length=_LENGTH + 3, dtype=jnp.float64)
        require_equal(mixer.grow_cache(start, _LENGTH + 3), longer, "grow_cache of an empty cache")
    for leaf in jax.tree.leaves(start):
        require(leaf.shape[:1] == (_BATCH,), f"a leaf of the cache {leaf.shape} has no batch axis")


def _random_cut(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[int]:
    lengths: list[int] = []
    while (rest := _LENGTH - sum(lengths)) > 0:
        lengths.append(int(rng.choice([size for size in sizes if size <= rest])))
    return lengths


def _to_front(x: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """The rows where `keep` is True, then the others."""
    return np.concatenate([x[keep], x[~keep]])


def _row(tree: Any, row: int) -> Any:
    return jax.tree.map(lambda x: x[row], tree)


MIXER_PROPERTIES: dict[str, Property] = {
    check.__name__: check
    for check in (
        config_is_a_frozen_value,
        parameters_are_float32_and_share_no_buffer,
        parameter_axes_have_the_parameters_ranks,
        stream_cut_anywhere_equals_the_whole,
        padding_anywhere_changes_no_token_and_no_cache,
        packed_documents_equal_separate_rows,
        packed_documents_equal_separate_rows_in_single_precision,
        padding_alone_gives_zeros_and_keeps_the_cache,
        later_tokens_do_not_reach_earlier_outputs,
        sequences_of_a_batch_are_independent,
        gradients_of_bfloat16_tokens_are_finite_and_reach_every_parameter,
        bfloat16_stream_keeps_the_caches_dtypes,
        reset_cache_gives_the_first_one,
    )
}
"""Properties of every mixer, by name."""
