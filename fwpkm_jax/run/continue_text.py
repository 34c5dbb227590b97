"""Text from a run's model."""

import numpy as np

from fwpkm_jax.generation import Sampling
from fwpkm_jax.run.conversation import Conversation
from fwpkm_jax.run.load import Run


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
    with Conversation(run, sampling=sampling, seed=seed, write=write) as talk:
        return answered(talk, prompt, max_new_tokens=max_new_tokens, chat=chat)


def answered(
    talk: Conversation, prompt: str, *, max_new_tokens: int, chat: bool = False, read: str = ""
) -> str:
    """`continue_text` of a conversation that goes on, after it has read another text."""
    tokenizer = talk.tokenizer
    if read:
        talk.read(tokenizer.encode(read))
    if chat:
        new = list(talk.reply(prompt, max_new_tokens=max_new_tokens, template=True))
        return tokenizer.decode(np.concatenate(new)) if new else ""
    tokens = tokenizer.encode(prompt)
    (new,) = talk.answer(tokens, max_new_tokens=max_new_tokens)
    return tokenizer.decode(np.concatenate([tokens, new]))
