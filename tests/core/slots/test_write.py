"""The write's formulas: where they stand, and who may compute them otherwise."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fwpkm_jax
import pallas_kernels
from fwpkm_jax.core.slots.write import PLAIN, ValueWrite
from pallas_kernels.dispatch import interpret_kernels
from pallas_kernels.row_ops import VALUE_SCAN

LIBRARY = Path(fwpkm_jax.__file__).parent
KERNELS = Path(pallas_kernels.__file__).parent


def errors_in(source: str) -> list[int]:
    """Lines that form an error, `x - target`; inside a square it is a loss."""
    tree = ast.parse(source)
    squares = {
        id(node.left)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
    }
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and id(node) not in squares
        and "target" in ast.unparse(node.right)
    )


def test_the_scan_finds_an_error_and_no_loss():
    assert errors_in("e = m[:, None] * (y - chunk.targets)\ngap = y - row(target, t)") == [1, 2]
    assert not errors_in("loss = (y - target) ** 2\nrest = target - y")


def test_the_error_has_one_formula_in_the_library_and_none_in_kernels():
    rooms = [LIBRARY / "core" / "slots", LIBRARY / "rules" / "fwpkm.py", KERNELS]
    files = [rooms[1], *rooms[0].rglob("*.py"), *rooms[2].rglob("*.py")]
    found = {str(path.relative_to(LIBRARY.parent)): errors_in(path.read_text()) for path in files}
    found = {name: lines for name, lines in found.items() if lines}
    assert found.pop("fwpkm_jax/core/slots/definition.py")  # It stands by itself, to test against.
    assert list(found) == ["fwpkm_jax/core/slots/write.py"]
    assert len(found["fwpkm_jax/core/slots/write.py"]) == 1


def test_every_kernel_that_gives_errors_names_the_formula():
    files = (KERNELS / "slot_read").glob("*.py")
    naming = {path.name for path in files if "PLAIN.error" in path.read_text()}
    assert naming == {"api.py", "gpu.py", "gpu_back.py", "tpu.py"}


def test_the_error_is_the_gradient_of_half_the_weighted_squared_error():
    rng = np.random.default_rng(0)
    read, target, weight = (jnp.asarray(rng.normal(size=s)) for s in ((5, 3), (5, 3), (5, 1)))
    loss = lambda read: 0.5 * jnp.sum(weight * (read - target) ** 2)  # noqa: E731
    np.testing.assert_allclose(
        PLAIN.error(read, target, weight), jax.grad(loss)(read), rtol=1e-6, atol=1e-7
    )


@pytest.mark.by_default("gpu")
@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_kernels_refuse_a_write_with_any_option(kernel):
    table = jnp.zeros((256, 128), jnp.float32)
    options = {"learning_rate": 0.5, "clip": 1.0, "weight_decay": 0.1}
    fields = {field.name for field in dataclasses.fields(ValueWrite)} - {"step_size"}
    assert fields == set(options)
    with interpret_kernels(kernel):
        assert VALUE_SCAN.choose("pallas", table, ValueWrite(step_size=3.0)) == kernel
        for name, value in options.items():
            with pytest.raises(NotImplementedError, match=f"a write with {name}={value}"):
                VALUE_SCAN.choose("pallas", table, ValueWrite(step_size=3.0, **{name: value}))
            # Chosen automatically, they leave such a write to plain XLA.
            write = ValueWrite(step_size=3.0, **{name: value})
            assert VALUE_SCAN.choose("auto", table, write) == "reference"
