"""The contract of a token mixer as properties that `check_mixer` runs."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.layers.mixers.base import AbstractMixer, AbstractMixerConfig
from fwpkm_jax.layers.parameters import declaration_of
from fwpkm_jax.testing.mixer_case import BATCH, LENGTH, MixerCase
from fwpkm_jax.testing.mixer_documents import (
    packed_documents_equal_separate_rows,
    packed_documents_equal_separate_rows_in_single_precision,
)
from fwpkm_jax.testing.properties import (
    Property,
    require,
    require_close,
    require_equal,
    require_finite,
    require_same_types,
    run_properties,
)

_PIECES, _MASKED_PIECES = (1, 7), (1, 3)
"""Lengths of a stream's pieces, without and with a mask: one token, and more than a short window or
convolution. They are few, so that each is compiled once for all cuts."""
_CUTS = 6
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


def parameters_say_what_they_are(case: MixerCase) -> None:
    """Checks that each parameter declares its role, and one axis for each of its dimensions."""
    for path, leaf in nnx.to_flat_state(nnx.state(case.build())):
        name = "/".join(str(part) for part in path)
        declared = declaration_of(leaf)
        if declared is None:
            raise AssertionError(
                f"{name} does not say what it is; make it with layers.parameter(value, role, axes)"
            )
        try:
            declared.axes_of(leaf.shape, name)
        except ValueError as error:
            raise AssertionError(str(error)) from None


def stream_cut_anywhere_equals_the_whole(case: MixerCase) -> None:
    """Checks that outputs and final cache do not depend on how a stream is cut into pieces."""
    x = case.sample()
    none = case.call(x, None, None)[1]
    require(none is None, "a call without a cache returns one")
    _, by_token = case.stream(x, [1] * LENGTH)
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
        mask = rng.uniform(size=(BATCH, LENGTH)) < (0.2, 0.5, 0.8)[cut % 3]
        clean = np.asarray(case.sample(seed=cut))
        x = np.where(mask[:, :, None], clean, 1e3)  # Large values at padding must not matter.
        whole = np.asarray(case.call(x, mask, None)[0])
        require_equal(whole[~mask], np.zeros_like(whole[~mask]), "the output at padding")
        lengths = _random_cut(rng, _MASKED_PIECES)
        pieces, caches = case.stream(x, lengths, mask.astype(np.float64))
        require_close(pieces, whole, f"the output of padded pieces of {lengths}", **_LOOSE)
        # The tokens of each sequence, moved to its beginning, one by one.
        fronts = [np.concatenate([x[i, mask[i]], x[i, ~mask[i]]]) for i in range(BATCH)]
        alone = np.stack(fronts)
        expected, after = case.stream(alone, [1] * int(mask.sum(axis=1).max(initial=1)))
        for row in range(BATCH):
            number = int(mask[row].sum())
            require_close(
                whole[row, mask[row]], expected[row, :number], "a token beside padding", **_LOOSE
            )
            own, last = (_row(cache, row) for cache in (caches[-1], after[number]))
            require_close(own, last, "the cache of padded pieces", **_LOOSE)


def padding_alone_gives_zeros_and_keeps_the_cache(case: MixerCase) -> None:
    x = case.sample(3)
    _, caches = case.stream(x, [1, 1, 1])
    output, same = case.call(x, jnp.zeros((BATCH, 3)), caches[-1])
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
    mask = jnp.ones((BATCH, 9)).at[1].set(0)

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
    cache = mixer.init_cache(BATCH, max_length=8, dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((BATCH, 3, case.model_dim), jnp.bfloat16)
    output, after = jax.eval_shape(lambda x, cache: mixer(x, cache=cache), x, cache)
    require(output.dtype == jnp.bfloat16, f"bfloat16 tokens come back as {output.dtype}")
    require_same_types(after, cache, "the cache of a bfloat16 stream")


def reset_cache_gives_the_first_one(case: MixerCase) -> None:
    mixer = case.mixer
    start = mixer.init_cache(BATCH, max_length=LENGTH, dtype=jnp.float64)
    _, caches = case.stream(case.sample(), [7])
    require_equal(mixer.reset_cache(caches[-1]), start, "reset_cache")
    require(
        mixer.capacity(start) in (None, LENGTH),
        f"capacity is {mixer.capacity(start)} for max_length={LENGTH}",
    )
    if type(mixer).grow_cache is not AbstractMixer.grow_cache:
        longer = mixer.init_cache(BATCH, max_length=LENGTH + 3, dtype=jnp.float64)
        require_equal(mixer.grow_cache(start, LENGTH + 3), longer, "grow_cache of an empty cache")
    for leaf in jax.tree.leaves(start):
        require(leaf.shape[:1] == (BATCH,), f"a leaf of the cache {leaf.shape} has no batch axis")


def _random_cut(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[int]:
    lengths: list[int] = []
    while (rest := LENGTH - sum(lengths)) > 0:
        lengths.append(int(rng.choice([size for size in sizes if size <= rest])))
    return lengths


def _row(tree: Any, row: int) -> Any:
    return jax.tree.map(lambda x: x[row], tree)


MIXER_PROPERTIES: dict[str, Property] = {
    check.__name__: check
    for check in (
        config_is_a_frozen_value,
        parameters_are_float32_and_share_no_buffer,
        parameters_say_what_they_are,
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
