"""Faults in `fwpkm_jax.rules`."""

from lab.seeded_faults.fault import Fault

_FWPKM = ("tests/rules/test_fwpkm.py", "tests/rules/test_two_phase.py")
_MATRIX = ("tests/rules/test_contract.py", "tests/rules/test_matrix_limits.py")
_PUBLISHED = ("tests/golden/test_published_rules.py",)

FAULTS = (
    Fault(
        "FwPKM: the step forgets the heads",
        "step = float(rule.num_heads * rule.top_k)",
        "step = float(rule.top_k)",
        _FWPKM,
    ),
    Fault(
        "FwPKM: the reconstruction loss is doubled",
        "return 0.5 * jnp.sum(losses) / jnp.maximum(jnp.sum(chunk.paired), 1.0)",
        "return jnp.sum(losses) / jnp.maximum(jnp.sum(chunk.paired), 1.0)",
        _FWPKM,
    ),
    Fault(
        "FwPKM: keys do not decay",
        "gradient = gradient + self.weight_decay * keys",
        "gradient = gradient + 0.0 * keys",
        _FWPKM,
    ),
    Fault(
        "FwPKM: a row read twice counts twice in the update's norm",
        "jnp.sqrt(jnp.sum(squares / slot_counts(slot_ids, ones, num_slots=before.shape[0])))",
        "jnp.sqrt(jnp.sum(squares))",
        _FWPKM,
    ),
    Fault(
        "FwPKM: the release's factor ignored",
        "if self.factor is None else self.factor * self.write_weight",
        "if self.factor is None else self.write_weight",
        (*_FWPKM, "tests/golden/test_fwpkm_stream.py"),
    ),
    Fault(
        "FwMLP: padding counts in the mean",
        "return jnp.sum(errors) / jnp.maximum(num_written, 1.0), output",
        "return jnp.mean(errors), output",
        ("tests/rules/test_fwmlp.py", "tests/rules/test_contract.py"),
    ),
    Fault(
        "FwMLP: the mean target is a sum",
        "sum(seen[1:], start=seen[0]) * (1 / len(seen))",
        "sum(seen[1:], start=seen[0])",
        ("tests/rules/test_fwmlp.py",),
    ),
    Fault(
        "FwMLP: padding decays the weights",
        "rate = jnp.where(num_written > 0, self.learning_rate, 0.0).astype(num_written.dtype)",
        "rate = jnp.full_like(num_written, self.learning_rate)",
        ("tests/rules/test_fwmlp.py", "tests/rules/test_contract.py"),
    ),
    Fault(
        "LaCT: the slope of SiLU",
        "slope = slope * (1 + before - silu)",
        "slope = slope * (1 + before)",
        ("tests/rules/test_lact.py",),
    ),
    Fault(
        "LaCT: a chunk of padding moves the rows by rounding",
        "written = jnp.any(chunk.write_weight != 0)",
        "written = jnp.any(chunk.write_weight == chunk.write_weight)",
        ("tests/rules/test_contract.py", "tests/rules/test_lact.py"),
    ),
    Fault(
        "Titans: padding forgets the momentum",
        "kept = jnp.where(skipped, 1.0, writes.momentum[:, order])",
        "kept = writes.momentum[:, order]",
        ("tests/rules/test_contract.py", "tests/rules/test_titans.py"),
    ),
    Fault(
        "Titans: padding forgets the weights",
        "kept = jnp.where(skipped, 1.0, 1.0 - writes.forget)",
        "kept = 1.0 - writes.forget",
        ("tests/rules/test_contract.py", "tests/rules/test_titans.py"),
    ),
    Fault(
        "Titans: tokens read before the write that they complete",
        "[1 : tokens + 1]",
        "[0:tokens]",
        ("tests/rules/test_titans.py",),
        under="fwpkm_jax/rules",
    ),
    Fault(
        "matrix rules: padding decays the memory",
        "log_decay=keep(tokens.log_decay, 0.0),",
        "log_decay=tokens.log_decay,",
        _MATRIX,
    ),
    Fault(
        "mLSTM: the running scale forgets its decay",
        "return first[0] + second[0], jnp.maximum(first[1] + second[0], second[1])",
        "return first[0] + second[0], jnp.maximum(first[1], second[1])",
        _MATRIX,
    ),
    Fault(
        "Longhorn: an explicit step",
        "explicit = strength / (1 + strength * jnp.sum(jnp.square(tokens.key), axis=-1))",
        "explicit = strength / (1 + jnp.sum(jnp.square(tokens.key), axis=-1))",
        _MATRIX,
    ),
    Fault(
        "Mamba-2: writes without their step",
        "return tokens._replace(value=given(tokens.strength)[..., None] * tokens.value)",
        "return tokens",
        _MATRIX,
    ),
    Fault(
        "gated RFA: chunks write the share that is kept",
        "written = forgotten(tokens.log_decay)[..., None] * with_one(tokens.value)",
        "written = jnp.exp(given(tokens.log_decay))[..., None] * with_one(tokens.value)",
        _MATRIX,
    ),
    Fault(
        "RetNet: heads decay faster and faster",
        "share = 1 - 2.0 ** (-5 - np.arange(inputs.shape[2]))",
        "share = 1 - 2.0 ** (-5 + np.arange(inputs.shape[2]) / 4)",
        (*_MATRIX, "tests/layers/mixers/test_matrix_memory.py"),
    ),
    Fault(
        "OjaNet: values of any length",
        "return query, key, l2_normalize(value)",
        "return query, key, value",
        (*_MATRIX, "tests/layers/mixers/test_matrix_memory.py"),
    ),
    Fault(
        "Gated DeltaNet-2: what is erased is found after the decay",
        "found = jnp.exp(given(tokens.log_decay)) * erase * tokens.key",
        "found = erase * tokens.key",
        (*_MATRIX, *_PUBLISHED),
    ),
    Fault(
        "preconditioned: the multiplier leaves its range",
        "self.reach ** (-distance / (1 + jnp.abs(distance)))",
        "self.reach ** (-distance)",
        _PUBLISHED,
    ),
    Fault(
        "slot attention: slots are read without the softmax over them",
        "chunk(jax.nn.softmax(met), slice(width, None))",
        "chunk(met, slice(width, None))",
        (*_MATRIX, *_PUBLISHED),
    ),
    Fault(
        "Raven: the weights of the chosen slots do not add up to 1",
        "weights = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-9)",
        "weights = chosen",
        _MATRIX,
    ),
    Fault(
        "Mamba-3: the memory is not turned back at the end of a piece",
        "RecurrenceOutput(output, Mamba3State(_turn_keys(matrix, back), *last))",
        "RecurrenceOutput(output, Mamba3State(matrix, *last))",
        (*_MATRIX, *_PUBLISHED),
    ),
    Fault(
        "windows: a document's window holds tokens of the one before",
        "within = (at >= 0) & (place >= begin[:, None])",
        "within = at >= 0",
        _MATRIX,
    ),
    Fault(
        "Falcon-3: errors of a token's writes are taken one after the other",
        "beta = Together(writes(share)) if self.delta else None",
        "beta = writes(share) if self.delta else None",
        _MATRIX,
    ),
    Fault(
        "in-place TTT: pairs of the piece before count twice",
        "jnp.where(earlier, self.targets(new), self.targets(new + known))",
        "self.targets(new + known)",
        ("tests/layers/mixers/test_in_place.py",),
    ),
)
