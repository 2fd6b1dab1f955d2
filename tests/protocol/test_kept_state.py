"""A state in memory is taken over only if the restored checkpoint names the very files of its cut."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headgate.runtime.protocol import kept_state
from headgate.runtime.protocol.kept_state import KeptFacts, RestoreFacts, reason_to_read
from headgate.state.keygroups import KeyGroupRange
from headgate.state.snapshot import StateHandle


def handle(checksum: str, kind: str = "table") -> StateHandle:
    return StateHandle(state="s", kind=kind, size_bytes=9, checksum=checksum, rows=1, file="chk/7")


OWN = KeyGroupRange(0, 3)
FILES = (handle("a"), handle("b", "delta"))
KEPT = KeptFacts("code", OWN, {6, 7}, FILES)
RESTORED = RestoreFacts("code", OWN, 7, True, FILES)


def test_the_state_of_the_same_cut_is_taken_over() -> None:
    assert reason_to_read(KEPT, RESTORED) == ""
    assert reason_to_read(replace(KEPT, handles=()), replace(RESTORED, handles=())) == ""


@pytest.mark.parametrize(
    ("kept", "restored", "reason"),
    [
        (KEPT, replace(RESTORED, code="other"), kept_state.OTHER_JOB),
        (KEPT, replace(RESTORED, key_groups=KeyGroupRange(0, 7)), kept_state.OTHER_KEY_GROUPS),
        (KEPT, replace(RESTORED, of_this_job=False), kept_state.OTHER_STORAGE),
        (KEPT, replace(RESTORED, checkpoint_id=5), kept_state.NOT_OPEN),
        (replace(KEPT, handles=None), RESTORED, kept_state.NOT_WRITTEN),
        # A later attempt has used the number of the checkpoint, and the name of the file, again.
        (KEPT, replace(RESTORED, handles=(handle("a"), handle("c", "delta"))), kept_state.OTHER_FILES),
        (KEPT, replace(RESTORED, handles=FILES[:1]), kept_state.OTHER_FILES),
        (replace(KEPT, handles=()), RESTORED, kept_state.OTHER_FILES),
    ],
)  # fmt: skip
def test_everything_else_is_read(kept: KeptFacts, restored: RestoreFacts, reason: str) -> None:
    assert reason_to_read(kept, restored) == reason
