"""The generic loop: order of its hooks, the step that runs ahead, pauses, ends."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from fwpkm_jax.training import fit as fit_module
from fwpkm_jax.training.fit import Hooks, Report, fit


def count(log):
    """A step on plain numbers that notes when it starts."""

    def step(state, batch):
        log.append(f"start {batch}")
        return state + batch, {"loss": jnp.float32(batch), "state": jnp.float32(state)}

    return step


def noting(log, *, pauses=(), stops=None):
    """Hooks that note each call with the step and the state that they see."""

    def note(name):
        return lambda report, state: log.append(f"{name} {report.step} state {state}")

    def measure(report, state):
        note("measure")(report, state)
        return {"valid": float(state)}

    def on_pause(report, state):
        note("pause")(report, state)
        return report.step == stops

    return Hooks(
        check=note("check"),
        on_metrics=note("metrics"),
        pause_after=lambda step: step in pauses,
        measure=measure,
        on_pause=on_pause,
    )


def test_metrics_are_read_once_the_next_step_has_started():
    log = []
    result = fit(count(log), 0, [1, 2, 3], noting(log))
    assert result == (6, 3, False)
    assert log == [
        *("start 1", "start 2", "check 1 state 3", "metrics 1 state 3"),
        *("start 3", "check 2 state 6", "metrics 2 state 6"),
        *("check 3 state 6", "metrics 3 state 6"),
    ]


def test_a_pause_waits_for_its_step_and_measures_before_the_metrics_are_given():
    log = []
    fit(count(log), 0, [1, 2, 3], noting(log, pauses={2}))
    at = log.index("start 2")
    assert log[at : at + 8] == [
        *("start 2", "check 1 state 3", "metrics 1 state 3"),
        *("check 2 state 3", "measure 2 state 3", "metrics 2 state 3", "pause 2 state 3"),
        "start 3",
    ]


def test_reports_hold_step_batch_metrics_and_what_was_measured():
    reports: list[Report] = []
    hooks = dataclasses.replace(
        noting([], pauses={8}), on_metrics=lambda report, _: reports.append(report)
    )
    fit(count([]), 10, [5, 7], hooks, start=6)
    assert [report[:3] for report in reports] == [
        (7, 5, {"loss": 5.0, "state": 10.0}),
        (8, 7, {"loss": 7.0, "state": 15.0, "valid": 22.0}),
    ]


def test_a_pause_can_end_the_loop_and_no_batch_is_taken_beyond():
    batches = iter([1, 2, 3, 4])
    assert fit(count([]), 0, batches, noting([], pauses={1, 2}, stops=2)) == (3, 2, True)
    assert list(batches) == [3, 4]


def test_steps_count_from_the_start_and_end_the_loop():
    batches = iter([1, 2, 3, 4])
    assert fit(count([]), 0, batches, start=3, steps=5) == (3, 5, False)
    assert list(batches) == [3, 4]
    assert fit(count([]), 7, iter([]), start=5, steps=5) == (7, 5, False)


def test_too_few_batches_are_refused():
    with pytest.raises(ValueError, match=r"ended after step 5 of steps=9; .* steps=None"):
        fit(count([]), 0, [1, 2], start=3, steps=9)


def test_a_check_that_raises_ends_the_loop_before_the_metrics_are_given():
    log = []

    def check(report, state):
        if report.step == 2:
            raise FloatingPointError("loss")

    hooks = dataclasses.replace(noting(log), check=check)
    with pytest.raises(FloatingPointError):
        fit(count(log), 0, [1, 2, 3, 4], hooks)
    assert log[-2:] == ["metrics 1 state 3", "start 3"]


def test_seconds_leave_pauses_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(fit_module.time, "perf_counter", lambda: now[0])
    seconds = []

    def step(state, batch):
        now[0] += batch
        return state, {}

    def on_pause(report, state):
        now[0] += 100.0
        return False

    hooks = Hooks(
        on_metrics=lambda report, _: seconds.append(report.seconds),
        pause_after=lambda step: step == 2,
        on_pause=on_pause,
    )
    fit(step, None, [1.0, 2.0, 4.0, 8.0], hooks)
    # Step 1 is read when step 2 has run here, where steps end at once.
    assert seconds == [3.0, 0.0, 12.0, 0.0]


def test_a_jitted_step_may_donate_its_state():
    @jax.jit
    def plain(state, batch):
        return jax.tree.map(lambda x: x + batch, state), {"mean": jnp.mean(state["w"])}

    donating = jax.jit(plain, donate_argnums=0)
    means = []
    hooks = Hooks(on_metrics=lambda report, _: means.append(report.metrics["mean"]))
    result = fit(donating, {"w": jnp.zeros(4)}, (jnp.float32(x) for x in (1, 2, 3)), hooks)
    assert means == [0.0, 1.0, 3.0]
    assert float(result.state["w"][0]) == 6.0
