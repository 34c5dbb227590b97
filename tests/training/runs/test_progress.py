"""The progress line on a terminal and elsewhere, and the speed it shows."""

import io

from fwpkm_jax.io.status_line import format_duration
from fwpkm_jax.training.runs.progress import Progress, Speedometer


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


VALUES = {"loss": 1.5, "grad_norm": 0.25, "lr": 1e-3, "tokens_per_second": 1234.5}


def test_a_terminals_line_is_rewritten_at_every_step_and_messages_stand_alone():
    stream = Terminal()
    progress = Progress(steps=100, every=10, stream=stream)
    progress.show(1, VALUES, seconds_per_step=2.0)
    progress.show(2, VALUES, seconds_per_step=2.0)
    progress.say("Saved.")
    first, second, rest = stream.getvalue().split("\r")[1:] + [""] * 1
    assert first.startswith(
        "step 1/100  loss 1.5000  grad 0.25  lr 1.00e-03  1,234 tok/s  ETA 3:18"
    )
    assert second.startswith("step 2/100")
    assert second.endswith("\x1b[K\nSaved.\n")
    assert not rest


def test_durations_read_as_on_a_clock():
    assert [format_duration(s) for s in (3.2, 59.6, 3661)] == ["0:03", "1:00", "1:01:01"]


def test_speed_is_of_the_last_steps():
    speed = Speedometer(window=2)
    for seconds in (5.0, 1.0, 3.0, 1.0):
        speed.step_done(seconds)
    assert speed.seconds_per_step == 2.0  # The last two steps.
    assert (speed.total_seconds, speed.total_steps) == (10.0, 4)
