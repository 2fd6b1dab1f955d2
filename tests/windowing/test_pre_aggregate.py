"""Aggregation in front of an exchange: the same results as without it, and when records go on."""

from __future__ import annotations

import datetime
import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.api.job_definition import definition_of
from headgate.connectors import collect, from_list
from headgate.errors import StateError
from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.base import Operator
from headgate.operators.drops import Drops
from headgate.operators.elements import WATERMARK_MAX, ColumnBatch
from headgate.operators.graph import PRE_AGGREGATION_OPTION
from headgate.operators.windows import pre_aggregate
from headgate.operators.windows.dense_partials import DensePartials
from headgate.operators.windows.factory import WindowFactory
from headgate.operators.windows.kinds import WINDOW_FIELDS, cumulative, sliding, tumbling
from headgate.operators.windows.late import LATE_COUNTER
from headgate.operators.windows.pre_aggregate import (
    GROUPS_OPTION,
    PAUSE_ROWS,
    SAMPLE_ROWS,
    Gain,
)
from headgate.runtime.options.execution import PRE_AGGREGATION, PRE_AGGREGATION_GROUPS
from headgate.runtime.plan import make_plan
from headgate.state.values import PARTIAL_ROWS
from headgate.tests.support.operators import MillisecondsRecorder, Recorder, operator_context

SCHEMA = pa.schema([("user", pa.string()), ("x", pa.int32()), ("y", pa.float64())])
AGGREGATES = {
    "n": hg.count(),
    "known": hg.count("x"),
    "total": hg.sum("x"),
    "twice": hg.sum("x * 2"),
    "least": hg.min("y"),
    "most": hg.max("x"),
    "mean": hg.avg("x"),
}
WINDOWS = {
    "tumbling": tumbling("1s"),
    "tumbling with lateness": tumbling("1s", offset="300ms", allowed_lateness="2s"),
    "days of a zone": tumbling("1d", zone="Europe/Berlin"),
    "sliding": sliding("2500ms", "1s"),
    "sliding with lateness": sliding("2s", "1s", allowed_lateness="200ms"),
    "cumulative": cumulative("3s", "1s"),
}
DAY = 86_400_000


def factory(window: Any, keys: tuple[str, ...] = ("user",), **aggregates: Any) -> WindowFactory:
    plan = AggregatePlan(keys, aggregates or AGGREGATES, SCHEMA, WINDOW_FIELDS)
    return WindowFactory(window, plan, "step")


def batch(rows: list[tuple[str, int | None, float | None, int]]) -> ColumnBatch:
    columns = [pa.array([r[at] for r in rows], type_) for at, type_ in enumerate(SCHEMA.types)]
    data = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    return ColumnBatch(data, np.array([row[-1] for row in rows], np.int64))


def opened(operator: Operator, output: Any, parallelism: int = 2, **options: str) -> Any:
    metrics = output if isinstance(output, Recorder) else Recorder()
    operator.output = output
    operator.open(
        operator_context(parallelism=parallelism, metrics=metrics, options=options, drops=Drops())
    )
    return operator


def sender(window: Any = None, parallelism: int = 2, **options: str) -> tuple[Any, Recorder]:
    output = Recorder()
    made = factory(window or tumbling("1s"), n=hg.count(), s=hg.sum("x")).pre_aggregate()
    return opened(made, output, parallelism, **options), output


class Receiver:
    """The step behind the exchange, with a valve for the event time of its senders."""

    def __init__(self, made: WindowFactory, senders: int) -> None:
        self.output = MillisecondsRecorder()
        self.step = opened(made(), self.output, 1)
        self.watermarks = [-(2**63)] * senders
        self.batches = self.rows = 0

    def at(self, sender: int) -> Any:
        receiver = self

        class Channel:
            def emit(self, batch: ColumnBatch) -> None:
                receiver.batches += 1
                receiver.rows += len(batch)
                receiver.step.process(batch, 0)

            def emit_watermark(self, timestamp: int) -> None:
                before = min(receiver.watermarks)
                receiver.watermarks[sender] = timestamp
                if (now := min(receiver.watermarks)) > before:
                    receiver.step.on_watermark(now)

            def emit_idle(self, idle: bool) -> None: ...

        return Channel()

    def found(self) -> tuple[list[Any], int, int]:
        rows = sorted(self.output.rows(), key=repr)
        late = self.output.counts.get(LATE_COUNTER, 0)
        sent = len(self.output.rows("late"))
        return rows, late, sent + sum(self.step.context.drops.counts.values())


def play(seed: int, made: WindowFactory, scale: int, aggregated: bool) -> Receiver:
    """Two senders with records in and out of order, watermarks and barriers, in an order of the seed."""
    rng = random.Random(seed)
    receiver = Receiver(made, 2)
    senders: list[Any] = []
    for number in range(2):
        channel = receiver.at(number)
        senders.append(
            opened(
                made.pre_aggregate(), channel, **{GROUPS_OPTION: "3" if seed % 3 == 0 else "1000"}
            )
            if aggregated
            else opened(Operator(), channel)
        )
    times, watermarks = [0, 0], [-(2**63)] * 2
    for _ in range(50):
        number, what = rng.randrange(2), rng.random()
        if what < 0.6:
            times[number] += rng.randrange(500)
            rows = [
                (
                    rng.choice("abcd"),
                    rng.choice([None, rng.randrange(-50, 50)]),
                    rng.choice([None, float("nan"), rng.random()]),
                    max(0, times[number] - int(rng.expovariate(1 / rng.choice([300, 3_000]))))
                    * scale,
                )
                for _ in range(rng.randrange(1, 30))
            ]
            if aggregated:
                senders[number].process(batch(rows), 0)
            else:
                receiver.at(number).emit(batch(rows))
        elif what < 0.85:
            watermarks[number] = max(watermarks[number], (times[number] - 600) * scale)
            senders[number].on_watermark(watermarks[number])
        else:
            senders[number].prepare_snapshot(1)
            assert senders[number].snapshot(1) is None
    for each in senders:
        each.on_watermark(WATERMARK_MAX)
        each.finish()
    return receiver


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("keys", [("user", "x"), ()], ids=["keys", "no key"])
def test_results_and_late_records_are_those_of_the_plain_path(
    name: str, keys: tuple[str, ...]
) -> None:
    scale = 40_000 if "zone" in name else 1
    fewer = late = 0
    for seed in range(3):
        made = factory(WINDOWS[name], keys)
        plain, aggregated = (play(seed, made, scale, each) for each in (False, True))
        assert repr(aggregated.found()) == repr(plain.found())
        late += plain.found()[1]
        fewer += plain.rows - aggregated.rows
    assert fewer > 0
    assert late > 0


def test_records_go_on_before_a_barrier_and_at_the_end() -> None:
    for leave in (lambda step: step.prepare_snapshot(1), lambda step: step.finish()):
        step, output = sender()
        step.process(batch([("a", 1, 0.0, 10), ("a", 2, 0.0, 20), ("b", 3, 0.0, 10)]), 0)
        assert output.events == []
        leave(step)
        assert sorted(output.rows()) == [("a", 2, 3, 0), ("b", 1, 3, 0)]
        leave(step)
        assert len(output.events) == 1


def test_records_go_on_before_a_watermark_that_ends_their_pane() -> None:
    step, output = sender()
    step.process(batch([("a", 1, 0.0, 10), ("a", 2, 0.0, 1_500)]), 0)
    step.on_watermark(998)
    assert output.events == [("watermark", 998)]
    step.on_watermark(999)
    assert [event for event, _ in output.events] == ["watermark", "rows", "watermark"]
    assert output.rows() == [("a", 1, 1, 999)], "the time is ahead of the watermark before"
    step.on_watermark(WATERMARK_MAX)
    assert output.rows()[1:] == [("a", 1, 2, 1_000)]


def test_records_go_on_before_the_stream_is_idle() -> None:
    step, output = sender()
    output.emit_idle = lambda idle: output.events.append(("idle", idle))  # type: ignore[attr-defined]
    step.process(batch([("a", 1, 0.0, 10)]), 0)
    step.on_idle(True)
    assert [event for event, _ in output.events] == ["rows", "idle"]


def test_records_are_not_held_behind_an_idle_time() -> None:
    """The receiver goes on without a sender that was idle: what that held would become late."""
    receiver = Receiver(factory(tumbling("1s"), n=hg.count(), s=hg.sum("x")), 2)
    step, _ = sender()
    step.output = receiver.at(0)
    step.on_idle(True)
    step.on_idle(False)
    step.process(batch([("a", 1, None, 5_100)]), 0)
    # The valve leaves the first sender out, since it is behind what the other one has sent.
    receiver.step.on_watermark(6_000)
    _, late, _ = receiver.found()
    assert (late, [row[3] for row in receiver.output.rows()]) == (0, [1])


def test_records_behind_the_watermark_go_on_as_they_are() -> None:
    step, output = sender()
    step.on_watermark(400)
    step.process(batch([("a", 1, 0.5, 400), ("a", 2, 0.5, 401), ("b", 3, 0.5, 10)]), 0)
    assert output.rows() == [("a", 1, 0.5, 400), ("b", 3, 0.5, 10)]
    step.prepare_snapshot(1)
    assert output.rows()[2:] == [("a", 1, 2, 401)]


def test_the_number_of_partial_results_is_bounded() -> None:
    step, output = sender(**{GROUPS_OPTION: "3"})
    step.process(batch([("a", 1, 0.0, 10), ("b", 1, 0.0, 10)]), 0)
    assert output.events == []
    step.process(batch([("a", 1, 0.0, 1_010)]), 0)
    assert sorted(output.rows()) == [("a", 1, 1, 0), ("a", 1, 1, 1_000), ("b", 1, 1, 0)]


def test_records_in_many_panes_go_on_as_they_are() -> None:
    step, output = sender()
    rows = [("a", 1, 0.0, 1_000 * pane) for pane in range(pre_aggregate.PANES_MAX + 1)]
    step.process(batch(rows), 0)
    assert output.rows() == rows


def test_one_sender_sends_records() -> None:
    step, output = sender(parallelism=1)
    step.process(batch([("a", 1, 0.0, 10)]), 0)
    assert output.rows() == [("a", 1, 0.0, 10)]


def test_records_without_event_time_are_left_to_the_window() -> None:
    step, output = sender()
    step.process(ColumnBatch(batch([("a", 1, 0.0, 10)]).data), 0)
    assert output.rows() == [("a", 1, 0.0, None)]


def test_what_saves_little_is_given_up_and_tried_again() -> None:
    gain = Gain()
    assert not gain.passes(1)
    gain.note(SAMPLE_ROWS - 1, SAMPLE_ROWS)
    assert not gain.passes(1), "the sample is too small"
    gain.note(1, 1)
    assert gain.passes(PAUSE_ROWS - 1)
    assert gain.passes(1)
    assert not gain.passes(1)
    gain.note(SAMPLE_ROWS, int(SAMPLE_ROWS / 2.5))
    assert gain.passes(2 * PAUSE_ROWS), "more is needed to begin again than to go on"
    assert not gain.passes(1)
    gain.note(SAMPLE_ROWS, SAMPLE_ROWS // 3)
    assert not gain.passes(1)
    gain.note(SAMPLE_ROWS, int(SAMPLE_ROWS / 2.5))
    assert not gain.passes(1)


@pytest.mark.parametrize("type_", [pa.int8(), pa.int32(), pa.uint32(), pa.int64()], ids=str)
def test_integer_keys_are_counted(type_: pa.DataType) -> None:
    schema = pa.schema([("key", type_)])
    plan = AggregatePlan(("key",), {"n": hg.count(), "m": hg.count()}, schema, WINDOW_FIELDS)
    limits = np.iinfo(type_.to_pandas_dtype())
    near = [limits.max - 1, limits.max, limits.max - 1] * 50
    for keys in (near, [limits.min, limits.max] * 30, [None, 1, 2, 1], [3], [*near, limits.min]):
        output = Recorder()
        step = opened(WindowFactory(tumbling("1s"), plan, "step").pre_aggregate(), output)
        for times in (range(len(keys)), [10 + 20 * at for at in range(len(keys))]):
            data = pa.RecordBatch.from_arrays([pa.array(keys, type_)], schema=schema)
            step.process(ColumnBatch(data, np.array(times, np.int64)), 0)
        step.finish()
        wanted = Counter((key, at // 1_000 * 1_000) for at, key in enumerate(keys))
        wanted += Counter((key, (10 + 20 * at) // 1_000 * 1_000) for at, key in enumerate(keys))
        counted: Counter[tuple[Any, int]] = Counter()
        for key, n, time in output.rows():
            counted[key, time] += n
        assert counted == wanted


@pytest.mark.parametrize("seed", range(4))
def test_integer_keys_close_together_are_not_looked_up(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes between: keys far away or lower ones, nulls as keys and values, bounds."""
    rng, dense = random.Random(seed), []
    add = DensePartials.add
    monkeypatch.setattr(
        DensePartials, "add", lambda self, *given: dense.append(add(self, *given)) or dense[-1]
    )
    schema = pa.schema([("key", pa.int32()), ("x", pa.int64()), ("y", pa.float32())])
    aggregates = {"n": hg.count(), "known": hg.count("x"), "total": hg.sum("x + 1")}
    aggregates |= {"least": hg.min("y"), "most": hg.max("x")}
    plan = AggregatePlan(("key",), aggregates, schema, WINDOW_FIELDS)
    made, output = WindowFactory(tumbling("1s"), plan, "step"), Recorder()
    bound = {GROUPS_OPTION: "40"} if seed % 2 else {}
    step = opened(made.pre_aggregate(), output, **bound)
    sent = []
    for number in range(40):
        low, odd, size = rng.randrange(-50, 50), rng.randrange(8), rng.randrange(1, 80)
        rows = [
            (
                low + (10**9 * (at % 2) if odd == 0 else rng.randrange(30)),
                rng.choice([None, 7]) if odd == 1 else rng.randrange(-9, 9),
                rng.choice([None, 0.5, float("nan")]) if odd == 2 else float(rng.randrange(9)),
                200 * number + rng.randrange(2_000),
            )
            for at in range(size)
        ]
        if odd == 3:
            rows[0] = (None, *rows[0][1:])
        columns = [pa.array([r[at] for r in rows], t) for at, t in enumerate(schema.types)]
        data = pa.RecordBatch.from_arrays(columns, schema=schema)
        sent.append(ColumnBatch(data, np.array([row[-1] for row in rows], np.int64)))
        step.process(sent[-1], 0)
        if odd > 5:
            step.on_watermark(200 * number - 1_000)
        elif odd == 5:
            step.prepare_snapshot(number)
    step.finish()
    assert set(dense) == {True, False}
    results = []
    partials = [each for kind, each in output.events if kind == "rows"]
    assert sum(map(len, partials)) < sum(map(len, sent))
    for batches in (sent, partials):
        found = MillisecondsRecorder()
        window = opened(made(), found, 1)
        for each in batches:
            window.process(each, 0)
        window.on_watermark(WATERMARK_MAX)
        results.append(sorted(found.rows(), key=repr))
    assert repr(results[0]) == repr(results[1])


def test_scattered_keys_go_on_as_they_are() -> None:
    step, output = sender()
    rows = [(str(number), 1, 0.0, 10) for number in range(SAMPLE_ROWS)]
    step.process(batch(rows), 0)
    step.prepare_snapshot(1)
    output.events.clear()
    step.process(batch(rows[:5]), 0)
    assert output.rows() == rows[:5]


def test_late_partial_results_count_as_their_records() -> None:
    made = factory(tumbling("1s"), n=hg.count())
    receiver = Receiver(made, 1)
    step = opened(made.pre_aggregate(), receiver.at(0))
    step.process(batch([("a", 1, 0.0, 10)] * 3 + [("b", 1, 0.0, 1_010)]), 0)
    receiver.step.on_watermark(1_500)  # it was restored, and is further than its senders
    step.prepare_snapshot(1)
    step.on_watermark(WATERMARK_MAX)
    rows, counted, dropped = receiver.found()
    assert rows == [("b", 1_000, 2_000, 1, 1_999)]
    assert (counted, dropped) == (3, 3)


def test_partial_results_of_other_aggregates_are_refused() -> None:
    output = Recorder()
    step = opened(factory(tumbling("1s"), n=hg.count()).pre_aggregate(), output)
    step.process(batch([("a", 1, 0.0, 10)]), 0)
    step.prepare_snapshot(1)
    window = opened(factory(tumbling("1s"), n=hg.count(), s=hg.sum("x"))(), Recorder(), 1)
    with pytest.raises(StateError, match="this aggregate is new column=`s`"):
        window.process(output.events[0][1], 0)


# --- the plan ----------------------------------------------------------------------------------


class Sale(msgspec.Struct):
    shop: str
    amount: int
    price: float
    at: datetime.datetime


def job(window: Any = None, *, keyed: bool = True, late: bool = False, **how: Any) -> hg.Job:
    options = how.pop("options", {})
    aggregates = how.pop("aggregates", {"n": hg.count(), "s": hg.sum("amount")})
    made = hg.Job("sales", parallelism=how.pop("parallelism", 2), options=options)
    sales = made.read(from_list([], schema=Sale), name="sales").event_time("at")
    stream = sales.key_by(how.pop("key", "shop")) if keyed else sales
    windows = stream.window(window or hg.tumbling("1m"))
    totals = windows.agg(**aggregates, name="totals", queryable=how.pop("queryable", ""))
    totals.write(collect(guarantee="none"), name="out")
    if late:
        totals.late.write(collect(guarantee="none"), name="late")
    return made


def steps(made: hg.Job) -> list[str]:
    return [node.name for node in definition_of(made).plan().nodes if node.kind == "pre-aggregate"]


def test_explain_shows_both_steps() -> None:
    for keyed in (True, False):
        text = job(keyed=keyed).explain()
        assert "totals partials" in text
        assert text.index("totals partials (pre-aggregate)") < text.index("totals (window)")


@pytest.mark.parametrize(
    "made",
    [
        job(parallelism=1),
        job(options={PRE_AGGREGATION.key: "false"}),
        job(late=True),
        job(queryable="totals"),
        job(parallelism=1, key="amount", queryable="totals"),
        job(hg.tumbling("1m", emit_every="1s")),
        job(hg.tumbling("1m", time="processing")),
        job(hg.session("1m")),
        job(hg.count_window(10)),
        job(hg.global_window()),
        job(aggregates={"s": hg.sum("price")}),
        job(aggregates={"m": hg.avg("price")}),
        job(aggregates={"n": hg.count(), "f": hg.first("amount")}),
        job(aggregates={"t": hg.min("shop")}),
        job(aggregates={"d": hg.count_distinct("shop")}),
        job(aggregates={"q": hg.quantile("price", 0.5)}),
    ],
)
def test_where_results_could_tell_or_nothing_is_won_there_is_no_such_step(made: hg.Job) -> None:
    assert steps(made) == []


def test_a_single_subtask_has_the_step_for_keys_that_are_not_looked_up() -> None:
    assert steps(job(parallelism=1, key="amount", aggregates={"n": hg.count()})) == [
        "totals partials"
    ]
    assert steps(job(parallelism=1, keyed=False)) == []


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_a_single_sender_has_the_results_of_the_plain_path(window: Any) -> None:
    """Its keys lie close together at times, far apart at others; it goes idle, and takes checkpoints."""
    schema = pa.schema([("user", pa.int64()), ("x", pa.int64())])
    plan = AggregatePlan(
        ("user",), {"n": hg.count(), "s": hg.sum("x"), "m": hg.max("x")}, schema, WINDOW_FIELDS
    )
    made = WindowFactory(window, plan, "step")
    for seed in range(8):
        plain, found = (_played_alone(seed, made, aggregated) for aggregated in (False, True))
        assert found.found() == plain.found()
        assert found.rows < plain.rows


def _played_alone(seed: int, made: WindowFactory, aggregated: bool) -> Receiver:
    rng = random.Random(seed)
    receiver = Receiver(made, 1)
    channel = receiver.at(0)
    step = (
        opened(made.pre_aggregate(), channel, 1) if aggregated else opened(Operator(), channel, 1)
    )
    time, watermark = 0, -(2**63)
    for _ in range(60):
        what = rng.random()
        if what < 0.7:
            time += rng.randrange(500)
            apart = rng.choice([1, 1, 1, 1 << 40])
            keys = [rng.choice([*range(5), -7]) * apart for _ in range(40)]
            if rng.random() < 0.1:
                keys[3] = None  # type: ignore[call-overload]
            values = [rng.randrange(-50, 50) for _ in keys]
            times = [max(0, time - int(rng.expovariate(1 / 300))) for _ in keys]
            data = pa.record_batch({"user": pa.array(keys, pa.int64()), "x": pa.array(values)})
            records = ColumnBatch(data, np.array(times, np.int64))
            step.process(records, 0) if aggregated else channel.emit(records)
        elif what < 0.85:
            watermark = max(watermark, time - 400)
            step.on_watermark(watermark)
        elif what < 0.95:
            step.prepare_snapshot(1)
        else:
            step.on_idle(True)
            step.on_idle(False)
    step.on_watermark(WATERMARK_MAX)
    return receiver


def test_floats_have_extremes_in_front_of_an_exchange() -> None:
    assert steps(job(aggregates={"most": hg.max("price")})) == ["totals partials"]


def test_channels_and_states_have_the_same_names_without_it() -> None:
    plans = [
        make_plan(definition_of(made).plan(), job_name="sales", parallelism=2)
        for made in (job(), job(options={PRE_AGGREGATION.key: "false"}))
    ]
    assert plans[0].exchanges().keys() == plans[1].exchanges().keys()


def test_the_operator_and_the_options_agree() -> None:
    assert PRE_AGGREGATION.key == PRE_AGGREGATION_OPTION
    assert PRE_AGGREGATION_GROUPS.key == GROUPS_OPTION
    assert PRE_AGGREGATION_GROUPS.default == pre_aggregate.GROUPS_MAX
    assert PARTIAL_ROWS not in SCHEMA.names
