"""Rules for watermarks: the two built in, and a user's own."""

from __future__ import annotations

import pickle

import cloudpickle
import numpy as np
import pytest

import headgate as hg
from headgate.errors import PlanError, UsageError, UserCodeError
from headgate.operators.elements import WATERMARK_MAX
from headgate.operators.splits import WHOLE

TICK_MS = 200


class Marks(hg.WatermarkGenerator):
    """Multiples of 1,000 are marks: all before them is there."""

    def on_batch(self, times):
        marks = times[times % 1_000 == 0]
        return marks.max() if len(marks) else None


class Counting(hg.WatermarkGenerator):
    """Its watermark is the latest time, plus the number of times it was asked."""

    def __init__(self):
        self.latest = None
        self.asked = 0

    def on_batch(self, times):
        assert times.dtype == np.int64
        self.latest = int(times.max())

    def on_interval(self):
        self.asked += 1
        return None if self.latest is None else self.latest + self.asked


def test_in_order(step):
    run = step(hg.WatermarkStrategy.monotonous())
    run.read(WHOLE, 10, 30, 20).wait(TICK_MS)
    assert run.watermarks == [29]


def test_bounded(step):
    run = step(hg.WatermarkStrategy.bounded("5ms"))
    run.read(WHOLE, 10, 30, 20).wait(TICK_MS)
    assert run.watermarks == [24]


def test_a_generator_may_answer_behind_each_batch(step):
    run = step(hg.WatermarkStrategy.custom(Marks))
    run.read(WHOLE, 999).read(WHOLE, 2_000, 1_000).read(WHOLE, 1_000).read(WHOLE, 3_000)
    assert run.events == [
        ("records", [999]),
        ("records", [2_000, 1_000]),
        ("watermark", 2_000),
        ("records", [1_000]),
        ("records", [3_000]),
        ("watermark", 3_000),
    ]
    run.wait(10 * TICK_MS)
    assert run.watermarks == [2_000, 3_000]


def test_a_generator_is_asked_at_every_interval_also_without_records(step):
    run = step(hg.WatermarkStrategy.custom(Counting))
    run.wait(3 * TICK_MS)
    assert run.watermarks == []
    run.read(WHOLE, 100).wait(2 * TICK_MS)
    assert run.watermarks == [104, 105]


def test_each_split_has_a_generator_of_its_own(step):
    run = step(hg.WatermarkStrategy.custom(Marks))
    run.splits.opened("a")
    run.splits.opened("b")
    run.read("a", 5_000).read("b", 2_000).read("b", 7_000)
    assert run.watermarks == [2_000, 5_000]


@pytest.mark.parametrize("answer", [1.5, "1", True, WATERMARK_MAX, -(2**63) - 1])
def test_other_answers_are_refused(step, answer):
    class Odd(hg.WatermarkGenerator):
        def on_interval(self):
            return answer

    run = step(hg.WatermarkStrategy.custom(Odd))
    with pytest.raises(
        UserCodeError, match="the watermark generator of `times` returned"
    ) as caught:
        run.wait(TICK_MS)
    assert caught.value.where == "job.py:5"


def test_an_error_of_a_generator_names_its_step_and_line(step):
    class Broken(hg.WatermarkGenerator):
        def on_batch(self, times):
            raise ValueError("no idea")

    run = step(hg.WatermarkStrategy.custom(Broken))
    with pytest.raises(UserCodeError) as caught:
        run.read(WHOLE, 1)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == (
        "the watermark generator of `times` raised ValueError: no idea\n  at job.py:5"
    )
    assert "on_batch" in error.detail


def test_what_makes_no_generator_is_refused(step):
    with pytest.raises(UserCodeError, match="the strategy of `times` made no generator"):
        step(hg.WatermarkStrategy.custom(dict))


def test_a_generator_instead_of_what_makes_one_is_refused():
    with pytest.raises(PlanError) as caught:
        hg.WatermarkStrategy.custom(Counting())
    assert "each split needs its own: custom(Counting)" in str(caught.value)
    assert "test_strategies.py" in caught.value.where


def test_a_bound_is_a_duration():
    with pytest.raises(UsageError, match="max_out_of_order needs a unit"):
        hg.WatermarkStrategy.bounded(5)


def test_strategies_travel():
    for strategy in (
        hg.WatermarkStrategy.monotonous(),
        hg.WatermarkStrategy.bounded("1s"),
        hg.WatermarkStrategy.custom(Marks),
    ):
        assert cloudpickle.loads(cloudpickle.dumps(strategy)).text == strategy.text
