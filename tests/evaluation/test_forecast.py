"""What an evaluation says of the time it takes."""

import logging

from fwpkm_jax.evaluation.forecast import Forecast


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_the_time_left_is_told_from_the_second_piece_on_and_every_ten_seconds(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    forecast = Forecast("ppl", total=1000, unit="tokens", clock=clock)
    clock.now += 60  # Compiling is no measure of the work.
    forecast.add(10)
    assert lines(caplog) == []
    clock.now += 1
    forecast.add(10)
    assert lines(caplog) == ["ppl: 20 of 1,000 tokens, about 1:38 left"]
    for _ in range(8):
        clock.now += 1
        forecast.add(10)
    assert len(lines(caplog)) == 1
    clock.now += 2
    forecast.add(20)
    assert lines(caplog)[1:] == ["ppl: 120 of 1,000 tokens, about 1:28 left"]
    clock.now += 88
    forecast.add(880)
    assert len(lines(caplog)) == 2


def test_a_short_evaluation_says_nothing(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    forecast = Forecast("recall", total=20, unit="batches", clock=clock)
    for _ in range(20):
        clock.now += 0.4
        forecast.add(1)
    assert lines(caplog) == []


def test_a_total_that_turns_out_smaller_shortens_the_forecast(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    forecast = Forecast("needle", total=1000, unit="words", clock=clock)
    forecast.add(1)
    forecast.total -= 900
    clock.now += 1
    forecast.add(1)
    assert lines(caplog) == ["needle: 2 of 100 words, about 1:38 left"]
