"""How much code one crosses to read a model with a memory: held, so that it does not grow unseen.

A limit is what the code has. Whoever needs more raises it, and says in the commit for what.
"""

import ast
import functools
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fwpkm_jax
import pallas_kernels
from fwpkm_jax import FastWeightConfig, FwPKM, LanguageModel, ModelConfig
from fwpkm_jax.layers import AttentionConfig

pytestmark = [pytest.mark.two_phase, pytest.mark.compiled_text]
ROOMS = tuple(package.__path__[0] for package in (fwpkm_jax, pallas_kernels))


MOST_PARAMETERS, MOST_METHODS = 10, 20


class Way(NamedTuple):
    """The code that runs while a function is traced on a CPU: the first three count it, the last
    is the number of functions that call each other."""

    files: int
    functions: int
    statements: int
    depth: int


LIMITS = {"forward": Way(29, 117, 691, 15), "gradient": Way(30, 145, 849, 15)}


def own_statements(node):
    """Statements of a function without its docstring and the bodies of functions inside."""
    documented = ast.get_docstring(node) is not None
    todo, count = list(node.body[documented:]), 0
    while todo:
        inner = todo.pop()
        count += isinstance(inner, ast.stmt)
        if not isinstance(inner, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(inner)
    return count


@functools.cache
def statements_of(path):
    """The statements of every function in a file, by the line where it begins."""
    functions = (
        x for x in ast.walk(ast.parse(Path(path).read_text())) if type(x) is ast.FunctionDef
    )
    return {
        min(x.lineno, *(y.lineno for y in [x, *x.decorator_list])): own_statements(x)
        for x in functions
    }


def way_of(function, *arguments):
    """The way through the library that tracing a function takes."""
    codes, depth, deepest = set(), 0, 0

    def watch(frame, event, _):
        nonlocal depth, deepest
        if frame.f_code.co_filename.startswith(ROOMS) and event in ("call", "return"):
            depth += 1 if event == "call" else -1
            deepest = max(deepest, depth)
            codes.add(frame.f_code)

    sys.setprofile(watch)
    try:
        jax.make_jaxpr(function)(*arguments)
    finally:
        sys.setprofile(None)
    named = [code for code in codes if not code.co_name.startswith("<")]  # No lambda.
    count = sum(statements_of(code.co_filename)[code.co_firstlineno] for code in named)
    return Way(len({code.co_filename for code in codes}), len(named), count, deepest)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_the_way_through_a_model_with_a_memory_stays_short(name):
    # Sizes that no other test has: what JAX has traced before, it does not trace again.
    value_dim = {"forward": 14, "gradient": 26}[name]
    config = ModelConfig(
        vocab_size=34,
        model_dim=22,
        mlp_dim=18,
        mixers=("swa",),
        window=5,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=24),
        memory_layers=(0,),
        fast_weight=FastWeightConfig(
            rule=FwPKM(num_subkeys=8, key_dim=12, value_dim=value_dim, top_k=2), chunk_size=5
        ),
    )
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    memory = model.init_memory(nnx.Rngs(1).params(), groups=1)
    graphdef, params = nnx.split(model)
    tokens = jnp.zeros((2, 10), jnp.int32)

    def forward(params, memory, tokens):
        out = nnx.merge(graphdef, params).hidden(tokens, memory)
        return out.x.sum(), out.memory

    traced = forward if name == "forward" else jax.value_and_grad(forward, has_aux=True)
    jax.eval_shape(traced, params, memory, tokens[:, :5])  # Imports what is imported on demand.
    found = way_of(traced, params, memory, tokens)
    over = [x for x, y, z in zip(Way._fields, found, LIMITS[name], strict=True) if y > z]
    assert not over, f"{found}: {over} exceed {LIMITS[name]}"


def test_functions_have_few_parameters_and_classes_few_methods():
    many = []
    for path in (path for room in ROOMS for path in Path(room).rglob("*.py")):
        if path.parent.name == "programs":
            continue  # Exported; what they take is the transformers library's choice.
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                taken = [one for one in taken if one.arg not in ("self", "cls")]
                many += [(path.name, node.name)] * (len(taken) > MOST_PARAMETERS)
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
                many += [(path.name, node.name)] * (len(methods) > MOST_METHODS)
    assert many == []
