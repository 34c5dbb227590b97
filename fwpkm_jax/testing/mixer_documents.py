"""The contract of token mixers on rows of several documents, whole and as streams."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.testing.documents import (
    Documents,
    apart,
    places_apart,
    random_documents,
    starts_of,
    together,
)
from fwpkm_jax.testing.mixer_case import BATCH, LENGTH, MixerCase
from fwpkm_jax.testing.properties import cast_floats, distance, require, require_near

_TRIALS, _DOCUMENTS, _PIECE = 6, 5, 5
_EXACT, _SINGLE = 1e-12, 1e-6  # Of the norm: packed documents in double and single precision.


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
    cotangents = jnp.asarray(rng.normal(size=(BATCH, LENGTH, case.model_dim)), dtype)

    @jax.jit
    def piece(x: jax.Array, mask: jax.Array, starts: jax.Array, cache: Any) -> Any:
        return nnx.merge(graphdef, params)(x, mask=mask, starts=starts, cache=cache)

    @jax.jit
    def gradients(params: Any, x: jax.Array, c: jax.Array, **documents: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            output, _ = nnx.merge(graphdef, params)(x, **documents)
            return jnp.sum(output * c), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    def alone(x: np.ndarray, rows: Documents, real: np.ndarray, dtype: Any = dtype) -> Any:
        """Outputs and gradients with one document per row, moved back; zeros at padding."""
        places = places_apart(rows, LENGTH, most=_DOCUMENTS, real=real)
        inputs = [jnp.asarray(apart(a, places), dtype) for a in (x, cotangents)]
        mask = jnp.asarray(places >= 0, dtype)
        (d_params, d_x), output = gradients(cast_floats(params, dtype), *inputs, mask=mask)
        return *(together(a, places, BATCH) for a in (output, d_x)), d_params

    def tolerances(x: np.ndarray, rows: Documents, real: np.ndarray, found: Any) -> list:
        """Of outputs and gradients: in single precision, never below what rounding takes."""
        if dtype == np.float64:
            return [tolerance] * len(found)
        exact = alone(x, rows, real, np.float64)
        return [max(tolerance, 4 * distance(*pair)) for pair in zip(found, exact, strict=True)]

    for trial in range(_TRIALS):
        x = np.asarray(case.sample(seed=trial, dtype=dtype))
        number = (1, 2, _DOCUMENTS)[trial % 3]
        rows = [random_documents(rng, LENGTH, number=number) for _ in range(BATCH)]
        starts = starts_of(rows, LENGTH)
        where = f"of documents {rows}"
        (d_params, d_x), packed = gradients(params, jnp.asarray(x), cotangents, starts=starts)
        everything = np.ones(starts.shape, bool)
        expected = alone(x, rows, everything)
        allowed = tolerances(x, rows, everything, expected)
        names = ("output", "gradient", "gradients")
        for index, found in enumerate((packed, d_x, d_params)):
            what = f"{names[index]} {where}"
            require_near(found, expected[index], what=what, tolerance=allowed[index])
        # A stream with padding: a start at padding moves to the document's next token.
        real = rng.uniform(size=starts.shape) < (1.0, 0.7)[trial % 2]
        cache = mixer.init_cache(BATCH, max_length=LENGTH, dtype=x.dtype)
        for first in range(0, LENGTH, _PIECE):
            at = slice(first, first + _PIECE)
            tokens = np.where(real[..., None], x, dtype(1e3))[:, at]
            output, cache = piece(tokens, real[:, at], starts[:, at], cache)
            if first == 0:
                expected = alone(x, rows, real)
                allowed = tolerances(x, rows, real, expected)
            what = f"stream {where}"
            require_near(output, expected[0][:, at], what=what, tolerance=allowed[0])


def _require_documents_refused(case: MixerCase) -> None:
    x, name = case.sample(3), type(case.mixer).__name__
    try:
        case.mixer(x, starts=jnp.ones((BATCH, 3), bool))
    except ValueError as error:
        require(name in str(error), f"the refusal of documents does not name {name}: {error}")
        return
    raise AssertionError("documents are neither taken nor refused")
