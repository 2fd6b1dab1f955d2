"""Looks for splits that have become part of a source while the job runs, and offers them to its subtasks.

`protocol/split_discovery.py` decides who reads them, and says why nothing of this has to be stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, final

import msgspec

from ...errors import HeadgateError, InternalError, SourceError, StateError
from ...operators.source import Source, SplitsLeftOutError
from ..control.messages import Messages, SplitsOffered
from ..job_settings import checkpoint_rules
from ..options.execution import DISCOVERED_SPLITS_MAX, DISCOVERY_INTERVAL, DISCOVERY_TIMEOUT
from ..plan import PhysicalPlan, Vertex
from ..protocol.checkpoints.manifest import Manifest
from ..protocol.failures import as_headgate_error
from ..protocol.split_discovery import KNOWN_SPLITS, LedgerStart, ready_splits
from .environment import JobEnvironment

_log = logging.getLogger("headgate.job")
_PARENTS_S: Final = 1.0
"""How often it is asked whether splits have ended while others wait for them."""
_NOT_LOOKED_UP = "new splits cannot be looked up, the job goes on with those it has"
_NAMED_MAX = 5
"""The most new splits that a message names."""


def going_on(env: JobEnvironment, plan: PhysicalPlan) -> frozenset[int]:
    """Return the vertices that new splits may give records at any time.

    None of their subtasks is finished for good, not even those that had been at a restored checkpoint: a
    source that was bounded, or looked for no splits, may have become one that does.
    """
    found: set[int] = set()
    todo = [vertex for vertex in plan.vertices if _looks(env, vertex) is not None]
    while todo:
        vertex = todo.pop()
        if vertex.id not in found:
            found.add(vertex.id)
            todo += [plan.vertices[edge.target] for edge in plan.outputs_of(vertex)]
    return frozenset(found)


def _interval_ms(env: JobEnvironment, source: Source) -> int:
    """Return how often splits of a source are looked for; 0: never."""
    own_ms = source.discover_every_ms
    return env.options.get(DISCOVERY_INTERVAL) if own_ms is None else own_ms


def _looks(env: JobEnvironment, vertex: Vertex) -> Source | None:
    """Return the source at the head of a vertex if splits of it are looked for."""
    source = vertex.head.source
    if source is None or not source.discovers or source.bounded or not _interval_ms(env, source):
        return None
    return source


def check_keys_kept(vertex: Vertex, manifest: Manifest, begun: Sequence[bytes]) -> None:
    """Check that a checkpoint says which splits had ended, for a source that has to know.

    Args:
        vertex: its source is the head.
        manifest: of the checkpoint.
        begun: the splits that had not ended.

    Raises:
        StateError: it does not, because the source looked for no splits then.
    """
    source, name = vertex.head.source, vertex.head.name
    if source is None or source.bounded or not source.splits_end:
        return
    subtasks = [each for op in manifest.operators if op.name == name for each in op.subtasks]
    handles = [handle for each in subtasks for snap in each.snapshots for handle in snap.handles]
    has_read = bool(begun) or any(each.finished for each in subtasks)
    if has_read and not any(handle.state == KNOWN_SPLITS for handle in handles):
        raise StateError(
            f"source `{name}` looked for no further files at checkpoint {manifest.checkpoint_id}, which "
            "therefore does not say which files had been read already: they would be read again",
            where=str(vertex.head.origin),
            fix="leave discover_every out, and give a second source with it only the new files, by a "
            "path of its own; or give the source another name, so that it begins with all files",
        )


def ledger_start(env: JobEnvironment, vertex: Vertex, begun: Sequence[bytes]) -> LedgerStart:
    """Return what the ledgers of a source that discovers splits begin with.

    Args:
        env: the job.
        vertex: its source is the head.
        begun: the splits that the attempt begins with, those of all subtasks.
    """
    source = vertex.head.source
    if source is None:
        raise InternalError(f"vertex has no source vertex=`{vertex.name}`")
    try:
        known = tuple(source.split_key(split) for split in begun)
    except HeadgateError:
        raise
    except Exception as error:
        what = f"source `{vertex.head.name}` cannot name its splits"
        raise as_headgate_error(error, what, str(vertex.head.origin)) from error
    rules = checkpoint_rules(env.spec.checkpoint, env.options)
    return LedgerStart(
        known,
        vertex.parallelism,
        enabled=_interval_ms(env, source) > 0,
        checkpoints=rules.interval_ms is not None,
    )


class _Looked(msgspec.Struct, frozen=True):
    """The result of a look.

    Attributes:
        splits: those that were found, by key.
        parents: the keys of the parents of those that have some.
        left_out: why others were left out; empty: none were.
    """

    splits: dict[str, bytes] = msgspec.field(default_factory=dict)
    parents: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    left_out: str = ""


def _heard(call: asyncio.Task[_Looked]) -> None:
    """Retrieve the error of a call that may have no waiter any more, so that asyncio does not warn of
    it.
    """
    if not call.cancelled():
        call.exception()


@final
class SplitDiscovery:
    """Looks for splits while a job runs. One that hangs, or fails, does the job no harm."""

    def __init__(self, env: JobEnvironment) -> None:
        self._env = env
        self._found: dict[str, dict[str, bytes]] = {}
        """The splits of the last look, by source and key."""
        self._problems: dict[str, str] = {}
        """The problem with the last look, by source."""
        self._calls: dict[str, asyncio.Task[_Looked]] = {}
        """The last call of each source; it may still be running although its look was stopped."""
        self._tasks: list[asyncio.Task[None]] = []
        self._wanted: list[asyncio.Event] = []
        """Set where a look is wanted at once; one for each source."""

    def start(
        self,
        plan: PhysicalPlan,
        send: Callable[[Messages], None],
        ended: Callable[[Vertex], Collection[str]],
    ) -> None:
        """Look at once, and then at intervals, until `stop`: all subtasks run.

        Args:
            plan: what runs.
            send: sends a message to all workers, for all attempts that are current.
            ended: returns the awaited splits of a source that have ended for good.
        """
        for vertex in plan.vertices:
            if (source := _looks(self._env, vertex)) is not None:
                wanted = asyncio.Event()
                self._wanted.append(wanted)
                look = self._look_again_and_again(vertex, source, send, ended, wanted)
                name = f"discover splits of {vertex.head.name}"
                self._tasks.append(asyncio.get_running_loop().create_task(look, name=name))

    def look_now(self) -> None:
        """Do not wait for the interval: subtasks have begun again, and do not know what was found."""
        for wanted in self._wanted:
            wanted.set()

    async def stop(self) -> None:
        """Look no more. A call of a source that is under way is not waited for, but the next look waits."""
        tasks, self._tasks, self._wanted = self._tasks, [], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_again_and_again(
        self,
        vertex: Vertex,
        source: Source,
        send: Callable[[Messages], None],
        ended: Callable[[Vertex], Collection[str]],
        wanted: asyncio.Event,
    ) -> None:
        interval_s = _interval_ms(self._env, source) / 1000
        while True:
            wanted.clear()
            found = await self._look(vertex.head.name, source)
            left_s = interval_s
            while True:
                ready, awaited = ready_splits(found.splits, found.parents, ended(vertex))
                waits = len(ready) < len(found.splits)
                if found.splits:
                    # Each time all of them: subtasks that were restarted meanwhile have to hear it again.
                    offer = SplitsOffered(
                        attempt=0,
                        vertex=vertex.id,
                        splits=ready,
                        awaited=tuple(awaited),
                        more=waits,
                    )
                    send(offer)
                pause_s = min(left_s, _PARENTS_S) if waits else left_s
                left_s -= pause_s
                try:
                    async with asyncio.timeout(pause_s):
                        await wanted.wait()
                    break
                except TimeoutError:
                    if left_s <= 0:
                        break

    async def _look(self, name: str, source: Source) -> _Looked:
        """Return all splits that exist; none if that cannot be found out now."""
        before = self._found.get(name)
        most = self._env.options.get(DISCOVERED_SPLITS_MAX)
        timeout_s = self._env.options.get(DISCOVERY_TIMEOUT) / 1000

        def call() -> _Looked:
            configured, left_out = source.configure(self._env.options.effective()), ""
            try:
                splits = configured.discover(dict(before or {}))
            except SplitsLeftOutError as error:
                splits, left_out = error.found, str(error)
            found = {configured.split_key(split): split for split in splits}
            parents: dict[str, tuple[str, ...]] = {}
            if configured.splits_have_parents:
                of_each = {key: configured.split_parents(split) for key, split in found.items()}
                parents = {key: tuple(each) for key, each in of_each.items() if each}
            return _Looked(found, parents, left_out)

        try:
            if name in self._calls:
                # The look that made this call may have been stopped. A source is called once at a time.
                await asyncio.wait({self._calls[name]})
            calling = self._calls[name] = asyncio.get_running_loop().create_task(
                asyncio.to_thread(call), name=f"look for splits of {name}"
            )
            calling.add_done_callback(_heard)
            done, _ = await asyncio.wait({calling}, timeout=timeout_s)
            if not done:
                self._problem(name, f"{_NOT_LOOKED_UP}: this takes longer than {timeout_s:g} s")
            looked = await asyncio.shield(calling)
            found = looked.splits
            if len(found) > most:
                raise SourceError(
                    f"there are {len(found):,} splits, and {most:,} are allowed",
                    fix=f"raise {DISCOVERED_SPLITS_MAX.key}",
                )
        except Exception as error:  # whatever a source raises, the splits that are known are read
            self._problem(name, f"{_NOT_LOOKED_UP}: {type(error).__name__}: {error}")
            return _Looked()
        if looked.left_out:
            self._problem(name, looked.left_out)
        else:
            self._problems.pop(name, None)
        self._found[name] = found
        if before is not None:
            self._announce(name, [key for key in found if key not in before])
        return looked

    def _problem(self, name: str, text: str) -> None:
        """Warn, once for each problem."""
        if self._problems.get(name) != text:
            self._problems[name] = text
            said = f"{name}: {text}"
            _log.warning("%s", said)
            self._env.publish("source", said, source=name)

    def _announce(self, name: str, new: list[str]) -> None:
        if new:
            named = ", ".join(sorted(new)[:_NAMED_MAX])
            rest = f" and {len(new) - _NAMED_MAX} more" if len(new) > _NAMED_MAX else ""
            said = f"{name}: found {len(new)} new splits: {named}{rest}"
            self._env.publish("source", said, source=name, splits=len(new))
