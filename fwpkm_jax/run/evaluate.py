"""Evaluations of a training run."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fwpkm_jax.evaluation import Origin, Result, Subject, choose_suite, run_suite
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype
from fwpkm_jax.evaluation.report import write_report
from fwpkm_jax.io.atomic import own_folder
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.run.load import Run, WhichWeights, check_can_evaluate, load_run
from fwpkm_jax.storage.addresses import address_of
from fwpkm_jax.training.runs.mirror import run_folder
from fwpkm_jax.training.sharding import make_partition


def evaluate(
    run_dir: str | Path,
    suite: Sequence[str] = (),
    *,
    step: int | Literal["best"] | None = None,
    configs: Mapping[str, Any] | None = None,
    limit: int | None = None,
    mesh: MeshConfig | None = None,
    weights: WhichWeights = "trained",
    data: Sequence[str] = (),
    fast_weight_dtype: FastWeightDtype = "float32",
) -> dict[str, Result]:
    """Results of the evaluations of a run, by name; each table is printed when it is ready.

    Also writes JSON, arrays and plots into `run_dir/results`, and `report.html`, a page that shows
    and explains all results of the run so far.

    Args:
      run_dir: the run's directory, also in a bucket.
      suite: names in `fwpkm_jax.evaluation.EVALS`, or "all"; by default those that suit the data.
      step: the checkpoint, as in `load_run`.
      configs: options of evaluations by name, for instance `{"ppl": PerplexityConfig(...)}`.
      limit: most documents, batches or samples to score; the unit depends on the evaluation.
      mesh: devices that share the work, whatever the run was trained on; None: one device. Changes
        results only by rounding.
      weights: the slow weights, as in `load_run`.
      data: files or folders of text to read in place of the run's validation text.
      fast_weight_dtype: precision of the memory between calls of the model.

    Raises:
      FileNotFoundError: there is no such run or checkpoint.
      ValueError: a name is unknown, the run was imported without a tokenizer, an evaluation does
        not suit the run's data, or devices cannot share it as `mesh` says.

    Example:
      >>> from fwpkm_jax import evaluate
      >>> results = evaluate("runs/recall", ["recall"])  # doctest: +SKIP
      >>> results["recall"].record["results"]["writing"]["all"]["accuracy"]  # doctest: +SKIP
      0.98
    """
    partition = None if mesh is None else make_partition(mesh)
    with run_folder(run_dir) as folder:
        run = load_run(folder, step, weights=weights)
        check_can_evaluate(run, folder)
        subject = subject_of(run, name=address_of(run_dir))
        subject = dataclasses.replace(
            subject,
            partition=partition,
            text_paths=tuple(data),
            fast_weight_dtype=fast_weight_dtype,
        )
        chosen = choose_suite(suite, subject, configs)
        directory = own_folder(folder / "results")
        results = run_suite(subject, chosen, directory=directory, configs=configs, limit=limit)
        written = write_report(folder).relative_to(folder)
    print(f"wrote {address_of(Path(run_dir) / written)}")
    return results


def subject_of(run: Run, *, name: str) -> Subject:
    """The model, memory and training facts of a run, as evaluations take them."""
    experiment, training = run.experiment, run.experiment.training
    return Subject(
        model=run.model,
        memory=run.memory,
        data=experiment.data,
        lifetime=training.memory.lifetime,
        groups=training.memory.groups,
        batch_size=training.batch_size,
        seed=experiment.seed,
        origin=Origin(
            run=name, step=run.step, fingerprint=experiment.fingerprint, weights=run.weights
        ),
    )
