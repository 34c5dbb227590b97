"""A run's configuration in plain sentences, and the glossary of a report."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fwpkm_jax.config_json import UnknownNameError, from_json
from fwpkm_jax.data import AbstractDataConfig
from fwpkm_jax.models.config import ModelConfig

Config = Mapping[str, Any]

GLOSSARY = (
    (
        "memory",
        "Numbers that change while the model reads; its parameters change only in training. "
        "Every token reads from the memory and adds the result to its own state. Also called fast "
        "weights.",
    ),
    (
        "writing, frozen",
        "After each chunk of tokens the memory is changed so that what was read would have "
        "predicted the next token better: it writes. Frozen: it is read but left as training left "
        "it. The difference between the two is what reading the text at hand adds.",
    ),
    (
        "slot",
        "A row of the memory. A token reads the few slots whose addresses fit it best, and writes "
        "only to those.",
    ),
    ("gate", "How much of the memory's answer a token takes, from 0 (none) to 1 (only that)."),
    (
        "nats, perplexity",
        "The loss is minus the logarithm of the probability that the model gave to the token that "
        "came, in nats; less is better. Perplexity is its exponential: the number of equally "
        "likely tokens that would give the same loss.",
    ),
    (
        "collision, coverage, KLD",
        "How slots were shared: the share of reads whose slot was read more than once; the share "
        "of slots read at all; and how far the use is from even (0 is even).",
    ),
    (
        "[0.1, 0.2]",
        "A 95 % interval: repeated with other texts or samples of this kind, the number would lie "
        "in such an interval 19 times of 20. It says nothing about other training seeds.",
    ),
)


def describe_model(config: Config, results: Config | None) -> str:
    """The model and its size, in sentences.

    Args:
      config: a run's `config.json`.
      results: the run's `results.json`; None if the run has not finished.
    """
    model = config["model"]
    counted = Counter(_mixer_labels(model))
    mixers = " and ".join(f"{label} in {count} of them" for label, count in counted.items())
    text = (
        f"A language model of {len(model['mixers'])} layers, {model['model_dim']:,} wide, with "
        f"{mixers}. {_describe_memory(model)}"
    )
    if model["pkm_layers"]:
        pkm = model["pkm"]
        text += (
            f" In layer {_join(model['pkm_layers'])} a product-key memory of "
            f"{pkm['num_subkeys'] ** 2:,} slots that only training changes replaces the MLP."
        )
    if results is None:
        return text + " The run has not finished, so its parameters were not counted."
    memory = results.get("memory_parameters", 0)
    text += f" It has {results['parameters']:,} parameters"
    return text + (f" and {memory:,} numbers of memory." if memory else ".")


def _mixer_labels(model: Config) -> list[str]:
    """What the model's mixers are called; those of plugins, which a report does not import, as the
    configuration names them."""
    try:
        layout = from_json(model, ModelConfig, path="model")
        return [mixer.label for mixer in layout.mixer_configs]
    except ValueError:
        mixers = model["mixers"]
        return [
            str(x["class"]).removesuffix("Config") if isinstance(x, dict) else x for x in mixers
        ]


def describe_task(config: Config) -> str:
    """The training data and the length of training, in sentences."""
    data, training = config["data"], config["training"]
    try:
        kind = from_json(data, AbstractDataConfig, path="data").about
    except UnknownNameError:  # Of a plugin, which a report does not import.
        kind = str(data["class"])
    lifetime = training["memory"]["lifetime"]
    text = (
        f"It was trained for {training['steps']:,} steps of {training['batch_size']} sequences on "
        f"{kind}.{_describe_needles(data.get('needles'))}"
    )
    if not config["model"]["memory_layers"]:
        return text
    groups = training["memory"]["groups"]
    lifetimes = {"carried": "carried from step to step", "batch": "new in every batch"}
    lived = lifetimes[lifetime]
    if groups == 1:
        return f"{text} All sequences of a batch shared one memory, {lived}."
    shared = training["batch_size"] // groups
    each = "sequence" if shared == 1 else f"{shared} sequences"
    return f"{text} Every {each} of a batch had a memory of its own, {lived}: {groups} in all."


_SILENT = ", the rest of these sentences nothing"


def _describe_needles(needles: Config | None) -> str:
    if not needles:
        return ""
    return (
        f" Of the pieces {needles['share']:.0%} hold {needles['num_needles']} sentences with a "
        "number, each twice; the digits of the second can be known from the first and weigh "
        f"{needles['answer_weight']:g} times as much in the loss"
        f"{_SILENT if needles.get('sentence_weight') == 0 else ''}. Held-out text has no such "
        "sentences, so its loss is no measure of the training loss."
    )


def _describe_memory(model: Config) -> str:
    layers, block = model["memory_layers"], model["fast_weight"]
    if not layers:
        return "No layer writes a memory while it reads."
    rule = block["rule"]
    by_token = "num_reads" in rule  # Sparse Delta Memory.
    every = f"written after every {block['chunk_size']:,} tokens"
    if by_token:
        every = "written at every token"
    kind = "a memory"
    if "num_subkeys" in rule:
        read = rule["num_heads"] * rule["num_reads" if by_token else "top_k"]
        kind += f" of {rule['num_subkeys'] ** 2:,} slots, {read} of them read by each token"
    elif "hidden_dim" in rule:
        kind += f" that is a small dense network with {rule['hidden_dim']:,} hidden units"
    text = f"In layer {_join(layers)} {kind}, {every} ({rule['class']})."
    if block["gate_output"] or block.get("gate_residual", False):
        return text
    return f"{text} Its answer is added in full; the gate does not limit it."


def _join(numbers: list[int]) -> str:
    """The numbers as text, such as "2, 6 and 10"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
