"""Faults in what files, settings and extreme numbers from outside must not do."""

from lab.seeded_faults.fault import Fault

_TOKENIZER = ("tests/data/test_tokenizer_json.py",)
_IDENTITY = ("tests/data/test_identity.py",)
_DOCUMENTS = ("tests/data/test_documents.py",)
_LIMITS = ("tests/rules/test_matrix_limits.py",)
_TTT = ("tests/golden/test_ttt.py",)

FAULTS = (
    Fault(
        "tokenizer: a file's truncation is obeyed",
        "        self._tokenizer.no_truncation()\n",
        "",
        _TOKENIZER,
    ),
    Fault(
        "tokenizer: a file's padding is obeyed",
        "        self._tokenizer.no_padding()\n",
        "",
        _TOKENIZER,
    ),
    Fault(
        "tokenizer: a file's dropout is obeyed",
        "self._tokenizer.model.dropout = None",
        "pass",
        _TOKENIZER,
    ),
    Fault(
        "identity: files are known by their size",
        "                while block := content.read(2**20):\n"
        "                    digest.update(block)\n",
        "",
        _IDENTITY,
    ),
    Fault(
        "identity: a large file is known by its beginning",
        "content.seek(number * (size - BLOCK) // (blocks - 1))",
        "content.seek(number * BLOCK)",
        _IDENTITY,
    ),
    Fault(
        "identity: validation text is not known",
        "for x in config.valid_paths],",
        "for x in ()],",
        _IDENTITY,
    ),
    Fault(
        "identity: preparation goes on with other text of equal size and time",
        "if known != now:",
        'if known["bytes"] != now["bytes"]:',
        ("tests/data/prepare/test_job.py",),
    ),
    Fault(
        "documents: a byte order mark is text",
        "bom = 3 if at == 0",
        "bom = 0 if at == 0",
        _DOCUMENTS,
    ),
    Fault(
        "documents: hidden files are read",
        'return any(part.startswith(".") for part in name.split("/"))',
        "return False",
        _DOCUMENTS,
    ),
    Fault(
        "documents: a git-lfs pointer is text",
        "if is_pointer(content.read(100)):",
        "if content.read(0):",
        _DOCUMENTS,
    ),
    Fault(
        "documents: a folder is a file by its name",
        "if x.is_file() and is_named(str(x), str(path))",
        "if is_named(str(x), str(path))",
        _DOCUMENTS,
    ),
    Fault(
        "token files: wide ids lose their upper half",
        'return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")',
        'return np.dtype("<u2")',
        ("tests/data/test_token_files.py",),
    ),
    Fault(
        "sampling: the temperature divides logits of any size",
        "    logits = logits - jnp.max(logits, axis=-1, keepdims=True)\n",
        "",
        ("tests/generation/test_sampling.py",),
    ),
    Fault(
        "slots: the temperature divides scores of any size",
        "    scores = scores - jax.lax.stop_gradient(jnp.max(scores, axis=axis, keepdims=True))\n",
        "",
        ("tests/core/slots/test_addressing.py",),
    ),
    Fault(
        "decay: a large rate overflows before its product",
        "decay = jnp.where(log_rate > _LARGEST_LOG_RATE, -jnp.exp(exponent), usual)",
        "decay = usual",
        _LIMITS,
    ),
    Fault(
        "mlstm: the divisor's bound leaves the range of numbers",
        "jnp.exp(-jnp.clip(log_scale, -limit, limit))",
        "jnp.exp(-log_scale)",
        ("tests/layers/mixers/test_extreme_numbers.py",),
    ),
    Fault(
        "rwkv7: short keys are not of unit length",
        "return x * jax.lax.rsqrt(jnp.maximum(square, _SHORTEST**2))",
        "return x * jax.lax.rsqrt(square + 1e-6)",
        _LIMITS,
    ),
    Fault(
        "comba: the correction without the feedback",
        "query.astype(dtype) - self.correction * self.feedback * key.astype(dtype)",
        "query.astype(dtype) - self.correction * key.astype(dtype)",
        _LIMITS,
    ),
    Fault(
        "ttt: steps are summed",
        "            if factors is not None:\n"
        "                weights = scale_steps(base, weights, factors)\n",
        "",
        _TTT,
    ),
    Fault(
        "ttt: a chunk's last factor is left out",
        "weights=select(ends, whole.weights, memory.weights)",
        "weights=memory.weights",
        ("tests/layers/mixers/test_contract.py",),
    ),
    Fault(
        "ttt: factors are not cut off at 0",
        "factors = jnp.maximum(inverse + learned, 0.0)",
        "factors = inverse + learned",
        _TTT,
    ),
    Fault(
        "ttt: the norm's bias is written",
        "                gradients = gradients._replace(norm_bias=norm_bias)\n",
        "",
        _TTT,
    ),
    Fault(
        "generation: a program for each number of tokens",
        "np.int32(min(NEW_AT_ONCE, max_new_tokens - start)),",
        "jnp.full((max_new_tokens,), min(NEW_AT_ONCE, max_new_tokens - start), jnp.int32)[0],",
        ("tests/generation/test_generate.py",),
    ),
    Fault(
        "generation: a program for each length of a prompt",
        "SHORT_PIECES = (16, 64, 256)",
        "SHORT_PIECES = tuple(range(1, 999))",
        ("tests/generation/test_generate.py",),
    ),
)
