"""Faults in `fwpkm_jax.layers`, `fwpkm_jax.models` and `fwpkm_jax.generation`."""

from lab.seeded_faults.fault import Fault

_MEMORY = (
    "tests/layers/memories",
    "tests/layers/test_fast_weight_streams.py",
    "tests/layers/test_fast_weight_gradients.py",
)
_GDN = ("tests/layers/mixers/test_gated_delta_net.py", "tests/layers/mixers/test_contract.py")
_ATTENTION = ("tests/layers/mixers/test_attention.py", "tests/layers/mixers/test_contract.py")
_PKM = ("tests/layers/test_pkm.py", "tests/training/test_batch_norm.py")
_MODEL = ("tests/models/test_language_model.py", "tests/models/test_reset_caches.py")
_GENERATION = ("tests/generation",)

FAULTS = (
    Fault(
        "memory layer: padding counts in the streamed losses",
        "losses = loss_gate * paired * jnp.mean",
        "losses = loss_gate * jnp.mean",
        _MEMORY,
    ),
    Fault(
        "memory layer: gradients flow through what is reported",
        "return output, jax.lax.stop_gradient(facts)",
        "return output, facts",
        _MEMORY,
        under="fwpkm_jax/layers/memories",
    ),
    Fault(
        "memory layer: the gate's sides swapped",
        "mixed = gate * read + (1.0 - gate) * signals.value",
        "mixed = (1.0 - gate) * read + gate * signals.value",
        _MEMORY,
    ),
    Fault(
        "memory layer: large reads count more than in full",
        "output * jnp.minimum(size / self.config.full_read**2, 1.0)",
        "output * size / self.config.full_read**2",
        _MEMORY,
    ),
    Fault(
        "memory layer: the halves of the query by head",
        "halves = query.astype(memory_dtype).reshape(*x.shape[:2], 2, -1)",
        "halves = query.astype(memory_dtype).reshape(*x.shape[:2], 2 * rule.num_heads, -1)",
        _MEMORY,
    ),
    Fault(
        "block: computed again by the running statistics",
        "batch_statistics=context.batch_statistics,",
        "batch_statistics=context.batch_statistics and context.remat is None,",
        ("tests/models/test_remat.py", "tests/training/test_batch_norm.py"),
    ),
    Fault(
        "model: a new document labels the last token of the old one",
        "head = head._replace(waits=jnp.zeros_like(head.waits))",
        "head = head._replace(waits=head.waits)",
        _MODEL,
    ),
    Fault(
        "model: every layer draws the same memory",
        "jax.random.fold_in(rng, index), groups=groups",
        "jax.random.fold_in(rng, 0), groups=groups",
        _MODEL,
    ),
    Fault(
        "memory: queries in bfloat16 skip their normaliser",
        'narrow = narrow and query.dtype == jnp.bfloat16 and self.config.query_norm == "none"',
        "narrow = narrow and query.dtype == jnp.bfloat16",
        ("tests/layers/test_fast_weight_gradients.py",),
    ),
    Fault(
        "model: an id outside the vocabulary reads the last row",
        "embed(self.embedding[...], tokens)",
        'self.embedding[...].at[tokens].get(mode="clip")',
        _MODEL,
    ),
    Fault(
        "model: over devices an id outside the vocabulary reads the last row",
        "rows = embed(embedding, tokens)",
        'rows = embedding.at[tokens].get(mode="clip")',
        _MODEL,
    ),
    Fault(
        "Gated DeltaNet: padding writes",
        "log_decay, beta = jnp.where(real, log_decay, 0), jnp.where(real, beta, 0)",
        "log_decay = jnp.where(real, log_decay, 0)",
        _GDN,
    ),
    Fault(
        "convolution: forgets its cache behind padding",
        "end=None if counts is None else reach + counts)",
        "end=None if counts is None else counts + 0 * reach)",
        _GDN,
        under="fwpkm_jax/core/sequence/convolution.py",
    ),
    Fault(
        "attention: streams start at position 0 again",
        "positions = positions if first is None else positions + first[:, None]",
        "positions = positions if first is None else positions + 0 * first[:, None]",
        _ATTENTION,
    ),
    Fault(
        "attention: padding is seen",
        "jnp.where(packing.is_real, positions, -1), documents",
        "jnp.where(packing.is_real, positions, positions), documents",
        _ATTENTION,
        under="fwpkm_jax/core/attention/softmax.py",
    ),
    Fault(
        "attention: a document sees the one before",
        "same = own == key_documents[:, None, :]",
        "same = own >= key_documents[:, None, :]",
        ("tests/layers/mixers/test_contract.py",),
    ),
    Fault(
        "attention: a document that goes on sees its persistent tokens twice",
        "seen &= jnp.where(first, own > 0, same)",
        "seen &= jnp.where(first, own >= 0, same)",
        ("tests/layers/mixers/test_attention.py",),
    ),
    Fault(
        "convolution: a document sees the one before",
        "same = numbers[:, start : start + length] == documents",
        "same = numbers[:, start : start + length] <= documents",
        ("tests/layers/mixers/test_contract.py",),
    ),
    Fault(
        "matrix memories: a document starts from the memory of the one before",
        "return jnp.where(at, jnp.asarray(LOWEST_LOG_DECAY, log_decay.dtype), log_decay)",
        "return jnp.where(at, log_decay, log_decay)",
        ("tests/rules/test_contract.py", "tests/layers/mixers/test_contract.py"),
    ),
    Fault(
        "LaCT: a document sees the one before",
        "positions, cache, counts, documents=documents",
        "positions, cache, counts, documents=0 * documents if documents is not None else None",
        ("tests/layers/mixers/test_contract.py",),
        under="fwpkm_jax/layers/mixers/lact.py",
    ),
    Fault(
        "Titans, LaCT: a document starts from the memory of the one before",
        "state = select(one.fresh, fresh, state)",
        "state = select(one.fresh & False, fresh, state)",
        ("tests/core/streams/test_documents.py", "tests/layers/mixers/test_contract.py"),
    ),
    Fault(
        "Titans: gradients' base moves a token early",
        "ends = position % chunk == 0",
        "ends = (position + 1) % chunk == 0",
        ("tests/layers/mixers/test_contract.py", "tests/generation/test_generate.py"),
    ),
    Fault(
        "rotary: YaRN without its scale",
        "scale = 0.1 * math.log(self.factor) + 1",
        "scale = 1.0",
        ("tests/layers/test_rotary.py",),
    ),
    Fault(
        "PKM: one softmax over all heads",
        'normalization="head",',
        'normalization="token",',
        _PKM,
        under="fwpkm_jax/layers",
    ),
    Fault(
        "PKM: biased variance in the statistics",
        "unbiased = variance * (tokens / jnp.maximum(tokens - 1, 1))",
        "unbiased = variance",
        _PKM,
    ),
    Fault(
        "Fast Weight Layer: the last token learns token 0",
        "counted = jnp.concatenate([stream.waits[:, None], real], axis=1) * follows",
        "counted = jnp.concatenate([stream.waits[:, None], real], axis=1)",
        ("tests/layers/fast_weight_layers",),
    ),
    Fault(
        "sampling: the token that reaches top_p is cut",
        "before < sampling.top_p",
        "before + probabilities < sampling.top_p",
        ("tests/generation/test_sampling.py",),
    ),
    Fault(
        "generation: stopped sequences go on drawing",
        "num_drawn=state.num_drawn + count",
        "num_drawn=state.num_drawn + 1",
        _GENERATION,
    ),
    Fault(
        "generation: every token by the same draw",
        "draws = jax.vmap(jax.random.fold_in)(keys, state.num_drawn)",
        "draws = jax.vmap(jax.random.fold_in)(keys, 0 * state.num_drawn)",
        _GENERATION,
    ),
    Fault(
        "generation: a prompt's logits go to sequences without one",
        "logits=jnp.where(has_prompt[:, None], logits, state.logits)",
        "logits=logits",
        _GENERATION,
    ),
    Fault(
        "functions: padding changes a memory",
        "g, beta = (jnp.where(real[:, :, None], x, 0) for x in (g, beta))",
        "g, beta = (jnp.where(real[:, :, None], x, x) for x in (g, beta))",
        ("tests/test_functions.py",),
    ),
    Fault(
        "functions: a label outside of the vocabulary gives a finite loss",
        "total = total * jnp.where(jnp.any(labels >= vocab), jnp.nan, 1.0)",
        "total = total * jnp.where(jnp.any(labels >= vocab), 1.0, 1.0)",
        ("tests/test_functions.py",),
    ),
    Fault(
        "functions: the first document forgets the state that is given",
        "starts = starts & (document_numbers(starts) > 1)",
        "starts = starts & (document_numbers(starts) > 0)",
        ("tests/test_functions.py",),
    ),
)
