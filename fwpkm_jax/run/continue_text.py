"""Text from a run's model."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from fwpkm_jax.data.tokenizer_json import encode_message
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
    chat: bool = False,
) -> str:
    """The prompt and the text that the run's model generates after it; in a chat the answer alone.

    Args:
      run: from `load_run`; it was trained on text.
      prompt: text of at least one token; the model reads it first.
      max_new_tokens: most tokens to generate; generation stops at an end of document.
      sampling: how tokens are chosen; None takes the most likely one.
      seed: seed of the draws.
      write: whether prompt and answer are written into the memory.
      chat: the prompt is a message, brought into the form that the model was trained on by the chat
        template of its tokenizer.

    Raises:
      ValueError: the run was not trained on text, the prompt is empty, or the tokenizer has no chat
        template.

    Example:
      >>> from fwpkm_jax import Sampling, continue_text, load_run
      >>> run = load_run("runs/books_tiny")  # doctest: +SKIP
      >>> print(continue_text(run, "My dear", sampling=Sampling(temperature=0.8)))  # doctest: +SKIP
    """
    tokenizer = text_tokenizer(run)
    tokens = encode_message(tokenizer, prompt) if chat else tokenizer.encode(prompt)
    sampling = sampling or Sampling()
    # The embedding may have more rows than the tokenizer has ids.
    vocab_size = sampling.vocab_size or min(tokenizer.vocab_size, run.model.config.vocab_size)
    memory = jax.tree.map(lambda x: x[:1], run.memory)  # The first group, for one sequence.
    state = init_generation(run.model, memory, batch=1, max_length=len(tokens) + max_new_tokens)
    out = generate(
        run.model,
        [tokens],
        state,
        max_new_tokens=max_new_tokens,
        sampling=dataclasses.replace(sampling, vocab_size=vocab_size),
        rng=jax.random.key(seed),
        # A tokenizer may have ids that the model has no row for.
        stop_ids=[token for token in tokenizer.stop_ids if token < run.model.config.vocab_size],
        write=write,
    )
    new = np.asarray(out.tokens[0, : int(out.lengths[0])])
    return tokenizer.decode(new if chat else np.concatenate([tokens, new]))
