"""The watermark valve: cases by hand, then against a slow model that states the rules once more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import InternalError
from headgate.operators.elements import WATERMARK_MAX, WATERMARK_MIN
from headgate.runtime.task.valve import ValveOutput, WatermarkValve

NOTHING = ValveOutput()
WENT_IDLE, WOKE = ValveOutput(idle=True), ValveOutput(idle=False)


def test_the_minimum_of_all_channels_moves_time() -> None:
    valve = WatermarkValve(2)
    assert valve.on_watermark(0, 10) == NOTHING
    assert valve.on_watermark(1, 7) == ValveOutput(7)
    assert valve.on_watermark(1, 12) == ValveOutput(10)
    assert valve.on_watermark(1, 11) == NOTHING
    assert valve.watermark == 10


def test_one_channel_passes_everything_that_rises() -> None:
    valve = WatermarkValve(1)
    assert [valve.on_watermark(0, ts).watermark for ts in (5, 5, 4, 6)] == [5, None, None, 6]


def test_an_idle_channel_is_not_waited_for() -> None:
    valve = WatermarkValve(2)
    valve.on_watermark(0, 10)
    assert valve.on_status(1, True) == ValveOutput(10)
    assert valve.on_watermark(0, 20) == ValveOutput(20)
    assert valve.on_watermark(1, 99) == NOTHING  # idle channels have no say
    assert valve.on_status(1, True) == NOTHING


def test_a_channel_that_woke_behind_takes_part_once_it_caught_up() -> None:
    valve = WatermarkValve(2)
    valve.on_status(1, True)
    valve.on_watermark(0, 20)
    assert valve.on_status(1, False) == NOTHING
    assert valve.on_watermark(0, 30) == ValveOutput(30)
    assert valve.on_watermark(1, 29) == NOTHING
    assert valve.on_watermark(0, 31) == ValveOutput(31)
    assert valve.on_watermark(1, 35) == NOTHING
    assert valve.on_watermark(0, 40) == ValveOutput(35)


def test_when_the_holder_of_the_minimum_goes_idle_last_the_maximum_is_flushed() -> None:
    valve = WatermarkValve(2)
    valve.on_watermark(0, 10)
    valve.on_watermark(1, 50)
    assert valve.on_status(1, True) == NOTHING
    assert valve.on_status(0, True) == ValveOutput(50, idle=True)
    assert valve.idle
    assert valve.on_status(0, False) == WOKE
    assert valve.on_watermark(0, 60) == ValveOutput(60)


def test_without_the_minimum_nothing_is_flushed() -> None:
    valve = WatermarkValve(2)
    valve.on_watermark(0, 10)
    valve.on_watermark(1, 50)
    assert valve.on_status(0, True) == ValveOutput(50)
    valve.on_status(0, False)
    assert valve.on_status(1, True) == NOTHING  # only channel 0 is left, and it is behind
    assert valve.on_status(0, True) == WENT_IDLE


def test_a_channel_that_is_behind_leaves_without_moving_time() -> None:
    """As in Flink: only the departure of the channel that holds the minimum re-evaluates it."""
    valve = WatermarkValve(3)
    valve.on_watermark(2, 5)
    valve.on_status(2, True)
    valve.on_watermark(0, 20)
    assert valve.on_watermark(1, 10) == ValveOutput(10)
    valve.on_status(2, False)
    assert [valve.on_status(position, True) for position in (0, 1, 2)] == [
        NOTHING,
        NOTHING,
        WENT_IDLE,
    ]
    assert [valve.on_status(position, False) for position in (0, 2)] == [WOKE, NOTHING]
    assert valve.on_status(2, True) == NOTHING
    assert valve.on_watermark(0, 21) == ValveOutput(21)


def test_an_ended_channel_is_not_waited_for() -> None:
    valve = WatermarkValve(2)
    valve.on_watermark(0, 10)
    assert valve.on_end(1) == ValveOutput(10)
    assert valve.on_end(1) == NOTHING
    assert valve.on_watermark(1, 99) == NOTHING
    assert valve.on_status(1, True) == NOTHING
    assert valve.on_end(0) == ValveOutput(WATERMARK_MAX)


def test_time_does_not_end_while_a_channel_is_merely_idle() -> None:
    """Or all that the idle channel sends later would be late, and dropped."""
    valve = WatermarkValve(2)
    valve.on_watermark(0, 10)
    valve.on_watermark(1, 20)
    valve.on_status(0, True)
    assert valve.on_end(1) == WENT_IDLE
    assert valve.watermark == 20
    assert valve.on_status(0, False) == WOKE
    assert valve.on_watermark(0, 30) == ValveOutput(30)
    assert valve.on_end(0) == ValveOutput(WATERMARK_MAX)


def test_the_end_of_the_last_idle_channel_wakes_the_stream_and_ends_time() -> None:
    valve = WatermarkValve(1)
    valve.on_status(0, True)
    assert valve.on_end(0) == ValveOutput(WATERMARK_MAX, idle=False)
    assert not valve.idle


def test_the_maximal_watermark_is_an_end() -> None:
    valve = WatermarkValve(2)
    valve.on_status(0, True)
    assert valve.on_watermark(1, WATERMARK_MAX) == WENT_IDLE
    assert valve.on_watermark(0, WATERMARK_MAX) == ValveOutput(WATERMARK_MAX, idle=False)


def test_a_valve_needs_channels() -> None:
    with pytest.raises(InternalError):
        WatermarkValve(0)


class Model:
    """The rules of the watermark valve over whole histories: it keeps only what each channel has sent."""

    def __init__(self, channels: int) -> None:
        self.watermarks = [WATERMARK_MIN] * channels
        self.state = ["active"] * channels
        self.behind = [False] * channels
        self.sent = WATERMARK_MIN
        self.sent_idle = False

    def live(self) -> list[int]:
        return [i for i, state in enumerate(self.state) if state == "active"]

    def step(self, position: int, event: int | str) -> ValveOutput:
        if self.state[position] == "ended":
            return NOTHING
        before, was_idle = self.sent, self.sent_idle
        if isinstance(event, int):
            self.on_watermark(position, event)
        elif event == "active":
            if self.state[position] == "idle":
                self.state[position] = "active"
                self.behind[position] = self.watermarks[position] < self.sent
                self.sent_idle = False
        elif event != self.state[position]:
            self.on_leave(position, event)
        return ValveOutput(
            self.sent if self.sent != before else None,
            self.sent_idle if self.sent_idle != was_idle else None,
        )

    def on_watermark(self, position: int, timestamp: int) -> None:
        if self.state[position] == "active" and timestamp > self.watermarks[position]:
            self.watermarks[position] = timestamp
            self.behind[position] = self.behind[position] and timestamp < self.sent
            self.raise_to_minimum()

    def on_leave(self, position: int, state: str) -> None:
        left_idle = self.state[position] == "idle"
        held = self.watermarks[position] == self.sent
        self.state[position] = state
        if set(self.state) == {"ended"}:
            self.sent, self.sent_idle = WATERMARK_MAX, False
        elif not self.live():
            self.sent_idle = True
            if held and not left_idle:
                self.sent = max(self.sent, *self.watermarks)
        elif held and not left_idle:
            self.raise_to_minimum()

    def raise_to_minimum(self) -> None:
        counted = [self.watermarks[i] for i in self.live() if not self.behind[i]]
        if counted:
            self.sent = max(self.sent, min(counted))


EVENTS = st.one_of(st.integers(0, 12), st.sampled_from(["idle", "active", "ended"]))


def send(valve: WatermarkValve, position: int, event: int | str) -> ValveOutput:
    if event == "ended":
        return valve.on_end(position)
    if isinstance(event, str):
        return valve.on_status(position, event == "idle")
    return valve.on_watermark(position, event)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), EVENTS), max_size=30))
def test_equals_the_model(channels: int, events: list[tuple[int, int | str]]) -> None:
    valve, model = WatermarkValve(channels), Model(channels)
    for position, event in events:
        output = send(valve, position % channels, event)
        assert output == model.step(position % channels, event)
        assert (valve.watermark, valve.idle) == (model.sent, model.sent_idle)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), EVENTS), max_size=30))
def test_output_rises_statuses_alternate_and_the_end_comes(
    channels: int, events: list[tuple[int, int | str]]
) -> None:
    valve = WatermarkValve(channels)
    everything = [(position % channels, event) for position, event in events]
    everything += [(position, "ended") for position in range(channels)]
    outputs = [send(valve, position, event) for position, event in everything]
    watermarks = [output.watermark for output in outputs if output.watermark is not None]
    assert watermarks == sorted(set(watermarks))
    assert watermarks[-1] == WATERMARK_MAX
    statuses = [output.idle for output in outputs if output.idle is not None]
    assert statuses == [index % 2 == 0 for index in range(len(statuses))]
    assert not valve.idle
