"""The jobs that are simulated, and what each may show to the outside."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import headgate as hg
from headgate.api.resources import sharing_groups
from headgate.runtime.job import runnable
from headgate.runtime.plan import beside_source

from . import counting, joined, timed, windowed
from .outside import GlobalLedger, Ledger, World
from .reading import COUNTS, WINDOWS, Reads

STORAGE = "memory://sim"


def _missing_numbers(world: World) -> list[int]:
    return sorted(set(range(world.rows)) - {record[2] for record in world.visible})


def _missing_of_two(world: World) -> list[int]:
    return sorted(set(range(2 * world.rows)) - {record[2] for record in world.visible})


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of job.

    Attributes:
        build: adds its steps to a job, in the world of a token; returns the last stream.
        check: raises Violation if a record must not become visible now.
        missing: what is not visible, and must be at the end.
        conserves: it makes one record of one, and keeps none back: see `check_conserved`.
        flushes: only the end of the data brings out the last results.
        endless: its source never ends.
        sink: makes the sink of the last stream.
        queried: what clients read while the job runs; None: nothing.
        keeps: there are several workers, and those that live keep their state in memory.
        saves: clients take savepoints, and runs begin with them.
    """

    build: Callable[[hg.Job, str], Any]
    check: Callable[[World, tuple[Any, ...]], None]
    missing: Callable[[World], list[Any]] = _missing_numbers
    conserves: bool = False
    flushes: bool = False
    endless: bool = False
    sink: type[Ledger] = Ledger
    queried: Reads | None = None
    keeps: bool = False
    saves: bool = False


KINDS = {
    "async": Workload(counting.asked, counting.check_asked),
    "async by key": Workload(counting.asked_by_key, counting.check_count),
    "broadcast": Workload(counting.ruled, counting.check_ruled),
    "count": Workload(counting.count, counting.check_count, conserves=True),
    "join": Workload(counting.pairs, counting.check_pairs),
    "regions": Workload(counting.regions, counting.check_count),
    "shuffles": Workload(counting.shuffles, counting.check_shuffles, conserves=True),
    "timers": Workload(timed.timers, timed.check_timers, flushes=True),
    "union": Workload(counting.union, counting.check_union, _missing_of_two, conserves=True),
    "windows": Workload(timed.windows, timed.check_windows, timed.missing_windows, flushes=True),
}

MORE_KINDS = {
    "global": Workload(counting.count, counting.check_count, conserves=True, sink=GlobalLedger),
    "global regions": Workload(counting.regions, counting.check_count, sink=GlobalLedger),
    "growing": Workload(counting.growing, counting.check_count, endless=True),
    "growing regions": Workload(counting.growing_regions, counting.check_count, endless=True),
    "hybrid": Workload(counting.hybrid, counting.check_union, _missing_of_two),
    "hybrid regions": Workload(counting.hybrid_regions, counting.check_once, _missing_of_two),
    "kept": Workload(counting.count, counting.check_count, conserves=True, keeps=True),
    "kept counts": Workload(
        windowed.counts, windowed.check_counts, windowed.missing_counts, keeps=True
    ),
    "kept functions": Workload(
        windowed.functions,
        windowed.check_functions,
        windowed.missing_functions,
        flushes=True,
        keeps=True,
    ),
    "kept joins": Workload(
        joined.joined, joined.check_joined, joined.missing_joined, flushes=True, keeps=True
    ),
    "kept panes": Workload(
        timed.panes, timed.check_panes, timed.missing_panes, flushes=True, keeps=True
    ),
    "kept reduce": Workload(counting.reduced, counting.check_reduced, conserves=True, keeps=True),
    "kept running": Workload(timed.running, timed.check_running, timed.missing_running, keeps=True),
    "kept sessions": Workload(
        timed.sessions, timed.check_sessions, timed.missing_sessions, flushes=True, keeps=True
    ),
    "kept timers": Workload(timed.timers, timed.check_timers, flushes=True, keeps=True),
    "kept windows": Workload(
        timed.windows, timed.check_windows, timed.missing_windows, flushes=True, keeps=True
    ),
    "queried": Workload(counting.queried, counting.check_count, conserves=True, queried=COUNTS),
    "queried windows": Workload(
        timed.queried_windows,
        timed.check_windows,
        timed.missing_windows,
        flushes=True,
        queried=WINDOWS,
    ),
    "saved": Workload(counting.count, counting.check_count, conserves=True, saves=True),
    "saved global": Workload(
        counting.count, counting.check_count, conserves=True, sink=GlobalLedger, saves=True
    ),
    "saved delays": Workload(timed.delayed, timed.check_delayed, endless=True, saves=True),
    "saved panes": Workload(
        timed.panes, timed.check_panes, timed.missing_panes, flushes=True, saves=True
    ),
    "saved windows": Workload(
        timed.windows, timed.check_windows, timed.missing_windows, flushes=True, saves=True
    ),
}
"""Only run by name: what a seed draws from KINDS stays as it is."""

COMMON = ["count", "regions", "regions", "shuffles", "union"]
"""Those in which a broken cut shows soonest."""
UNCHAINED_RATE = 0.3
"""The probability that a step has subtasks of its own, so that more is on its way."""


def workload(kind: str) -> Workload:
    """The one of this name."""
    return (KINDS | MORE_KINDS)[kind]


def make_job(token: str, kind: str, settings: dict[str, Any], options: dict[str, str]) -> hg.Job:
    """A job of this kind.

    Args:
        token: of its world.
        kind: one of KINDS, or of MORE_KINDS.
        settings: `parallelism`, `max_parallelism` and the arguments of `job.checkpoint`.
        options: of the job.
    """
    settings = dict(settings)
    parallelism, most = settings.pop("parallelism"), settings.pop("max_parallelism")
    job = hg.Job("sim", parallelism=parallelism, max_parallelism=most, options=options)
    job.checkpoint(storage=STORAGE, **settings)
    job.restart(attempts=1_000_000, delay="100ms")
    of_kind = workload(kind)
    of_kind.build(job, token).write(of_kind.sink(token), name="out")
    return job


def draw_job(rng: random.Random, overtaking: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings and options of a job, by chance; `overtaking`: of one whose barriers overtake at once."""
    unaligned = rng.random() < 0.5 or overtaking
    overlapping = not unaligned and rng.random() < 0.5
    settings = {
        "parallelism": rng.randint(1, 3),
        # With an odd number of key groups old and new subtasks may have a single one in common.
        "max_parallelism": rng.choice((7, 12)),
        # The next must begin before one is complete, for them to overlap.
        "every": f"{rng.choice((20, 40) if overlapping else (150,) if overtaking else (150, 400, 1000))}ms",
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
        "jobmanager.execution.failover-strategy": rng.choice(("region", "region", "full")),
    }
    if rng.random() < UNCHAINED_RATE:
        options["pipeline.operator-chaining.enabled"] = "false"
    if unaligned:
        timeout = rng.choice(("0 ms", "20 ms", "0 ms" if overtaking else "300 ms"))
        options["execution.checkpointing.aligned-checkpoint-timeout"] = timeout
    options["slotmanager.redundant-taskmanager-num"] = rng.choice(("0", "0", "1", "2"))
    if rng.random() < 0.5:
        options["execution.checkpointing.local-backup.enabled"] = "true"
        options["execution.state-recovery.from-local"] = rng.choice(("true", "true", "false"))
        options["headgate.local-backup.size-max"] = rng.choice(("2kb", "1gb"))
    # With a watermark for each batch there are so many that they wait for partly filled buffers.
    options["pipeline.auto-watermark-interval"] = rng.choice(("200 ms", "0 ms"))
    merging = "execution.checkpointing.file-merging"
    if rng.random() < 0.2:
        options[f"{merging}.enabled"] = "false"
    else:
        options[f"{merging}.max-file-size"] = rng.choice(("4kb", "32mb"))
        options[f"{merging}.max-space-amplification"] = rng.choice(("1", "1.2", "2"))
        options["headgate.checkpoint.file-merging.piece-max"] = rng.choice(("1kb", "4mb"))
        options["headgate.checkpoint.gather-delay"] = rng.choice(("0 ms", "20 ms", "200 ms"))
    return settings, options


def spread_over_groups(job: hg.Job, rng: random.Random) -> int:
    """Put steps of a job into slot sharing groups; returns the number of groups."""
    definition = runnable(job)
    beside = beside_source(definition.graph)
    for node in definition.graph.nodes:
        if node.id not in beside and rng.random() < 0.4:
            node.slot_sharing_group = rng.choice(("default", "left", "right"))
    groups = set(sharing_groups(definition.graph).values())
    definition.declare_groups({name: hg.Resources() for name in sorted(groups)})
    return len(groups)
