"""Patterns against a model that tries everything: out of order, restarted, at other parallelism."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headgate.operators.patterns.automaton import compiled
from headgate.operators.patterns.buffer import SharedBuffer
from headgate.operators.patterns.matcher import Matcher, Rules, Runs
from headgate.operators.windows.late import LATE, LATE_COUNTER
from headgate.state.keyed.base import ABSENT

from .model import Model, pattern_of, setups

streams = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=8)
actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("xy"), st.sampled_from("abc"), st.integers(0, 20)),
        st.tuples(st.sampled_from("xx"), st.sampled_from("abc"), st.integers(0, 20)),
        st.integers(0, 20),
        st.integers(1, 3).map(lambda number: ("restart", number)),
    ),
    max_size=11,
)


class Table:
    """State of one key in a dictionary."""

    def __init__(self):
        self.rows = {}

    def get(self, entry):
        return self.rows.get(entry, ABSENT)

    def put(self, entry, value):
        self.rows[entry] = value

    def delete(self, entry):
        del self.rows[entry]


class Matching:
    """A matcher of one key, whose state is stored and loaded again behind every record and deadline."""

    def __init__(self, pattern):
        rules = Rules(compiled(pattern), pattern.after, pattern.within_ms, pattern.gap_ms, {}, "m")
        self.events, self.nodes = Table(), Table()
        self.buffer = SharedBuffer(self.events, self.nodes)
        self.matcher = Matcher(rules, self.buffer)
        self.found, self.timed_out = [], []

    def run(self, records):
        for number, (letter, time) in enumerate(records):
            self.deadlines(time)
            self.take(time, self.matcher.on_record(time, ("x", letter, time, number), 0), [])
        self.deadlines(2**62)
        self.take(None, self.matcher.on_end(), [])
        return self

    def deadlines(self, until):
        while (at := self.matcher.next_deadline()) is not None and at <= until:
            self.take(at, *self.matcher.on_deadline(at))

    def take(self, time, matched, timed_out):
        for nodes, kept in ((matched, self.found), (timed_out, self.timed_out)):
            for node in nodes:
                records = self.matcher.taken(node)
                pairs = [(stage, r[3]) for stage, several in records.items() for r in several]
                kept.append((tuple(sorted(pairs, key=lambda pair: pair[1])), time))
                self.buffer.release(node)
        self.buffer.flush()
        assert self.buffer.held == sum(map(len, self.nodes.rows.values()))
        self.matcher.runs = Runs.of_plain(self.matcher.runs.plain())


@settings(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setup=setups(), stream=streams)
def test_the_matcher_finds_what_a_model_finds_that_tries_everything(setup, stream):
    compare(setup, stream, grouped=False)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setup=setups(), stream=streams)
def test_stages_in_groups_find_the_same(setup, stream):
    assume(not all(spec.optional or spec.negated for spec in setup[0]))
    compare(setup, stream, grouped=True)


def compare(setup, stream, *, grouped):
    specs, within, gap, after = setup
    records, time = [], 0
    for letter, later in stream:
        time += later
        records.append((letter, time))
    model = Model(specs, within, gap, records).run()
    matching = Matching(pattern_of(specs, within, gap, after, grouped=grouped)).run(records)
    check(model, after, matching.found, matching.timed_out)
    assert not matching.events.rows, "records are kept that nobody needs"
    assert not matching.nodes.rows


def check(model, after, found, timed_out):
    """Compare what was found, (taken, time) each, with the model."""
    if after.kind == "none":
        assert sorted(found) == sorted((taken, at[0]) for taken, at in model.matches.items())
        assert sorted(timed_out) == sorted(model.timed_out.items())
        return
    ends = [(taken[0][1], at) for taken, at in model.matches.items()]
    assume(len(set(ends)) == len(ends))  # of equals, any may be the first
    assert [taken for taken, _ in found] == model.kept(after)


def key_of(record):
    return record[0]


def flat(records_by_stage, numbers):
    """A match of the step as the model writes it: (stage, number of record), in order."""
    pairs = [
        (stage, numbers.index(record))
        for stage, several in records_by_stage.items()
        for record in several
    ]
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setup=setups(), history=actions)
def test_records_out_of_order_and_restarts_change_nothing(world, setup, history):
    specs, within, gap, after = setup
    step = world.step(pattern_of(specs, within, gap, after), key_of, parallelism=2)
    accepted, late, watermark = [], 0, -1
    for number, action in enumerate(history):
        if isinstance(action, int):
            watermark = max(watermark, action)
            step.watermark(watermark)
        elif action[0] == "restart":
            step.restart(action[1])
        else:
            record = (*action, number)
            step.push([record], [action[2]], key=key_of)
            if action[2] <= watermark:
                late += 1
            else:
                accepted.append(record)
    step.end()
    found, timed_out = step.take(), step.take("timed_out")
    assert len(step.take(LATE)) == late == step.metrics.counts.get(LATE_COUNTER, 0)
    for key in "xy":
        records = sorted((r for r in accepted if r[0] == key), key=lambda r: r[2])
        model = Model(specs, within, gap, [(r[1], r[2]) for r in records]).run()
        mine = [(flat(m.records, records), time) for m, time in found if m.key == key]
        over = [(flat(m.records, records), time) for m, time in timed_out if m.key == key]
        check(model, after, mine, over)
    if within is not None or gap is not None:
        assert not any(rows(operator) for operator in step.operators), "something is kept for ever"


def rows(operator):
    tables = operator.snapshot(9).tables
    settings = ("match_watermark", "match_limits")
    return sum(cut.make(None).num_rows for name, cut in tables.items() if name not in settings)
