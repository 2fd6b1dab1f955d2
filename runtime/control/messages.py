"""All messages between the coordinator and its workers.

Calls of Ray's actors are neither ordered nor quick on a busy actor, so control messages travel on a
connection of our own: in order, framed, msgpack (docs/design/0003-ray-places-processes.md). Messages
that concern an attempt carry its number; a message of another attempt is ignored.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa

from ...operators.elements import CheckpointOptions
from ...operators.lost_records import LostRecord
from ...operators.splits import History
from ...state.snapshot import OperatorSnapshot, StateHandle
from ..observe.recent_logs import LogLine
from ..protocol.adoption import WorkerReport
from ..protocol.backpressure import HotGroup, WaitsFor
from ..protocol.drops import Dropped
from ..protocol.split_discovery import LedgerStart

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


class Sent(NamedTuple):
    """The number of records and bytes that a subtask has sent over an exchange of the plan."""

    edge: int
    records: int
    bytes: int


QUIET_FOR_GOOD: Final = 2**53
"""The time for which a source that has ended has had nothing to read."""


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
    """The number of records that the sinks in this subtask took."""
    times: tuple[StepTime, ...] = ()
    """The times of its event-time steps."""
    waits_for: WaitsFor = WaitsFor.NOTHING
    """The resource it waits for at the moment."""
    queued: int = 0
    """The number of buffers that wait in front of it."""
    hot_groups: tuple[HotGroup, ...] = ()
    """The key groups that get most of its records, by exchange: those that get many, and while it is
    backpressured any.
    """
    history: History = History.NONE
    """The phase of its reader: history, or live data."""
    dropped: tuple[Dropped, ...] = ()
    """The event time of its steps."""
    full_ms_per_second: int = 0
    """Whether it had as many calls under way as it may."""
    committed: int = 0
    """The newest checkpoint whose output of this subtask is visible."""
    sent: tuple[Sent, ...] = ()
    """What it has sent, by exchange."""
    quiet_ms: int = 0
    """For how long its source has had nothing to read; `QUIET_FOR_GOOD` when it has ended."""
    ended_splits: tuple[str, ...] = ()
    """The keys of the awaited splits (`SplitsOffered`) that have ended for good."""
    lost: tuple[LostRecord, ...] = ()
    """Samples of the records that it has dropped since the last report."""
    timers: dict[str, int] = {}
    """The number of timers that wait, by step; steps that set none are left out."""


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="t", kw_only=True):
    """Base of all control messages."""


# ---- both ways ------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message on a link: it introduces the sender.

    `role` is `worker` or `pulse`: the second link of a worker, that of its watch thread, which sends
    heartbeats.
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
    """After this number of failed connections in a row its watch thread takes the coordinator for gone."""
    stuck_after_ms: int = 60_000
    """A warning is logged for a call longer than this; 0: for none."""
    cancellation_interval_ms: int = 30_000
    """The time between two warnings about an attempt that does not stop after its cancellation."""
    cancellation_timeout_ms: int = 180_000
    """A worker without a coordinator kills itself if its attempt has not ended within this time."""


class Welcome(Message, frozen=True):
    """The coordinator's answer to Hello."""

    job_name: str
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    watching: Watching = Watching()
    generation: int = 0
    """The coordinator's generation; 0: it keeps no job log. A worker that obeys it obeys no older one."""
    takes_logs: bool = False
    """True if the coordinator keeps lines of the worker's log."""


class BusyStep(msgspec.Struct, frozen=True):
    """A subtask that has been in one call for a while."""

    vertex: int
    index: int
    task_name: str
    operator: str
    """The step that made the call; empty if that is not known."""
    busy_ms: int
    attempt: int


class Heartbeat(Message, frozen=True):
    """A sign of life; from a watch thread also the steps that have been in one call for over a second."""

    steps: tuple[BusyStep, ...] = ()


# ---- coordinator to worker ------------------------------------------------------------------------


class DeployCommon(msgspec.Struct, frozen=True, kw_only=True):
    """The part that all Deploy messages of an attempt have in common: it is encoded once."""

    job: bytes
    """The PhysicalPlan, by cloudpickle; by value, so that the modules of the user need not be installed."""
    workers: tuple[bytes, ...]
    """The exchange address of each worker of the attempt as msgpack, in the order of their slots: with
    `slots` they place the subtasks (`runtime/slots.py`).
    """
    slots: dict[str, int]
    """The slots of a worker, by slot sharing group."""
    settings: dict[str, str]
    sent_packs: tuple[StateHandle, ...] = ()
    """The in-flight records that senders had, of which each subtask restores what is for it, in this order
    and behind its own `SubtaskAssignment.in_flight`.
    """

    def packed(self) -> tuple[bytes, int]:
        """Return it for `Deploy.common`, and its size before it was compressed."""
        data = _encoder.encode(self)
        return pa.compress(data, codec="zstd", asbytes=True), len(data)

    @staticmethod
    def unpacked(message: Deploy) -> DeployCommon:
        """Return what a message has in common with the others of its attempt."""
        data = pa.decompress(message.common, message.common_size, codec="zstd", asbytes=True)
        return msgspec.msgpack.decode(data, type=DeployCommon)


class Deploy(Message, frozen=True):
    """Prepare subtasks: make gates and operators, open them, restore state. The answer is Deployed."""

    attempt: int
    generation: int
    plan: str
    """The fingerprint of the plan."""
    common: bytes
    """The part that all workers get: a DeployCommon, encoded and compressed."""
    common_size: int
    """The size of `common` before it was compressed."""
    subtasks: tuple[bytes, ...]
    """SubtaskAssignments, each as msgpack."""
    partial: bool = False
    """True if only the regions of `subtasks` begin again, which do not run here; all others go on."""
    storage: str = ""
    restored_checkpoint: int = 0
    run: str = ""
    """The run of the job; see `OperatorContext.run_id`."""
    state_root: str = ""
    """The address of the files of restored state; empty: they are in the job's own storage."""


class Warm(Message, frozen=True):
    """Let a worker without subtasks import, connect and make what a Deploy of this job will need."""

    job: bytes
    settings: dict[str, str]
    storage: str = ""


class SubtaskAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """One subtask to run, with the state that it restores. Sources get splits or split positions."""

    vertex: int
    index: int
    region: int = 0
    """The region, which fails and restarts as a whole; see `protocol/failover.py`."""
    state: tuple[OperatorSnapshot, ...] = ()
    """One snapshot per operator and old subtask: a snapshot never has handles of different subtasks."""
    splits: tuple[bytes, ...] | None = None
    """Fresh splits of the head, if it is a source and the job was not restored."""
    ledger: LedgerStart | None = None
    """For a source that discovers splits."""
    finished: bool = False
    """Whether the subtask had already finished in the restored checkpoint."""
    in_flight: tuple[StateHandle, ...] = ()
    """The in-flight records that it restores, in the order in which it reads them; then it restores those
    of `DeployCommon.sent_packs`.
    """
    in_flight_parallelism: int = 0
    """The parallelism of the vertex in that checkpoint. If it is another one now, other subtasks get the
    same records, and each keeps those that its partitioner gives to it.
    """


class Start(Message, frozen=True):
    """Connect and process: all workers have deployed."""

    attempt: int
    orphaned_ms: int = 0
    """For how long a worker goes on without a coordinator; 0: it does not, because the attempt is not in
    the log, so that no other coordinator would know it.
    """


class Adopt(Message, frozen=True):
    """Go on with the attempt unchanged: another coordinator leads it now."""

    attempt: int


class TriggerCheckpoint(Message, frozen=True):
    """Inject a barrier now; for sources."""

    attempt: int
    checkpoint_id: int
    trigger_ms: int
    options: CheckpointOptions


class CheckpointCompleted(Message, frozen=True):
    """Commit what was pre-committed: the checkpoint is in the job log."""

    attempt: int
    checkpoint_id: int
    generation: int


class CheckpointAborted(Message, frozen=True):
    """Forget the checkpoint: it will never complete."""

    attempt: int
    checkpoint_id: int


class Cancel(Message, frozen=True):
    """Drop regions, whatever attempt they are in; None: all. The answer is Cancelled."""

    attempt: int
    regions: tuple[int, ...] | None = None


class Terminate(Message, frozen=True):
    """Close all subtasks in good order: everything is committed. Each answers SubtaskTerminated."""

    attempt: int


class WatermarkLimit(Message, frozen=True):
    """Let splits of this alignment group wait while their watermark is above `limit` (ms); for sources."""

    attempt: int
    group: str
    limit: int


class LoopRoundOver(Message, frozen=True):
    """All heads of a loop have probe `number` back, and `records` came back in total; for these heads."""

    attempt: int
    loop: str
    number: int
    records: int


class HistoryOver(Message, frozen=True):
    """Go live: all subtasks of this source have read their history."""

    attempt: int
    vertex: int


class EndSource(Message, frozen=True):
    """End this source: none of its subtasks has had anything to read for as long as it waits for."""

    attempt: int
    vertex: int


class SplitsOffered(Message, frozen=True):
    """All splits of a source that may be read now; its subtasks take those that are new and theirs."""

    attempt: int
    vertex: int
    splits: dict[str, bytes]
    """By key."""
    awaited: tuple[str, ...] = ()
    """The keys of splits that others wait for: subtasks report which of them have ended for good."""
    more: bool = False
    """There are splits that may not be read yet, so the source is not idle for good."""


class FinishSources(Message, frozen=True):
    """End as if the data had ended (stop with drain); for sources."""

    attempt: int


class AskState(Message, frozen=True):
    """Read a queryable state of some keys of one subtask.

    The answer is StateAnswer, unless the subtask ends before.
    """

    attempt: int
    query: int
    """The number of the query, for its answer."""
    vertex: int
    index: int
    operator: str
    """The name of the step that has the state."""
    state: str
    """The name of the state in the step."""
    keys: tuple[bytes, ...]
    """The keys, by `encode_key`."""
    bytes_max: int
    """The most bytes of values that are sent back."""
    waiting_max: int
    """A subtask for which this many queries wait refuses more."""
    timeout_ms: int
    """After this time nobody waits for the answer."""
    checkpoint_id: int = 0
    """The values are those of this checkpoint; 0: those that the state has now."""


class ScanState(Message, frozen=True):
    """Read some more rows of a queryable state of one subtask. The answer is StateAnswer.

    The other fields are those of AskState.
    """

    attempt: int
    query: int
    vertex: int
    index: int
    operator: str
    state: str
    scan: int
    """The number of the scan, the same for all its slices at all subtasks."""
    begins: bool
    """The scan may be new at this subtask."""
    rows_max: int
    """The most rows; 0: the scan begins, or stays, without any."""
    keys: tuple[bytes, bytes, bytes]
    """Which keys are wanted, by `Selection.encode`."""
    bytes_max: int
    waiting_max: int
    timeout_ms: int
    slice_ms: int
    """The longest time that the subtask reads before it goes on with its batches."""
    idle_ms: int
    """After this time without a message about it, the scan is over."""
    checkpoint_id: int = 0


class EndScan(Message, frozen=True):
    """Forget a scan."""

    scan: int


class TakeProfile(Message, frozen=True):
    """Look at what a subtask runs and waits for. The answer is ProfileAnswer."""

    attempt: int
    query: int
    """The number of the query, for its answer."""
    vertex: int
    index: int
    milliseconds: int
    """How long to look."""
    hertz: int
    """How many looks per second."""


class Shutdown(Message, frozen=True):
    """Exit the worker."""


# ---- worker to coordinator ------------------------------------------------------------------------


class StateOutcome(StrEnum):
    """How the reading of a state ended."""

    READ = "read"
    ELSEWHERE = "elsewhere"
    """The subtask is not here: it restarts, or the job was rescaled."""
    STARTING = "starting"
    """The subtask is being restored, or waits for the others."""
    BUSY = "busy"
    """Too many queries wait for this subtask."""
    NOT_KEPT = "not_kept"
    """The subtask does not have the values at that checkpoint, or no longer."""
    SCAN_OVER = "scan_over"
    """The subtask does not know the scan, or no longer."""
    TOO_LARGE = "too_large"
    FAILED = "failed"


class StateAnswer(Message, frozen=True):
    """The answer of a subtask to AskState or ScanState."""

    query: int
    outcome: StateOutcome
    values: tuple[bytes, ...] = ()
    """The value of each key as JSON; empty: the key has none."""
    keys: tuple[bytes, ...] = ()
    """The keys of the values, of a scan."""
    more: bool = False
    """The scan has not gone through all keys of the subtask."""
    text: str = ""
    """The error, if it failed."""


class StackSamples(Message, frozen=True):
    """A call stack of a subtask, and how often it was seen."""

    frames: tuple[int, ...]
    """The calls, outermost first: indices of `ProfileAnswer.functions`."""
    running: int
    waiting: int


class ProfileAnswer(Message, frozen=True):
    """What a subtask did while it was looked at."""

    query: int
    outcome: StateOutcome
    """`BUSY`: the worker takes another profile."""
    samples: int = 0
    """The looks at it."""
    running: int = 0
    """Those in which the subtask ran; in the others it waited."""
    functions: tuple[str, ...] = ()
    """`function (file:line)` of all calls that were seen."""
    stacks: tuple[StackSamples, ...] = ()
    others: dict[str, int] = {}
    """The looks in which another task had the thread, by the name of the task."""


class Deployed(Message, frozen=True):
    """All subtasks of the attempt on this worker are prepared.

    The times are those of the slowest one: from the beginning until it had its state, and from then until
    its operators had restored it.
    """

    attempt: int
    fetching_ms: int = 0
    opening_ms: int = 0
    local_bytes: int = 0
    """The part of `read_bytes` that was read from copies on this machine."""
    read_bytes: int = 0
    """The bytes of state in files; state in the manifest does not count."""
    kept_bytes: int = 0
    """The bytes of state that was taken over from memory, and not read."""


class RestoreProgress(Message, frozen=True):
    """The progress of this worker's restore; sent from time to time until Deployed."""

    attempt: int
    done_bytes: int
    total_bytes: int
    region: int = 0


class Inventory(Message, frozen=True):
    """The list of what a worker runs: its first message to a coordinator that takes over."""

    report: WorkerReport


class Superseded(Message, frozen=True):
    """The worker obeys a newer coordinator: this is its last message to the former one."""

    generation: int


class Leaving(Message, frozen=True):
    """This worker's process was asked to end (SIGTERM), and will: its subtasks have to go elsewhere."""


class Cancelled(Message, frozen=True):
    """Nothing that was to be cancelled runs here any more; the numbers are those of Cancel."""

    attempt: int
    regions: tuple[int, ...] | None = None


class StepStuck(Message, frozen=True):
    """A call does not return; repeated each time it has taken twice as long."""

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
    """The region of a failure that is not of one subtask; -1: the failure is of all regions."""


class SubtaskAck(msgspec.Struct, frozen=True, gc=False):
    """The acknowledgement of one subtask: its part of the checkpoint is durable."""

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
    """The size of the new files; the others are shared with older checkpoints."""
    in_flight_bytes: int = 0
    """The part of these bytes that are records which barriers overtook."""
    processed_bytes: int = 0
    """The bytes of records that were processed during the alignment."""
    wrote: tuple[str, ...] = ()
    """The names of the sinks here that took records before the barrier, in this attempt."""
    held_ms: float = 0.0
    """The time for which it waited at the worker for acknowledgements of other subtasks."""


class CheckpointAcked(Message, frozen=True, gc=False):
    """These subtasks of a worker have acknowledged a checkpoint: all of them, or those that are ready."""

    attempt: int
    checkpoint_id: int
    subtasks: tuple[SubtaskAck, ...]


class CheckpointDeclined(Message, frozen=True):
    """This subtask could not take part."""

    attempt: int
    checkpoint_id: int
    vertex: int
    index: int
    reason: str
    text: str


class SubtaskFinished(Message, frozen=True):
    """All inputs have ended and the subtask has flushed; it stays for the final checkpoint."""

    attempt: int
    vertex: int
    index: int


class LoopRoundBack(Message, frozen=True):
    """Probe `number` is back at head `index` of a loop, and `records` came back before it."""

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
    """The progress of an event-time step of an alignment group in one subtask."""

    attempt: int
    vertex: int
    index: int
    step: str
    group: str
    watermark: int | None
    """In ms; None: it is idle, so no other subtask has to wait for it."""


class Statistics(Message, frozen=True):
    """The statistics of subtasks; sent periodically."""

    attempt: int
    subtasks: tuple[SubtaskStatistics, ...]


class LogLines(Message, frozen=True):
    """Lines that the log of the worker's process has got since the last ones were sent."""

    lines: tuple[LogLine, ...]
    skipped: int = 0
    """The number of further lines, which came faster than they are sent."""


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
    | EndSource
    | SplitsOffered
    | FinishSources
    | AskState
    | ScanState
    | EndScan
    | TakeProfile
    | Shutdown
    | StateAnswer
    | ProfileAnswer
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
    | LogLines
)

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Messages)


def encode(message: Messages) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Messages:
    """Decode the message in `data`.

    Raises:
        msgspec.DecodeError: it is not one of these messages.
    """
    decoded: Messages = _decoder.decode(data)
    return decoded
