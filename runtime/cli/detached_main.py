"""The process of a detached job: `headgate run` without a terminal, for a job that comes in by stdin.

It answers once, at the descriptor in its argument: that the job has begun, or with the error for which it
could not begin. After that its parent does not wait for it any more.
"""

from __future__ import annotations

import os
import pickle
import sys

import msgspec

PROGRESS_EVERY_S = 60.0
"""A line of progress in the log; it grows by about 200 kB a day."""


def main() -> None:
    """Run the job to its end; the exit code is that of `headgate run`."""
    answers = int(sys.argv[1])
    from ..cluster.spawned import ACCEPTED, Payload

    payload = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Payload)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.path.extend(path for path in payload.python_path if path not in sys.path)
    open_answer = True

    def answer(data: bytes) -> None:
        nonlocal open_answer
        if open_answer:
            open_answer = False
            os.write(answers, data)
            os.close(answers)

    from ..shipping import unship
    from .console import report
    from .run import configure_logging, run_spec

    try:
        configure_logging(payload.log_level)
        code = run_spec(
            unship(payload.job),
            payload.cluster,
            accepted=lambda: answer(ACCEPTED),
            progress_every_s=PROGRESS_EVERY_S,
        )
    except Exception as error:
        answer(_pickled(error))
        code = report(error)
    answer(ACCEPTED)  # it ended before anything was heard of it
    sys.exit(code)


def _pickled(error: Exception) -> bytes:
    from ...errors import InternalError

    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(InternalError(str(error)))


if __name__ == "__main__":
    main()
