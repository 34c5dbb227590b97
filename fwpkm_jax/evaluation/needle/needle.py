"""The needle evaluation: every length and number of readings, scored."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.needle import needle_views as views
from fwpkm_jax.evaluation.needle.config import NeedleConfig
from fwpkm_jax.evaluation.needle.reading import answer_each, encode_prompt, open_reader
from fwpkm_jax.evaluation.needle.samples import NeedleSample, take_samples
from fwpkm_jax.evaluation.needle.scores import score_answers
from fwpkm_jax.evaluation.reconfigure import with_yarn
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import files_of, missing_text, text_sources, texts_of
from fwpkm_jax.models.config import ModelConfig, mixer_memory


def evaluate(
    subject: Subject,
    config: NeedleConfig,
    *,
    texts: Callable[[], Iterable[tuple[str, str]]] | None = None,
    samples: Mapping[int, Sequence[NeedleSample]] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Outcome:
    """How often the model answers with a number hidden in a text that it has read n times.

    Args:
      texts: starts a pass over pairs of id and text; None: the texts that options and run name.
      samples: by words of a haystack, in place of those that are made from texts.
      tokenizer: the model's tokenizer; None: the run's.

    Returns:
      Numbers are under `runs` one row per length and number of readings: `words`, `readings`,
      `sample_seed`, `yarn_factor`, `token_length` and the fields of `score_answers`; shares have
      95 % intervals.

    Raises:
      ValueError: the texts give no sample of a length.
    """
    model = subject.model
    tokenizer = load_tokenizer(subject.text.tokenizer) if tokenizer is None else tokenizer
    files: dict[str, str] = {}
    if texts is None and samples is None:
        sources = text_sources(subject.text)
        files = files_of(source.files for source in sources)
        texts = partial(texts_of, sources, tokenizer)
    stretched, runs, scored = model, [], 0
    seed = subject.seed if config.seed is None else config.seed
    total = config.samples * sum(config.haystack_words) * sum(config.readings)
    forecast = Forecast("needle", total=total, unit="words")
    for words in config.haystack_words:
        if samples is None:
            assert texts is not None
            asked = take_samples(texts(), config, words=words, seed=seed)
        else:
            asked = samples[words]
        # A text may give fewer samples than requested.
        forecast.total += (len(asked) - config.samples) * words * sum(config.readings)
        factor = config.factor(words)
        stretched = with_yarn(model, factor=factor, original_length=config.yarn_original_length)
        prompts = [encode_prompt(sample, tokenizer) for sample in asked]
        lengths = [len(prompt.haystack) for prompt in prompts]
        scored += len(config.readings) * sum(prompt.digits for prompt in prompts)
        reader = open_reader(stretched, subject, prompts, config, tokenizer)
        for readings in config.readings:
            answers = []
            for answer in answer_each(reader, prompts, tokenizer, config, readings=readings):
                answers.append(answer)
                forecast.add(words * readings)
            runs.append(
                {
                    "words": words,
                    "readings": readings,
                    "sample_seed": seed,
                    "yarn_factor": factor,
                    "token_length": {
                        "min": min(lengths),
                        "mean": float(np.mean(lengths)),
                        "max": max(lengths),
                    },
                    **score_answers(asked, answers),
                }
            )
    until = "sample" if config.reset_memory_between_samples else "never"
    return Outcome(
        numbers={"runs": runs},
        scored_tokens=scored,
        files=files,
        mode=config.mode,
        resets=describe_resets(
            subject.memory,
            fast_weights="reading" if mixer_memory(model.config) else until,
            queue=until,
            caches="reading",
        ),
        chunk_size=describe_chunks(model.config, config),
        model=stretched,  # The last length's; each run holds its YaRN factor.
    )


def describe_chunks(model: ModelConfig, config: NeedleConfig) -> str | int:
    """Tokens per write, as a number or a description, for the record."""
    own = mixer_memory(model)
    if own is not None:
        return (
            f"{own.chunk_size}, {own.name}'s own: it has no override, and its memory starts anew "
            "at each reading"
        )
    if not model.memory_layers:
        return "nothing is written: the model has no memory"
    if config.chunk_size == "text":
        return "one write per reading, all waiting tokens"
    if config.chunk_size == "model":
        return model.fast_weight.chunk_size
    return config.chunk_size


NEEDLE = Evaluation(
    name="needle",
    config=NeedleConfig,
    evaluate=evaluate,
    limit="samples",
    title="Needle in a haystack",
    about=(
        "Sentences with a secret number are hidden in a long text; the model reads the text one or "
        "more times and is asked for one of the numbers. An answer counts if all its digits are "
        "right; where more readings give more right answers, the memory was filled by reading."
    ),
    table=views.table,
    plot=views.plot,
    finding=views.finding,
    controls="none",
    missing=lambda subject, config: missing_text(subject.text),
)
