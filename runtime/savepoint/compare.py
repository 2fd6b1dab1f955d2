"""Compares two savepoints, or a savepoint with a job."""

from __future__ import annotations

from typing import Any

import msgspec

from ...operators.graph import Node
from ...state.evolution import changed_meaning, compare, is_pickled
from ...state.snapshot import HINT, ChannelAddress, StateInfo
from ..options.registry import Options
from ..options.state import ALLOW_PICKLE, RECOVERY_ACCEPT_CHANGES, WITHOUT_CHANNEL_STATE
from ..plan import JobSpec, PhysicalPlan
from ..protocol.checkpoints.manifest import Manifest
from ..protocol.split_discovery import KNOWN_SPLITS
from .describe import SPLITS, describe, states_of
from .locate import StoredSnapshot


class RestoreCheck(msgspec.Struct):
    """The findings for a restore of a savepoint into a job.

    Attributes:
        unclaimed: states, as `operator.state`, that no operator of the job claims.
        incompatible: why states cannot be loaded, each with the old and the new type.
        migrated: states that are loaded with changes.
        new: states of the job that the savepoint does not have; they start empty.
        other: anything else that would prevent the start.
    """

    unclaimed: list[str] = msgspec.field(default_factory=list)
    incompatible: list[str] = msgspec.field(default_factory=list)
    migrated: list[str] = msgspec.field(default_factory=list)
    new: list[str] = msgspec.field(default_factory=list)
    other: list[str] = msgspec.field(default_factory=list)

    def ok(self, *, allow_non_restored: bool = False) -> bool:
        """Return True if the job would start."""
        return not (self.incompatible or self.other or (self.unclaimed and not allow_non_restored))


def check(located: StoredSnapshot, spec: JobSpec) -> RestoreCheck:
    """Compare the located state with the declarations of a job's operators; nothing is started."""
    found = RestoreCheck()
    _check_parallelism(located, spec, found)
    _check_in_flight(located, spec, found)
    if not Options(spec.options).get(ALLOW_PICKLE):
        found.other.extend(
            f"state `{name}` is pickled, and {ALLOW_PICKLE.key} is false"
            for name in stored_pickles(located.manifest)
        )
    declared = declared_states(spec.plan)
    found.unclaimed.extend(unclaimed_states(located.manifest, declared))
    stored = {operator.name: states_of(operator) for operator in located.manifest.operators}
    for operator, states in stored.items():
        for name, old in states.items():
            new = declared.get(operator, {}).get(name)
            if old is not None and new is not None:
                _compare(operator, old, new, found)
    accepted = accepted_changes(Options(spec.options))
    for operator, changes in changed_meanings(located.manifest, declared).items():
        (found.migrated if operator in accepted else found.incompatible).extend(
            f"operator `{operator}`: {text}" for text in changes
        )
    for operator, known in declared.items():
        missing = known.keys() - stored.get(operator, {}).keys()
        found.new.extend(f"{operator}.{name}" for name in sorted(missing))
    return found


def _check_parallelism(located: StoredSnapshot, spec: JobSpec, found: RestoreCheck) -> None:
    groups = located.manifest.max_parallelism
    if spec.max_parallelism not in (None, groups):
        found.other.append(
            f"max parallelism is {spec.max_parallelism} in the job and {groups} in the savepoint: "
            f"set it to {groups}, or leave it unset"
        )
    widest = max(vertex.parallelism for vertex in spec.plan.vertices)
    if widest > groups:
        found.other.append(
            f"parallelism {widest} is above the {groups} key groups of the savepoint"
        )


def _check_in_flight(located: StoredSnapshot, spec: JobSpec, found: RestoreCheck) -> None:
    if Options(spec.options).get(WITHOUT_CHANNEL_STATE) == located.manifest.checkpoint_id:
        return
    found.other.extend(
        f"it holds in-flight records from step `{channel.source}` to `{channel.target}`, which are not "
        f"connected in the job: start from a savepoint, or discard them with {WITHOUT_CHANNEL_STATE.key}"
        for channel in unconnected(located.manifest, spec.plan)
    )


def stored_pickles(manifest: Manifest) -> list[str]:
    """Return the states of a checkpoint that are marked as pickled, as `operator.state`."""
    return sorted(
        f"{operator.name}.{name}"
        for operator in manifest.operators
        for name, info in states_of(operator).items()
        if info is not None and is_pickled(info)
    )


def declared_states(plan: PhysicalPlan) -> dict[str, dict[str, StateInfo]]:
    """Return the declared states by operator; nothing for operators that declare them only at run time."""
    return {node.name: _declared(node) for vertex in plan.vertices for node in vertex.nodes}


def _declared(node: Node) -> dict[str, StateInfo]:
    if node.source is not None:
        states = {SPLITS: StateInfo(name=SPLITS, kind="split")}
        if node.source.discovers:
            states[KNOWN_SPLITS] = StateInfo(name=KNOWN_SPLITS, kind="union")
        return states
    if node.factory is None:
        return {}
    return {info.name: info for info in node.factory().states()}


def unclaimed_states(manifest: Manifest, declared: dict[str, dict[str, StateInfo]]) -> list[str]:
    """Return states of a checkpoint, as `operator.state`, that no operator of a job claims.

    Operators that declare no states claim everything stored under their name, and so do those of
    which the checkpoint has states that were not declared then. Hints need no claim.
    """
    found = []
    for operator in manifest.operators:
        known = declared.get(operator.name)
        for name, old in states_of(operator).items():
            if old is not None and old.kind == HINT:
                continue
            if known is None or (known and old is not None and name not in known):
                found.append(f"{operator.name}.{name}")
    return sorted(found)


def changed_meanings(
    manifest: Manifest, declared: dict[str, dict[str, StateInfo]]
) -> dict[str, list[str]]:
    """Return, by operator, where stored values have another meaning than those of today's job."""
    found: dict[str, list[str]] = {}
    for operator in manifest.operators:
        known = declared.get(operator.name, {})
        for name, old in states_of(operator).items():
            if old is not None and name in known:
                for text in changed_meaning(old, known[name]):
                    if text not in found.setdefault(operator.name, []):
                        found[operator.name].append(text)
    return {operator: texts for operator, texts in found.items() if texts}


def accepted_changes(options: Options) -> frozenset[str]:
    """Return the steps whose state the user wants to keep although their computation has changed."""
    named = options.get(RECOVERY_ACCEPT_CHANGES) or ""
    return frozenset(name.strip() for name in named.split(","))


def unconnected(manifest: Manifest, plan: PhysicalPlan) -> list[ChannelAddress]:
    """Return the exchanges of which a checkpoint has records, and that a job does not have."""
    channels = {handle.channel for handle in manifest.handles() if handle.channel is not None}
    gone = {channel.exchange for channel in channels} - plan.exchanges().keys()
    return sorted(gone, key=lambda each: (each.source, each.target, each.input_index))


def _compare(operator: str, old: StateInfo, new: StateInfo, found: RestoreCheck) -> None:
    result = compare(old, new)
    if result.verdict == "incompatible":
        found.incompatible.append(f"operator `{operator}`: {result.text}")
    elif result.verdict == "migration":
        found.migrated.append(f"operator `{operator}`: {result.text}")


def diff(one: StoredSnapshot, other: StoredSnapshot) -> list[dict[str, Any]]:
    """Return the changes from `one` to `other`: a row per state that is new, removed, or different."""
    before, after = _states(one), _states(other)
    rows: list[dict[str, Any]] = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        changes = _changes(old, new)
        if changes:
            rows.append(
                {
                    "operator": key[0],
                    "state": key[1],
                    "change": "added" if old is None else "removed" if new is None else "changed",
                    "details": changes,
                    "rows": _growth(old, new, "rows"),
                    "bytes": _growth(old, new, "bytes"),
                }
            )
    return rows


def _states(located: StoredSnapshot) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (operator["operator"], state["state"]): {**state, "parallelism": operator["parallelism"]}
        for operator in describe(located)["operators"]
        for state in operator["states"]
    }


_COMPARED = ("kind", "keys", "values", "version", "ttl_ms", "parallelism", "rows", "bytes")


def _changes(old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, list[Any]]:
    """Return the values before and after, field by field."""
    return {
        name: [(old or {}).get(name), (new or {}).get(name)]
        for name in _COMPARED
        if (old or {}).get(name) != (new or {}).get(name)
    }


def _growth(old: dict[str, Any] | None, new: dict[str, Any] | None, name: str) -> int:
    return int((new or {}).get(name, 0)) - int((old or {}).get(name, 0))
