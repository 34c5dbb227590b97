"""The benchmarks that ask questions, from the command line on a tiny run, as their page says."""

import importlib
import json
import re
import shlex
from pathlib import Path

import jax
import pytest
from flax import nnx

from fwpkm_jax.cli.eval_command import main, with_tasks
from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData, load_tokenizer
from fwpkm_jax.evaluation import EVALS, Subject
from fwpkm_jax.evaluation.data_files import local_path
from fwpkm_jax.evaluation.questions import views
from fwpkm_jax.evaluation.questions.asking import Group, Question, ReadingOptions, ask
from fwpkm_jax.evaluation.sources import sha256
from fwpkm_jax.interchange import Weights, start_run
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.outside_files import OutsideFileError
from tests.evaluation.conftest import tiny_model_config
from tests.evaluation.questions.test_babilong import LINES
from tests.evaluation.questions.test_ruler import SQUAD
from tests.interchange.small_hub import a_small_hub

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "evaluate.md"
MODEL = tiny_model_config(mixers=("swa",), memory_layers=(0,))


@pytest.fixture(scope="module")
def model():
    return LanguageModel(MODEL, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """A folder with an untrained run and small data of every benchmark."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "text.txt").write_text("Some text of the run. It is short. " * 4)
    text = (str(folder / "text.txt"),)
    data = TextData(train_paths=text, valid_paths=text, length=16)
    memory = model.init_memory(jax.random.key(1), groups=1)
    experiment = Experiment(model=MODEL, data=data, run_dir=str(folder / "run"))
    start_run(experiment, Weights(nnx.split(model)[1], memory))
    record = {"context": "A report about towers.", "input": "How many?", "length": 4}
    record |= {"answers": ["three towers", "3"], "language": "en", "all_classes": None}
    (folder / "longbench").mkdir()
    for task in ("hotpotqa", "samsum"):
        lines = (json.dumps(record | {"_id": f"{task}{n}"}) for n in range(3))
        (folder / "longbench" / f"{task}.jsonl").write_text("\n".join(lines))
    (folder / "babi").mkdir()
    (folder / "babi" / "qa1_single-supporting-fact_test.txt").write_text("\n".join(LINES))
    passages = ("The old man came back to the river", "She said yes and then she said no")
    lines = (json.dumps({"text": text}) for text in passages)
    (folder / "lambada_test.jsonl").write_text("\n".join(lines))
    (folder / "squad.json").write_text(json.dumps(SQUAD))
    return folder


NAMES = {
    "runs/qwen": "run",
    "longbench/data.zip": "longbench",
    "tasks_1-20_v1-2/en-10k": "babi",
    "lambada_test.jsonl": "lambada_test.jsonl",
}
"""Files of the page and those of the test's folder in their place."""
SMALLER = {
    "ruler": ["--ruler.lengths", "2048", "--ruler.piece_length", "64"],
    "babilong": ["--babilong.lengths", "0", "300", "--babilong.piece_length", "64"],
    "longbench_answers": ["--longbench_answers.max_tokens", "100"],
    "lambada": ["--lambada.piece_length", "64"],
}
"""Options behind those of the page, so that a command takes seconds."""


def commands() -> dict[str, list[str]]:
    """The commands of the page's section on benchmarks, by evaluation."""
    section = PAGE.read_text().partition("## Benchmarks that others run")[2].partition("\n## ")[0]
    block = re.findall(r"```bash\n(fwpkm .*?)```", section, re.DOTALL)[0]
    lines = block.replace("\\\n", " ").splitlines()
    found = [shlex.split(line)[2:] for line in lines]
    return {words[words.index("--suite") + 1]: words for words in found}


def test_the_page_has_a_command_for_each_benchmark():
    assert {*commands()} == {*SMALLER, "lm_eval"}


def shown(name, folder, capsys, monkeypatch, *more) -> str:
    """What the page's command prints."""
    monkeypatch.chdir(folder)
    words = [str(folder / NAMES[word]) if word in NAMES else word for word in commands()[name]]
    code = main([*words, "--limit", "2", f"--{name}.batch_size", "2", *SMALLER[name], *more])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


@pytest.mark.slow_cases("ruler")
@pytest.mark.thorough
@pytest.mark.parametrize("name", SMALLER)
def test_the_pages_command_runs_and_writes_its_results(name, folder, capsys, monkeypatch):
    text = shown(name, folder, capsys, monkeypatch)
    record = json.loads((folder / "run" / "results" / f"{name}.json").read_text())
    evaluation, results = EVALS[name], record["results"]
    assert evaluation.table(record) in text
    assert evaluation.finding(record).endswith(".")
    assert evaluation.title in (folder / "run" / "results" / "report.html").read_text()
    assert record["provenance"]["scored_tokens"] > 0
    if name == "lambada":
        assert results["passages"] == results["writing"]["answers"] == 2
        assert results["writing"]["perplexity"] != results["frozen"]["perplexity"]
        del results["writing"]  # As with `write` off.
        assert "memory writing" not in evaluation.table(record) + evaluation.finding(record)
        return
    for run in results["runs"]:
        assert run["questions"] == len(run["samples"]) == 2
        for which in ("writing", "frozen"):
            scores = [one["scores"][which] for one in run["samples"]]
            assert run[which]["score"] == pytest.approx(sum(scores) / 2)
    answers = [one["answers"] for run in results["runs"] for one in run["samples"]]
    assert any(x["writing"] != x["frozen"] for x in answers)  # Writing changes what is said.


def group(**changes) -> Group:
    questions = [Question("A text that is read. " * n, "What?", ("text",), str(n)) for n in (1, 3)]
    plain = Group("task", 9, questions, 4, lambda question, answer: float(len(answer) > 2))
    return plain._replace(**changes)


@pytest.mark.thorough
def test_answers_are_scored_by_group_and_pass(model):
    memory = model.init_memory(jax.random.key(1), groups=1)
    subject = Subject(model=model, memory=memory)
    tokenizer = load_tokenizer("bytes")
    options = {"batch_size": 2, "piece_length": 64}

    def asked(groups, **more):
        config = ReadingOptions(**options | more)
        return ask(subject, config, groups, tokenizer=tokenizer, name="x", files={}).numbers["runs"]

    (first, second) = asked([group(), group(max_tokens=20)])
    assert (first["task"], first["length"], first["questions"]) == ("task", 9, 2)
    assert first["tokens"] == {"min": 26, "mean": 47.0, "max": 68}
    assert second["tokens"] == {"min": 20, "mean": 20.0, "max": 20}
    difference = first["writing"]["score"] - first["frozen"]["score"]
    assert first["difference"]["score"] == pytest.approx(difference)
    (only,) = asked([group()], write="off")
    assert only["frozen"] == first["frozen"]
    assert "writing" not in only
    record = {"results": {"runs": [only]}, "config": {"memory_reset": "never"}}
    record["provenance"] = {"chunk_size": 8}
    assert "memory kept within a task\n" in views.table(record)
    assert "memory writing" not in views.table(record) + views.finding(record)
    (kept,) = asked([group()], memory_reset="never", batch_size=1, chunk_size=16)
    assert kept["samples"][0]["answers"]["frozen"] == first["samples"][0]["answers"]["frozen"]
    assert kept["samples"][1]["answers"]["writing"] != first["samples"][1]["answers"]["writing"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ruler", {}, "name lengths in tokens, as in --ruler.lengths 4096 8192"),
        ("babilong", {}, "name bAbI's folder, as in --babilong.data"),
        ("longbench_answers", {}, "name LongBench, as in --longbench_answers.data"),
        ("lambada", {}, "name the passages, as in --lambada.data"),
        ("lambada", {"data": "none.jsonl"}, "There is no file or folder"),
        ("lambada", {"data": "s3://a/b"}, "neither a path of this machine"),
        (
            "lambada",
            {"data": "DATA", "memory_reset": "never"},
            "one at a time; set batch_size to 1",
        ),
        ("babilong", {"data": "DATA"}, "is one task's file, but tasks=('qa1', "),
        ("longbench_answers", {"data": "DATA"}, "is one task's file, but tasks=('narrativeqa', "),
        ("longbench", {"data": "DATA"}, "is one task's file, but tasks=('narrativeqa', "),
        ("lm_eval", {}, "name tasks of the harness, as in --tasks"),
    ],
)
def test_what_is_missing_is_said_in_one_line(name, options, message, model, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "one two"}')
    options = {k: str(tmp_path / "data.jsonl") if x == "DATA" else x for k, x in options.items()}
    data = TextData(train_paths=("none.txt",))
    subject = Subject(model=model, memory={}, data=data)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        EVALS[name].evaluate(subject, EVALS[name].config(**options))


def made_of(name, monkeypatch, **options) -> tuple[list[Group], dict[str, str]]:
    """The questions that an evaluation would ask, and the hashes of its files."""
    module = importlib.import_module(EVALS[name].evaluate.__module__)
    kept = {}
    monkeypatch.setattr(module, "ask", lambda *given, **more: kept.update(groups=given[2], **more))
    subject = Subject(model=None, memory={}, data=TextData(train_paths=("none.txt",)))
    EVALS[name].evaluate(subject, EVALS[name].config(**options), tokenizer=load_tokenizer("bytes"))
    return kept["groups"], kept["files"]


def test_ruler_takes_its_words_essay_and_documents_from_the_files_named(folder, monkeypatch):
    (folder / "essay.txt").write_text("The tower stood here. Nobody saw it. " * 9)
    words = [a + b for a in "bcdfghkl" for b in ("all", "ent", "ind", "ock", "ust", "ame")]
    (folder / "words.txt").write_text(" ".join(words))
    options = {key: str(folder / f"{key}.txt") for key in ("essay", "words")}
    options["squad"] = str(folder / "squad.json")
    tasks = ("niah_multikey_1", "qa_1")
    (needles, documents), files = made_of(
        "ruler", monkeypatch, tasks=tasks, lengths=(2048,), samples=2, **options
    )
    (one, two) = needles.questions
    assert "The tower stood here." in one.context
    keys = re.findall(r"magic numbers for ([a-z]+)-([a-z]+) is", one.context + two.context)
    assert len(keys) == 8
    assert {word for key in keys for word in key} <= {*words}
    assert documents.questions[0].references == ("0 towers",)
    assert files == {path: sha256(Path(path)) for path in options.values()}
    with pytest.raises(ValueError, match=r"has 4 words of 3 to 12 small letters; 40 or more"):
        made_of("ruler", monkeypatch, lengths=(2048,), words=options["essay"])


def test_babilong_takes_its_background_and_prompts_from_the_files_named(folder, monkeypatch):
    (folder / "background.jsonl").write_text('{"text": "The sea is wide. It is deep."}')
    parts = {"instruction": "Read.", "examples": "One.", "post_prompt": "Answer."}
    (folder / "prompts.json").write_text(json.dumps({"qa1": parts}))
    options = {"text": folder / "background.jsonl", "prompts": folder / "prompts.json"}
    options = {key: str(path) for key, path in options.items()}
    about = {"tasks": ("qa1",), "lengths": (0, 300), "data": str(folder / "babi")}
    (alone, hidden), files = made_of("babilong", monkeypatch, **about, **options)
    assert alone.questions[0].context.startswith("Read.\nOne.\nAnswer.\n<context>\nMary went")
    assert "sea" not in alone.questions[0].context
    assert all(one in hidden.questions[0].context for one in ("The sea is wide.", "It is deep."))
    named = [*options.values(), str(folder / "babi" / "qa1_single-supporting-fact_test.txt")]
    assert files == {path: sha256(Path(path)) for path in named}
    (folder / "prompts.json").write_text(json.dumps({"qa1": parts | {"examples": 3}}))
    with pytest.raises(OutsideFileError, match="has no text 'examples'"):
        made_of("babilong", monkeypatch, **about, **options)


def test_tasks_belong_to_an_evaluation_that_has_some(capsys):
    assert main(["runs/none", "--suite", "ppl", "--tasks", "vt"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "no evaluation of --suite has tasks; name one of longbench, longbench_answers" in said
    assert main(["runs/none", "--suite", "ruler", "--tasks", "vvt"]) == 2
    assert "tasks: 'vvt' is none of niah_single_1" in capsys.readouterr().err
    config = EVALS["longbench"].config()
    found = with_tasks(("musique",), ("ppl", "longbench"), {"ppl": None, "longbench": config})
    assert found == {"longbench": EVALS["longbench"].config(tasks=("musique",))}


def test_all_leaves_out_benchmarks_without_data():
    data = TextData(train_paths=("none.txt",))
    subject = Subject(model=None, memory={}, data=data)
    for name in (*SMALLER, "lm_eval"):
        assert EVALS[name].missing(subject, EVALS[name].config())


def test_files_and_folders_of_a_data_set_of_the_hub_are_fetched(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    with a_small_hub(tmp_path, monkeypatch) as hub:
        hub.commit("datasets/a/babi", {"en/qa1_test.txt": b"one", "en/qa2_test.txt": b"two"})
        hub.commit("datasets/a/babi", {"en/qa1_test.txt": b"newer", "readme.md": b"no"})
        old = hub.repositories["datasets/a/babi"][0][0]
        assert local_path("hf://datasets/a/babi/en/qa1_test.txt").read_text() == "newer"
        folder = local_path(f"hf://datasets/a/babi@{old}/en/")
        assert {x.name: x.read_text() for x in folder.iterdir()} == {
            "qa1_test.txt": "one",
            "qa2_test.txt": "two",
        }
        assert not any("readme" in line for line in hub.asked)
        with pytest.raises(ValueError, match=r"has no file or folder 'hn'; check the path"):
            local_path("hf://datasets/a/babi/hn")
        with pytest.raises(ValueError, match=r"a/none"):
            local_path("hf://datasets/a/none/x")
    with pytest.raises(ValueError, match="is no data set of the hub; write hf://datasets/OWNER"):
        local_path("hf://datasets/lambada")
