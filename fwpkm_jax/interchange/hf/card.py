"""The card of an exported model: what it is, how to use it, and what was measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fwpkm_jax import __version__
from fwpkm_jax.evaluation import EVALS
from fwpkm_jax.evaluation.report import read_results
from fwpkm_jax.evaluation.report.words import describe_model, describe_task
from fwpkm_jax.interchange.hf.imported import HUB
from fwpkm_jax.io.untrusted import read_json, reading, shown
from fwpkm_jax.run import WhichWeights

CARD = "README.md"
"""The file that the hub shows as a model's page."""
_COMMANDS = "```bash\nfwpkm import hf {name} runs/model\nfwpkm eval runs/model\n```"


def model_card(
    run_dir: str | Path,
    name: str,
    *,
    step: int,
    weights: WhichWeights = "trained",
    sizes: Mapping[str, int],
    imported: Path | None,
    is_hybrid: bool,
    in_pytorch: bool,
    has_tokenizer: bool,
    license_name: str | None,
) -> str:
    """A card in Markdown, from a run's configuration and the results of its evaluations.

    It names no path of this machine. Results of another step or of other weights than the exported
    ones say so.

    Args:
      run_dir: the run.
      name: `owner/name` under which the model is pushed, or the folder's name.
      step: of the exported checkpoint.
      weights: which of its slow weights.
      sizes: the `parameters` of the model and its `memory_parameters`.
      imported: the files that an import has kept, of the run or its base; None: it was not
        imported.
      is_hybrid: whether PyTorch alone reads the folder.
      in_pytorch: whether the folder has programs that read its memories in PyTorch.
      has_tokenizer: whether it has a tokenizer that the transformers library reads.
      license_name: of the model as the hub names it; None: the card has none.

    Raises:
      OutsideFileError: a file of the run is damaged or has another form.
    """
    run = Path(run_dir)
    config = read_json(run / "config.json", kind=dict)
    with reading(run / "config.json", problem="has another form than this version shows"):
        model, has_memory = describe_model(config, sizes), bool(config["model"]["memory_layers"])
        trained = {**config, "training": {**config["training"], "steps": step}}
        task = describe_task(trained) if step else "It is as it was imported, not trained further."
    base = _origin(imported)
    tags = ["jax", "fast-weights"] + (["fwpkm"] if has_memory else [])
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head |= {"tags": tags} | ({"license": license_name} if license_name else {})
    head |= {"base_model": base[0]} if base else {}
    metrics = [x for _, record in _known(run) for x in _metrics(record)]
    if metrics:
        head["model-index"] = [{"name": name.split("/")[-1], "results": metrics}]
    others = "The package is fwpkm_jax, with its extra `hf`."
    if has_memory and not in_pytorch:
        others += (
            " The memories are a file of their own, which the transformers library does not read: "
            "it loads the model without them."
        )
    began = ""
    if base is not None:
        began = f" It began as [{base[0]}](https://huggingface.co/{base[0]}) at {base[1]}."
    parts = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
        "---",
        f"# {name.split('/')[-1]}",
        f"{model} {task}",
        *(() if is_hybrid else (_COMMANDS.format(name=name), others)),
        *(_use(name, has_tokenizer) if in_pytorch else ()),
        "## Results",
        *_results(run, step, weights),
        "## Where it comes from",
        f"Checkpoint of step {step}, written by fwpkm_jax {__version__}.{began}",
    ]
    top = parts.index("---", 1)
    return "\n".join(parts[: top + 1]) + "\n\n" + "\n\n".join(parts[top + 1 :]) + "\n"


def _origin(imported: Path | None) -> tuple[str, str] | None:
    """Name and commit of the model on the hub that the run began as."""
    if imported is None or not (imported / HUB).is_file():
        return None
    values = read_json(imported / HUB, kind=dict)
    with reading(imported / HUB):
        return str(values["name"]), str(values["revision"])


def _use(name: str, has_tokenizer: bool) -> list[str]:
    """How PyTorch reads the model with its memories, and what it lacks there."""
    tokens = "torch.tensor([[1, 2, 3]])"
    if has_tokenizer:
        tokens = f'AutoTokenizer.from_pretrained("{name}")("Text", return_tensors="pt").input_ids'
    lines = [
        "import torch",
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' * has_tokenizer}",
        f'model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)',
        f"text = model.generate({tokens}, max_new_tokens=20)",
        'model.save_memory("memories/alice.safetensors")  # `load_memory` begins with it again.',
    ]
    return [
        "## In PyTorch",
        "\n".join(["```python", *lines, "```"]),
        "Every text starts from the memories of this folder and writes its own. `write=False` "
        "only reads them; with `groups=1` the texts of a batch share one memory. fwpkm_jax loads "
        "the saved file, and the model loads what fwpkm_jax saves. The programs have no kernels, "
        "no rows of several documents, no beam search and no training.",
    ]


def _metrics(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The numbers of an evaluation for the hub: perplexity, recall, and the harness' tasks."""
    name, results, found = record["evaluation"], record["results"], []
    for memory in ("writing", "frozen"):
        if memory not in results:
            continue
        scores = results[memory]
        if name == "ppl":
            found.append(("text held out", "perplexity", memory, scores["all"]["perplexity"]))
        elif name == "recall":
            found.append(("recall of facts", "accuracy", memory, scores["all"]["accuracy"]))
        elif name == "lm_eval":
            found += [
                (task, metric["metric"], memory, metric["value"])
                for task, facts in scores.items()
                for metric in facts["metrics"]
            ]
    return [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": data, "type": data.replace(" ", "_")},
            "metrics": [{"type": kind, "name": f"{kind}, memory {memory}", "value": value}],
        }
        for data, kind, memory, value in found
    ]


def _known(run: Path) -> list[tuple[Path, Any]]:
    """Results of evaluations that this program knows."""
    return [(path, x) for path, x in read_results(run).items() if x["evaluation"] in EVALS]


def _results(run: Path, step: int, weights: WhichWeights) -> list[str]:
    """Finding and table of each evaluation that this program knows."""
    found = _known(run)
    if not found:
        return ["It has not been evaluated."]
    texts = [
        "Intervals are over texts or samples of this kind. They say nothing about other trainings "
        "of the same configuration: this is one."
    ]
    for path, record in found:
        evaluation = EVALS[record["evaluation"]]
        with reading(path, problem="has another form than this version shows"):
            finding, table = evaluation.finding(record), evaluation.table(record)
            how = _how(record["provenance"], step, weights)
        texts += [f"### {evaluation.title}", *([finding] if finding else [])]
        texts += [f"```text\n{table}\n```", f"{evaluation.about} {how}"]
    return texts


def _how(provenance: Mapping[str, Any], step: int, weights: WhichWeights) -> str:
    measured, other = provenance["checkpoint"], ""
    if measured["step"] != step:
        other = f" of step {measured['step']}, not of the step given here,"
    used = measured.get("weights", "trained")
    if used != weights:
        other += f" with {used} weights, not with the {weights} weights given here,"
    return shown(
        f"Measured{other} on {provenance['device']} with jax {provenance['jax']}, seed "
        f"{provenance['seed']}."
    )
