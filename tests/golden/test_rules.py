"""Matrix rules, token by token and in chunks, against published recurrences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.rules.matrix import MATRIX_RULES, Tokens
from tests.golden.vectors import assert_matches

KIND = "rules/*"
FIELDS = {"q": "query", "k": "key", "v": "value", "g": "log_decay", "beta": "strength"}


def test_a_rule_matches_its_reference(golden_path):
    """Outputs, final memory and every gradient of both forms; a file is `NAME_NUMBER.npz`."""
    with np.load(golden_path) as file, jax.enable_x64(True):
        arrays = {name: jnp.asarray(file[name], jnp.float64) for name in file.files}
        expected = {name: file[name] for name in file.files if name[:2] == "g:"}
        expected |= {name: file[name] for name in ("out", "state")}
        rule = MATRIX_RULES[golden_path.stem.rpartition("_")[0]]()
        given = {name[3:]: x for name, x in arrays.items() if name.startswith("in:")}

        @jax.jit
        def evaluate(given):
            def run(form, given):
                tokens = {FIELDS[name]: x for name, x in given.items() if name != "h0"}
                # The reference scales queries; in ours the layer does.
                tokens["query"] *= tokens["query"].shape[-1] ** -0.5
                return tuple(form(Tokens(**tokens), given.get("h0")))

            found = {}
            for form in (rule.recurrent, dataclasses.replace(rule, chunk_size=32).run, rule.run):
                out, pull = jax.vjp(functools.partial(run, form), given)
                (gradients,) = pull((arrays["co"], arrays["cs"]))
                gradients = {f"g:{name}": x for name, x in gradients.items()}
                found[len(found)] = {"out": out[0], "state": out[1], **gradients}
            return found

        found = evaluate(given)
    for results in found.values():
        assert results.keys() >= expected.keys()
        for name, array in expected.items():
            assert_matches(name, results[name], array, golden_path, np.float64)
