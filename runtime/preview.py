"""The first records of a stream, by running the part of its job that makes it, in this process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, final

import pyarrow as pa

from ..api.settings import NO_RESTART
from ..errors import JobError, UsageError
from ..operators.clock import SystemClock
from ..operators.elements import Batch, ColumnBatch
from ..operators.graph import Graph, Input, Node
from ..operators.origin import Origin
from ..operators.partitioning import Global
from ..operators.sink import Guarantee, Sink, SinkOperator, SinkWriter
from .cluster.launch import InProcessCluster
from .coordinator.job import JobCoordinator
from .options.execution import PARALLELISM, RUNTIME_MODE
from .options.monitoring import METRICS_PORT
from .options.network import BUFFER_TIMEOUT_ENABLED
from .options.registry import current_key
from .options.state import CHECKPOINT_DIR, CHECKPOINT_INTERVAL, RECOVERY_PATH
from .plan import JobSpec
from .storage.open_store import open_store

_NOT_OF_A_PREVIEW: Final = frozenset(
    option.key
    for option in (
        RUNTIME_MODE,
        BUFFER_TIMEOUT_ENABLED,
        CHECKPOINT_DIR,
        CHECKPOINT_INTERVAL,
        RECOVERY_PATH,
        METRICS_PORT,
        PARALLELISM,
    )
)
_log = logging.getLogger("headgate.job")


@final
@dataclass(slots=True)
class Preview:
    """The records that came of a stream.

    Attributes:
        batches: the records, not more than were asked for.
        complete: the stream ended, and there are no more records.
    """

    batches: list[Batch] = field(default_factory=list)
    complete: bool = False

    @property
    def rows(self) -> int:
        """The number of records that came."""
        return sum(len(batch) for batch in self.batches)


def preview(
    graph: Graph,
    options: Mapping[str, str],
    plan: Callable[[Graph, dict[str, str]], JobSpec],
    wanted: Input,
    rows: int,
    within_ms: int,
    origin: Origin,
) -> Preview:
    """Run what makes a stream until `rows` records came, the input ended, or the time is up.

    The job's checkpoints, sinks and other branches have no part in it.

    Args:
        graph: of the job as written so far; it stays as it is.
        options: of the job.
        plan: makes a job of another graph and other options, without checkpoints and with parallelism 1.
        wanted: the stream.
        rows: how many records are enough.
        within_ms: for how long to wait for them.
        origin: the user's line.

    Raises:
        UsageError: the job is wrong as written, or a source needs the job's storage.
        JobError: a step failed.
    """
    box = _Box(rows)
    kept = {k: v for k, v in options.items() if current_key(k) not in _NOT_OF_A_PREVIEW}
    spec = replace(plan(_part(graph, wanted, box, origin), kept), restart=NO_RESTART)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(_run(spec, box, within_ms / 1_000))
        except BaseException as error:
            failed.append(error)

    # A thread of its own: a notebook has an event loop in this one.
    thread = threading.Thread(target=run, name="headgate-preview", daemon=True)
    quiet = _Quiet(thread)
    _log.addFilter(quiet)
    try:
        thread.start()
        thread.join()
    except BaseException:  # Ctrl-C
        box.stop()
        thread.join()
        raise
    finally:
        _log.removeFilter(quiet)
        box.close()
    if failed:
        raise failed[0]
    return box.found


class _Quiet(logging.Filter):
    """Leaves out what the coordinator says while a preview runs: errors are raised, and the rest, such as
    records of `.late` that only this part of the job does not read, would mislead."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread = thread

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread.ident


# -- the part of the job ------------------------------------------------------------------------------


def _part(graph: Graph, wanted: Input, box: _Box, origin: Origin) -> Graph:
    """Copies of the nodes that `wanted` is made of, and a sink that fills `box`."""
    needed = _needed(graph, wanted.node)
    copies: dict[int, Node] = {}
    for node in graph.nodes:
        if node.id not in needed:
            continue
        if node.source is not None and node.source.needs_storage:
            raise UsageError(
                f"source `{node.name}` keeps its data in the job's storage, which show() leaves alone",
                where=str(origin),
                fix="run the job, and look at the output of a sink",
            )
        inputs = tuple(replace(i, node=copies[i.node.id]) for i in node.inputs)
        sides = dict(node.sides)
        copies[node.id] = replace(
            node, inputs=inputs, sides=sides, parallelism=None, slot_sharing_group=None
        )
    sink = _PreviewSink(box.id)
    shown = Node(
        id=max(copies) + 1,
        name="show",
        kind="sink",
        origin=origin,
        inputs=(Input(copies[wanted.node.id], Global(), wanted.side),),
        factory=partial(SinkOperator, sink),
        sink=sink,
        detail=sink.describe(),
    )
    names = {node.name for node in copies.values()}
    shown.name = next(n for i in itertools.count(1) if (n := f"show-{i}") not in names)
    return Graph([*copies.values(), shown])


def _needed(graph: Graph, node: Node) -> set[int]:
    """The nodes upstream of a node, with all of each loop that one of them is in."""
    needed: set[int] = set()
    front = [node]
    while front:
        each = front.pop()
        if each.id in needed:
            continue
        needed.add(each.id)
        front += [input_.node for input_ in each.inputs]
        front += [tail for tail in graph.nodes if tail.feeds == each.id]
    return needed


# -- running it ---------------------------------------------------------------------------------------


async def _run(spec: JobSpec, box: _Box, within_s: float) -> None:
    clock = SystemClock()
    cluster = InProcessCluster(clock=clock, open_store=open_store)
    coordinator = JobCoordinator(spec, cluster=cluster, clock=clock, open_store=open_store)
    running = asyncio.ensure_future(coordinator.run())
    enough = asyncio.ensure_future(box.enough())
    try:
        await asyncio.wait({running, enough}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if running.done() and not enough.done():
            outcome = running.result()
            if outcome.status != "FINISHED":
                raise outcome.error or JobError(f"the preview failed: {outcome.reason}")
            box.found.complete = True
    finally:
        running.cancel()
        enough.cancel()
        await asyncio.gather(running, enough, return_exceptions=True)
        await coordinator.close()
        await cluster.close()


_boxes: dict[int, _Box] = {}
"""The previews under way in this process, by number: a sink carries the number, since it is copied."""
_numbers = itertools.count(1)


@final
class _Box:
    """Takes the records of one preview."""

    def __init__(self, rows: int) -> None:
        self.id = next(_numbers)
        self.found = Preview()
        self._rows = rows
        self._loop: asyncio.AbstractEventLoop | None = None
        self._full = asyncio.Event()
        _boxes[self.id] = self

    async def enough(self) -> None:
        """Wait until there are as many records as wanted, or the preview is over."""
        self._loop = asyncio.get_running_loop()
        await self._full.wait()

    def put(self, batch: Batch) -> None:
        """Take what there is room for."""
        room = self._rows - self.found.rows
        if room > 0 and len(batch):
            self.found.batches.append(batch.slice(0, room))
        if self.found.rows >= self._rows:
            self._full.set()

    def stop(self) -> None:
        """End the wait, from another thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._full.set)

    def close(self) -> None:
        """Nothing comes any more."""
        _boxes.pop(self.id, None)


class _PreviewSink(Sink):
    guarantee = Guarantee.NONE

    def __init__(self, box: int) -> None:
        self._box = box

    def writer(self) -> SinkWriter:
        return _PreviewWriter(self._box)

    def describe(self) -> str:
        return "show()"


class _PreviewWriter(SinkWriter):
    def __init__(self, box: int) -> None:
        self._box = box

    def write(self, batch: Batch) -> None:
        if (box := _boxes.get(self._box)) is not None:
            box.put(batch)


# -- as text ------------------------------------------------------------------------------------------

_CELL_MAX: Final = 60
"""Characters of a value that are shown."""


def print_table(found: Preview, schema: pa.Schema | None, within: str) -> None:
    """Print what came of a stream, with a line that says whether that is all."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _titles(schema):
        table.add_column(Text(name), no_wrap=True, overflow="ellipsis")
    for row in _rows(found, schema):
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:  # a pipe or a notebook's cell cannot be widened
        console = Console(width=max(80, console.measure(table).maximum))
    console.print(table)
    console.print(Text(_last_line(found, within), style="dim"))


def _titles(schema: pa.Schema | None) -> list[str]:
    return ["record"] if schema is None else [f"{f.name}: {f.type}" for f in schema]


def _rows(found: Preview, schema: pa.Schema | None) -> Iterator[list[str]]:
    for batch in found.batches:
        if isinstance(batch, ColumnBatch):
            for row in batch.data.to_pylist():
                yield [_cell("null" if row[name] is None else str(row[name])) for name in row]
        else:
            for record in batch.records:
                yield [_cell(repr(record))]


def _cell(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= _CELL_MAX else f"{line[: _CELL_MAX - 1]}…"


def _last_line(found: Preview, within: str) -> str:
    rows = f"{found.rows} row{'' if found.rows == 1 else 's'}"
    if found.complete:
        return f"{rows}, which is all"
    return f"{rows}; there may be more (looked for at most {within})"
