"""Packs of in-flight records: each run is found again, and nothing else, wherever the pack lies."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import xxhash

from headgate.errors import StateError
from headgate.runtime.protocol.checkpoints.packs import (
    FORMAT,
    PackBuilder,
    address_of,
    handle_of_list,
    is_pack,
    runs_of,
)
from headgate.state.snapshot import MANY, ChannelAddress, StateHandle


def address(sender: int, receiver: int) -> ChannelAddress:
    return ChannelAddress(
        source="s", side="", target="t", input_index=0, sender=sender, receiver=receiver
    )


def read(handle: StateHandle, file: bytes) -> bytes:
    """The verified bytes of a handle."""
    data = file[handle.offset : handle.offset + handle.size_bytes]
    if handle.inline is not None:
        data = handle.inline
    assert xxhash.xxh3_64_hexdigest(data) == handle.checksum
    assert len(data) == handle.size_bytes
    return data


def a_pack(rng: random.Random, kind: str) -> tuple[StateHandle, bytes, list[Any]]:
    """A pack at some place of a file, and its runs."""
    own, runs = rng.randrange(40), []
    for _ in range(rng.randrange(1, 9)):
        ends = (rng.randrange(6), own) if kind == "input" else (own, rng.randrange(6))
        runs.append((address(*ends), rng.randbytes(rng.randrange(1, 50)), rng.randrange(1, 2**40)))
    content = bytearray(rng.randbytes(rng.randrange(9)))
    pack = PackBuilder(content, "channel-state", kind, address_of(runs[0][0], kind))
    for run in runs:
        pack.add(*run)
    handle = pack.finish()
    content += b"of others"
    if rng.random() < 0.5:
        return msgspec.structs.replace(handle, file="f"), bytes(content), runs
    inline = bytes(content[handle.offset : handle.offset + handle.size_bytes])
    return msgspec.structs.replace(handle, inline=inline, offset=0), b"", runs


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("seed", range(40))
def test_each_run_is_found_by_its_list(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    handle, file, runs = a_pack(rng, kind)
    read(handle, file)
    assert is_pack(handle)
    assert handle.rows == sum(rows for _, _, rows in runs)
    listed = read(handle_of_list(handle), file)
    found = runs_of(handle, listed)
    assert not any(is_pack(run) for run in found)
    assert [(run.channel, read(run, file), run.rows) for run in found] == runs
    needed = {rng.randrange(6) for _ in range(3)}
    some = [
        run for run, (channel, _, _) in zip(found, runs, strict=True) if channel.receiver in needed
    ]
    assert list(runs_of(handle, listed, needed)) == (found if kind == "input" else some)


def test_both_ends_have_one_address_for_all_their_channels() -> None:
    assert {address_of(address(n, 3), "input") for n in range(9)} == {address(MANY, 3)}
    assert {address_of(address(3, n), "output") for n in range(9)} == {address(3, MANY)}
    assert address(MANY, 3).exchange == address(0, 0)


def test_a_list_of_a_newer_version_is_refused() -> None:
    handle, _, _ = a_pack(random.Random(1), "input")
    with pytest.raises(StateError, match="list of records on their way is in an unknown format"):
        runs_of(handle, msgspec.msgpack.encode((FORMAT + 1, b"")))
