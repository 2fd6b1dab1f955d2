"""Jobs on the RocksDB backend: the option, a failure with recovery, and what is shared in a process."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import Pause, collect, from_list
from headgate.errors import PlanError
from headgate.operators import extras, keyed_backend
from headgate.state.rocksdb.database import shared_memory
from headgate.state.settings import RocksDBSettings

KEYS = 50


class Count(hg.KeyedProcess[int, tuple[int, int], tuple[int, int]]):
    """Counts the records of a key; fails once, when there have been checkpoints."""

    seen = hg.ValueState[int](default=0)
    last = hg.ListState[int]()

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def open(self, ctx: Any) -> None:
        if ctx.restored_checkpoint:
            self.marker.write_text(str(ctx.restored_checkpoint))

    def on_record(self, record: tuple[int, int], ctx: Any) -> list[tuple[int, int]]:
        self.seen.set(self.seen.get() + 1)
        self.last.add(record[1])
        assert len(self.last.get()) == self.seen.get()
        if record[1] == 4_000 and not self.marker.exists():
            self.marker.touch()
            raise RuntimeError("once")
        return [(record[0], self.seen.get())]


def test_a_job_recovers_with_its_state(tmp_path: Path) -> None:
    job = hg.Job(
        "counts",
        options={
            "state.backend.type": "rocksdb",
            "execution.checkpointing.interval": "50 ms",
            "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": "3",
            "restart-strategy.fixed-delay.delay": "0 ms",
        },
    )
    items: list[Any] = []
    for low in range(0, 6_000, 500):
        items += [(i % KEYS, i) for i in range(low, low + 500)]
        items.append(Pause("100ms"))  # time for a checkpoint
    out = collect(guarantee="exactly_once")
    job.read(from_list(items, batch_rows=100), name="in").key_with(_first).process(
        Count(str(tmp_path / "marker")), name="count"
    ).write(out, name="out")
    job.run()
    assert int((tmp_path / "marker").read_text()) > 0
    assert sorted(out.rows) == [(k, n + 1) for k in range(KEYS) for n in range(6_000 // KEYS)]


def _first(record: tuple[int, int]) -> int:
    return record[0]


def test_without_the_package_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    job = hg.Job("counts", options={"state.backend.type": "rocksdb"})
    rows = job.read(from_list([(1, 1)]), name="in")
    rows.key_with(_first).process(Count(""), name="count").write(
        collect(guarantee="none"), name="out"
    )
    with pytest.raises(PlanError, match=r"pip install 'headgate\[rocksdb\]'"):
        job.run()


def test_options_become_settings() -> None:
    assert keyed_backend.rocksdb_settings({}) == RocksDBSettings()
    options = hg.Job("x", options={"state.backend.rocksdb.writebuffer.size": "8 mb"}).options
    assert keyed_backend.rocksdb_settings(options).write_buffer_bytes == 8 << 20


def test_all_databases_of_a_process_share_one_memory(world: Any) -> None:
    first, second = world.start(2)
    memories = {
        id(table.database._memory) for one in (first, second) for table in one._tables.values()
    }
    assert len(memories) == 1
    settings = first._tables["number"].database.settings
    memory = shared_memory(settings)
    assert id(memory) in memories
    for key in range(300_000):
        first.set_key(key)
        first.value_table("number").put(key)
    assert 0 < memory.cache.get_usage() <= 1.5 * settings.memory_bytes
    assert memory.write_buffers.get_buffer_size() == settings.memory_bytes // 2


_HOLDER = """
import pickle, runpy, sys
from pathlib import Path
shared = runpy.run_path(sys.argv[1])
here = Path(sys.argv[2])
(here / "uploaded").mkdir()
(here / "local").mkdir()
world = shared["World"](here / "local", shared["Store"](here / "uploaded"))
job, backends = shared["Job"](), world.start(1)
job.write(backends, range(3000), 1)
plain = world.to_plain(world.checkpoint(backends))
(here / "out").write_bytes(pickle.dumps((plain, job.numbers, job.names)))
job.write(backends, range(3000), 2)
backends[0].snapshot({})["number"].collect()
print("ready", flush=True)
while True:
    job.write(backends, range(3000), 3)
"""


def test_files_outlive_a_killed_process(world: Any, job: Any, tmp_path: Path) -> None:
    """Killed while it writes and holds an open cut; a new process has the uploaded files only."""
    conftest = Path(__file__).with_name("conftest.py")
    here = tmp_path / "killed"
    here.mkdir()
    arguments = [sys.executable, "-c", _HOLDER, str(conftest), str(here)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
        finally:
            process.kill()
    shutil.rmtree(here / "local")
    plain, job.numbers, job.names = pickle.loads((here / "out").read_bytes())
    checkpoint = world.from_plain(plain)
    job.check(world.restore(checkpoint, 1))
    job.check(world.restore(checkpoint, 2))
