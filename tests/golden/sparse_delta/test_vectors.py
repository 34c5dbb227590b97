"""`functions.sparse_delta` against this folder's arrays, gradients included."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax import functions
from tests.golden.sparse_delta import make

PATHS = sorted(Path(__file__).parent.glob("*.npz"))
FLOATS = ("table", "write_weights", "read_weights", "v", "g", "beta")


def load(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def test_the_arrays_are_what_the_script_makes():
    assert [path.stem for path in PATHS] == sorted(make.CASES)
    for path in PATHS:
        given, found = make.inputs_of(path.stem), load(path)
        for name, x in (given | make.results(path.stem, given)).items():
            np.testing.assert_allclose(found.pop(name), x, rtol=1e-10, atol=1e-12)
        assert not found


@pytest.mark.usefixtures("float64")
@pytest.mark.by_default("weighted")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_function_gives_the_arrays(path):
    arrays = load(path)
    decay = "weighted" if path.stem == "weighted" else "slot"
    exact = {name: jnp.asarray(arrays[name], jnp.float64) for name in (*FLOATS, "co", "ct")}
    ids = {name: jnp.asarray(arrays[name]) for name in make.IDS}
    run = functools.partial(functions.sparse_delta, **ids, decay=decay)

    @jax.jit
    def both(floats):
        out, pull = jax.vjp(lambda floats: tuple(run(**floats)), floats)
        return out, pull((exact["ct"], exact["co"]))[0]

    (table, output), gradients = both({name: exact[name] for name in FLOATS})
    np.testing.assert_allclose(output, arrays["output"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(table, arrays["last_table"], rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, arrays[f"g:{name}"], rtol=1e-10, atol=1e-12)
