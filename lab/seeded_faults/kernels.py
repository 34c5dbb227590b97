"""Faults in `pallas_kernels`, which the tests interpret on a CPU."""

from lab.seeded_faults.fault import Fault

_READ = ("tests/kernels/test_parity.py", "-k", "slot_read or slot_dot")
_WRITE = ("tests/kernels/test_parity.py", "-k", "slot_add")
_ADDITIONS = ("tests/kernels/test_tpu_additions.py",)
_TOP_K = ("tests/kernels/test_product_top_k.py", "tests/kernels/test_parity.py", "-k", "top_k")
_SHARED_MEMORY = ("tests/kernels/test_shared_memory.py",)
_LOSS = ("tests/kernels/test_cross_entropy.py",)
_DELTA = ("tests/kernels/test_gated_delta.py", "tests/kernels/test_parity.py", "-k", "delta")

_MIX = ("tests/kernels/test_mix_rms_norm.py",)
_EMBED = ("tests/kernels/test_embed.py",)

FAULTS = (
    Fault(
        "norm of a mix: the cotangents of reads in the order of the batch",
        "x_bar[place] = share * mixed_bar",
        "x_bar[token] = share * mixed_bar",
        _MIX,
        under="pallas_kernels/mix_rms_norm/gpu.py",
    ),
    Fault(
        "norm of a mix: a layer gives the batch for the sequences of a memory",
        "len(x) // groups if write else 1",
        "len(x) if write else 1",
        _MIX,
        under="fwpkm_jax/layers/memories/fast_weight.py",
    ),
    Fault(
        "embedding: an id outside the table adds to the gradient of its first row",
        "rows = jnp.where(exists[:, None], rows.reshape(ids.size, -1), 0.0)",
        "rows = rows.reshape(ids.size, -1)",
        _EMBED,
        under="pallas_kernels/embed/api.py",
    ),
    Fault(
        "losses of rows: the sum of earlier tiles keeps the old maximum",
        "total = factor * total + jnp.sum(terms)",
        "total = total + jnp.sum(terms)",
        _LOSS,
        under="pallas_kernels/cross_entropy/gpu.py",
    ),
    Fault(
        "losses of rows: a tile's first place left out of the label's",
        "== label - tile * (TILE * lanes)",
        "== label",
        _LOSS,
        under="pallas_kernels/cross_entropy/gpu.py",
    ),
    Fault(
        "slot dot on a TPU: the first lanes left out",
        "for begin in range(0, width, LANES)]",
        "for begin in range(0, max(width - LANES, 1), LANES)]",
        _READ,
        under="pallas_kernels/slot_read/tpu.py",
    ),
    Fault(
        "slot read on a TPU: the ring's second round is not copied",
        "pl.when(token + depth < tokens)(lambda: start(token + depth))",
        "pl.when(token + depth + 1 < tokens)(lambda: start(token + depth))",
        _READ,
        under="pallas_kernels/slot_read/tpu.py",
    ),
    Fault(
        "slot read: the target's cotangent without its weight",
        "_, of_error = jax.vjp(PLAIN.error, output, target, write_weight[:, None])",
        "_, of_error = jax.vjp(PLAIN.error, output, target, jnp.ones_like(write_weight)[:, None])",
        _READ,
    ),
    Fault(
        "slot read: errors do not reach the table",
        "vectors = vectors + read_bar",
        "vectors = vectors",
        _READ,
    ),
    Fault(
        "slot add on a TPU: a run's sum goes on into the next",
        "total = jnp.where(begins == 1, 0.0, total) + of.coefficients[j] * row",
        "total = total + of.coefficients[j] * row",
        _WRITE,
        under="pallas_kernels/slot_add/tpu.py",
    ),
    Fault(
        "sorted references: runs begin one reference early",
        "[jnp.ones((1,), bool), group[1:] != group[:-1]]",
        "[group[1:] != group[:-1], jnp.ones((1,), bool)]",
        _ADDITIONS,
    ),
    Fault(
        "product keys' cotangents: rows and columns swapped",
        "row, column = slot_ids // num_subkeys, slot_ids % num_subkeys",
        "column, row = slot_ids // num_subkeys, slot_ids % num_subkeys",
        _TOP_K,
        under="pallas_kernels/product_top_k/api.py",
    ),
    Fault(
        "product keys' cotangents: the queries' sign",
        "jnp.sum(coefficients, axis=-1, keepdims=True) * halves - to_queries",
        "to_queries - jnp.sum(coefficients, axis=-1, keepdims=True) * halves",
        _TOP_K,
    ),
    Fault(
        "product keys on a TPU: sub-keys added behind the end can win",
        "return jnp.where(sub_keys < subkeys, scores, -jnp.inf)",
        "return jnp.where(sub_keys <= subkeys, scores, -jnp.inf)",
        _TOP_K,
        under="pallas_kernels/product_top_k/tpu.py",
    ),
    Fault(
        "gated delta: corrections without their strength",
        "lower = jnp.where(row > column, side.scale(beta, overlap * decays.between), 0.0)",
        "lower = jnp.where(row > column, overlap * decays.between, 0.0)",
        _DELTA,
    ),
    Fault(
        "gated delta: reads of the memory before are not scaled",
        "return scale * from_start + side.product(attention, errors)",
        "return from_start + side.product(attention, errors)",
        _DELTA,
        under="pallas_kernels/gated_delta/chunk.py",
    ),
    Fault(
        "gated delta backward: the memory's decay is lost",
        "d_start = times(decays.whole, d_state)",
        "d_start = d_state",
        _DELTA,
    ),
    Fault(
        "gated delta backward: the keys' second use is lost",
        "d_key += product(d_overlap, key) + product(d_overlap, key, contract=(0, 0))",
        "d_key += product(d_overlap, key)",
        _DELTA,
    ),
    Fault(
        "gated delta on a GPU: warps overwrite what others still multiply",
        "put(errors, multiply(inverse, errors), reused=True)",
        "put(errors, multiply(inverse, errors))",
        _SHARED_MEMORY,
    ),
    Fault(
        "product keys on a GPU: a warpgroup reads terms that the other has not written",
        "        plgpu.barrier_wait(split)\n",
        "",
        _SHARED_MEMORY,
    ),
    Fault(
        "dispatch: a kernel asked for by name falls back",
        "        if by_name or kernel in LIBRARIES:\n            raise error",
        "        if False:\n            raise error",
        ("tests/kernels/test_dispatch.py",),
    ),
    Fault(
        "another package's kernels: a row that starts a document keeps the memory given",
        "state = jnp.where(starts[:, 0, None, None, None], 0, state)",
        "state = state",
        ("tests/kernels/test_recurrence.py",),
    ),
    Fault(
        "another package's kernels: they are used without a comparison",
        "failure = None if simulated or lacking else self._failure(kernel)",
        "failure = None if simulated or lacking or kernel == 'jla' else self._failure(kernel)",
        ("tests/kernels/test_recurrence.py",),
    ),
)
