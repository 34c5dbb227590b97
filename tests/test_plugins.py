"""Mixers and data of another package: registered by name, named in configurations, found again."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.cli.experiment import parse_command_line
from fwpkm_jax.config import from_json, read_experiment
from fwpkm_jax.data import make_dataset
from fwpkm_jax.evaluation.report import words
from fwpkm_jax.layers.mixers import AttentionConfig, register_mixer
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.plugins import import_plugins
from fwpkm_jax.run.train import train
from tests.training.tiny_config import get_config

ROOT = Path(__file__).parents[1]

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.data import AbstractDataConfig
from fwpkm_jax.layers import parameter
from fwpkm_jax.layers.mixers import AbstractMixer, AbstractMixerConfig, register_mixer


@dataclass(frozen=True, kw_only=True)
class RunningSumConfig(AbstractMixerConfig):
    scale: float = 0.5

    def build(self, model_dim, *, norm_eps, init_std, dtype, rngs):
        return RunningSum(self, model_dim)


class RunningSum(AbstractMixer):
    """Each token gets the scaled sum of all tokens so far."""

    def __init__(self, config, model_dim):
        self.gain = parameter(jnp.full((model_dim,), config.scale), "scale")

    def init_cache(self, batch, *, max_length, dtype):
        return jnp.zeros((batch, self.gain.shape[0]), jnp.float32)

    def mix(self, x, *, mask=None, cache=None):
        real = jnp.ones(x.shape[:2]) if mask is None else mask.astype(jnp.float32)
        sums = jnp.cumsum(x.astype(jnp.float32) * real[..., None], axis=1)
        if cache is not None:
            sums = sums + cache[:, None]
        y = sums * self.gain[...][None, None] * real[..., None]
        return y.astype(x.dtype), None if cache is None else sums[:, -1]


@dataclass(frozen=True, kw_only=True)
class CountingData(AbstractDataConfig):
    length: int = 16
    top: int = 32

    @property
    def vocab_size(self):
        return self.top

    def source(self, *, split, seed):
        return Counting(self, seed)


class Counting:
    def __init__(self, config, seed):
        self.config, self.seed = config, seed

    def __len__(self):
        return 6

    def __getitem__(self, index):
        numbers = self.seed + index + np.arange(self.config.length + 1, dtype=np.int32)
        weights = np.ones(self.config.length, np.float32)
        return {"tokens": numbers % self.config.top, "loss_weight": weights}


register_mixer("running_sum", RunningSumConfig())
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder of a package `sums_of_another`, importable here."""
    folder = tmp_path_factory.mktemp("another")
    (folder / "sums_of_another").mkdir()
    (folder / "sums_of_another" / "__init__.py").write_text("from .layer import *\n")
    (folder / "sums_of_another" / "layer.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def another(package):
    return importlib.import_module("sums_of_another.layer")


def own_experiment(another, *mixers, **changes):
    tiny = get_config()
    model = dataclasses.replace(tiny.model, mixers=mixers, memory_layers=())
    return dataclasses.replace(tiny, model=model, **changes)


def test_plugins_are_part_of_the_json_and_the_fingerprint():
    experiment = get_config()
    assert experiment.plugins == ()
    assert experiment.to_json()["plugins"] == []
    listed = dataclasses.replace(experiment, plugins=("json",))
    assert listed.to_json()["plugins"] == ["json"]
    assert listed.fingerprint != experiment.fingerprint


def test_modules_of_names_and_classes_are_added_unless_listed(another):
    named = own_experiment(another, "running_sum", "swa")
    assert named.plugins == ("sums_of_another.layer",)
    config = another.RunningSumConfig(scale=2.0)
    assert own_experiment(another, config, "swa").plugins == ("sums_of_another.layer",)
    data = another.CountingData(top=20)
    assert dataclasses.replace(get_config(), data=data).plugins == ("sums_of_another.layer",)
    listed = own_experiment(another, "running_sum", "swa", plugins=("sums_of_another",))
    assert listed.plugins == ("sums_of_another",)
    for experiment in (named, listed, own_experiment(another, config, "swa", data=data)):
        assert from_json(json.loads(json.dumps(experiment.to_json()))) == experiment


@pytest.mark.thorough
def test_a_run_is_read_in_a_process_that_knows_nothing_of_the_plugin(another, package, tmp_path):
    data = another.CountingData(top=20)
    mixers = (another.RunningSumConfig(scale=2.0), "running_sum")
    experiment = own_experiment(another, *mixers, data=data, run_dir=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(experiment.to_json()))
    program = (
        "import sys\n"
        f"sys.path += [{str(package)!r}, {str(ROOT)!r}]\n"
        "from fwpkm_jax.config import read_experiment\n"
        "import sums_of_another.layer\n"
        f"print(read_experiment({str(tmp_path)!r}).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == experiment.fingerprint, done.stderr[-2000:]


def test_a_plugin_that_is_not_installed_is_refused():
    said = "plugins names the module never_installed.mixers, which is not installed; .*PYTHONPATH"
    with pytest.raises(ValueError, match=said):
        parse_command_line(["recall", "--plugins", "never_installed.mixers"], default="")
    with pytest.raises(ValueError, match=r"plugins='\.\./evil' is not the name of a module"):
        import_plugins(["../evil"])


def test_a_plugin_that_lacks_a_module_says_which(package):
    (package / "lacking.py").write_text("import something_else_entirely\n")
    with pytest.raises(ModuleNotFoundError, match="something_else_entirely"):
        import_plugins(["lacking"])


def test_the_current_folder_is_not_where_plugins_are_found(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(ValueError, match="only_here, which is not installed"):
        import_plugins(["only_here"])
    assert sys.path[0] == ""


EVIL = "from pathlib import Path\nPath(r'{mark}').write_text('it ran')\n"


@pytest.fixture
def received(tmp_path):
    """A run of another's whose configuration names a module that lies in its own folder, beside
    files that are called like modules of the system."""
    run = tmp_path / "run"
    run.mkdir()
    values = {**get_config().to_json(), "plugins": ["evil_plugin", "antigravity"]}
    (run / "config.json").write_text(json.dumps(values))
    (run / "weights.safetensors").touch()
    code = EVIL.format(mark=tmp_path / "mark")
    for name in ("evil_plugin", "tyro", "json", "jax", "jinja2", "tokenizers", "numpy"):
        (run / f"{name}.py").write_text(code)
    yield run
    assert not (tmp_path / "mark").exists()


def fwpkm(*arguments, cwd, **environment):
    """`python -m fwpkm_jax` in a folder, from an installed package: not from this checkout."""
    return subprocess.run(
        [sys.executable, "-m", "fwpkm_jax", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.thorough
def test_a_run_folder_runs_no_code(received):
    """One that opens the run names the plugins and the way to go on; two do without them."""
    listed = fwpkm("memories", ".", cwd=received)
    assert (listed.returncode, listed.stderr) == (0, "")
    refused = fwpkm("generate", ".", cwd=received)
    assert refused.returncode == 2
    assert refused.stderr == (
        "fwpkm generate: ./config.json names plugins, which are code: evil_plugin, antigravity; if "
        "you trust it, add `--plugins evil_plugin antigravity` to the command (in Python: import "
        "it first).\n"
    )
    named = fwpkm("generate", ".", "--plugins", "evil_plugin", cwd=received)
    assert named.returncode == 2
    assert "evil_plugin, which is not installed" in named.stderr


@pytest.mark.thorough("report .")
@pytest.mark.slow_cases("eval --help", "export hf . out", "train --base . --run_dir new")
@pytest.mark.parametrize(
    "arguments",
    ["report .", "eval --help", "eval .", "export . out", "export hf . out", "train --resume .",
     "train --base . --run_dir new", "chat . --memory a", "import weights . new"],
)  # fmt: skip
def test_no_command_runs_code_of_a_run_folder(received, arguments):
    done = fwpkm(*arguments.split(), cwd=received)
    ends_well = arguments in ("report .", "eval --help")
    assert done.returncode == (0 if ends_well else 2)
    assert "Traceback" not in done.stderr
    if not ends_well:
        assert "names plugins, which are code: evil_plugin, antigravity" in done.stderr


def test_a_run_of_plugins_that_the_program_imported_is_read(another, tmp_path):
    experiment = own_experiment(another, "running_sum", "swa", run_dir=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(experiment.to_json()))
    assert read_experiment(tmp_path) == experiment
    again = parse_command_line(
        ["--resume", str(tmp_path), "--plugins", "sums_of_another"], default=""
    )
    assert again == experiment


def test_the_command_line_imports_plugins_before_it_reads_names(another):
    arguments = ["recall", "--model.memory_layers", "--model.mixers", "running_sum", "swa"]
    experiment = parse_command_line([*arguments, "--plugins", "sums_of_another"], default="")
    assert experiment.model.mixers == ("running_sum", "swa")
    assert experiment.plugins == ("sums_of_another",)
    own = '{"class": "RunningSumConfig", "scale": 3.0}'
    arguments[-2] = own
    experiment = parse_command_line([*arguments, "--plugins", "sums_of_another"], default="")
    assert experiment.model.mixers == (another.RunningSumConfig(scale=3.0), "swa")


def test_what_a_program_defines_is_refused(another, monkeypatch):
    monkeypatch.setattr(another.RunningSumConfig, "__module__", "__main__")
    with pytest.raises(ValueError, match=r"RunningSumConfig is defined in a program .*of its own"):
        own_experiment(another, another.RunningSumConfig())


def test_a_name_belongs_to_one_module():
    with pytest.raises(ValueError, match=r"'gdn' is registered by fwpkm_jax.*gated_delta_net"):
        register_mixer("gdn", AttentionConfig())
    with pytest.raises(ValueError, match=r"'gla' is registered by fwpkm_jax.*gla"):
        register_mixer("gla", AttentionConfig())
    with pytest.raises(ValueError, match="name=''"):
        register_mixer("", AttentionConfig())
    with pytest.raises(TypeError):
        register_mixer("new", 3)  # pyright: ignore[reportArgumentType]


@pytest.mark.thorough
def test_a_mixer_of_another_package_reads_streams_and_starts_again(another):
    config = ModelConfig(
        vocab_size=20, model_dim=8, mlp_dim=8, mixers=("running_sum",), init_std=0.3,
        activation_dtype="float32",
    )  # fmt: skip
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(20, size=(2, 9)))
    whole = model(tokens, {}).logits
    start = model.init_stream({}, batch=2, max_length=9)
    first = model.stream(tokens[:, :4], start)
    second = model.stream(tokens[:, 4:], first.stream)
    logits = jnp.concatenate([first.logits, second.logits], axis=1)
    np.testing.assert_allclose(logits, whole, rtol=1e-5, atol=1e-5)
    again = model.reset_caches(second.stream, pending=False)
    jax.tree.map(np.testing.assert_array_equal, again, start)


@pytest.mark.parametrize(
    ("x", "mask", "said"),
    [
        (jnp.ones((2, 8)), None, r"x is float32\[2, 8\]; expected \[batch, length, model\]"),
        (jnp.ones((2, 0, 8)), None, "length is 0; give at least one"),
        (jnp.ones((2, 3, 8), jnp.int32), None, r"x is int32\[2, 3, 8\].* of floats"),
        (
            jnp.ones((2, 3, 8)),
            jnp.ones((2, 4)),
            r"mask is float32\[2, 4\]; expected .*length=3",
        ),
    ],
)
def test_input_of_another_shape_or_dtype_is_refused(another, x, mask, said):
    mixer = another.RunningSumConfig().build(
        8, norm_eps=1e-5, init_std=0.02, dtype=None, rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match=said):
        mixer(x, mask=mask)


def test_a_parameter_that_does_not_say_what_it_is_is_refused_before_a_run_begins(
    another, monkeypatch, tmp_path
):
    monkeypatch.setattr(another, "parameter", lambda value, role: nnx.Param(value))
    run = tmp_path / "run"
    experiment = own_experiment(another, "swa", "running_sum", run_dir=str(run))
    with pytest.raises(ValueError, match=r"parameter blocks/1/mixer/gain does not say what it is"):
        train(experiment)
    assert not run.exists()


def test_a_cache_that_grows_needs_its_capacity(another, monkeypatch):
    mixer = another.RunningSumConfig().build(
        8, norm_eps=1e-5, init_std=0.02, dtype=None, rngs=nnx.Rngs(0)
    )
    monkeypatch.setattr(
        another.RunningSum,
        "init_cache",
        lambda self, batch, *, max_length, dtype: jnp.zeros((batch, max_length)),
    )
    cache = mixer.init_cache(2, max_length=5, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"RunningSum .*\(2, 1\).*\(2, 5\).*RunningSum\.capacity"):
        mixer.reset_cache(cache)


def test_data_of_another_package_make_batches_that_continue_anywhere(another):
    config = another.CountingData(length=4, top=20)
    train = iter(make_dataset(config, split="train", batch_size=2, seed=3))
    first, second = next(train), next(train)
    np.testing.assert_array_equal(first["tokens"], [[3, 4, 5, 6, 7], [4, 5, 6, 7, 8]])
    again = iter(make_dataset(config, split="train", batch_size=2, seed=3, rows=[1]))
    again.set_state({"next_index": 1})
    np.testing.assert_array_equal(next(again)["tokens"], second["tokens"][1:])
    valid = list(make_dataset(config, split="valid", batch_size=4, seed=0))
    assert [float(batch["loss_weight"].sum()) for batch in valid] == [16.0, 8.0]
    assert config.text is None
    assert config.num_answers is None


def test_a_report_names_mixers_and_data_of_another_package(another):
    data = another.CountingData(top=20)
    config = own_experiment(another, "running_sum", another.RunningSumConfig(), data=data)
    model = words.describe_model(config.to_json(), None)
    assert "with RunningSum in 2 of them" in model
    assert "CountingData, rows of 16 tokens" in words.describe_task(config.to_json())
