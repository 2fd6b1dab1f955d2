"""A checkpoint of one backend, restored by the other."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.errors import StateError


def test_files_of_rocksdb_are_not_silently_left_out(world: Any, job: Any) -> None:
    backends = world.start(1)
    job.write(backends, range(10), 1)
    checkpoint = world.checkpoint(backends)
    with pytest.raises(StateError, match="another state backend") as caught:
        world.memory().restore(world.restored(checkpoint, world.own(0, 1)), 0)
    assert "state.backend.type" in caught.value.fix
