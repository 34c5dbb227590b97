"""What kernels do not take: refused with a reason if asked for by name, else left to plain JAX."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.cross_entropy import row_cross_entropy
from pallas_kernels.embed import embed
from pallas_kernels.gated_delta import chunk_gated_delta_rule
from pallas_kernels.mix_rms_norm import mix_rms_norm
from pallas_kernels.product_top_k import select_slots
from pallas_kernels.short_convolution import Part, short_convolution
from pallas_kernels.short_convolution.specs import heads
from pallas_kernels.slot_add import slot_add
from pallas_kernels.slot_read import slot_read


def array(shape, kind="f"):
    kinds = {"f": jnp.float32, "h": jnp.float16, "b": jnp.bfloat16, "d": jnp.float64}
    kinds |= {"i": jnp.int32, "s": jnp.int16}
    return jax.ShapeDtypeStruct(shape, kinds[kind])


def norms(shape=(3, 128), kinds="fff"):
    arrays = map(array, (shape, shape, shape[1:]), kinds)
    return functools.partial(add_rms_norm, eps=1e-5), dict(
        zip(("x", "branch", "scale"), arrays, strict=True)
    )


def mixes(width=128, kinds="fff", result=jnp.float32):
    arrays = map(array, ((2, 3, width), (2, 3, width), (2, 3)), kinds)
    call = functools.partial(mix_rms_norm, eps=1e-5, dtype=result)
    return call, dict(zip(("x", "y", "gate"), arrays, strict=True))


def rows(kind="f", width=128, length=3):
    return embed, {"table": array((8, width), kind), "tokens": array((length,), "i")}


def losses(tokens=2, vocab=128, kinds="fif", result=jnp.float32):
    arrays = map(array, ((tokens, vocab), (tokens,), (tokens,)), kinds)
    call = functools.partial(row_cross_entropy, dtype=result)
    return call, dict(zip(("logits", "labels", "weights"), arrays, strict=True))


def rule(key=64, value=64, kind="f"):
    tokens = (1, 5, 2)
    shapes = {"query": (*tokens, key), "key": (*tokens, key), "value": (*tokens, value)}
    arrays = {name: array(shape, kind) for name, shape in shapes.items()}
    return chunk_gated_delta_rule, arrays | {"log_decay": array(tokens), "beta": array(tokens)}


def selection(tokens=3, subkeys=7, half=4, kind="f"):
    queries, keys = array((tokens, 1, 2 * half), kind), array((1, 2, subkeys, half), kind)
    return functools.partial(select_slots, top_k=3), {"queries": queries, "keys": keys}


PARTS = heads(64, 64)


def convolution(groups=8, parts=PARTS, width=4, kind="f", activation=jax.nn.silu):
    channels = groups * sum(part.width for part in parts if part.convolved)
    arrays = {
        "x": array((1, 12, groups, sum(part.width for part in parts)), kind),
        "before": array((1, width - 1, channels)),
        "weight": array((width, channels)),
    }
    return functools.partial(short_convolution, parts=parts, activation=activation), arrays


def reads(width=128, kind="f"):
    arrays = {"values": array((16, width), kind), "slot_ids": array((5, 2), "i")}
    return slot_read, arrays | {"weights": array((5, 2))}


def additions(kind="f"):
    from fwpkm_jax.core.slots.values.grouping import group_slots

    groups = jax.eval_shape(lambda: group_slots(jnp.zeros((5, 2), jnp.int32), num_slots=16))
    arrays = {"values": array((16, 128), kind), "groups": groups}
    return slot_add, arrays | {"coefficients": array((5, 2)), "rows": array((5, 128))}


REFUSED = (
    (norms, {"shape": (3, 96)}, "rows of 96 values, only multiples of 128"),
    (norms, {"shape": (3, 2176)}, "rows of 2176 values, only multiples of 128 up to 2048"),
    (norms, {"shape": (0, 128)}, r"a stream of shape \(0, 128\), at least one row"),
    (norms, {"kinds": "hff"}, "a stream in float16"),
    (norms, {"kinds": "fhf"}, r"a branch float16\[3, 128\] beside a stream float32\[3, 128\]"),
    (norms, {"kinds": "ffh"}, "a scale in float16"),
    (mixes, {"width": 96}, "rows of 96 values, only multiples of 128"),
    (mixes, {"width": 1152}, "rows of 1152 values, only multiples of 128 up to 1024"),
    (mixes, {"kinds": "hhh"}, "rows in float16, only float32"),
    (mixes, {"kinds": "fhf"}, r"rows float16\[2, 3, 128\] beside rows float32\[2, 3, 128\]"),
    (mixes, {"kinds": "ffh"}, r"a gate float16\[2, 3\] of rows float32\[2, 3, 128\]"),
    (mixes, {"result": jnp.float16}, "a result in float16, only float32 and bfloat16"),
    (rows, {"kind": "b"}, "a table in bfloat16, only float32"),
    (rows, {"width": 96}, "rows of 96 values, only multiples of 128"),
    (rows, {"width": 1152}, "rows of 1152 values, at most 1024"),
    (rows, {"length": 0}, r"tokens of shape \(0,\), at least one"),
    (losses, {"vocab": 400}, "rows of 400 logits, only multiples of 128"),
    (losses, {"vocab": 56_448}, "rows of 56448 logits, only multiples of 128 up to 56320"),
    (losses, {"tokens": 0}, r"logits of shape \(0, 128\), at least one row"),
    (losses, {"result": jnp.float16}, "a gradient in float16"),
    (losses, {"kinds": "bif"}, "bfloat16 logits with float32 weights"),
    (losses, {"kinds": "fsf"}, "int16 labels"),
    (rule, {"key": 129}, "keys of width 129, at most 128"),
    (rule, {"value": 257}, "values of width 257, at most 256"),
    (rule, {"kind": "d"}, "float64"),
    (selection, {"subkeys": 1025}, "subkeys=1025"),
    (selection, {"half": 516}, "half=516"),
    (selection, {"tokens": 0}, "0 tokens"),
    (selection, {"kind": "d"}, "dtypes float64 and float64; both must be float32"),
    (convolution, {"groups": 3}, "3 rows of 64 columns"),
    (convolution, {"parts": heads(24, 64)}, "8 rows of 24 columns"),
    (
        convolution,
        {"parts": (Part(128, 64), Part(64))},
        "heads of 64 in 8 groups of 128 columns",
    ),
    (convolution, {"width": 9}, "9 taps per channel, only 2 to 8"),
    (convolution, {"width": 1}, "1 taps per channel, only 2 to 8"),
    (
        convolution,
        {"groups": 1, "parts": (Part(512, 64), Part(100))},
        "100 columns, .* no multiple of 64",
    ),
    (convolution, {"activation": jax.nn.relu}, r"another activation than jax\.nn\.silu"),
    (convolution, {"kind": "h"}, "x in float16, only bfloat16 and float32"),
    (reads, {"width": 96}, "rows of 96 values, only multiples of 128"),
    (reads, {"kind": "h"}, "float16 tables"),
    (additions, {"kind": "b"}, "bfloat16 tables"),
)
KERNELS = {rule: ("tpu", "gpu"), selection: ("tpu", "gpu")}
KERNELS |= {reads: ("tpu", "gpu"), additions: ("tpu", "gpu")}
CASES = [
    pytest.param(*case, kernel, id=f"{case[0].__name__}-{kernel}-{case[2][:24]}")
    for case in REFUSED
    for kernel in KERNELS.get(case[0], ("gpu",))
]


@pytest.mark.parametrize(("of", "change", "reason", "kernel"), CASES)
def test_what_a_kernel_does_not_take_is_named_and_left_to_plain_jax(of, change, reason, kernel):
    with jax.enable_x64("d" in str(change.get("kind"))), dispatch.compile_kernels(kernel):
        call, arrays = of(**change)
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(functools.partial(call, backend="pallas"), **arrays)
        if of is not additions:  # They warn that small ones are lost.
            plain = jax.eval_shape(functools.partial(call, backend="reference"), **arrays)
            assert jax.eval_shape(call, **arrays) == plain
