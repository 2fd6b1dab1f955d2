"""Everything the coordinator and its workers say to each other.

Ray's actor calls are neither ordered nor quick on a busy actor (ARCHITECTURE.md, decision 3), so control
travels on a connection of our own: in order, framed, msgpack. Messages that concern an attempt carry its
number; a message of another attempt is ignored.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from ...operators.elements import CheckpointOptions
from ...operators.splits import History
from ...state.snapshot import OperatorSnapshot, StateHandle
from ..protocol.adoption import WorkerReport
from ..protocol.backpressure import HotGroup, WaitsFor
from ..protocol.drops import Dropped

_encoder = msgspec.msgpack.Encoder()


class StepTime(msgspec.Struct, frozen=True):
    """Event time of one `event_time` step in one subtask; see `EventTimeStatus`."""

    step: str
    watermark: int
    idle: bool
    held_ms: int
    split: str
    queued: bool
    splits: int
    idle_splits: int
    queued_splits: int
    paused_splits: int


class SubtaskStatistics(msgspec.Struct, frozen=True):
    """Counters of one subtask since the attempt began, and rates over the last second."""

    vertex: int
    index: int
    records_in: int
    records_out: int
    busy_ms_per_second: int
    idle_ms_per_second: int
    backpressured_ms_per_second: int
    watermark: int
    records_written: int = 0
    """Records that the sinks in this subtask took."""
    times: tuple[StepTime, ...] = ()
    """The times of its event-time steps."""
    waits_for: WaitsFor = WaitsFor.NOTHING
    """At the moment."""
    queued: int = 0
    """The number of buffers that wait in front of it."""
    hot_groups: tuple[HotGroup, ...] = ()
    """The key groups that get most of its records, by exchange; only while it is backpressured."""
    history: History = History.NONE
    """The phase of its reader: history, or live data."""
    dropped: tuple[Dropped, ...] = ()
    """The event time of its steps."""
    full_ms_per_second: int = 0
    """It had as many calls under way as it may."""
    committed: int = 0
    """The newest checkpoint whose output of this subtask is visible."""


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="t", kw_only=True):
    """Base of all control messages."""


# ---- both ways ------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message on a link: who is there.

    `role` is `worker` or `pulse`: the second link of a worker, that of the thread that says it
    is alive.
    """

    token: str
    role: str
    worker_id: str = ""
    pid: int = 0
    address: bytes = b""
    """The worker's exchange address, msgpack."""
    metrics_url: str = ""
    """The address of the worker's own Prometheus endpoint, if it has one."""
    generation: int = 0
    """The generation of the coordinator that the worker obeys; 0: it obeys none yet."""


class Watching(msgspec.Struct, frozen=True):
    """Settings of the watch that a worker keeps over its own calls."""

    unreachable_after: int = 2
    """Failed connections of its thread in a row after which the coordinator counts as gone."""
    stuck_after_ms: int = 60_000
    """A call longer than that is warned of; 0: none is."""
    cancellation_interval_ms: int = 30_000
    """Time between warnings of an attempt that does not let itself be cancelled."""
    cancellation_timeout_ms: int = 180_000
    """A worker without a coordinator whose attempt does not end by then kills itself."""


class Welcome(Message, frozen=True):
    """The coordinator's answer to Hello."""

    job_name: str
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    watching: Watching = Watching()
    generation: int = 0
    """The coordinator's generation; 0: it keeps no job log. A worker that obeys it obeys no older one."""


class BusyStep(msgspec.Struct, frozen=True):
    """A subtask that has been in one call for a while."""

    vertex: int
    index: int
    task_name: str
    operator: str
    """The step whose call it is; empty if that is not known."""
    busy_ms: int
    attempt: int


class Heartbeat(Message, frozen=True):
    """I am alive. From the thread of a worker also: who has been in one call for more than a second."""

    steps: tuple[BusyStep, ...] = ()


# ---- coordinator to worker ------------------------------------------------------------------------


class Deploy(Message, frozen=True):
    """Prepare subtasks: make gates and operators, open them, restore state. Answer: Deployed."""

    attempt: int
    generation: int
    plan: str
    """Fingerprint of `job`."""
    job: bytes
    """cloudpickle of the PhysicalPlan; by value, so that the user's modules need not be installed."""
    subtasks: tuple[bytes, ...]
    """msgpack of SubtaskAssignment."""
    peers: dict[str, bytes]
    """Exchange address of each worker of the attempt, msgpack."""
    placement: dict[str, str]
    """`vertex:index` to worker id, of all subtasks."""
    settings: dict[str, str]
    partial: bool = False
    """True if only the regions of `subtasks` begin again, of which nothing runs here; all others go on."""
    storage: str = ""
    restored_checkpoint: int = 0
    state_root: str = ""
    """Address of the directory that restored state files lie in; empty: the job's own below `storage`."""


class Warm(Message, frozen=True):
    """Tells a worker without subtasks to import, connect and make what a Deploy of this job will need."""

    job: bytes
    settings: dict[str, str]
    storage: str = ""


class SubtaskAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """One subtask to run, with the state it gets back. Sources get splits or split positions."""

    vertex: int
    index: int
    region: int = 0
    """The region, which fails and restarts as a whole; see `protocol/failover.py`."""
    state: tuple[OperatorSnapshot, ...] = ()
    """One snapshot per operator and old subtask: handles of different subtasks are never in one."""
    splits: tuple[bytes, ...] | None = None
    """Fresh splits of the head, if it is a source and the job was not restored."""
    finished: bool = False
    """The subtask had already finished in the restored checkpoint."""
    in_flight: tuple[StateHandle, ...] = ()
    """Records that were on their way to it, in the order in which they are to be read."""
    in_flight_parallelism: int = 0
    """Of the vertex when they were on their way. If it is another one now, other subtasks get the same
    records: each keeps those that its partitioner gives it."""


class Start(Message, frozen=True):
    """All workers have deployed: connect and process."""

    attempt: int
    orphaned_ms: int = 0
    """So long a worker goes on without a coordinator; 0: the log does not have the attempt, so that no
    successor would know of it."""


class Adopt(Message, frozen=True):
    """Says that the coordinator that now leads goes on with the attempt unchanged."""

    attempt: int


class TriggerCheckpoint(Message, frozen=True):
    """Sources: inject a barrier now."""

    attempt: int
    checkpoint_id: int
    trigger_ms: int
    options: CheckpointOptions


class CheckpointCompleted(Message, frozen=True):
    """The checkpoint is in the job log: commit what was pre-committed."""

    attempt: int
    checkpoint_id: int
    generation: int


class CheckpointAborted(Message, frozen=True):
    """The checkpoint will never complete."""

    attempt: int
    checkpoint_id: int


class Cancel(Message, frozen=True):
    """Tells a worker to drop regions, whatever attempts of them run; None: all. The answer is Cancelled."""

    attempt: int
    regions: tuple[int, ...] | None = None


class Terminate(Message, frozen=True):
    """All is done and committed: close the subtasks in good order. Answer: SubtaskTerminated each."""

    attempt: int


class WatermarkLimit(Message, frozen=True):
    """Sources: splits of this alignment group with a watermark above `limit` (ms) are to wait."""

    attempt: int
    group: str
    limit: int


class LoopRoundOver(Message, frozen=True):
    """Heads of a loop: probe `number` is back at all of you, and `records` came back in all."""

    attempt: int
    loop: str
    number: int
    records: int


class HistoryOver(Message, frozen=True):
    """Subtasks of a source with a history: all of you have read it, so go live."""

    attempt: int
    vertex: int


class FinishSources(Message, frozen=True):
    """Sources: end as if the data had ended (stop with drain)."""

    attempt: int


class Shutdown(Message, frozen=True):
    """Exit the worker."""


# ---- worker to coordinator ------------------------------------------------------------------------


class Deployed(Message, frozen=True):
    """All subtasks of the attempt on this worker are prepared.

    Times are of the slowest one: from the beginning until it had its state, and from then until its
    operators had taken it over.
    """

    attempt: int
    fetching_ms: int = 0
    opening_ms: int = 0
    local_bytes: int = 0
    """The part of `read_bytes` that came from copies on this machine."""
    read_bytes: int = 0
    """State in files; what came with the manifest does not count."""


class RestoreProgress(Message, frozen=True):
    """Tells how much of the restored state this worker has read; sent now and then until Deployed."""

    attempt: int
    done_bytes: int
    total_bytes: int
    region: int = 0


class Inventory(Message, frozen=True):
    """Tells what a worker runs: its first message to a coordinator that takes over."""

    report: WorkerReport


class Superseded(Message, frozen=True):
    """The last message to a coordinator that is none any more: the worker obeys a newer one."""

    generation: int


class Leaving(Message, frozen=True):
    """This worker's process was asked to end (SIGTERM), and will: its subtasks are to go elsewhere."""


class Cancelled(Message, frozen=True):
    """Nothing of what was to be cancelled runs here any more; the numbers are those of Cancel."""

    attempt: int
    regions: tuple[int, ...] | None = None


class StepStuck(Message, frozen=True):
    """A call does not return; said again each time it has taken twice as long."""

    step: BusyStep
    stack: str
    """The place of the call: the stack of its thread, or the chain that it awaits."""


class SubtaskFailed(Message, frozen=True):
    """A subtask (or the worker's exchange) failed; the attempt of its region is over."""

    attempt: int
    vertex: int
    index: int
    task_name: str
    error: bytes
    """The pickled HeadgateError."""
    text: str
    kind: str
    """The value of a FailureKind."""
    detail: str = ""
    region: int = -1
    """The region of a failure that is not of one subtask; -1: all regions of the attempt."""


class CheckpointAcked(Message, frozen=True):
    """This subtask's part of the checkpoint is durable."""

    attempt: int
    checkpoint_id: int
    vertex: int
    index: int
    snapshots: tuple[OperatorSnapshot, ...]
    finished: bool
    sync_ms: float
    async_ms: float
    alignment_ms: float
    start_delay_ms: float = 0.0
    unaligned: bool = False
    written_bytes: int = 0
    """The size of what is new in the store; the rest is shared with older checkpoints."""
    in_flight_bytes: int = 0
    """The bytes among them that are records which barriers overtook."""
    processed_bytes: int = 0
    """Records processed during the alignment."""
    wrote: tuple[str, ...] = ()
    """Names of the sinks here that have taken records in front of the barrier, in this attempt."""


class CheckpointDeclined(Message, frozen=True):
    """This subtask could not take part."""

    attempt: int
    checkpoint_id: int
    vertex: int
    index: int
    reason: str
    text: str


class SubtaskFinished(Message, frozen=True):
    """All inputs ended and the subtask flushed; it stays for the final checkpoint."""

    attempt: int
    vertex: int
    index: int


class LoopRoundBack(Message, frozen=True):
    """Probe `number` is back at head `index` of a loop, and `records` came back in front of it."""

    attempt: int
    loop: str
    index: int
    number: int
    records: int


class SubtaskTerminated(Message, frozen=True):
    """The subtask committed and closed in good order."""

    attempt: int
    vertex: int
    index: int


class WatermarkReached(Message, frozen=True):
    """Tells how far an event-time step of an alignment group has come in one subtask."""

    attempt: int
    vertex: int
    index: int
    step: str
    group: str
    watermark: int | None
    """In ms; None: it is idle, and no other is to wait for it."""


class Statistics(Message, frozen=True):
    """Periodic; for progress and `list`."""

    attempt: int
    subtasks: tuple[SubtaskStatistics, ...]


Messages: TypeAlias = (
    Hello
    | Welcome
    | Heartbeat
    | Deploy
    | Warm
    | Start
    | Adopt
    | TriggerCheckpoint
    | CheckpointCompleted
    | CheckpointAborted
    | Cancel
    | Terminate
    | WatermarkLimit
    | LoopRoundOver
    | HistoryOver
    | FinishSources
    | Shutdown
    | Deployed
    | RestoreProgress
    | StepStuck
    | Inventory
    | Leaving
    | Superseded
    | Cancelled
    | SubtaskFailed
    | CheckpointAcked
    | CheckpointDeclined
    | LoopRoundBack
    | SubtaskFinished
    | SubtaskTerminated
    | WatermarkReached
    | Statistics
)

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Messages)


def encode(message: Messages) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Messages:
    """The message in `data`.

    Raises:
        msgspec.DecodeError: not one of ours.
    """
    decoded: Messages = _decoder.decode(data)
    return decoded
