"""From acknowledgements to the manifest of a checkpoint, and what a manifest adds up to."""

from __future__ import annotations

from ...state.snapshot import OperatorSnapshot
from ..control.messages import CheckpointAcked
from ..plan import PhysicalPlan
from ..protocol.checkpoints.decisions import Publish
from ..protocol.checkpoints.manifest import Manifest, ManifestOperator, ManifestSubtask
from ..protocol.ids import SubtaskId


def make_manifest(decision: Publish[CheckpointAcked], plan: PhysicalPlan, now_ms: int) -> Manifest:
    """All acknowledgements as one manifest, by operator name."""
    operators: list[ManifestOperator] = []
    for vertex in plan.vertices:
        acks = [decision.acks[SubtaskId(vertex.id, index)] for index in range(vertex.parallelism)]
        for node in vertex.nodes:
            subtasks = tuple(
                ManifestSubtask(
                    subtask=ack.index,
                    snapshots=tuple(s for s in ack.snapshots if _tells(s, node.name)),
                    finished=ack.finished,
                )
                for ack in acks
            )
            operators.append(
                ManifestOperator(name=node.name, parallelism=vertex.parallelism, subtasks=subtasks)
            )
    return Manifest(
        checkpoint_id=decision.checkpoint_id,
        trigger_ms=decision.trigger_ms,
        completed_ms=now_ms,
        duration_ms=now_ms - decision.trigger_ms,
        max_parallelism=plan.max_parallelism,
        operators=tuple(operators),
    )


def _tells(snapshot: OperatorSnapshot, name: str) -> bool:
    """It is of the operator `name`, and says anything."""
    return snapshot.operator == name and bool(snapshot.handles or snapshot.states)


def size_of(manifest: Manifest) -> int:
    """Bytes of state in a checkpoint, those it shares with older ones included."""
    return sum(handle.size_bytes for handle in manifest.handles())


def state_bytes_of(manifest: Manifest) -> dict[str, int]:
    """The same by operator, of those that have state."""
    found = {
        operator.name: sum(
            handle.size_bytes
            for subtask in operator.subtasks
            for snapshot in subtask.snapshots
            for handle in snapshot.handles
        )
        for operator in manifest.operators
    }
    return {name: size for name, size in found.items() if size}
