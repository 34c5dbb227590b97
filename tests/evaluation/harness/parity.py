"""lm-evaluation-harness with our adapter beside its own transformers backend, on tiny models.

    python -m tests.evaluation.harness.parity FOLDER OUT.json [NAME ...]

FOLDER holds folders of transformers models (`../shared/hf`); NAME chooses some, and NAME+bos has a
tokenizer that adds a first token. Needs lm-eval, torch, transformers and accelerate; no connection.
Writes the largest differences of each model.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # Before the hub's client is imported.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

from typing import Any

import jax
import numpy as np
from flax import nnx

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.interchange.hf import open_folder, read_weights
from fwpkm_jax.models.language_model import LanguageModel

WORDS = [
    "the",
    "memory",
    "reads",
    "a",
    "book",
    "and",
    "the",
    "river",
    "turns",
    "under",
    "an",
    "old",
    "stone",
    "bridge",
    "at",
    "night",
]
CHARACTERS = [*map(chr, range(32, 127)), "\n"]
END = "<eos>"  # The 97th token, as many as the models have.
LONGEST = 48  # Shorter than the longest texts, so that contexts are cut and windows made.
TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "tiny_text": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "qu"], "max_gen_toks": 10, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path, *, documents: int = 4) -> Path:
    """Writes the YAML files of `TASKS` and their documents; returns the folder."""
    rng = np.random.default_rng(0)
    lines = [
        {
            "context": " ".join(rng.choice(WORDS, rng.integers(1, 16))),
            "choices": [f" {word}" for word in rng.choice(WORDS, 3)],
            "answer": int(rng.integers(3)),
        }
        for _ in range(documents)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(folder / "test.jsonl")}}
        head = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps(head | task))  # JSON is YAML.
    return folder


def write_tokenizer(folder: Path, *, bos: bool = False) -> None:
    """Writes a tokenizer of single characters, with one that adds a first token if `bos`."""
    from tokenizers import Tokenizer, decoders, models, processors

    vocabulary = {text: number for number, text in enumerate([*CHARACTERS, END])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=" "))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    if bos:
        ends = [(END, vocabulary[END])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END} $A", special_tokens=ends
        )
        config["bos_token"] = END
    tokenizer.save(str(folder / "tokenizer.json"))
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 256}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def copy_model(source: Path, target: Path, *, bos: bool = False) -> Path:
    """A copy of a model's folder with a tokenizer and the id of the end of a text."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".safetensors") and file.name != "generation_config.json":
            shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part["eos_token_id"] = len(CHARACTERS)
    (target / "config.json").write_text(json.dumps(config))
    write_tokenizer(target, bos=bos)
    return target


def our_model(folder: Path) -> LanguageModel:
    """The imported model."""
    source = open_folder(folder)
    structure = nnx.eval_shape(lambda: LanguageModel(source.config, rngs=nnx.Rngs(0), dtype=None))
    return nnx.merge(nnx.split(structure)[0], read_weights(source).params)


def responses(model: Any, tasks: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every answer of a model of the harness by task, and the scores."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    samples = {
        task: [one["resps"] for one in sorted(found["samples"][task], key=lambda x: x["doc_id"])]
        for task in TASKS
    }
    return samples, {task: found["results"][task] for task in TASKS}


def compare(source: Path, folder: Path, *, bos: bool = False) -> dict[str, Any]:
    """The largest differences of one model's answers in both backends."""
    import torch
    from lm_eval.models.huggingface import HFLM

    from fwpkm_jax.evaluation.harness.adapter import HarnessModel
    from fwpkm_jax.evaluation.harness.options import HarnessConfig

    copy = copy_model(source, folder / "model", bos=bos)
    tasks = write_tasks(folder / "tasks")
    theirs = HFLM(
        pretrained=str(copy), dtype=torch.float32, device="cpu", batch_size=4, max_length=LONGEST
    )
    ours = HarnessModel(
        our_model(copy),
        {},
        load_tokenizer(str(copy / "tokenizer.json")),
        HarnessConfig(batch_size=4, max_length=LONGEST, add_bos=bos, piece_length=LONGEST),
    )
    (their_answers, their_scores), (our_answers, our_scores) = (
        responses(model, tasks) for model in (theirs, ours)
    )

    def numbers(answers: dict[str, Any], task: str) -> np.ndarray:
        return np.asarray([_first(x) for doc in answers[task] for x in doc], np.float64)

    def apart(task: str) -> float:
        return float(np.max(np.abs(numbers(their_answers, task) - numbers(our_answers, task))))

    texts = [answers["tiny_text"] for answers in (their_answers, our_answers)]
    greedy = [
        [bool(_flat(x)[1]) for doc in answers["tiny_choice"] for x in doc]
        for answers in (their_answers, our_answers)
    ]
    return {
        "requests": sum(len(doc) for task in our_answers.values() for doc in task),
        "log_likelihood": apart("tiny_choice"),
        "greedy_equal": greedy[0] == greedy[1],
        "rolling": apart("tiny_rolling"),
        "texts": len(texts[0]),
        "texts_equal": sum(a == b for a, b in zip(*texts, strict=True)),
        "characters": sum(len(_flat(x)[0]) for doc in texts[1] for x in doc),
        "scores": max(
            abs(value - our_scores[task][key])
            for task, scores in their_scores.items()
            for key, value in scores.items()
            if isinstance(value, float)
        ),
    }


def _flat(response: Any) -> list[Any]:
    """An answer without the lists that the harness puts around it."""
    while (
        isinstance(response, list) and len(response) == 1 and isinstance(response[0], list | tuple)
    ):
        response = response[0]
    return list(response) if isinstance(response, list | tuple) else [response]


def _first(response: Any) -> float:
    return float(_flat(response)[0])


if __name__ == "__main__":
    folder, out, *names = sys.argv[1:]
    sources = sorted(path.parent for path in Path(folder).glob("*/config.json"))
    results = {}
    with jax.default_matmul_precision("highest"), tempfile.TemporaryDirectory() as scratch:
        for name in names or [source.name for source in sources]:
            source, _, kind = name.partition("+")  # NAME+bos: its tokenizer adds a first token.
            source = next(one for one in sources if one.name == source)
            results[name] = compare(source, Path(scratch) / name, bos=kind == "bos")
            print(name, json.dumps(results[name]), flush=True)
    Path(out).write_text(json.dumps(results, indent=1))
