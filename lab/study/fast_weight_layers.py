"""Measures which parts of a Fast Weight Layer help and what they cost: a small ablation.

    taskset -c 0 python -m lab.study.fast_weight_layers

Trains the config `fast_weight_layer` without steps, with all steps, and with steps of the output
bias alone, each from several seeds. The models then read the beginnings of unseen books. The first
of these books is used to choose step sizes at test time, and the others give the results:
perplexity and processor seconds per token, in one JSON file.

References: Clark et al. 2022, arXiv:2212.02475, Tables 1 and 2.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import environment, settings, write_result
from benchmarks.options import parse
from benchmarks.processes import ROOT
from fwpkm_jax.config import Experiment, load_config
from fwpkm_jax.data import Document
from fwpkm_jax.evaluation.dynamic.reader import DynamicReading, GradientSteps, read_dynamically
from fwpkm_jax.evaluation.intervals import student_t
from fwpkm_jax.evaluation.reconfigure import reconfigure
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.training.fit import Hooks, Report, fit
from fwpkm_jax.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from fwpkm_jax.training.state import MemoryConfig, TrainState, init_state, model_graph
from fwpkm_jax.training.step import make_train_step

VARIANTS = ("none", "all", "test_time", "output_bias", "dynamic")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Trains and evaluates the variants of a Fast Weight Layer."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters and data."""
    steps: int = 250
    """Training steps."""
    documents: int = 6
    """Pieces to read of each unseen book."""
    layer_rate: float = 1e-4
    """Step size of the layer's tensors before training."""
    bias_rate: float = 1e-2
    """Step size of the output bias before training."""
    rates: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    """Step sizes of the layer's tensors to try at test time."""
    learning_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    """Learning rates to try for dynamic evaluation."""
    chunk_length: int = 64
    """Tokens per step of dynamic evaluation."""
    data: Path = Path("../shared/data/books")
    """Folder of train.jsonl and valid.jsonl."""
    config: str = "fast_weight_layer"
    """Config of the model, a name or a file; its `data.length` and `training.batch_size` count."""
    out: Path = ROOT / "lab/results/fast_weight_layers_cpu.json"
    """JSON file of the results; seeds that it already holds are skipped."""


def books(path: Path) -> list[np.ndarray]:
    """The bytes of each book as tokens."""
    texts = (json.loads(line)["text"] for line in path.read_text().splitlines())
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def pieces(all_books: Sequence[np.ndarray], *, number: int, length: int) -> list[np.ndarray]:
    """Pieces with `length` labels from the first 100,000 bytes of each book, evenly spaced."""
    starts = np.linspace(2_000, 100_000, number).astype(int)
    return [book[start : start + length + 1] for book in all_books for start in starts]


def trained(
    config: ModelConfig, text: np.ndarray, *, experiment: Experiment, options: Options, seed: int
) -> LanguageModel:
    """The model after training on rows drawn from the text."""
    length = experiment.data.length
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=20)
    schedule = learning_rate_schedule(optimizer, steps=options.steps)
    transform = make_optimizer(optimizer, steps=options.steps)
    state = init_state(config, memory=MemoryConfig(), optimizer=transform, seed=seed)
    graphdef = model_graph(config)
    step = make_train_step(
        graphdef, transform, schedule=schedule, micro_batches=1, memory=MemoryConfig()
    )
    rng, began = np.random.default_rng(seed), time.process_time()

    def batch() -> dict[str, np.ndarray]:
        starts = rng.integers(0, len(text) - length - 1, size=experiment.training.batch_size)
        tokens = np.stack([text[start : start + length + 1] for start in starts])
        weight = np.ones((len(starts), length), np.float32)
        return {"tokens": tokens, "loss_weight": weight}

    def show(report: Report[Any], _: TrainState) -> None:
        if report.step % 50 == 0:
            seconds = time.process_time() - began
            print(
                f"  step {report.step}: {report.metrics['loss']:.3f}, {seconds:.0f} s", flush=True
            )

    batches = (batch() for _ in range(options.steps))
    state = fit(step, state, batches, Hooks(on_metrics=show)).state
    return nnx.merge(graphdef, state.params)


def moved(model: LanguageModel, rate: float) -> LanguageModel:
    """The model that was trained without steps, now with steps of one size for all tensors."""
    layer = model.config.fast_weight_layer
    assert layer is not None
    config = replace(model.config, fast_weight_layer=replace(layer, steps="all"))
    model = reconfigure(model, config)
    assert model.fast_weight_layer is not None
    rates = model.fast_weight_layer.log_rates
    rates.set_value(jnp.full_like(rates[...], np.log(rate)))
    return model


def read(
    model: LanguageModel, texts: Sequence[np.ndarray], steps: GradientSteps | None = None
) -> DynamicReading:
    """Reads every piece as a separate document, timed in processor seconds."""
    length = len(texts[0]) - 1
    documents = (Document(str(number), text) for number, text in enumerate(texts))
    return read_dynamically(
        model, [documents], segment_length=length, steps=steps, clock=time.process_time
    )


def measured(reading: DynamicReading, *, length: int) -> dict[str, Any]:
    """Loss, perplexity and processor time of a pass, and the losses of early and late tokens."""
    loss, position = reading.losses.loss.astype(np.float64), reading.losses.position
    assert reading.tokens_per_second is not None
    return {
        "loss": float(loss.mean()),
        "perplexity": float(np.exp(loss.mean())),
        "loss_first_quarter": float(loss[position < length // 4].mean()),
        "loss_last_quarter": float(loss[position >= length - length // 4].mean()),
        "cpu_microseconds_per_token": 1e6 / reading.tokens_per_second,
    }


def of_seed(seed: int, options: Options, experiment: Experiment) -> dict[str, Any]:
    """Trains and evaluates all variants from one seed."""
    parent, length = experiment.model, experiment.data.length
    layer = parent.fast_weight_layer
    assert layer is not None
    text = np.concatenate(books(options.data / "train.jsonl"))
    unseen = books(options.data / "valid.jsonl")
    dev = pieces(unseen[:1], number=options.documents, length=length)
    test = pieces(unseen[1:], number=options.documents, length=length)
    models = {}
    for steps in ("none", "all", "output_bias"):
        print(f"seed {seed}, trained with steps={steps}", flush=True)
        rate = options.bias_rate if steps == "output_bias" else options.layer_rate
        config = replace(parent, fast_weight_layer=replace(layer, steps=steps, initial_rate=rate))
        models[steps] = trained(config, text, experiment=experiment, options=options, seed=seed)

    def loss_on_dev(reading: DynamicReading) -> float:
        return float(reading.losses.loss.mean())

    by_rate = {rate: loss_on_dev(read(moved(models["none"], rate), dev)) for rate in options.rates}
    by_learning_rate = {
        rate: loss_on_dev(read(models["none"], dev, gradient_steps(rate, options)))
        for rate in options.learning_rates
    }
    rate = min(by_rate, key=by_rate.__getitem__)
    learning_rate = min(by_learning_rate, key=by_learning_rate.__getitem__)

    def tested(model: LanguageModel, steps: GradientSteps | None = None) -> dict[str, Any]:
        return measured(read(model, test, steps), length=length)

    assert models["all"].fast_weight_layer is not None
    return {
        "none": tested(models["none"]),
        "all": tested(models["all"])
        | {"learned_log_rates": models["all"].fast_weight_layer.log_rates[...].tolist()},
        "test_time": tested(moved(models["none"], rate))
        | {"rate": rate, "dev_losses": {str(k): v for k, v in by_rate.items()}},
        "output_bias": tested(models["output_bias"]),
        "dynamic": tested(models["none"], gradient_steps(learning_rate, options))
        | {
            "learning_rate": learning_rate,
            "dev_losses": {str(k): v for k, v in by_learning_rate.items()},
        },
    }


def gradient_steps(rate: float, options: Options) -> GradientSteps:
    """The steps of dynamic evaluation."""
    return GradientSteps(learning_rate=rate, chunk_length=options.chunk_length)


def summary(seeds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means of each variant over the seeds, and its change of loss against `none` with interval."""
    found = {}
    for name in VARIANTS:
        of = {
            key: np.array([one[name][key] for one in seeds.values()])
            for key in ("loss", "perplexity", "cpu_microseconds_per_token")
        }
        change = of["loss"] - np.array([one["none"]["loss"] for one in seeds.values()])
        row: dict[str, Any] = {key: float(values.mean()) for key, values in of.items()}
        row["change_of_loss"] = float(change.mean())
        if len(change) > 1:
            half = student_t(len(change)) * float(change.std(ddof=1)) / len(change) ** 0.5
            row["interval_half"] = half
        found[name] = row
    for row in found.values():
        cost = found["none"]["cpu_microseconds_per_token"]
        row["cost"] = row["cpu_microseconds_per_token"] / cost
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the seeds that the file lacks, and saves after each."""
    options = parse(Options, argv, description=__doc__)
    experiment = load_config(options.config)
    path, seeds, where = options.out, {}, environment()
    chosen = json.loads(json.dumps(settings(options)))
    if path.exists():
        before = json.loads(path.read_text())
        if before["options"] | {"seeds": None} == chosen | {"seeds": None}:
            seeds = before["seeds"]
    for seed in options.seeds:
        if str(seed) not in seeds:
            seeds[str(seed)] = of_seed(seed, options, experiment)
        write_result(
            where | {"options": chosen, "seeds": seeds, "mean": summary(seeds)},
            path,
        )
    for name, row in summary(seeds).items():
        print(name, {key: round(value, 4) for key, value in row.items()})


if __name__ == "__main__":
    main()
