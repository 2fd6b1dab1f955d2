"""State files read by `StateReader`, whole and in part, after one of them was damaged."""

from __future__ import annotations

import asyncio
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import xxhash

from headgate.runtime.protocol.checkpoints.packs import PackBuilder, address_of
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.task.local_files import SubtaskDirectory
from headgate.runtime.task.parquet_files import encode_tables
from headgate.runtime.task.state_restore import PackLists, StateReader
from headgate.state.keygroups import KeyGroupRange
from headgate.state.snapshot import ChannelAddress, OperatorSnapshot, StateHandle

from .corruption import damaged, judge

GROUPS = 64
ROWS = 6_000
PARTS = {"whole": KeyGroupRange(0, GROUPS - 1), "part": KeyGroupRange(20, 27)}


@dataclass(frozen=True)
class Files:
    """Some state in files, one of each kind, and its handles in a checkpoint."""

    objects: dict[str, bytes]
    snapshot: OperatorSnapshot
    in_flight: tuple[StateHandle, ...]


def _table(rng: random.Random, rows: int) -> pa.Table:
    groups = sorted(rng.randrange(GROUPS) for _ in range(rows))
    return pa.table(
        {
            "key_group": pa.array(groups, pa.int32()),
            "key": pa.array(range(rows), pa.int64()),
            "text": pa.array([f"text {rng.randrange(50)}" for _ in range(rows)]),
            "deleted": pa.array([False] * rows),
            "numbers": pa.array([[n, n + 1] if n % 3 else None for n in range(rows)]),
        }
    )


@cache
def files() -> Files:
    """Return the files, which are always the same."""
    rng = random.Random(1)
    objects: dict[str, bytes] = {}
    handles = []
    for kind, rows in (("table", ROWS), ("delta", ROWS // 4)):
        table = _table(rng, rows)
        pieces = [table.slice(start, 500) for start in range(0, rows, 500)]
        encoded = encode_tables(pieces, lambda: Path("too large"))
        assert encoded is not None
        assert isinstance(encoded.data, bytes)
        name = f"chk/1-1/{kind}.parquet"
        objects[name] = encoded.data
        handles.append(
            StateHandle(
                state="table",
                kind=kind,
                size_bytes=encoded.size_bytes,
                checksum=encoded.checksum,
                rows=rows,
                file=name,
                first_key_group=encoded.first_key_group,
                last_key_group=encoded.last_key_group,
                keys=("key",),
                footer=encoded.footer,
            )
        )
    items = msgspec.msgpack.encode([rng.randbytes(40) for _ in range(200)])
    for kind, data in (
        ("items", items),
        ("file", rng.randbytes(9_000)),
        ("meta", rng.randbytes(700)),
    ):
        name = f"chk/1-1/{kind}.bin"
        objects[name] = data
        handles.append(_handle(kind, kind.replace("meta", "file"), data, name))
    channel = ChannelAddress(source="a", side="", target="b", input_index=0, sender=0, receiver=0)
    pieces_of_channels = [rng.randbytes(1_500) for _ in range(3)]
    objects["chk/1-1/in-flight.channel"] = b"".join(pieces_of_channels)
    in_flight = tuple(
        msgspec.structs.replace(
            _handle("input", "channel-state", data, "chk/1-1/in-flight.channel"),
            channel=channel,
            offset=1_500 * number,
        )
        for number, data in enumerate(pieces_of_channels)
    )
    packs = (_pack(rng, objects, "input", 0), _pack(rng, objects, "output", 1))
    snapshot = OperatorSnapshot(operator="op", handles=tuple(handles))
    return Files(objects, snapshot, (*in_flight, *packs))


def _pack(rng: random.Random, objects: dict[str, bytes], kind: str, end: int) -> StateHandle:
    """Add a file with a pack of the channels between subtask `end` and three others."""
    content = bytearray()
    channels = [
        ChannelAddress(
            source="a",
            side="",
            target="b",
            input_index=0,
            sender=other if kind == "input" else end,
            receiver=end if kind == "input" else other,
        )
        for other in range(3)
    ]
    pack = PackBuilder(content, "channel-state", kind, address_of(channels[0], kind))
    for channel in channels:
        pack.add(channel, rng.randbytes(700), 1)
    name = f"chk/1-1/{kind}.channel"
    handle = msgspec.structs.replace(pack.finish(), file=name)
    objects[name] = bytes(content)
    return handle


def _handle(kind: str, state: str, data: bytes, name: str) -> StateHandle:
    return StateHandle(
        state=state,
        kind=kind,
        size_bytes=len(data),
        checksum=xxhash.xxh3_64_hexdigest(data),
        rows=1,
        file=name,
        last_key_group=GROUPS - 1,
        file_id="one" if kind == "file" else "",
    )


async def _read(objects: dict[str, bytes], own: KeyGroupRange, directory: Path) -> list[Any]:
    with ThreadPoolExecutor(1) as threads:
        reader = StateReader(
            MemoryStore("damaged", objects),
            subtask="op (1/1)",
            own=own,
            threads=threads,
            transfers=asyncio.Semaphore(4),
            directory=SubtaskDirectory(directory),
            progress=lambda _: None,
        )
        state = await reader.load("op", [files().snapshot])
        (restored,) = state.files["file"]
        contents = {id_: path.read_bytes() for id_, path in restored.files.items()}
        receivers = {0, 2} if own.first else {0, 1, 2}
        runs = await reader.runs_in_flight(files().in_flight, lambda _: receivers, PackLists())
        pieces = await reader.load_in_flight(runs)
    return [state.tables["table"].to_pylist(), state.items, restored.meta, contents, pieces]


def read(objects: dict[str, bytes], part: str) -> list[Any]:
    """Return all state, as a subtask with the key groups of `part` restores it."""
    with tempfile.TemporaryDirectory(prefix="headgate-damaged-") as directory:
        return asyncio.run(_read(objects, PARTS[part], Path(directory)))


@cache
def undamaged(part: str) -> list[Any]:
    """Return the state that is read from undamaged files."""
    return read(files().objects, part)


def check_damage(name: str, part: str, rng: random.Random) -> str:
    """Damage the file called `name`, and read all state; see `judge`."""
    kind, data = damaged(files().objects[name], rng)
    return judge(
        lambda: read({**files().objects, name: data}, part),
        undamaged(part),
        name,
        f"{kind} in {name}, read {part}",
    )
