"""Records the jobs that run on this machine, one small file per job, so that `headgate list` finds them.

The files lie in a directory of the user's own (mode 0700) and hold the address and the token of the
job's coordinator. They are hints: a coordinator that was killed leaves one behind, which the next reader
finds dead and removes. Each is sealed (`state/sealed.py`), so that a damaged one is an error with its path:
it is neither overlooked nor taken for that of a dead coordinator.

The token of a job is random, or the content of a file that every side has.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from ...errors import CorruptError, HeadgateError, StateError, StorageError, UsageError
from ...operators.private_directory import keep_newest, private_directory
from ...state.sealed import Record, SealedFormat
from ..options.network import CONTROL_TOKEN_FILE, QUERY_TOKEN_FILE
from ..options.registry import Options

ENDED_MAX: Final = 100
"""The number of jobs whose failures are kept after their end."""
TOKEN_CHARACTERS_MIN = 16
_log = logging.getLogger("headgate.registry")


class JobRecord(Record, frozen=True, kw_only=True):
    """The record of a running job: where the REST API of its coordinator listens."""

    name: str
    addresses: list[str]
    token: str
    pid: int
    started_ms: int
    cluster: str


_FORMAT: Final = SealedFormat[JobRecord]("record of a running job", JobRecord)
_FIX: Final = (
    "if the job still runs, find it by --storage or --cluster, or end its process; if it does not, delete "
    "the file"
)


def run_dir() -> Path:
    """Return the directory of the records and of the coordinators' Unix sockets; make it if necessary.

    Raises:
        StorageError: it cannot be made, or it belongs to another user.
    """
    base = os.environ.get("HEADGATE_RUN_DIR")
    if base is None:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        usable = runtime is not None and os.access(runtime, os.W_OK)
        base = (
            f"{runtime}/headgate" if usable else f"{tempfile.gettempdir()}/headgate-{os.getuid()}"
        )
    try:
        return private_directory(Path(base))
    except OSError as error:
        raise StorageError(
            f"the run directory cannot be used path=`{base}` cause=`{error.strerror or error}`",
            fix="set HEADGATE_RUN_DIR to a directory of your own",
        ) from error


def socket_path(name: str, pid: int, token: str) -> str:
    """Return the path of a Unix socket for workers; it is short whatever the name of the job."""
    return _socket(name, pid, token, "sock")


def rest_socket_path(name: str, pid: int, token: str) -> str:
    """Return the path of a Unix socket for the REST API of a coordinator."""
    return _socket(name, pid, token, "rest")


def _socket(name: str, pid: int, token: str, suffix: str) -> str:
    # Two coordinators of one process, one of which will be refused, have different tokens.
    digest = hashlib.blake2s(f"{name}/{pid}/{token}".encode(), digest_size=6).hexdigest()
    return str(run_dir() / f"{digest}.{suffix}")


def _file(name: str) -> Path:
    digest = hashlib.blake2s(name.encode(), digest_size=6).hexdigest()
    return run_dir() / f"job-{digest}.json"


def register(record: JobRecord) -> None:
    """Publish a record; replaces that of an earlier coordinator of the job."""
    target = _file(record.name)
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_FORMAT.encode(record))
    temporary.replace(target)


def leave_failures(name: str, failures: list[dict[str, Any]]) -> None:
    """Keep the failures of a job that has ended here, for `headgate history`, instead of older ones."""
    target = _ended(name)
    if not failures:
        target.unlink(missing_ok=True)
        return
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.encode(failures))
    temporary.replace(target)
    keep_newest(run_dir(), "ended-*.json", ENDED_MAX)


def left_failures(name: str) -> list[dict[str, Any]] | None:
    """Return the failures of the last run of a job that ended here; None: they are not known."""
    try:
        found: list[dict[str, Any]] = msgspec.json.decode(_ended(name).read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return found


def _ended(name: str) -> Path:
    digest = hashlib.blake2s(name.encode(), digest_size=6).hexdigest()
    return run_dir() / f"ended-{digest}.json"


def unregister(record: JobRecord) -> None:
    """Remove the record of a job, unless it is another one by now; one that cannot be read stays."""
    try:
        found = find(record.name)
    except HeadgateError as error:
        _log.warning("%s", error)
        return
    if found == record:
        with contextlib.suppress(FileNotFoundError):
            _file(record.name).unlink()


def forget(record: JobRecord) -> None:
    """Remove the record and the Unix sockets of a coordinator that was killed."""
    unregister(record)
    for path in _sockets_of(record):
        Path(path).unlink(missing_ok=True)


def _sockets_of(record: JobRecord) -> tuple[str, str]:
    key = (record.name, record.pid, record.token)
    return socket_path(*key), rest_socket_path(*key)


def is_alive(record: JobRecord) -> bool:
    """Return False if the coordinator's process is gone, or nothing can listen at its addresses.

    Process ids are valid only on the machine of the record, which is this one, because the record is in its
    run directory. If another process has got the number, the Unix socket is gone all the same.
    """
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    sockets = [a.removeprefix("unix:") for a in record.addresses if a.startswith("unix:")]
    # Records of older versions have no checksum, so an address may be wrong: `forget` must not remove the
    # sockets of a coordinator that lives.
    return not sockets or any(Path(path).exists() for path in (*sockets, *_sockets_of(record)))


def find(name: str) -> JobRecord | None:
    """Return the record of the job.

    Raises:
        StateError: it is damaged, or of a newer version.
        StorageError: it cannot be read.
    """
    return _read(_file(name))


def records() -> tuple[list[JobRecord], list[HeadgateError]]:
    """Return all records, by name, and an error for each file that cannot be read."""
    found: list[JobRecord] = []
    unread: list[HeadgateError] = []
    for path in sorted(run_dir().glob("job-*.json")):
        try:
            record = _read(path)
        except HeadgateError as error:
            unread.append(error)
            continue
        if record is not None:
            found.append(record)
    return sorted(found, key=lambda record: record.name), unread


def _read(path: Path) -> JobRecord | None:
    try:
        record = _FORMAT.decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"a record of a running job cannot be read path=`{path}` "
            f"cause=`{error.strerror or error}`",
            fix=_FIX,
        ) from error
    except StateError as error:
        if isinstance(error, CorruptError):
            error.fix = _FIX
        raise
    if _file(record.name).name != path.name:
        raise CorruptError(
            f"a record of a running job is damaged name=`{path}` "
            f"cause=`it is that of another job, {record.name}`",
            fix=_FIX,
        )
    return record


def make_token(options: Options) -> str:
    """Return the token for a job that begins: that of its file, or a random one.

    Raises:
        UsageError: the file has none.
    """
    path = options.get(CONTROL_TOKEN_FILE)
    return secrets.token_hex(16) if path is None else read_token_file(Path(path))


def query_token(options: Options, token: str | None) -> str | None:
    """Return the token that only queries of state take; None: there is none.

    Args:
        options: of the job.
        token: that of the job, if it is not random.

    Raises:
        UsageError: the file has none, or it has the token of the job.
    """
    path = options.get(QUERY_TOKEN_FILE)
    if path is None:
        return None
    found = read_token_file(Path(path))
    if found == token:
        raise UsageError(
            f"the token for queries is the token of the job {QUERY_TOKEN_FILE.key}=`{path}`",
            fix="put another secret there: who has this one could command the job",
        )
    return found


def read_token_file(path: Path) -> str:
    """Return the token in a file, without surrounding white space.

    Raises:
        UsageError: the file cannot be read, or its content is too short for a secret.
    """
    try:
        token = path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the token file cannot be read path=`{path}`: {error}",
            fix="mount the secret there, or name another file",
        ) from None
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise UsageError(
            f"the token in the file is too short path=`{path}` characters=`{len(token)}`",
            fix=f"put at least {TOKEN_CHARACTERS_MIN} random characters there, such as the output of "
            "`openssl rand -hex 16`",
        )
    return token
