"""A finished or running training run, opened for reading."""

from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx

from fwpkm_jax.config import Experiment, read_experiment
from fwpkm_jax.data import AbstractDataConfig, Tokenizer, load_tokenizer
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.training.averages import EMA, ema_names, ema_weights
from fwpkm_jax.training.checkpoints.restore import find_step, read_arrays, read_checkpoint, targets
from fwpkm_jax.training.runs.mirror import run_folder
from fwpkm_jax.training.state import Memories, init_state, model_graph

WhichWeights = Literal["trained", "ema"]
"""Slow weights of a checkpoint. trained: those after its step; of `optimizer.name=schedule_free`
they are the average that it evaluates. ema: their moving average, see `OptimizerConfig.ema`."""

IMPORTED = "hf"
"""Folder in a run that was imported from a folder of the transformers library: its small files."""
_ADD_TOKENIZER = (
    "add tokenizer.json to the folder that the run was imported from, and import it again"
)


class Run(NamedTuple):
    """The configuration of a run and the weights of one of its checkpoints."""

    experiment: Experiment
    """The configuration it was trained with."""
    graphdef: nnx.GraphDef[LanguageModel]
    """The model's structure; `nnx.merge(graphdef, params)` is the model."""
    params: Any
    """Slow weights, an `nnx.State`."""
    memory: Memories
    """Fast weights after training, leaves `[groups, ...]`; initial ones if none were saved."""
    step: int
    """The checkpoint's step."""
    weights: WhichWeights = "trained"
    """Which of its slow weights these are."""

    @property
    def model(self) -> LanguageModel:
        """The model with its slow weights."""
        return nnx.merge(self.graphdef, self.params)


def text_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer of a run on text.

    Raises:
      ValueError: the run's data are generated tokens.
    """
    data = run.experiment.data
    if data.text is None and run.step == 0:  # Imported, and not trained since.
        raise ValueError(
            f"The run was imported with {type(data).__name__}, whose tokens are no text. If its "
            f"model knows text, {_ADD_TOKENIZER}."
        )
    if data.text is None:
        raise ValueError(
            f"The run was trained on {type(data).__name__}, whose tokens are no text; choose a run "
            "on text, such as that of `fwpkm train books_tiny`."
        )
    return load_tokenizer(data.text.tokenizer)


def check_can_evaluate(run: Run, run_dir: str | Path) -> None:
    """Raises ValueError for a model of text without its tokenizer, which no evaluation suits."""
    kept = Path(run_dir) / IMPORTED
    lacks = kept.is_dir() and not (kept / "tokenizer.json").is_file()
    if lacks and run.step == 0 and run.experiment.data.text is None:
        raise ValueError(
            f"{run_dir} has no tokenizer.json, and its model was never trained on "
            f"{type(run.experiment.data).__name__}; {_ADD_TOKENIZER}."
        )


def load_run(
    run_dir: str | Path,
    step: int | Literal["best"] | None = None,
    *,
    weights: WhichWeights = "trained",
) -> Run:
    """A run's configuration and the weights of one of its checkpoints.

    Args:
      run_dir: the directory that `train.py` wrote, also in a bucket.
      step: a step, "best" for the lowest validation loss, None for the newest.
      weights: which slow weights, see `WhichWeights`; the fast weights are the same for both.

    Raises:
      FileNotFoundError: there is no run, or no such checkpoint; the error lists those that exist.
      DamagedCheckpointError: the checkpoint cannot be read; name another step.
      ValueError: the run keeps no moving average, or the tokenizer that it names is not the one it
        was trained with.

    Example:
      >>> from fwpkm_jax import load_run
      >>> run = load_run("runs/recall", "best")  # doctest: +SKIP
      >>> run.model.config.memory_layers  # doctest: +SKIP
      (1,)
    """
    with run_folder(run_dir, "newest" if step is None else "all") as folder:
        return _load(folder, step, weights)


def _load(run_dir: Path, step: int | Literal["best"] | None, weights: WhichWeights) -> Run:
    experiment = read_experiment(run_dir)
    directory = run_dir / "checkpoints"
    found = find_step(directory, step)
    init = partial(
        init_state,
        experiment.model,
        memory=experiment.training.memory,
        optimizer=None,
        seed=experiment.seed,
    )
    merge = experiment.checkpoint.merge
    restored = read_checkpoint(directory, found, jax.eval_shape(init), merge=merge)
    _check_tokenizer(experiment.data, restored.data_position)
    state = restored.state
    memory = state.memory or jax.jit(lambda: init().memory)()  # As resumed training does.
    params = state.params
    if weights == "ema":
        params = _with_averages(params, experiment, directory / str(found))
    graphdef = model_graph(experiment.model)
    # A learned start is that of these weights, not of the trained or the initial ones.
    memory = nnx.merge(graphdef, params).restart(memory)
    return Run(experiment, graphdef, params, memory, found, weights)


def _with_averages(params: Any, experiment: Experiment, checkpoint: Path) -> Any:
    """The slow weights with the moving averages of a checkpoint in place of those that have one."""
    config = experiment.optimizer
    names = ema_names(params, ema=config.ema, train=config.train)
    like = targets(params, jax.tree.map(lambda x: x.sharding, params))
    try:
        averages = read_arrays(
            checkpoint, {EMA + name: like[name] for name in names}, item="optimizer"
        )
    except ValueError as error:
        raise ValueError(f"weights=ema: {error}; use weights=trained.") from error
    return ema_weights(params, averages, names)


def _check_tokenizer(data: AbstractDataConfig, position: Any) -> None:
    """Raises ValueError if the data's tokenizer is not the one that a checkpoint was trained with.

    A missing tokenizer is ignored.
    """
    trained_with = ((position or {}).get("source") or {}).get("tokenizer")
    text = data.text
    if trained_with is None or text is None:
        return
    try:
        found = load_tokenizer(text.tokenizer).fingerprint
    except (ValueError, ImportError):
        return
    if found != trained_with:
        raise ValueError(
            f"data.tokenizer={text.tokenizer!r} is another tokenizer now ({found}) than the one "
            f"that the run was trained with ({trained_with}); put that one back."
        )
