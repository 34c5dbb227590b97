"""The harness with our adapter: beside its own backend, from the command line, what is refused."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.cli.eval_command import main
from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData, load_tokenizer
from fwpkm_jax.evaluation import EVALS, Subject
from fwpkm_jax.evaluation.harness import adapter
from fwpkm_jax.evaluation.harness.evaluate import HarnessConfig
from fwpkm_jax.interchange import Weights, start_run
from fwpkm_jax.models.language_model import LanguageModel
from tests.evaluation.conftest import tiny_model_config
from tests.evaluation.harness.parity import TASKS, write_tasks
from tests.evaluation.questions.test_evaluate import PAGE, commands

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared" / "hf"


def without(*packages) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


needs_harness = without("lm_eval")


@pytest.mark.thorough
@pytest.mark.extras
@needs_harness
@without("torch", "transformers", "accelerate")
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} holds no models")
def test_the_harness_gives_the_same_numbers_as_with_its_own_backend(tmp_path):
    out = tmp_path / "out.json"
    names = ["qwen3", "qwen3+bos"]
    command = [sys.executable, "-m", "tests.evaluation.harness.parity", SHARED, out, *names]
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, found in json.loads(out.read_text()).items():
        assert found["log_likelihood"] < 1e-4, name
        assert found["rolling"] < 1e-4, name
        assert found["scores"] < 1e-5, name
        assert found["greedy_equal"], name
        assert found["texts_equal"] == found["texts"] == 4, name
        assert found["characters"] > 20, name


@pytest.fixture(scope="module")
def model():
    config = tiny_model_config(mixers=("swa",), memory_layers=(0,))
    return LanguageModel(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def memory(model):
    return model.init_memory(jax.random.key(1), groups=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory, model, memory):
    """An untrained run on text, and the folder of the tasks beside it."""
    folder = tmp_path_factory.mktemp("harness")
    write_tasks(folder / "tasks", documents=3)
    (folder / "text.txt").write_text("Some text. " * 9)
    text = (str(folder / "text.txt"),)
    data = TextData(train_paths=text, valid_paths=text, length=16)
    experiment = Experiment(model=model.config, data=data, run_dir=str(folder / "run"))
    start_run(experiment, Weights(nnx.split(model)[1], memory))
    return folder / "run"


@pytest.mark.thorough
@pytest.mark.extras
@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_the_command_reports_every_task_in_both_passes(run, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    options = {"include_path": run.parent / "tasks", "bootstrap_iters": 0, "batch_size": 2}
    given = [word for key, x in options.items() for word in (f"--lm_eval.{key}", str(x))]
    words = commands()["lm_eval"]  # The page's, with tasks that need no connection.
    assert words[:4] == ["runs/qwen", "--suite", "lm_eval", "--tasks"]
    assert main([str(run), *words[1:4], *TASKS, "--limit", "2", *given]) == 0
    record = json.loads((run / "results" / "lm_eval.json").read_text())
    results = record["results"]
    assert EVALS["lm_eval"].table(record) in capsys.readouterr().out
    for name in ("writing", "frozen"):
        assert set(results[name]) == set(TASKS)
        assert results[name]["tiny_choice"]["documents"] == 2
        metrics = [x["metric"] for x in results[name]["tiny_rolling"]["metrics"]]
        assert metrics == ["bits_per_byte"]
    bits = [results[x]["tiny_rolling"]["metrics"][0]["value"] for x in ("writing", "frozen")]
    assert bits[0] != bits[1]
    assert record["provenance"]["scored_tokens"] > 20
    assert record["provenance"]["resets"]["memory"] == "request"
    assert main([str(run), "--suite", "lm_eval", "--tasks", "arc_eazy", *given]) == 2
    assert "nearest name is arc_easy. Tasks of your own" in capsys.readouterr().err
    assert main([str(run), "--suite", "lm_eval", "--tasks", "none.yaml", *given]) == 2
    assert "there is no file none.yaml" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.extras
@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_the_pages_program_runs(run, monkeypatch, capsys):
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (program,) = re.findall(r"```python\n(from lm_eval.*?)```", PAGE.read_text(), re.DOTALL)
    manager = TaskManager(include_path=str(run.parent / "tasks"), include_defaults=False)
    given = 'tasks=["tiny_choice"], task_manager=manager, limit=1'
    program = program.replace("runs/qwen", str(run)).replace('tasks=["lambada_openai"]', given)
    exec(program, {"manager": manager})
    assert "'acc,none': " in capsys.readouterr().out


class Request:
    """A request of the harness."""

    def __init__(self, *args):
        self.args = args


@pytest.mark.thorough
@pytest.mark.extras
@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_requests_start_from_the_memory_unless_it_is_kept(model, memory):
    tokenizer = load_tokenizer("bytes")
    options = {"batch_size": 1, "piece_length": 32}
    asked = [Request("a long context of one text", " or other"), Request("", "more")]

    def nats(requests, **more):
        one = adapter.HarnessModel(model, memory, tokenizer, **options | more)
        return [score for score, _ in one.loglikelihood(requests, disable_tqdm=True)]

    both = nats(asked)
    np.testing.assert_allclose(nats(asked[::-1])[::-1], both, atol=1e-4)  # In any order.
    kept = nats(asked, memory_reset="never")
    assert kept[0] == pytest.approx(both[0], abs=1e-4)
    assert abs(kept[1] - both[1]) > 1e-3
    plain = adapter.HarnessModel(model, memory, tokenizer, **options)
    text = "a text of some length to be read"
    (whole,) = plain.loglikelihood_rolling([Request(text)])
    assert whole == pytest.approx(nats([Request("", text)])[0], abs=1e-4)
    windows = adapter.HarnessModel(model, memory, tokenizer, max_length=10, **options)
    (cut,) = windows.loglikelihood_rolling([Request(text)])
    assert abs(cut - whole) > 1e-3
    assert plain.loglikelihood_rolling([Request("")]) == [0.0]
    stops = {"until": ["\n"], "max_gen_toks": 4}
    (answer,) = plain.generate_until([Request("Some text", stops)])
    assert "\n" not in answer
    with pytest.raises(ValueError, match=r"asks for sampled texts \(temperature=0\.7\)"):
        plain.generate_until([Request("x", stops | {"do_sample": True, "temperature": 0.7})])
    with pytest.raises(ValueError, match="max_length=10 leaves no room for the 12 new tokens"):
        windows.generate_until([Request("x", stops | {"max_gen_toks": 12})])
    with pytest.raises(ValueError, match="max_length=10 is less than the 32 tokens"):
        windows.loglikelihood([Request("x", text)], disable_tqdm=True)
    with pytest.raises(ValueError, match="has no token of its own"):
        plain.loglikelihood([Request("x", "")], disable_tqdm=True)
    with pytest.raises(ValueError, match="names no token that starts a text; leave it out"):
        adapter.HarnessModel(model, memory, tokenizer, add_bos=True)


def test_what_is_missing_is_said(model, memory, monkeypatch, tmp_path):
    data = TextData(train_paths=("none.txt",))
    subject = Subject(model=model, memory=memory, data=data)
    evaluate = EVALS["lm_eval"].evaluate
    with pytest.raises(ValueError, match=r"tasks=\(\): name tasks of the harness"):
        evaluate(subject, HarnessConfig())
    with pytest.raises(ValueError, match="max_length=1 must be at least 2"):
        HarnessConfig(max_length=1)
    monkeypatch.setattr(adapter, "MISSING", ModuleNotFoundError("lm_eval"))
    with pytest.raises(ImportError, match=r"run: pip install -e '\.\[lm-eval\]'"):
        evaluate(subject, HarnessConfig(tasks=("x",)))
    with pytest.raises(ImportError, match=r"run: pip install -e '\.\[lm-eval\]'"):
        adapter.HarnessModel(model, memory, load_tokenizer("bytes"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lacks = EVALS["lm_eval"].missing(subject, HarnessConfig(tasks=("x",)))
    assert lacks == "lm-evaluation-harness (extra lm-eval)"
