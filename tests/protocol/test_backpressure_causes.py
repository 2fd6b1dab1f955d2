"""From the times of subtasks to who holds the others up: every shape of job, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.runtime.protocol.backpressure import (
    Exchange,
    Finding,
    HotGroup,
    Level,
    RecentRecords,
    SubtaskLoad,
    VertexShape,
    WaitsFor,
    explain,
    find_causes,
    hot_key_groups,
    level_of,
)

KEY_GROUPS = 128
BUSY = SubtaskLoad(busy=990, idle=10, backpressured=0)
IDLE = SubtaskLoad(busy=120, idle=880, backpressured=0)
PRESSED = SubtaskLoad(busy=80, idle=0, backpressured=920)
SLIGHTLY = SubtaskLoad(busy=100, idle=600, backpressured=300)


def find(arrows: str, **loads: SubtaskLoad | list[SubtaskLoad]) -> list[Finding]:
    """Findings of a plan such as `a>b b>c`; each name has one load, or one for each subtask."""
    each = {name: load if isinstance(load, list) else [load] for name, load in loads.items()}
    ids = {name: id_ for id_, name in enumerate(each)}
    ends = [arrow.split(">") for arrow in arrows.split()]
    return find_causes(
        [VertexShape(ids[name], name, len(found)) for name, found in each.items()],
        [Exchange(id_, ids[source], ids[target]) for id_, (source, target) in enumerate(ends)],
        {
            (ids[name], index): load
            for name, found in each.items()
            for index, load in enumerate(found)
        },
        KEY_GROUPS,
    )


def blamed(findings: list[Finding]) -> dict[str | None, set[str]]:
    """By cause, who waits."""
    return {
        found.cause.vertex.name if found.cause else None: {p.vertex.name for p in found.pressed}
        for found in findings
    }


def load(busy: int, **changes: Any) -> SubtaskLoad:
    return SubtaskLoad(busy=busy, idle=1000 - busy, backpressured=0, **changes)


@pytest.mark.parametrize(
    ("backpressured", "level"), [(0, "OK"), (100, "OK"), (101, "LOW"), (500, "LOW"), (501, "HIGH")]
)
def test_levels(backpressured: int, level: str) -> None:
    assert level_of(backpressured) is Level(level)


# ---- shapes ---------------------------------------------------------------------------------------


def test_nobody_waits() -> None:
    assert find("a>b", a=BUSY, b=BUSY) == []


def test_a_chain_is_followed_to_the_first_that_does_not_wait() -> None:
    (found,) = find("a>b b>c c>d", a=PRESSED, b=SLIGHTLY, c=BUSY, d=BUSY)
    assert blamed([found]) == {"c": {"a", "b"}}
    assert explain(found) == (
        "`a` and `b` are backpressured (up to HIGH, 92 %) because of `c` (1/1), busy 99 %"
    )


def test_the_subtask_that_waits_most_counts() -> None:
    (found,) = find("a>b", a=[IDLE, SLIGHTLY], b=BUSY)
    assert explain(found) == "`a` is backpressured (LOW, 30 %) because of `b` (1/1), busy 99 %"


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        (BUSY, IDLE, {"left": {"in"}}),
        (IDLE, BUSY, {"right": {"in"}}),
        (BUSY, BUSY, {"left": {"in"}, "right": {"in"}}),
        (PRESSED, IDLE, {"join": {"in", "left"}}),
        (PRESSED, BUSY, {"join": {"in", "left"}, "right": {"in"}}),
        (PRESSED, PRESSED, {"join": {"in", "left", "right"}}),
    ],
)
def test_a_diamond(left: SubtaskLoad, right: SubtaskLoad, wanted: dict[str, set[str]]) -> None:
    arrows = "in>left in>right left>join right>join"
    loads = {"in": PRESSED, "left": left, "right": right, "join": BUSY}
    assert blamed(find(arrows, **loads)) == wanted


def test_both_inputs_of_a_union_wait_for_it() -> None:
    assert blamed(find("a>u b>u c>u", a=PRESSED, b=PRESSED, c=IDLE, u=BUSY)) == {"u": {"a", "b"}}


def test_parts_of_a_job_that_have_nothing_to_do_with_each_other() -> None:
    findings = find("a>b c>d", a=PRESSED, b=BUSY, c=PRESSED, d=BUSY)
    assert blamed(findings) == {"b": {"a"}, "d": {"c"}}


def test_a_loop_is_walked_once() -> None:
    arrows = "in>head head>body body>tail tail>head tail>out"
    loads = {"in": PRESSED, "head": PRESSED, "body": PRESSED, "tail": PRESSED, "out": BUSY}
    assert blamed(find(arrows, **loads)) == {"out": {"in", "head", "body", "tail"}}
    loads = {"in": PRESSED, "head": PRESSED, "body": BUSY, "tail": IDLE, "out": IDLE}
    assert blamed(find(arrows, **loads)) == {"body": {"in", "head"}}


def test_nobody_waits_for_himself() -> None:
    both = SubtaskLoad(busy=700, idle=0, backpressured=300)
    (found,) = find("head>tail tail>head", head=both, tail=IDLE)
    assert (found.cause, [each.vertex.name for each in found.waiting]) == (None, ["tail"])


def test_one_that_works_between_waits_is_blamed_if_nobody_behind_is_busy() -> None:
    both = SubtaskLoad(busy=700, idle=0, backpressured=300)
    findings = find("a>b b>c", a=PRESSED, b=both, c=load(450))
    assert blamed(findings) == {"b": {"a"}, None: {"b"}}
    assert blamed(find("a>b b>c", a=PRESSED, b=both, c=BUSY)) == {"c": {"a", "b"}}


def test_what_is_behind_one_that_does_not_wait_is_not_looked_at() -> None:
    assert blamed(find("a>b b>c", a=PRESSED, b=IDLE, c=BUSY)) == {None: {"a"}}


def test_of_many_that_wait_three_are_named() -> None:
    names = [f"v{number}" for number in range(6)]
    arrows = " ".join(f"{a}>{b}" for a, b in zip(names, [*names[1:], "slow"], strict=True))
    (found,) = find(arrows, **dict.fromkeys(names, PRESSED), slow=BUSY)
    assert explain(found).startswith("`v0`, `v1`, `v2` and 3 more are backpressured (up to HIGH")


# ---- nobody is busy -------------------------------------------------------------------------------


def test_nobody_is_busy() -> None:
    (found,) = find("a>b a>c", a=PRESSED, b=[IDLE, load(300)], c=IDLE)
    assert found.cause is None
    assert explain(found) == (
        "`a` is backpressured (HIGH, 92 %), but nobody downstream is busy: "
        "`b` (2/2), busy 30 %; `c` (1/1), busy 12 %"
    )


@pytest.mark.parametrize(
    ("waits_for", "said"),
    [
        (WaitsFor.BARRIERS, "waits for the other barriers of a checkpoint"),
        (WaitsFor.CALLS, "has the most calls in flight that it may have"),
    ],
)
def test_what_those_wait_for_who_are_not_busy(waits_for: WaitsFor, said: str) -> None:
    (found,) = find("a>b", a=PRESSED, b=load(120, waits_for=waits_for))
    assert explain(found).endswith(f"nobody downstream is busy: `b` (1/1), busy 12 %, {said}")


def test_nothing_is_known_of_who_has_not_reported() -> None:
    (found,) = find("a>b", a=PRESSED, b=[])
    assert explain(found) == (
        "`a` is backpressured (HIGH, 92 %); nothing is known yet about what is downstream"
    )


def test_a_step_of_calls_says_so() -> None:
    (found,) = find("a>b", a=PRESSED, b=load(990, waits_for=WaitsFor.CALLS))
    assert explain(found).endswith(
        "because of `b` (1/1), busy 99 % with the most calls in flight that it may have"
    )


def test_full_is_told_apart_from_busy() -> None:
    waits = SubtaskLoad(busy=20, full=950, idle=30, backpressured=0, waits_for=WaitsFor.CALLS)
    (found,) = find("a>b", a=PRESSED, b=waits)
    assert explain(found).endswith(
        "because of `b` (1/1), full 95 % with the most calls in flight that it may have"
    )
    both = SubtaskLoad(busy=400, full=500, idle=100, backpressured=0)
    (found,) = find("a>b", a=PRESSED, b=both)
    assert explain(found).endswith("because of `b` (1/1), busy 40 %, full 50 %")


# ---- the hottest subtask --------------------------------------------------------------------------


def test_skew_names_subtask_share_and_key_group() -> None:
    hot = HotGroup(edge=0, subtask=1, group=17, records=480, of_subtask=1000, of_all=1640)
    senders = [
        SubtaskLoad(busy=80, idle=0, backpressured=920, hot_groups=(hot,)),
        SubtaskLoad(busy=80, idle=0, backpressured=910, hot_groups=(hot,)),
    ]
    receivers = [load(200), load(990, records=9), load(210), load(205)]
    (found,) = find("map>slow", map=senders, slow=receivers)
    assert explain(found) == (
        "`map` is backpressured (HIGH, 92 %) because of `slow` (2/4), busy 99 %: "
        "it gets 61 % of the records, 48 % of them in key group 17"
    )


def test_of_those_busy_alike_the_one_with_most_records_is_named() -> None:
    loads = [load(1000, records=10), load(960, records=80), load(940, records=90)]
    (found,) = find("a>b", a=PRESSED, b=loads)
    assert found.cause is not None
    assert (found.cause.subtask, found.cause.records_share) == (1, 80 / 180)


def test_subtasks_with_even_shares() -> None:
    (found,) = find("a>b", a=PRESSED, b=[load(990, records=5), load(980, records=5)])
    assert explain(found).endswith("`b` (1/2), busy 99 %: all its subtasks are busy")
    (found,) = find("a>b", a=PRESSED, b=[load(990, records=5), load(280, records=5)])
    assert explain(found).endswith("`b` (1/2), busy 99 %")


def test_without_samples_the_share_is_of_what_subtasks_got() -> None:
    receivers = [load(200, records=10), load(990, records=30)]
    (found,) = find("a>b", a=PRESSED, b=receivers)
    assert explain(found).endswith("`b` (2/2), busy 99 %: it gets 75 % of the records")


def group_of(*sent: HotGroup, parallelism: int = 2) -> tuple[int | None, float | None]:
    """The key group named of subtask 0, if each sender says one of these."""
    senders = [
        SubtaskLoad(busy=0, idle=0, backpressured=1000, hot_groups=(hot,) if hot else ())
        for hot in sent
    ]
    receivers = [load(990, records=9)] + [load(10, records=1)] * (parallelism - 1)
    (found,) = find("a>b", a=senders, b=receivers)
    assert found.cause is not None
    return found.cause.key_group, found.cause.key_group_share


def test_what_senders_say_is_added_up() -> None:
    first, second = HotGroup(0, 0, 3, 50, 100, 200), HotGroup(0, 0, 5, 90, 300, 400)
    assert group_of(first, HotGroup(0, 0, 3, 60, 100, 200)) == (3, 0.55)
    assert group_of(first, second) == (None, None), "90 of 400"


def test_key_groups_of_other_subtasks_and_exchanges_do_not_count() -> None:
    assert group_of(HotGroup(0, 1, 99, 90, 100, 100)) == (None, None)
    assert group_of(HotGroup(7, 0, 3, 90, 100, 100)) == (None, None)


def test_a_key_group_with_its_even_share_is_not_named() -> None:
    hot = HotGroup(0, 0, 0, 100, 100, 200)
    assert group_of(hot, parallelism=32) == (0, 1.0)
    assert group_of(hot, parallelism=KEY_GROUPS) == (None, None), "it has no other"


# ---- shares ---------------------------------------------------------------------------------------


def test_old_records_count_less() -> None:
    recent = RecentRecords()
    assert recent.of(0, 0) == 0
    recent.report(0, 0, 1000)
    recent.report(0, 0, 1000)
    assert recent.of(0, 0) == 980
    for second in range(1000):
        recent.report(0, 0, 1000 + 10 * second)
    assert recent.of(0, 0) == pytest.approx(500)
    recent.clear()
    recent.report(0, 0, 5)
    assert recent.of(0, 0) == 5


def test_hot_key_groups_of_all_senders() -> None:
    def hot(group: int, records: int, of_subtask: int, of_all: int) -> HotGroup:
        subtask = group // 64
        return HotGroup(0, subtask, group, records, of_subtask, of_all)

    samples = [hot(70, 50, 60, 100), hot(70, 30, 60, 100), hot(3, 30, 40, 100), hot(4, 2, 40, 100)]
    first, second = hot_key_groups(samples, 2, 128)
    assert (first.key_group, first.subtask) == (70, 1)
    assert (first.records_share, first.subtask_share) == (80 / 400, 80 / 120)
    assert (second.key_group, second.subtask_share) == (3, 30 / 40)
    assert hot_key_groups([], 2, 128) == []
    # With one key group for each subtask it has all the records of its subtask, however few.
    assert hot_key_groups([hot(70, 60, 60, 100)], 128, 128) == []
