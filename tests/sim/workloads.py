"""The jobs that are simulated, and what each may show to the outside."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import headgate as hg

from .outside import KEYS, WORLDS, Ledger, Numbers, World

STORAGE = "memory://sim"


class _Counted(hg.KeyedProcess[int, int, tuple[int, int, int]]):
    """Numbers the records of each key."""

    count = hg.ValueState[int](default=0)

    def on_record(self, record: int, ctx: hg.Context[int]) -> Iterator[tuple[int, int, int]]:
        count = self.count.get() + 1
        self.count.set(count)
        yield record % KEYS, count, record


class _CountedAgain(hg.KeyedProcess[int, tuple[int, int, int], tuple[int, int, int, int]]):
    """Numbers what comes in behind the first count."""

    count = hg.ValueState[int](default=0)

    def on_record(
        self, record: tuple[int, int, int], ctx: hg.Context[int]
    ) -> Iterator[tuple[int, int, int, int]]:
        count = self.count.get() + 1
        self.count.set(count)
        key, first, number = record
        yield key, count, number, first


class _Trouble:
    """A function of the user's that raises now and then."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, record: Any) -> Any:
        world = WORLDS[self._token]
        world.perhaps_fail(world.faults.map_rate, "user error")
        return record


def key_of(number: int) -> int:
    """Of a number."""
    return number % KEYS


def first_of(record: tuple[int, ...]) -> int:
    """The key is in front."""
    return record[0]


def _place_of(number: int) -> int:
    """Which of its key's numbers it is, from 1."""
    return number // KEYS + 1


def check_counted(world: World, record: tuple[int, ...]) -> None:
    """Of each key the numbers must come in order, each once, with the right count."""
    key, count, number = record
    wanted = len(world.by_key.get(key, ())) + 1
    if (key, count, number) != (key_of(number), wanted, key + (wanted - 1) * KEYS):
        raise world.violated(f"out of place: {record}, wanted number {wanted} of the key")


def check_counted_twice(world: World, record: tuple[int, ...]) -> None:
    """The first count must be right; the second dense and in order; no number may come twice."""
    key, second, number, first = record
    seen = world.by_key.get(key, [])
    if first != _place_of(number) or key != key_of(number):
        raise world.violated(f"the first step counted wrong: {record}")
    if second != len(seen) + 1:
        raise world.violated(f"out of place: {record}, {len(seen)} of the key are visible")
    if any(number == other[2] for other in seen):
        raise world.violated(f"visible twice: {record}")


def make_job(token: str, kind: str, settings: dict[str, Any], options: dict[str, str]) -> hg.Job:
    """A job of this kind.

    Args:
        token: of its world.
        kind: `count`, or `shuffles`.
        settings: `parallelism` and the arguments of `job.checkpoint`.
        options: of the job.
    """
    settings = dict(settings)
    parallelism = settings.pop("parallelism")
    job = hg.Job("sim", parallelism=parallelism, max_parallelism=KEYS, options=options)
    job.checkpoint(storage=STORAGE, **settings)
    job.restart(attempts=1_000_000, delay="100ms")
    numbers = job.read(Numbers(token), name="numbers")
    if kind == "count":
        counted = numbers.map(_Trouble(token), name="trouble").key_with(key_of)
        out = counted.process(_Counted(), name="count")
    else:
        out = (
            numbers.key_with(key_of)
            .process(_Counted(), name="count")
            .rebalance()
            .map(_Trouble(token), name="trouble")
            .key_with(first_of)
            .process(_CountedAgain(), name="again")
        )
    out.write(Ledger(token), name="out")
    return job


KINDS = {"count": check_counted, "shuffles": check_counted_twice}


def draw_job(rng: random.Random, kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings and options of a job, by chance."""
    unaligned = rng.random() < 0.5
    overlapping = not unaligned and rng.random() < 0.3
    settings = {
        "parallelism": rng.randint(1, 3),
        "every": f"{rng.choice((150, 400, 1000))}ms",
        "timeout": rng.choice(("2s", "30s")),
        "max_concurrent": 3 if overlapping else 1,
        "tolerable_failures": rng.choice((0, 3, 1000)),
        "retain": rng.choice((1, 1, 3)),
    }
    options = {
        "execution.checkpointing.unaligned.enabled": str(unaligned).lower(),
        "execution.checkpointing.incremental": rng.choice(("true", "false")),
        "execution.checkpointing.data-inline-threshold": rng.choice(("0b", "20kb")),
        "headgate.checkpoint.delta-chain-max": rng.choice(("2", "20")),
        "execution.buffer-timeout.interval": rng.choice(("0 ms", "20 ms", "100 ms")),
        "taskmanager.network.memory.buffers-per-channel": rng.choice(("1", "2")),
        "taskmanager.network.memory.floating-buffers-per-gate": rng.choice(("1", "8")),
        "headgate.buffer.rows": rng.choice(("4", "32768")),
        "heartbeat.interval": "1 s",
        "heartbeat.timeout": "4 s",
        "headgate.job.stall-timeout": "60 s",
        "headgate.recovery.stall-timeout": "60 s",
        "headgate.coordinator.takeovers-max": "1000000",
    }
    if unaligned:
        timeout = rng.choice(("0 ms", "20 ms", "300 ms"))
        options["execution.checkpointing.aligned-checkpoint-timeout"] = timeout
    options["slotmanager.redundant-taskmanager-num"] = rng.choice(("0", "0", "1", "2"))
    if rng.random() < 0.5:
        options["execution.checkpointing.local-backup.enabled"] = "true"
        options["execution.state-recovery.from-local"] = rng.choice(("true", "true", "false"))
        options["headgate.local-backup.size-max"] = rng.choice(("2kb", "1gb"))
    return settings, options
