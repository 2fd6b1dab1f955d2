"""The step around the matcher: order of event time, conditions, side outputs, state, mistakes."""

from __future__ import annotations

import cloudpickle
import pyarrow as pa
import pytest

import headgate as hg
from headgate.api.job_definition import WrittenJob
from headgate.api.stream import output_of
from headgate.connectors import from_list
from headgate.errors import PlanError, StateError, UserCodeError
from headgate.operators.patterns.operator import (
    PARTIAL_MAX,
    PARTIAL_OPTION,
    RECORDS_PER_TIMER,
    TIMED_OUT_COUNTER,
)
from headgate.operators.windows.late import LATE, LATE_COUNTER
from headgate.runtime.options.execution import MATCH_PARTIAL_MAX

SCHEMA = {"user": "string", "amount": "int64", "at": "int64"}


def key_of(record):
    return record[0]


def letter(wanted):
    return lambda record: record[1] == wanted


def ab(**options):
    return hg.cep.begin("a", **options).where(letter("a")).followed_by("b").where(letter("b"))


def not_b():
    return (
        hg.cep.begin("a").where(letter("a")).not_followed_by("b").where(letter("b")).within("10ms")
    )


def records_of(taken):
    return [(match.records, time) for match, time in taken]


def test_records_are_handled_in_event_time_and_ties_as_they_came(world, steps):
    pattern = hg.cep.begin("a").next("b").next("c")
    step = steps(world.stream().key_with(key_of).match(pattern, name="m"))
    rows = [("k", "third", 7), ("k", "first", 3), ("k", "fourth", 7), ("k", "second", 5)]
    step.push(rows, [row[2] for row in rows]).watermark(4)
    assert step.take() == []
    step.watermark(7)
    found = [[match[stage][0][1] for stage in "abc"] for match, _ in step.take()]
    assert found == [["first", "second", "third"], ["second", "third", "fourth"]]


def test_a_match_says_key_records_and_times(world, steps):
    step = steps(world.stream().key_with(key_of).match(ab(), name="m"))
    step.push([("k", "a"), ("j", "b"), ("k", "b")], [1, 2, 5]).end()
    records = {"a": [("k", "a")], "b": [("k", "b")]}
    assert step.take() == [(hg.cep.Match("k", records, 1, 5), 5)]


def test_optional_stages_that_took_nothing_are_empty_and_others_unknown(world):
    pattern = hg.cep.begin("a").where(letter("a")).next("x").where(letter("x")).optional()
    step = world.step(pattern, key_of)
    step.push([("k", "a")], [1]).end()
    ((match, _),) = step.take()
    assert match["x"] == []
    with pytest.raises(KeyError):
        match["y"]


def test_what_came_before_is_seen_by_conditions(world, steps):
    """Amounts that rise, and a last one above all others together."""

    def rises(record, earlier):
        return not earlier["up"] or record[1] > earlier["up"][-1][1]

    def above(record, earlier):
        assert earlier.timestamp == record[1] % 10
        return record[1] > sum(r[1] for r in earlier["up"])

    pattern = hg.cep.begin("up").where(rises).times(2).consecutive().next("top").where(above)
    step = steps(world.stream().key_with(key_of).match(pattern, name="m"))
    amounts = [11, 32, 13, 24, 45]
    step.push([("k", amount) for amount in amounts], [amount % 10 for amount in amounts])
    step.watermark(3).restart().end()
    found = [[r[1] for r in (*m["up"], *m["top"])] for m, _ in step.take()]
    assert found == [[13, 24, 45]]


def test_functions_of_the_record_are_called_once_for_each_and_only_if_it_matters(world):
    asked = {"b": [], "c": []}

    def asking(letter):
        return lambda record: asked[letter].append(record) or record.startswith(letter)

    pattern = hg.cep.begin("a").where(lambda record: record.startswith("a"))
    loop = pattern.followed_by("b").where(asking("b")).one_or_more().greedy()
    found = world.found(loop.followed_by("c").where(asking("c")), "x a1 a2 a3 b1 b2 c y")
    assert len(found) == 3
    assert asked == {"b": ["a2", "a3", "b1", "b2", "c", "y"], "c": ["c"]}


@pytest.mark.parametrize("watermarks", [[5, 10, 11, 12, 30], [30]])
def test_deadlines_are_exact_however_watermarks_come(world, steps, watermarks):
    step = steps(world.stream().key_with(key_of).match(ab().within("10ms"), name="m"))
    step.push([("k", "a"), ("j", "a"), ("j", "b"), ("k", "b")], [1, 2, 11, 11])
    for watermark in watermarks:
        step.watermark(watermark)
    assert records_of(step.take()) == [({"a": [("j", "a")], "b": [("j", "b")]}, 11)]
    assert records_of(step.take("timed_out")) == [({"a": [("k", "a")], "b": []}, 11)]
    assert step.metrics.counts[TIMED_OUT_COUNTER] == 1


def test_results_are_in_front_of_the_watermark_that_causes_them(world, steps):
    step = steps(world.stream().key_with(key_of).match(not_b(), name="m"))
    step.push([("k", "a")], [1]).watermark(10)
    assert [event[0] for event in step.events] == ["watermark"]
    step.watermark(11)
    assert [(event[0], event[-1]) for event in step.events] == [("main", 11), ("watermark", 11)]


def test_what_did_not_come_in_time_is_a_match(world, steps):
    step = steps(world.stream().key_with(key_of).match(not_b(), name="m"))
    step.push([("k", "a"), ("j", "a"), ("j", "b")], [1, 1, 10]).end()
    assert records_of(step.take()) == [({"a": [("k", "a")]}, 11)]
    assert step.take("timed_out") == []


def test_gaps_between_neighbours(world):
    pattern = hg.cep.begin("a").where(letter("a")).one_or_more().followed_by("b").where(letter("b"))
    step = world.step(pattern.within("5ms", between="neighbours"), key_of)
    rows = [("k", "a", 0), ("k", "a", 4), ("k", "b", 8), ("k", "a", 20), ("k", "b", 25)]
    step.push(rows, [row[2] for row in rows]).end()
    found = [[r[2] for r in (*m["a"], *m["b"])] for m, _ in step.take()]
    assert found == [[0, 4, 8], [4, 8]]
    # The record at 0 alone waited for a b, and for the b only until 5.
    over = [([r[2] for r in m["a"]], time) for m, time in step.take("timed_out")]
    assert ([20], 25) in over


def test_late_records_are_counted_and_not_lost(world, steps):
    step = steps(world.stream().key_with(key_of).match(ab(), name="m"))
    step.push([("k", "a")], [10]).watermark(10)
    step.push([("k", "b"), ("k", "b"), ("k", "b")], [9, 10, 11]).end()
    assert step.take(LATE) == [(("k", "b"), 9), (("k", "b"), 10)]
    assert step.metrics.counts[LATE_COUNTER] == 2
    assert [match.end for match, _ in step.take()] == [11]


def test_what_waited_to_the_end_has_the_time_of_its_own_last_record(world, steps):
    """The first one is never complete, and what began behind it waits for it."""
    pattern = (
        hg.cep.begin("open", after_match=hg.cep.skip_to_next())
        .where(lambda r: r[1] == "open")
        .followed_by("shut")
        .where(lambda r, earlier: r[1] == "shut" and r[2] == earlier["open"][0][2])
    )
    step = steps(world.stream().key_with(key_of).match(pattern, name="m"))
    rows = [("open", 1), ("open", 2), ("open", 3), ("shut", 3), ("shut", 2)]
    step.push([("k", *row) for row in rows], [1, 2, 3, 4, 5]).watermark(5)
    assert step.take() == []
    step.end()
    assert [(m.start, m.end, time) for m, time in step.take()] == [(2, 5, 5), (3, 4, 4)]


def greedy_without_end():
    """One match under way that takes more and more."""
    begun = hg.cep.begin("a").where(letter("a")).followed_by("b").where(letter("b"))
    return begun.one_or_more().greedy().followed_by("c").where(letter("c"))


@pytest.mark.parametrize(
    ("pattern", "letters"), [(ab(), "aaaa"), (greedy_without_end(), "abbb")], ids=repr
)
def test_what_is_under_way_for_one_key_has_a_bound(world, pattern, letters):
    stream = world.stream().key_with(key_of).match(pattern, name="m")
    step = world.Step(stream, options={PARTIAL_OPTION: "3"})
    step.push([(key, x) for key in "jk" for x in letters[:3]], [1, 2, 3] * 2).watermark(3)
    with pytest.raises(StateError, match="too many partial matches for one key") as raised:
        step.restart().push([("k", letters[3])], [4]).watermark(4)
    assert "step=`m` key=`'k'` partial=`4`" in raised.value.message
    assert PARTIAL_OPTION in raised.value.fix
    assert "test_operator.py" in raised.value.where


def test_the_bound_is_an_option_of_jobs():
    assert (MATCH_PARTIAL_MAX.key, MATCH_PARTIAL_MAX.default) == (PARTIAL_OPTION, PARTIAL_MAX)


def test_a_match_that_ends_makes_room(world):
    stream = world.stream().key_with(key_of).match(ab(), name="m")
    step = world.Step(stream, options={PARTIAL_OPTION: "2"})
    for at in range(0, 40, 4):
        step.push([("k", x) for x in "aab"], [at + 1, at + 2, at + 3]).watermark(at + 3).restart()
    assert len(step.take()) == 20


@pytest.mark.parametrize(
    ("before", "behind", "ended"),
    [(None, "10ms", 11), ("1h", "10ms", 11), ("10ms", "20ms", 21), ("10ms", None, None)],
)
def test_another_time_counts_for_what_is_under_way(world, before, behind, ended):
    """Also for keys of which nothing comes any more."""

    def pattern(within):
        return ab() if within is None else ab().within(within)

    step = world.step(pattern(before), key_of)
    step.push([("k", "a")], [1]).watermark(5)
    step.node = world.step(pattern(behind), key_of).node
    step.restart().watermark(10)
    assert step.take("timed_out") == []
    step.watermark(100)
    assert [at for _, at in step.take("timed_out")] == ([] if ended is None else [ended])


@pytest.mark.parametrize("parallelism", [1, 3])
def test_goes_on_in_the_middle_of_matches_at_another_parallelism(world, parallelism):
    pattern = hg.cep.begin("a").where(letter("a")).one_or_more().followed_by("b").where(letter("b"))
    step = world.step(pattern.within("100ms"), key_of, parallelism=2)
    keys = [f"k{number}" for number in range(30)]
    step.push([(k, "a") for k in keys], [1] * 30, key=key_of).watermark(3)
    step.push([(k, "b") for k in keys], [8] * 30, key=key_of)
    step.push([(k, "a") for k in keys], [5] * 30, key=key_of)
    step.restart(parallelism).push([(keys[0], "a")], [3], key=key_of).end()
    found = sorted((m.key, len(m["a"]), time) for m, time in step.take())
    assert found == sorted((k, n, 8) for k in keys for n in (1, 1, 2))
    assert len(step.take(LATE)) == 1


def test_many_records_of_one_key_are_handled_in_parts(world, steps):
    count = 2 * RECORDS_PER_TIMER + 7
    pattern = hg.cep.begin("a", after_match=hg.cep.skip_past_last_event()).next("b")
    step = steps(world.stream().key_with(key_of).match(pattern, name="m"))
    step.push([("k", n) for n in range(count)], list(range(count))).watermark(count)
    assert [m["a"][0][1] for m, _ in step.take()] == list(range(0, count - 1, 2))


def test_a_pattern_of_another_form_is_not_continued(world):
    first = world.step(ab(), key_of)
    first.push([("k", "a")], [1]).watermark(1)
    other = world.step(ab().next("c"), key_of)
    first.node = other.node
    with pytest.raises(StateError, match="another form") as raised:
        first.restart()
    assert "another name" in raised.value.fix


def test_a_changed_threshold_is_continued(world):
    def pattern(least):
        return hg.cep.begin("a").where(letter("a")).next("b").where(lambda r: r[2] > least)

    step = world.step(pattern(5), key_of)
    step.push([("k", "a", 0)], [1]).watermark(1)
    step.node = world.step(pattern(50), key_of).node
    step.restart().push([("k", "b", 7)], [2]).end()
    assert step.take() == []


# --- columns -----------------------------------------------------------------------------------


def columns(pattern, select=None, into=None):
    job = WrittenJob("test")
    stream = job.read(from_list([], schema=SCHEMA), name="in").event_time("at")
    return stream.key_by("user").match(pattern, name="m", select=select, into=into)


def batch(rows):
    names = list(SCHEMA)
    return pa.RecordBatch.from_pylist([dict(zip(names, row, strict=True)) for row in rows])


def test_expressions_and_functions_together_on_columns(world):
    pattern = (
        hg.cep.begin("small")
        .where("amount < 10")
        .next("large")
        .where("amount > 100")
        .or_where(lambda r: r.amount is None)
    )
    result = columns(
        pattern,
        select=lambda m: {"user": m.key, "small": m["small"][0].amount, "n": len(m["large"])},
        into={"user": "string", "small": "int64", "n": "int64"},
    )
    step = world.Step(result)
    rows = [
        ("ann", 5, 1),
        ("bob", 7, 2),
        ("ann", 500, 3),
        ("bob", 50, 4),
        ("bob", 1, 5),
        ("bob", None, 6),
    ]
    for one in ([rows[:3], rows[3:]], [rows]):
        step = world.Step(result)
        for some in one:
            step.push_columns(batch(some), [row[2] for row in some])
        step.restart().end()
        assert step.take() == [
            ({"user": "ann", "small": 5, "n": 1}, 3),
            ({"user": "bob", "small": 1, "n": 1}, 6),
        ]


def test_an_expression_without_columns_holds_for_all_records(world):
    step = world.Step(columns(hg.cep.begin("a").where("1 = 1").next("b").where("amount IS NULL")))
    step.push_columns(batch([("ann", 5, 1), ("ann", None, 2)]), [1, 2]).end()
    assert len(step.take()) == 1


def test_a_step_that_has_travelled_to_a_worker_works(world):
    pattern = hg.cep.begin("a").where("amount < 10").one_or_more().until("amount IS NULL")
    result = columns(pattern.next("b").where(lambda r: r.amount == 50))
    output_of(result).node.factory = cloudpickle.loads(
        cloudpickle.dumps(output_of(result).node.factory)
    )
    step = world.Step(result)
    rows = [("ann", 5, 1), ("ann", 50, 2), ("ann", 5, 3), ("ann", None, 4), ("ann", 50, 5)]
    step.push_columns(batch(rows), [row[2] for row in rows])
    step.watermark(5)
    assert [(match.start, match.end) for match, _ in step.take()] == [(1, 2)]


# --- mistakes ----------------------------------------------------------------------------------


def test_a_condition_that_raises_names_its_own_line_and_the_record(world):
    step = world.step(hg.cep.begin("a").where(lambda r: r[1] / 0), key_of)
    step.push([("k", 1)], [1])
    with pytest.raises(UserCodeError, match="ZeroDivisionError") as raised:
        step.watermark(1)
    assert "test_operator.py" in raised.value.where
    assert "('k', 1)" in str(raised.value)


def test_a_select_that_raises_names_the_match(world):
    stream = world.stream().key_with(key_of).match(ab(), name="m", select=lambda m: m["zz"])
    step = world.Step(stream)
    step.push([("k", "a"), ("k", "b")], [1, 2])
    with pytest.raises(UserCodeError, match="KeyError"):
        step.watermark(2)


one = hg.cep.begin("a")
MISTAKES = {
    "two stages have the name `a`": lambda: one.next("a"),
    "two stages have the name `b`": lambda: one.next(hg.cep.begin("b")).next("b"),
    "without a time limit": lambda: columns(one.not_followed_by("b")),
    "no clear meaning after the optional": lambda: one.optional().not_next("b"),
    "until is for stages without an upper bound": lambda: one.times(3).until(len),
    "either greedy or has an until": lambda: one.one_or_more().greedy().until(len),
    "either greedy or has an until ": lambda: one.one_or_more().until(len).greedy(),
    "greedy or allows combinations": lambda: one.one_or_more().allow_combinations().greedy(),
    "greedy is for stages that repeat": lambda: one.greedy(),
    "greedy is not for groups": lambda: hg.cep.begin(one).one_or_more().greedy(),
    "consecutive is for stages that repeat": lambda: one.consecutive(),
    "either consecutive or allows": lambda: one.one_or_more().consecutive().allow_combinations(),
    "has a quantifier already": lambda: one.times(2).one_or_more(),
    "is optional already": lambda: one.optional().optional(),
    "must not come": lambda: one.not_next("b").one_or_more(),
    "needs 0 <= low <= high": lambda: one.times(3, 2),
    "needs 0 <= low <= high ": lambda: one.times(0),
    "takes whole numbers": lambda: one.times("2"),
    "goes up to": lambda: one.times(1_000_000),
    "takes a whole number from": lambda: one.times_or_more(0),
    "or_where needs a where": lambda: one.or_where(len),
    "a group has no condition": lambda: hg.cep.begin(one).where(len),
    "within applies to the whole pattern": lambda: hg.cep.begin(one.within("1m")),
    "a group needs a stage": lambda: hg.cep.begin(one.optional()),
    "within needs at least 1 ms": lambda: one.within("0s"),
    "within needs a unit": lambda: one.within(10),
    "between is ends or neighbours": lambda: one.within("1s", between="all"),
    "a stage is a name or a pattern": lambda: one.next(""),
    "after_match is not a strategy": lambda: hg.cep.begin("a", after_match="next"),
    "a condition is a function or an expression": lambda: one.where(5),
    "not 3 arguments": lambda: one.where(lambda a, b, c: True),
    "names no stage": lambda: columns(hg.cep.begin("a", after_match=hg.cep.skip_to_last("x"))),
    "match needs a pattern": lambda: columns("a b"),
    "a match has no columns": lambda: columns(one, into={"n": "int64"}),
    "amuont": lambda: columns(one.where("amuont > 3")),
    "looks at more than one record": lambda: columns(one.where("sum(amount) > 3")),
}  # fmt: skip


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_found_when_the_job_is_planned(said):
    with pytest.raises(PlanError, match=said.strip()) as raised:
        MISTAKES[said]()
    assert "test_operator.py" in raised.value.where


def test_expressions_need_columns_and_patterns_event_time(world):
    with pytest.raises(PlanError, match="needs columns"):
        world.step(one.where("amount > 3"), key_of)
    with pytest.raises(PlanError, match="needs event time"):
        world.stream(event_time=False).key_with(key_of).match(one, name="m")
    with pytest.raises(PlanError, match="no name"):
        world.stream().key_with(key_of).match(one)
