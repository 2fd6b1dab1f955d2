"""One container as a local process, with its own files, processes and host name, and its pod's network.

The container's root is the machine's, under an overlay that is dropped with the container. So the
interpreter and headgate are there as in an image, any path can be a mount point, and a read-only root is
read-only. This needs root.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import headgate

PACKAGE = Path(headgate.__file__).resolve().parent
LAUNCHER = Path(__file__).with_name("launcher.py")
HOME = "/home/headgate"
USER = 10001
"""The user of the image."""
PATHS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
LAST_WORDS = "/dev/termination-log"
DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
POLL_S = 0.01


@dataclass(frozen=True)
class Mount:
    """A file or directory of the machine that the container sees at `path`."""

    source: Path
    path: str
    read_only: bool


@dataclass(frozen=True)
class Sandbox:
    """The settings that a container is started with.

    Attributes:
        directory: its own, and new for each start.
        network: the file of the network namespace of its pod.
    """

    directory: Path
    network: str
    hostname: str
    command: list[str]
    env: dict[str, str]
    mounts: list[Mount]
    working_directory: str = HOME
    user: int = USER
    group: int = USER
    groups: tuple[int, ...] = ()
    read_only_root: bool = False
    last_words_path: str = LAST_WORDS

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def last_words(self) -> Path:
        """The file behind the container's termination message."""
        return self.directory / "last-words"


@dataclass
class Running:
    """A started container. `pid` is, on the machine, that of the container's process 1."""

    process: asyncio.subprocess.Process
    sandbox: Sandbox
    pid: int

    def signal(self, number: signal.Signals) -> None:
        """A signal to process 1 of the container, if it is still there."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    async def run(self, command: list[str], seconds_max: float) -> bool:
        """Return True if a command inside the container ends with success in time."""
        inside = [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--pid",
            "--ipc",
            "--uts",
            "--net",
            "--root",
        ]
        process = await asyncio.create_subprocess_exec(
            *inside,
            *_as_user(self.sandbox),
            *command,
            env=self.sandbox.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return await asyncio.wait_for(process.wait(), seconds_max) == 0
        except TimeoutError:
            process.kill()
            await process.wait()
            return False


async def start(sandbox: Sandbox) -> Running:
    """Start the container; its output goes to `sandbox.log`."""
    for name in ("upper", "work", "root", "tmp", "run"):
        (sandbox.directory / name).mkdir(parents=True)
    (sandbox.directory / "tmp").chmod(0o1777)
    sandbox.last_words.touch()
    sandbox.last_words.chmod(0o666)
    script = sandbox.directory / "start.sh"
    script.write_text(_script(sandbox))
    number = sandbox.directory / "pid"
    with sandbox.log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(LAUNCHER), str(number), sandbox.network),
            *("sh", str(script)),
            env=sandbox.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = sandbox.directory / "started"
    while process.returncode is None and not (started.exists() and number.exists()):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    return Running(process, sandbox, int(number.read_text()) if number.exists() else process.pid)


def base_environment(programs: str) -> dict[str, str]:
    """Return what an image of headgate sets: the interpreter of the tests comes first on the path.

    Arguments:
        programs: a directory of programs that come even before it, or an empty text.
    """
    path = ":".join([*filter(None, [programs]), f"{sys.prefix}/bin", *PATHS])
    return {"PATH": path, "HOME": HOME, "PYTHONUNBUFFERED": "1", "LANG": "C.UTF-8"}


def _script(sandbox: Sandbox) -> str:
    root = str(sandbox.directory / "root")
    inner = sandbox.directory
    lines = [
        "set -e",
        "mount --make-rprivate /",
        f"echo {shlex.quote(sandbox.hostname)} > /proc/sys/kernel/hostname",
        f"mount -t overlay overlay -o lowerdir=/,upperdir={inner}/upper,workdir={inner}/work {root}",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /sys {root}/sys",
        *_devices(root),
        f"mount --bind {inner}/tmp {root}/tmp",
        f"mount --bind {inner}/run {root}/run",
        *_installation(root),
        f"mkdir -p {root}{HOME} && chown {USER}:{USER} {root}{HOME}",
        # Mount points are made before anything is read-only, and parents before what lies in them.
        *(
            line
            for mount in sorted(sandbox.mounts, key=lambda m: os.path.realpath(m.path))
            for line in _mount(root, mount)
        ),
        *_mount(root, Mount(sandbox.last_words, sandbox.last_words_path, read_only=False)),
    ]
    if sandbox.read_only_root:
        lines += [f"mount -o remount,bind,ro {root}", f"mount -o remount,bind,ro {root}/run"]
        if not any(mount.path.rstrip("/") == "/tmp" for mount in sandbox.mounts):
            lines.append(f"mount -o remount,bind,ro {root}/tmp")
    lines.append(f"mkdir {inner}/started")
    lines.append(shlex.join(["exec", "chroot", root, *_as_user(sandbox), *sandbox.command]))
    return "\n".join(lines) + "\n"


def _devices(root: str) -> list[str]:
    """A /dev of its own, as a container has it: in that of the machine nothing may be made."""
    lines = [f"mount -t tmpfs -o size=64k,mode=755 tmpfs {root}/dev"]
    for name in DEVICES:
        lines += [f"touch {root}/dev/{name}", f"mount --bind /dev/{name} {root}/dev/{name}"]
    lines += [
        f"ln -s /proc/self/fd/{number} {root}/dev/{name}"
        for number, name in enumerate(("stdin", "stdout", "stderr"))
    ]
    shm = f"mount -t tmpfs -o size=64m,mode=1777 tmpfs {root}/dev/shm"
    return [*lines, f"ln -s /proc/self/fd {root}/dev/fd", f"mkdir {root}/dev/shm", shm]


def _mount(root: str, mount: Mount) -> list[str]:
    # The links of the machine are those of the container, and must not lead out of its root.
    target = shlex.quote(root + os.path.realpath(mount.path))
    source = shlex.quote(str(mount.source))
    if mount.source.is_dir():
        lines = [f"mkdir -p {target}"]
    else:
        lines = [f"mkdir -p $(dirname {target})", f"[ -e {target} ] || touch {target}"]
    lines.append(f"mount --bind {source} {target}")
    if mount.read_only:
        lines.append(f"mount -o remount,bind,ro {target}")
    return lines


def _installation(root: str) -> list[str]:
    """The interpreter and headgate, wherever they are, can be read by any user."""
    lines = []
    for path in dict.fromkeys([Path(sys.prefix), Path(sys.base_prefix), PACKAGE]):
        hidden = path.is_relative_to("/tmp") or path.is_relative_to("/run")
        if hidden or path.stat().st_dev != os.stat("/").st_dev:
            lines += [f"mkdir -p {root}{path}", f"mount --rbind {path} {root}{path}"]
        lines += [
            f"chmod o+x {root}{parent}" for parent in path.parents if not _open_to_all(parent)
        ]
    return lines


def _open_to_all(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o001)


def _as_user(sandbox: Sandbox) -> list[str]:
    groups = ",".join(str(group) for group in sandbox.groups)
    return [
        *("setpriv", "--reuid", str(sandbox.user), "--regid", str(sandbox.group)),
        *(["--groups", groups] if groups else ["--clear-groups"]),
        *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"),
        *("env", f"--chdir={sandbox.working_directory}"),
    ]
