"""Goal: a second run of a running job is refused, and one after a crash is not held up.

Method: `check_former` on virtual time, with what a look at the former coordinator finds given by the test;
the look itself at real sockets; `tests/cli/test_cli_takeover.py` has real processes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headgate.errors import UsageError
from headgate.runtime.coordinator.former import Reach, ask_leader, check_former, this_leader
from headgate.runtime.protocol.joblog import JobStatus, Leader
from headgate.runtime.storage.joblog_store import JobLog
from headgate.runtime.storage.memory import MemoryStore
from headgate.testing.loop import VirtualClock, VirtualLoop

LEADER = Leader(host="one", pid=7, started_ms=1_000, addresses=("tcp:10.0.0.1:5",))


class Lab:
    """The log of a run that goes on, and a new run that looks at it; time is virtual."""

    def __init__(self) -> None:
        self.loop = VirtualLoop(1)
        self.objects: dict[str, bytes] = {}
        self.former = self.log("former")
        self.run(
            self.former.start_generation(parallelism=1, max_parallelism=4, run="a", leader=LEADER)
        )
        self.asked = 0

    def log(self, writer: str) -> JobLog:
        return JobLog(MemoryStore("former", self.objects), writer, VirtualClock(self.loop))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = self.loop.create_task(work)
        self.loop.drive(self.loop.time() + 3600)
        return task.result()

    def check(self, *answers: Reach, run: str = "b", take_over: bool = False) -> str:
        """Start a run whose questions get these answers, the last one from then on; return the outcome."""

        async def ask(leader: Leader) -> Reach:
            assert leader == LEADER
            self.asked += 1
            return answers[min(self.asked, len(answers)) - 1]

        async def main() -> str:
            log = self.log("new")
            await log.load()
            return await check_former(
                log, run, take_over=take_over, watch_ms=20_000, now_ms=66_000, ask=ask
            )

        return str(self.run(main()))


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_a_run_that_goes_on_is_left_alone(lab: Lab) -> None:
    with pytest.raises(UsageError) as refused:
        lab.check(Reach.ANSWERS)
    assert refused.value.message == (
        "the job runs already: process 7 on one since 1970-01-01 00:00:01 UTC (1m 5s), no checkpoint yet"
    )
    assert "--take-over" in refused.value.fix
    assert len(lab.objects) == 2, "nothing was claimed"


def test_unless_the_user_says_so(lab: Lab) -> None:
    assert lab.check(Reach.ANSWERS, take_over=True).startswith("takes the job over from process 7")
    assert lab.asked == 0


def test_a_dead_one_holds_nobody_up(lab: Lab) -> None:
    assert lab.check(Reach.GONE).startswith("the former run is dead (process 7 on one")
    assert lab.asked == 1


def test_nor_does_one_that_is_about_to_die(lab: Lab) -> None:
    assert lab.check(Reach.ANSWERS, Reach.ANSWERS, Reach.GONE).startswith("the former run is dead")


def test_one_that_cannot_be_reached_is_taken_for_dead_if_it_writes_nothing(lab: Lab) -> None:
    text = lab.check(Reach.UNKNOWN)
    assert text.startswith("the former run cannot be reached, and has written nothing for 20s")


def test_and_lives_if_it_writes(lab: Lab) -> None:
    lab.loop.call_later(9, lambda: lab.loop.create_task(lab.former.end_job(JobStatus.FINISHED)))
    with pytest.raises(UsageError, match="runs already"):
        lab.check(Reach.UNKNOWN)


@pytest.mark.parametrize("run", ["a", "b"])
def test_a_restart_of_the_same_run_and_a_run_that_has_ended_are_not_asked(
    lab: Lab, run: str
) -> None:
    if run == "b":
        lab.run(lab.former.end_job(JobStatus.FINISHED))
    assert lab.check(Reach.ANSWERS, run=run) == ""
    assert lab.asked == 0


# --- the look at a coordinator ----------------------------------------------------------------


def looking(leader: Leader) -> Reach:
    return asyncio.run(ask_leader(leader))


def listening(path: Path | None = None) -> tuple[socket.socket, str]:
    if path is None:
        server = socket.create_server(("127.0.0.1", 0))
        return server, f"tcp:127.0.0.1:{server.getsockname()[1]}"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server, f"unix:{path}"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_who_listens_answers_and_who_was_killed_is_gone(kind: str, tmp_path: Path) -> None:
    server, address = listening(tmp_path / "s" if kind == "unix" else None)
    leader = this_leader([address], 5)
    assert looking(leader) is Reach.ANSWERS
    server.close()  # its file stays, as of a process that was killed
    assert looking(leader) is Reach.GONE


def test_one_of_two_addresses_is_enough(tmp_path: Path) -> None:
    server, address = listening()
    assert looking(this_leader([f"unix:{tmp_path}/gone", address], 5)) is Reach.ANSWERS
    server.close()


def test_loopback_and_files_of_another_machine_say_nothing(tmp_path: Path) -> None:
    server, address = listening()
    leader = this_leader([address, f"unix:{tmp_path}/gone"], 5)
    assert looking(msgspec.structs.replace(leader, host="elsewhere")) is Reach.UNKNOWN
    server.close()


def test_one_that_does_not_listen_is_judged_by_its_process() -> None:
    ask: Callable[[int], Reach] = lambda pid: looking(  # noqa: E731
        msgspec.structs.replace(this_leader([], 5), pid=pid)
    )
    assert ask(os.getpid()) is Reach.GONE, "this very process had another run before"
    assert ask(os.getppid()) is Reach.UNKNOWN
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert ask(child) is Reach.GONE


def test_a_leader_that_listened_where_we_do_is_gone() -> None:
    """A pod gets the address, the host name and the process number of the pod before it."""

    async def main() -> list[Reach]:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        address = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
        now_ms = time.time_ns() // 1_000_000
        before = msgspec.structs.replace(this_leader([address], now_ms), started_ms=1_000)
        within = this_leader([address], now_ms)  # another run in this very process
        found = [await ask_leader(each, own=[address]) for each in (before, within)]
        found.append(await ask_leader(before))
        server.close()
        return found

    assert asyncio.run(main()) == [Reach.GONE, Reach.ANSWERS, Reach.ANSWERS]
