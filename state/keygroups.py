"""Key groups: the atomic units of keyed state (in Flink: `KeyGroupRangeAssignment`).

A key belongs for ever to one of `max_parallelism` key groups; a subtask owns a contiguous range.
"""

from __future__ import annotations

import msgspec

from ..errors import PlanError

MAX_PARALLELISM_LIMIT = 32768


class KeyGroupRange(msgspec.Struct, frozen=True):
    """Key groups `first` to `last`, both included; empty if last < first."""

    first: int
    last: int

    def __contains__(self, key_group: int) -> bool:
        return self.first <= key_group <= self.last

    def __len__(self) -> int:
        return max(0, self.last - self.first + 1)

    def overlaps(self, other: KeyGroupRange) -> bool:
        """Return True if the two ranges share a key group."""
        return self.first <= other.last and other.first <= self.last


def key_group_range(subtask: int, parallelism: int, max_parallelism: int) -> KeyGroupRange:
    """Return the range that subtask number `subtask` of `parallelism` owns."""
    first = (subtask * max_parallelism + parallelism - 1) // parallelism
    last = ((subtask + 1) * max_parallelism - 1) // parallelism
    return KeyGroupRange(first, last)


def owner_of(key_group: int, parallelism: int, max_parallelism: int) -> int:
    """Return the subtask that owns `key_group`."""
    return key_group * parallelism // max_parallelism


def default_max_parallelism(parallelism: int) -> int:
    """Return Flink's default: 1.5 × parallelism rounded up to a power of two, within [128, 32768]."""
    wanted = parallelism + parallelism // 2
    power = 1 << max(0, wanted - 1).bit_length()
    return min(max(power, 128), MAX_PARALLELISM_LIMIT)


def check_max_parallelism(max_parallelism: int, parallelism: int) -> None:
    """Raise PlanError unless 1 <= parallelism <= max_parallelism <= 32768."""
    if not 1 <= max_parallelism <= MAX_PARALLELISM_LIMIT:
        raise PlanError(
            f"max parallelism must lie in 1..{MAX_PARALLELISM_LIMIT} value=`{max_parallelism}`"
        )
    if parallelism > max_parallelism:
        raise PlanError(
            f"parallelism is above the number of key groups parallelism=`{parallelism}` "
            f"max_parallelism=`{max_parallelism}`",
            fix="lower the parallelism, or start the job fresh with more key groups",
        )
