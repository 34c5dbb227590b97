"""The harness with our adapter: beside its own backend, from the command line, what is refused."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.cli import main
from fwpkm_jax.cli.eval_command import parse
from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData, load_tokenizer
from fwpkm_jax.evaluation import EVALS, Subject
from fwpkm_jax.evaluation.harness import adapter
from fwpkm_jax.evaluation.harness.options import HarnessConfig
from fwpkm_jax.interchange import Weights, start_run
from fwpkm_jax.models.language_model import LanguageModel
from tests.evaluation.conftest import tiny_model_config
from tests.evaluation.harness.parity import TASKS, write_tasks, write_tokenizer

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared" / "hf"
PAGE = ROOT / "docs" / "howto" / "evaluate.md"


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
    options = {"include_path": run.parent / "tasks", "batch_size": 2}
    given = [word for key, x in options.items() for word in (f"--lm_eval.{key}", str(x))]
    words = ["--suite", "lm_eval", "--lm_eval.tasks", *TASKS]
    assert main(["eval", str(run), *words, "--limit", "2", *given]) == 0
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
    assert (
        main(["eval", str(run), "--suite", "lm_eval", "--lm_eval.tasks", "arc_eazy", *given]) == 2
    )
    assert "nearest name is arc_easy. Tasks of your own" in capsys.readouterr().err
    assert (
        main(["eval", str(run), "--suite", "lm_eval", "--lm_eval.tasks", "none.yaml", *given]) == 2
    )
    assert "there is no file none.yaml" in capsys.readouterr().err


@pytest.mark.slow
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


@pytest.mark.thorough
def test_the_pages_commands_are_understood():
    blocks = re.findall(r"```bash\n(fwpkm eval runs/qwen .*?)```", PAGE.read_text(), re.DOTALL)
    lines = blocks[0].replace("\\\n", " ").splitlines()
    tasks = set()
    for line in lines:
        options = parse(shlex.split(line)[2:])
        assert options.suite == ("lm_eval",)
        assert set(options.lm_eval.local_files) <= set(options.lm_eval.tasks)
        tasks |= set(options.lm_eval.tasks)
    assert {"lambada_openai", "longbench_hotpotqa", "babilong_qa1", "vt", "fwpkm_needles"} <= tasks


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
        one = adapter.HarnessModel(model, memory, tokenizer, HarnessConfig(**options | more))
        return [score for score, _ in one.loglikelihood(requests, disable_tqdm=True)]

    both = nats(asked)
    np.testing.assert_allclose(nats(asked[::-1])[::-1], both, atol=1e-4)  # In any order.
    kept = nats(asked, memory_reset="never")
    assert kept[0] == pytest.approx(both[0], abs=1e-4)
    assert abs(kept[1] - both[1]) > 1e-3
    plain = adapter.HarnessModel(model, memory, tokenizer, HarnessConfig(**options))
    text = "a text of some length to be read"
    (whole,) = plain.loglikelihood_rolling([Request(text)])
    assert whole == pytest.approx(nats([Request("", text)])[0], abs=1e-4)
    cutting = HarnessConfig(max_length=10, **options)
    windows = adapter.HarnessModel(model, memory, tokenizer, cutting)
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
        adapter.HarnessModel(model, memory, tokenizer, HarnessConfig(add_bos=True))


@pytest.mark.thorough
@pytest.mark.extras
@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_the_document_before_a_question_is_read_apart():
    """Full attention would see the document from the question."""
    config = tiny_model_config(mixers=("attention",), memory_layers=(0,))
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    memory = model.init_memory(jax.random.key(1), groups=1)
    tokenizer = load_tokenizer("bytes")
    options = {"batch_size": 1, "piece_length": 32, "question_from": "Question:"}
    document, question = "Question: no. A long document of some words.", "Question: who?"

    def nats(text, write=True, **more):
        config = HarnessConfig(**options | more)
        one = adapter.HarnessModel(model, memory, tokenizer, config, write=write)
        ((score, _),) = one.loglikelihood([Request(text, " I")], disable_tqdm=True)
        return score

    frozen = partial(nats, write=False)
    hidden = {"attention": "question"}
    # The last place where the words stand is the question: frozen, it is all that is known.
    assert frozen(document + question, **hidden) == pytest.approx(frozen(question), abs=1e-5)
    assert abs(frozen(document + question) - frozen(question)) > 1e-4
    assert abs(nats(document + question, **hidden) - nats(question, **hidden)) > 1e-4
    once, twice = (nats(document + question, readings=n, **hidden) for n in (1, 2))
    assert abs(once - twice) > 1e-4
    cut = len(question) + len(" I") - 1 + 9  # Nine tokens of the document are left.
    expected = nats(document[-9:] + question, **hidden)
    assert nats(document + question, max_length=cut, **hidden) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match=r"does not stand in the context that ends 'x'"):
        nats("x")
    plain = adapter.HarnessModel(model, memory, tokenizer, HarnessConfig(**options))
    with pytest.raises(ValueError, match="a task scores whole texts, which have no question"):
        plain.loglikelihood_rolling([Request("text")])
    stops = {"until": [], "max_gen_toks": 5}
    answers = [
        adapter.HarnessModel(
            model, memory, tokenizer, HarnessConfig(**options | one), write=False
        ).generate_until([Request(text, stops)])
        for text, one in ((document + question, hidden), (question, {}))
    ]
    assert answers[0] == answers[1]


def results_of(run, *words) -> dict:
    """The results of a command that needs no connection."""
    command = [
        "eval",
        str(run),
        "--suite",
        "lm_eval",
        "--lm_eval.piece_length",
        "64",
        *map(str, words),
    ]
    assert main(command) == 0
    return json.loads((run / "results" / "lm_eval.json").read_text())


@pytest.mark.slow
@pytest.mark.extras
@without("lm_eval", "jieba", "rouge", "fuzzywuzzy")
@pytest.mark.filterwarnings("ignore")
def test_documents_of_a_task_come_from_local_files(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    passages = ("The old man came back to the river", "She said yes and then she said no")
    lambada = tmp_path / "lambada_test.jsonl"
    lambada.write_text("\n".join(json.dumps({"text": one}) for one in passages))
    record = {"context": "A report about towers.", "input": "How many?", "length": 4}
    record |= {"answers": ["three towers", "3"], "language": "en", "all_classes": None}
    (tmp_path / "published").mkdir()
    published = tmp_path / "published" / "hotpotqa.jsonl"
    published.write_text("\n".join(json.dumps(record | {"_id": f"{n}"}) for n in range(3)))
    data = (f"lambada_openai={lambada}", f"longbench_hotpotqa={published.parent}")
    asked = []
    generate = adapter.HarnessModel.generate_until
    monkeypatch.setattr(
        adapter.HarnessModel,
        "generate_until",
        lambda self, requests, *more: asked.extend(requests) or generate(self, requests, *more),
    )
    words = ("--lm_eval.tasks", "lambada_openai", "longbench_hotpotqa", "--lm_eval.data", *data)
    record = results_of(run, *words, "--limit", 2)
    found = record["results"]["writing"]
    assert {task: one["documents"] for task, one in found.items()} == {
        "lambada_openai": 2,
        "longbench_hotpotqa": 2,
    }
    (accuracy,) = (x for x in found["lambada_openai"]["metrics"] if x["metric"] == "acc")
    assert 0 <= accuracy["value"] <= 1
    assert {Path(x).name for x in record["provenance"]["data_files"]} == {
        "lambada_test.jsonl",
        "hotpotqa.jsonl",
    }
    assert "A report about towers.\n" in asked[0].args[0]
    assert asked[0].args[0].endswith("Question: How many?\nAnswer:")
    words = ["--suite", "lm_eval", "--lm_eval.tasks", "arc_easy", "--lm_eval.data", data[0]]
    assert main(["eval", str(run), *words]) == 2
    assert "'lambada_openai' is no single task of lm_eval.tasks" in capsys.readouterr().err
    words[3:] = ["lambada_openai", "--lm_eval.data", "lambada_openai=none.jsonl"]
    assert main(["eval", str(run), *words]) == 2
    assert "none.jsonl for lambada_openai" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.extras
@needs_harness
@pytest.mark.filterwarnings("ignore")
def test_samples_are_generated_without_a_connection(run, monkeypatch):
    """Needles of this package, asked with the books out of attention's reach."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    metadata = json.dumps({"words": 40, "samples": 3, "seed": 5})
    words = ("--lm_eval.tasks", "fwpkm_needles", "--lm_eval.metadata", metadata)
    hidden = ("--lm_eval.question_from", " The secret number for", "--lm_eval.attention")
    record = results_of(run, *words, *hidden, "question", "--lm_eval.readings", 2)
    for name in ("writing", "frozen"):
        found = record["results"][name]["fwpkm_needles"]
        assert found["documents"] == 3
        assert [x["metric"] for x in found["metrics"]] == ["exact_match"]
    assert record["provenance"]["resets"]["attention_and_gdn"] == "question"
    from fwpkm_jax.evaluation.harness.needle_task import samples

    one, same, other = (samples(words=40, samples=2, seed=n)["test"] for n in (5, 5, 6))
    assert one.to_list() == same.to_list() != other.to_list()
    assert all(x["answer"] in x["haystack"] for x in one)


@pytest.mark.slow
@pytest.mark.extras
@without("lm_eval", "transformers", "wonderwords", "nltk")
@pytest.mark.filterwarnings("ignore")
def test_rulers_samples_are_as_long_as_the_metadata_say(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_tokenizer(tmp_path)
    metadata = json.dumps({"max_seq_lengths": [1024], "tokenizer": str(tmp_path)})
    words = ("--lm_eval.tasks", "niah_single_1", "--limit", 1)
    record = results_of(run, *words, "--lm_eval.metadata", metadata)
    found = record["results"]["writing"]["niah_single_1"]
    assert "1024" in [x["metric"] for x in found["metrics"]]
    assert record["config"]["metadata"] == metadata


def test_what_is_missing_is_said(model, memory, monkeypatch, tmp_path):
    data = TextData(train_paths=("none.txt",))
    subject = Subject(model=model, memory=memory, data=data)
    evaluate = EVALS["lm_eval"].evaluate
    with pytest.raises(ValueError, match=r"tasks=\(\): name tasks, as in --lm_eval.tasks"):
        evaluate(subject, HarnessConfig())
    for options, message in (
        ({"max_length": 1}, "max_length=1 is too small; use 2"),
        ({"readings": 2}, "readings=2 and attention='document' need to know where the document"),
        ({"attention": "question"}, "name the words that begin the question"),
        ({"question_from": ""}, "question_from='' begins no question"),
        ({"metadata": "{"}, r"metadata='\{' is no JSON"),
        ({"metadata": "[1]"}, r"metadata='\[1\]' must be an object"),
        ({"data": ("lambada_openai",)}, "'lambada_openai' is not of the form TASK=FILE"),
    ):
        with pytest.raises(ValueError, match=message):
            HarnessConfig(**options)
    monkeypatch.setattr(adapter, "MISSING", ModuleNotFoundError("lm_eval"))
    with pytest.raises(ImportError, match=r"run: pip install -e '\.\[lm-eval\]'"):
        evaluate(subject, HarnessConfig(tasks=("x",)))
    with pytest.raises(ImportError, match=r"run: pip install -e '\.\[lm-eval\]'"):
        adapter.HarnessModel(model, memory, load_tokenizer("bytes"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lacks = EVALS["lm_eval"].missing(subject, HarnessConfig(tasks=("x",)))
    assert lacks == "lm-evaluation-harness (extra lm-eval)"
