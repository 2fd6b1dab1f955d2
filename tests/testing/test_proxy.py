"""CuttingProxy: bytes arrive up to the cut, and no further."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from headgate.testing.proxy import CuttingProxy, Direction
from headgate.tests.testing.counter import Counter, ask


@pytest.fixture
def counter() -> Iterator[Counter]:
    made = Counter()
    made.lists["a"] = list(range(1000))
    yield made
    made.close()


@pytest.fixture
def proxy(counter: Counter) -> Iterator[CuttingProxy]:
    with CuttingProxy(counter.port) as made:
        yield made


def read(proxy: CuttingProxy) -> list[object]:
    found = []
    with contextlib.suppress(OSError):
        for record in ask(proxy.port, "read", "a", 0):
            found.append(record)
    return found


def test_everything_passes_until_a_cut(proxy: CuttingProxy) -> None:
    assert read(proxy) == [*range(1000), "these are all"]
    assert proxy.passed("answers") == 10 * 2 + 90 * 3 + 900 * 4 + len('"these are all"\n')
    assert proxy.cuts == 0


@pytest.mark.parametrize(("count", "seen"), [(0, 0), (1, 0), (2, 1), (20, 10), (23, 11)])
def test_answers_are_cut_at_a_byte_once(proxy: CuttingProxy, count: int, seen: int) -> None:
    before = proxy.passed("answers")
    proxy.cut_after(count, "answers")
    assert read(proxy) == list(range(seen))
    assert (proxy.passed("answers") - before, proxy.cuts) == (count, 1)
    assert len(read(proxy)) == 1001


@pytest.mark.parametrize(("direction", "done"), [("requests", False), ("answers", True)])
def test_the_server_may_have_done_it(
    counter: Counter, proxy: CuttingProxy, direction: Direction, done: bool
) -> None:
    proxy.cut_after(0, direction)
    with pytest.raises(OSError, match=r".+"):
        list(ask(proxy.port, "append", "b", [1]))
    with counter.lock:
        assert counter.lists.get("b", []) == [1] * done


def test_a_cut_that_has_not_come_can_be_forgotten(proxy: CuttingProxy) -> None:
    proxy.cut_after(5, "answers")
    proxy.calm()
    assert len(read(proxy)) == 1001


def test_all_connections_are_cut_at_a_command(proxy: CuttingProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client:
        client.sendall(b'["append", "b", []]\n')
        assert client.recv(100) == b'"done"\n'
        proxy.cut()
        with contextlib.suppress(ConnectionError):
            assert client.recv(100) == b""
    assert len(read(proxy)) == 1001


def test_without_a_server_clients_are_refused_until_there_is_one(counter: Counter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        nobody = held.getsockname()[1]
    with CuttingProxy(nobody) as proxy:
        assert read(proxy) == []
