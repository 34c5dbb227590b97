"""A signal while a run compiles is answered at once; there is nothing to save."""

import dataclasses
import io
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest

from fwpkm_jax.run import setup as parts
from fwpkm_jax.run.train import train
from fwpkm_jax.training import compiling
from fwpkm_jax.training.checkpoints.restore import checkpoint_steps
from fwpkm_jax.training.compiling import abandoned_compilation, compile_answering
from fwpkm_jax.training.runs.signals import Stopped, StopSignals
from tests.training.processes import CONFIG, ROOT

# A program whose compiler takes minutes.
PROGRAM = """
import sys, time
import jax
jax.stages.Lowered.compile = lambda lowered: print("compiling", flush=True) or time.sleep(300)
from fwpkm_jax.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow_cases("15")
@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_ends_at_once_and_leaves_no_lock(tmp_path, number):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "train", str(CONFIG), "--run_dir", str(run)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        while "compiling" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)  # The compiler's 300 seconds are not over.
    finally:
        process.kill()
    assert process.returncode == 128 + number, errors
    assert f"{number.name}: stopped {run} before the first step of this session; 0 steps" in output
    assert "The same command continues it." in output
    assert "Traceback" not in errors
    assert (run / "config.json").exists()
    assert not (run / "lock").exists()


def interrupt_soon():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.fixture
def long_compilation(monkeypatch):
    """A compilation that lasts until the test ends, so that a signal arrives during it."""
    end = threading.Event()

    def compile_for_ever(lowered):
        interrupt_soon()
        end.wait(60)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_for_ever)
    yield
    end.set()


@pytest.mark.slow
def test_a_resumed_run_keeps_its_steps(unbroken, tmp_path, monkeypatch):
    training = dataclasses.replace(unbroken.experiment.training, steps=5)
    experiment = dataclasses.replace(
        unbroken.experiment, training=training, run_dir=str(tmp_path / "run")
    )
    train(experiment, stream=io.StringIO())

    def compile_step(setup, state, batch):
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("not reached")

    monkeypatch.setattr(parts, "compile_step", compile_step)
    training = dataclasses.replace(training, steps=6)
    stream = io.StringIO()
    result = train(dataclasses.replace(experiment, training=training), stream=stream)
    assert (result.status, result.step, result.signal) == ("interrupted", 5, signal.SIGTERM)
    assert result.state is not None
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [5]
    assert "5 steps are done" in stream.getvalue()


def test_an_abandoned_compilation_is_known_until_it_ends(long_compilation):
    handler = signal.getsignal(signal.SIGINT)
    began = time.monotonic()
    with StopSignals() as signals, pytest.raises(Stopped), signals.nothing_to_save():
        compile_answering(jax.jit(lambda x: x + 1), 1.0)
    assert time.monotonic() - began < 20
    assert abandoned_compilation()
    assert signal.getsignal(signal.SIGINT) == handler


def test_nothing_is_abandoned_afterwards():
    deadline = time.monotonic() + 30
    while compiling.abandoned_compilation() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not compiling.abandoned_compilation()
    assert compile_answering(jax.jit(lambda x: x + 1), 1.0)(1.0) == 2.0


def test_an_error_of_the_compiler_is_raised(monkeypatch):
    def fail(lowered):
        raise ValueError("no such instruction")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(ValueError, match="no such instruction"):
        compile_answering(jax.jit(lambda x: x + 1), 1.0)
    assert not abandoned_compilation()


@pytest.fixture
def interruptible():
    """SIGINT as a program in the foreground gets it; one in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_with_something_to_save_is_answered_with_a_line_and_a_second_one_acts():
    lines = []
    with StopSignals(say=lines.append) as signals:
        signal.raise_signal(signal.SIGINT)
        assert lines == [
            "SIGINT: stops as soon as every step done is saved; a second signal stops at once, "
            "without saving."
        ]
        assert signals.poll() == signals.wait() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped), signals.nothing_to_save():
            raise AssertionError("not reached")
