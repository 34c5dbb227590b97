"""Dynamic evaluation: perplexity while all slow weights learn from the text, and the cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fwpkm_jax.evaluation.dynamic import views
from fwpkm_jax.evaluation.dynamic.reader import read_dynamically
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.option_checks import check_least
from fwpkm_jax.evaluation.readers.gradient_steps import GradientSteps
from fwpkm_jax.evaluation.readers.token_losses import differences, scores
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import capped, files_of, missing_text, num_labels, text_sources


@dataclass(frozen=True, kw_only=True)
class DynamicConfig:
    """Dynamic evaluation: perplexity with gradient steps on all slow weights, and without."""

    data: tuple[str, ...] = ()
    """Files or folders of text, one data set each. Empty: the run's validation text."""
    steps: GradientSteps = field(default_factory=GradientSteps)
    """The gradient steps. Choose the learning rate on other text of the same kind."""
    segment_length: int | None = None
    """Inputs of a segment; attention and GDN start empty in each. None: the run's training
    length."""
    max_tokens: int | None = None
    """Tokens scored in each data set at most."""
    max_documents: int | None = None
    """Documents read of each data set at most."""

    def __post_init__(self) -> None:
        check_least(self, 1, "segment_length", "max_tokens", "max_documents")


def evaluate(subject: Subject, config: DynamicConfig) -> Outcome:
    """Perplexity of texts with and without gradient steps on the text read, and the speed of both.

    Args:
      subject: the trained model; it has no fast-weight memory.
      config: the protocol.

    Returns:
      Numbers are `plain` and `dynamic` (loss in nats and perplexity by data set and over `all`,
      `tokens_per_second`), `difference` (loss of dynamic minus plain with a 95 % interval over
      segments) and `slowdown`, seconds per token of dynamic over plain. Arrays hold each token's
      source, document, segment, position and losses.

    Raises:
      ValueError: the model has a fast-weight memory, or the texts hold nothing to predict.

    References: Mikolov et al. 2010; Krause et al. 2018, arXiv:1709.07432.
    """
    sources = text_sources(subject.text, config.data)
    length = config.segment_length or subject.text.length
    limits = {"max_documents": config.max_documents, "max_tokens": config.max_tokens}
    labels = num_labels(sources, **limits)
    passes = {
        name: read_dynamically(
            subject.model,
            [capped(source.documents(), **limits) for source in sources],
            segment_length=length,
            steps=steps,
            forecast=Forecast(f"dynamic, {name}", total=labels, unit="tokens"),
            partition=subject.partition,
        )
        for name, steps in (("plain", None), ("dynamic", config.steps))
    }
    names = [source.name for source in sources]
    results: dict[str, Any] = {
        name: scores(one.losses, names) | {"tokens_per_second": one.tokens_per_second}
        for name, one in passes.items()
    }
    plain, dynamic = passes["plain"], passes["dynamic"]
    results["difference"] = differences(dynamic.losses, plain.losses, names)
    speeds = plain.tokens_per_second, dynamic.tokens_per_second
    results["slowdown"] = speeds[0] / speeds[1] if speeds[0] and speeds[1] else None
    return Outcome(
        numbers=results,
        scored_tokens=len(plain.losses.loss),
        arrays=plain.losses.places()
        | {f"loss_{name}": one.losses.loss for name, one in passes.items()},
        files=files_of(source.files for source in sources),
        mode=f"segment_length={length}, chunk_length={config.steps.chunk_length}",
        resets=describe_resets({}, fast_weights="none", queue="none", caches="segment")
        | {"slow_weights": config.steps.reset},
    )


def _missing(subject: Subject, config: DynamicConfig) -> str | None:
    if subject.model.config.memory_layers:
        return "a model without fast-weight memory (model.memory_layers=())"
    return missing_text(subject.text, config.data)


DYNAMIC = Evaluation(
    name="dynamic",
    config=DynamicConfig,
    evaluate=evaluate,
    limit="max_documents",
    title="Learning from the text with all weights",
    about=(
        "The model reads documents twice, once with fixed weights and once with a gradient step on "
        "all weights after every chunk, as in training. The loss with steps is the reference for a "
        "memory; the steps cost a backward pass through the whole model."
    ),
    table=views.table,
    finding=views.finding,
    missing=_missing,
)
