"""Lookup joins: what is found comes behind the record's columns; answers are kept, but not for ever."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import PlanError
from headgate.operators.joins.lookup import LookUp
from headgate.testing import harness

ORDER = {"ad": "string", "n": "long", "at": "timestamp"}
AD = {"owner": "string", "n": "double"}


class Ad(msgspec.Struct):
    owner: str
    n: float


async def find(ad: Any) -> Any:
    await asyncio.sleep(0.5)
    return None if ad is None or ad.startswith("?") else Ad(f"owner of {ad}", len(ad))


class Service:
    """A function that counts its calls."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def __call__(self, key: Any) -> Any:
        self.asked.append(key)
        if key == "down":
            raise OSError(key)
        return None if key == "none" else {"owner": key}


def looking_up(service: Any, rows: int = 2, keep_s: float = 10) -> LookUp:
    return LookUp(service, ("ad",), ("ad",), ("owner",), rows, keep_s)


def ask(lookup: LookUp, *ads: str) -> list[Any]:
    async def run() -> list[Any]:
        return [await lookup({"ad": ad}) for ad in ads]

    return asyncio.run(run())


def test_records_and_what_is_found_for_them() -> None:
    job = hg.Job("lookup")
    orders = job.read(from_list([], schema=ORDER), name="orders")
    joined = orders.lookup("ad", find, into=AD, suffix="_ad", name="ads")
    assert joined.schema.names == ["ad", "n", "at", "owner", "n_ad"]
    assert all(field.nullable for field in list(joined.schema)[3:])
    joined.write(collect(guarantee="none"), name="out")
    with harness(job, parallelism=2) as h:
        ads = ["hat", "?", None, "hat"]
        h.push("orders", *({"ad": ad, "n": n, "at": h.now} for n, ad in enumerate(ads)))
        h.checkpoint()
        h.crash()
        h.advance_time("1s")
        found = sorted((row["n"], row["ad"], row["owner"], row["n_ad"]) for row in h.drain("out"))
        hat = ("hat", "owner of hat", 3.0)
        assert found == [(0, *hat), (1, "?", None, None), (2, None, None, None), (3, *hat)]


def test_answers_are_kept_and_those_used_last_stay() -> None:
    service = Service()
    lookup = looking_up(service)
    assert ask(lookup, "a", "none", "a", "none", "a") == [
        ("a", "a"),
        ("none", None),
        ("a", "a"),
        ("none", None),
        ("a", "a"),
    ]
    assert service.asked == ["a", "none"]
    ask(lookup, "b", "a", "none")
    assert service.asked == ["a", "none", "b", "none"]
    assert len(lookup.cache) == 2


def test_answers_grow_old() -> None:
    service = Service()
    lookup = looking_up(service, keep_s=5)

    async def run() -> None:
        loop, now = asyncio.get_running_loop(), 100.0
        for after, asked in ((0.0, 1), (4.9, 1), (5.0, 2), (9.9, 2), (10.0, 3)):
            loop.time = lambda at=now + after: at  # type: ignore[method-assign]
            await lookup({"ad": "a"})
            assert len(service.asked) == asked
        del loop.time

    asyncio.run(run())


def test_failures_are_not_kept_and_nothing_is_with_zero_rows() -> None:
    service = Service()
    lookup = looking_up(service)
    for _ in range(2):
        with pytest.raises(OSError, match="down"):
            ask(lookup, "down")
    assert service.asked == ["down", "down"]
    nothing = looking_up(service, rows=0)
    ask(nothing, "a", "a")
    assert len(service.asked) == 4
    assert len(nothing.cache) == 0


def test_a_copy_begins_with_an_empty_cache() -> None:
    lookup = LookUp(find, ("a", "b"), ("a", "b"), ("owner",), 5, 60.0)
    lookup.cache._found["x"] = (0.0, 1)
    again = pickle.loads(pickle.dumps(lookup))
    assert len(again.cache) == 0
    assert again._key == ("a", "b")


def test_what_is_refused() -> None:
    orders = hg.Job("refused").read(from_list([], schema=ORDER), name="orders")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (("add", find), {}, "unknown column `add` in lookup"),
        (("ad", lambda ad: None), {}, "is not async"),
        (("ad", find), {"suffix": None}, "both have a column `n`"),
        (("ad", find), {"cache_rows": -1}, "cache_rows must be a whole number"),
        (("ad", find), {"name": ""}, "has no name"),
    ]
    for arguments, more, problem in wrong:
        with pytest.raises(PlanError, match=problem):
            orders.lookup(*arguments, **{"into": AD, "suffix": "2", "name": "ads", **more})
