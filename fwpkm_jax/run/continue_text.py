"""Text from a run's model."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from fwpkm_jax.generation import Sampling, generate, init_generation
from fwpkm_jax.run.load import Run, text_tokenizer


def continue_text(
    run: Run,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
    write: bool = True,
) -> str:
    """The prompt and the text that the run's model generates after it.

    Args:
      run: from `load_run`; it was trained on text.
      prompt: text of at least one token; the model reads it first.
      max_new_tokens: most tokens to generate; generation stops at an end of document.
      sampling: how tokens are chosen; None takes the most likely one.
      seed: seed of the draws.
      write: whether prompt and answer are written into the memory.

    Raises:
      ValueError: the run was not trained on text, or the prompt is empty.

    Example:
      >>> from fwpkm_jax import Sampling, continue_text, load_run
      >>> run = load_run("runs/books_tiny")  # doctest: +SKIP
      >>> print(continue_text(run, "My dear", sampling=Sampling(temperature=0.8)))  # doctest: +SKIP
    """
    tokenizer = text_tokenizer(run)
    tokens = tokenizer.encode(prompt)
    sampling = sampling or Sampling()
    # The embedding may have more rows than the tokenizer has ids.
    vocab_size = sampling.vocab_size or tokenizer.vocab_size
    memory = jax.tree.map(lambda x: x[:1], run.memory)  # The first group, for one sequence.
    state = init_generation(run.model, memory, batch=1, max_length=len(tokens) + max_new_tokens)
    out = generate(
        run.model,
        [tokens],
        state,
        max_new_tokens=max_new_tokens,
        sampling=dataclasses.replace(sampling, vocab_size=vocab_size),
        rng=jax.random.key(seed),
        stop_ids=[tokenizer.eos_id],
        write=write,
    )
    new = np.asarray(out.tokens[0, : int(out.lengths[0])])
    return tokenizer.decode(np.concatenate([tokens, new]))
