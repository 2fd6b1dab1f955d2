"""The tables of Flink's documentation of CEP, as tables: contiguity, quantifiers, skip strategies."""

from __future__ import annotations

import re

import pytest

import headgate as hg
from headgate.errors import PlanError
from headgate.operators.patterns.cep import (
    begin,
    no_skip,
    skip_past_last_event,
    skip_to_first,
    skip_to_last,
    skip_to_next,
)
from headgate.operators.patterns.match import PATTERN, parse_after_match


def is_(letters):
    return lambda word: word[0] in letters


B, C = is_("b"), is_("c")


def a(after_match=None):
    return begin("a", after_match=after_match).where(is_("a"))


def b_plus(pattern):
    return pattern.where(is_("b")).one_or_more()


def with_c(pattern):
    return pattern.followed_by("c").where(is_("c"))


CONTIGUITY = [
    (a().next("b").where(is_("b")), "a c b1 b2", []),
    (a().next("b").where(is_("b")), "a b1 b2", ["a b1"]),
    (a().followed_by("b").where(is_("b")), "a c b1 b2", ["a b1"]),
    (a().followed_by_any("b").where(is_("b")), "a c b1 b2", ["a b1", "a b2"]),
]
LOOP = "a b1 d1 b2 d2 b3 c"
LOOPS = [
    (
        with_c(b_plus(a().followed_by_any("b")).consecutive()),
        LOOP,
        ["a b1 c", "a b2 c", "a b3 c"],
    ),
    (
        with_c(b_plus(a().followed_by_any("b"))),
        LOOP,
        ["a b1 c", "a b1 b2 c", "a b1 b2 b3 c", "a b2 c", "a b2 b3 c", "a b3 c"],
    ),
    (
        with_c(b_plus(a().followed_by_any("b")).allow_combinations()),
        LOOP,
        ["a b1 c", "a b1 b2 c", "a b1 b3 c", "a b1 b2 b3 c", "a b2 c", "a b2 b3 c", "a b3 c"],
    ),
]
CDB = "c d a1 a2 a3 d a4 b"


def c_a_plus():
    start = begin("start").where(is_("c"))
    return start.followed_by("middle").where(is_("a")).one_or_more()


def end(pattern):
    return pattern.followed_by("end").where(is_("b"))


QUANTIFIERS = [
    (end(c_a_plus().consecutive()), CDB, ["c a1 b", "c a1 a2 b", "c a1 a2 a3 b"]),
    (end(c_a_plus()), CDB, ["c a1 b", "c a1 a2 b", "c a1 a2 a3 b", "c a1 a2 a3 a4 b"]),
    (
        end(c_a_plus().allow_combinations()),
        CDB,
        [
            "c a1 b", "c a1 a2 b", "c a1 a3 b", "c a1 a4 b", "c a1 a2 a3 b", "c a1 a2 a4 b",
            "c a1 a3 a4 b", "c a1 a2 a3 a4 b",
        ],
    ),
    (a().one_or_more().until(is_("b")), "a1 c a2 b a3", ["a1", "a1 a2", "a2", "a3"]),
    (a().times(2), "a1 c a2 a3", ["a1 a2", "a2 a3"]),
    (a().times(2).consecutive(), "a1 c a2 a3", ["a2 a3"]),
    (a().times(2, 3), "a1 a2 a3", ["a1 a2", "a1 a2 a3", "a2 a3"]),
    (a().times_or_more(2), "a1 a2 a3", ["a1 a2", "a1 a2 a3", "a2 a3"]),
    (a().next("b").where(B).times(0, 2).next("c").where(C), "a1 c1 a2 b c2", ["a1 c1", "a2 b c2"]),
    (a().next("b").where(B).optional().next("c").where(C), "a1 b c1 a2 c2", ["a1 b c1", "a2 c2"]),
    (a().followed_by("b").where(B).optional().followed_by("c").where(C), "a b c", ["a b c", "a c"]),
    (a().optional().next("c").where(is_("c")), "a c", ["a c", "c"]),
    (a().one_or_more().greedy().next("x").where(is_("ab")), "a1 a2 b", ["a1 a2 b", "a2 b"]),
    (a().one_or_more().next("x").where(is_("ab")), "a1 a2 b", ["a1 a2", "a1 a2 b", "a2 b"]),
    (
        with_c(a().one_or_more().greedy()),
        "a1 x a2 c",
        ["a1 a2 c", "a2 c"],
    ),
]  # fmt: skip


def not_b(pattern):
    return pattern.not_followed_by("no").where(is_("b"))


NEGATIONS = [
    (with_c(not_b(a())), "a1 x c1 a2 b c2", ["a1 c1"]),
    (not_b(a()).followed_by_any("c").where(is_("c")), "a c1 b c2", ["a c1"]),
    (with_c(a().not_next("no").where(is_("b"))), "a1 b c1 a2 x b c2", ["a2 c2"]),
    (a().not_next("no").where(is_("b")), "a1 b a2 x a3", ["a2"]),
    (with_c(not_b(a().one_or_more())), "a1 b a2 c", ["a2 c"]),
    (b_plus(a().not_next("no").where(is_("a")).next("b")).greedy().optional(), "a b", ["a b"]),
    (with_c(not_b(a().one_or_more())), "a1 x a2 c", ["a1 a2 c", "a1 c", "a2 c"]),
    (
        not_b(a()).followed_by("c").where(is_("c")).optional().followed_by("d").where(is_("d")),
        "a1 c b d1 a2 x d2",
        ["a1 c d1", "a2 d2"],
    ),
]  # fmt: skip


def b_plus_c(after_match):
    return b_plus(begin("b", after_match=after_match)).consecutive().next("c").where(is_("c"))


ALL_THREE = ["b1 b2 b3 c", "b2 b3 c", "b3 c"]
TO_FIRST = "a b c1 c2 c3 d"


def any_of(after_match):
    start = begin("x", after_match=after_match).where(is_("abc"))
    middle = start.next("y").where(is_("bc"))
    return middle.next("c").where(is_("c")).one_or_more().greedy().next("d").where(is_("d"))


def overlapping(after_match):
    """`a b+`, where every further b makes another match that begins with the same record."""
    return b_plus(a(after_match).followed_by("b"))


SKIPS = [
    (b_plus_c(no_skip()), "b1 b2 b3 c", ALL_THREE),
    (b_plus_c(skip_to_next()), "b1 b2 b3 c", ALL_THREE),
    (b_plus_c(skip_past_last_event()), "b1 b2 b3 c", ["b1 b2 b3 c"]),
    (b_plus_c(skip_to_first("b")), "b1 b2 b3 c", ALL_THREE),
    (b_plus_c(skip_to_last("b")), "b1 b2 b3 c", ["b1 b2 b3 c", "b3 c"]),
    (any_of(no_skip()), TO_FIRST, ["a b c1 c2 c3 d", "b c1 c2 c3 d", "c1 c2 c3 d"]),
    (any_of(skip_to_first("c")), TO_FIRST, ["a b c1 c2 c3 d", "c1 c2 c3 d"]),
    (overlapping(no_skip()), "a b1 b2 b3", ["a b1", "a b1 b2", "a b1 b2 b3"]),
    (overlapping(skip_to_next()), "a b1 b2 b3", ["a b1"]),
]


def groups():
    ab = a().next("b").where(is_("b"))
    yield begin(ab).times(2).consecutive(), "a1 b1 a2 b2 a3 x b3", ["a1 b1 a2 b2"]
    yield begin(ab).times(2), "a1 b1 x a2 b2", ["a1 b1 a2 b2"]
    start = begin("s").where(is_("s"))
    yield with_c(start.followed_by(ab).optional()), "s1 a b c", ["s1 a b c", "s1 c"]
    yield with_c(start.next(ab).optional()), "s1 c1 s2 a b c2", ["s1 c1", "s2 a b c2", "s2 c2"]
    yield (
        with_c(start.next(ab).one_or_more().consecutive()),
        "s a b a b c",
        ["s a b c", "s a b a b c"],
    )


def then(pattern, verb, letter):
    return getattr(pattern, verb)(letter).where(is_(letter))


def loop_then_not(verb, loop):
    return then(then(loop, verb, "c"), "followed_by", "d")


LOOP_B = b_plus(a().followed_by("b"))
GROUP_B = begin(b_plus(a().followed_by("b")))
ABSENT_BEHIND_LOOPS = [
    # A negated stage behind a loop ends it, whatever the verb; another way out of it goes on.
    *[(loop_then_not(verb, LOOP_B), "a b c b d", []) for verb in ("not_next", "not_followed_by")],
    *[(loop_then_not(verb, GROUP_B), "a b c b d", []) for verb in ("not_next", "not_followed_by")],
    (loop_then_not("not_next", LOOP_B), "a b x c b d", ["a b d"]),
    (loop_then_not("not_followed_by", LOOP_B), "a b x c b d", []),
    (loop_then_not("not_next", LOOP_B), "a b b d", ["a b d", "a b b d"]),
    # Only once the loop has enough something can come next that must not.
    (loop_then_not("not_next", then(a(), "followed_by", "b").times(2)), "a b c b d", ["a b b d"]),
    (loop_then_not("not_followed_by", then(a(), "followed_by", "b").times(2)), "a b c b d", []),
]


@pytest.mark.parametrize(
    ("pattern", "records", "wanted"),
    [*ABSENT_BEHIND_LOOPS, *CONTIGUITY, *LOOPS, *QUANTIFIERS, *NEGATIONS, *SKIPS],
    ids=repr,
)
def test_finds_what_the_documentation_says(world, pattern, records, wanted):
    assert sorted(world.found(pattern, records)) == sorted(wanted)


@pytest.mark.parametrize(("pattern", "records", "wanted"), groups(), ids=repr)
def test_groups_repeat_as_a_whole(world, pattern, records, wanted):
    found = [sorted(match.split()) for match in world.found(pattern, records)]
    assert sorted(found) == sorted(sorted(match.split()) for match in wanted)


@pytest.mark.parametrize(
    ("times", "wanted", "over"),
    [
        ([0, 50, 51, 52], ["b b b"], []),
        ([0, 50, 51, 53], [], ["b b"]),
        ([0, 50, 52, 53], [], ["b"]),
        ([0, 50, 53, 54], [], ["b"]),
    ],
)
def test_a_window_is_between_the_records_of_one_stage(world, times, wanted, over):
    pattern = then(a(), "followed_by", "b").times(3, window="2ms").followed_by("end")
    step = world.step(pattern, lambda word: "k")
    step.push(["a", "b1", "b2", "b3", "end"], [*times, 500], key=lambda word: "k").end()
    shown = [" ".join(word[0] for word in m.records["b"]) for m, _ in step.take()]
    assert shown == wanted
    shown = [" ".join(word[0] for word in m.records["b"]) for m, _ in step.take("timed_out")]
    assert shown == over


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: a().times(1, window="1s"), "it takes one only"),
        (lambda: a().times(2, "1s"), "times takes whole numbers value=`'1s'`"),
        (lambda: a().times_or_more(2, window="0s"), "window needs at least 1 ms"),
        (lambda: a().one_or_more(window="soon"), "window is not a duration"),
    ],
)
def test_a_window_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_matches_of_one_moment_come_in_the_order_in_which_they_begin(world):
    assert world.found(b_plus_c(no_skip()), "b1 b2 b3 c") == ALL_THREE


def test_what_an_earlier_run_could_drop_comes_when_it_no_longer_can(world):
    """The run that began with b1 waits for more; the end of the input says that none come."""
    pattern = b_plus(begin("b", after_match=skip_to_first("b"))).next("c").where(is_("c"))
    step = world.step(pattern, lambda word: "k")
    step.push(["b1", "b2", "c"], [0, 1, 2], key=lambda word: "k").watermark(50)
    assert [m.records["b"] for m, _ in step.take()] == [["b1", "b2"]]
    step.end()
    assert [(m.records["b"], time) for m, time in step.take()] == [(["b2"], 2)]


STRATEGIES = [
    no_skip(),
    skip_to_next(),
    skip_past_last_event(),
    skip_to_first("b"),
    skip_to_last("a stage"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_strategies_are_read_from_their_texts(strategy):
    assert re.fullmatch(PATTERN, str(strategy))
    assert parse_after_match(str(strategy)) == strategy


def test_the_module_has_it_all():
    assert set(hg.cep.__all__) <= set(dir(hg.cep))
