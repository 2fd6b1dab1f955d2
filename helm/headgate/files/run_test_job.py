"""What `helm test` runs: make a StreamJob, wait for its end, delete it. It needs Python's own library only.

Arguments: the namespace and the name of the job, its number of records, and the seconds it may take.
"""

import http.client
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from typing import Any

IDENTITY = "/var/run/secrets/kubernetes.io/serviceaccount"
POLL_S = 1
ANSWER_S = 10
"""How long one request may take."""
DELETE_S = 50
"""How long the operator may take to let the ended job go, even if the job took all the time of the test:
the pod may last a minute longer than that."""
Deadline = float
"""A reading of the monotonic clock, in seconds."""


def call(
    method: str, path: str, until: Deadline, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One request; it is repeated until `until` while the API server cannot be reached or is busy.

    Raises:
        HTTPError: the API server refuses the request, or is busy until then.
        OSError: it cannot be reached until then.
    """
    while True:
        try:
            return _call_once(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            refused = isinstance(error, urllib.error.HTTPError) and not (
                error.code == 429 or error.code >= 500
            )
            if refused or time.monotonic() > until:
                raise
            print(f"{method} is repeated: {error}", flush=True)
            time.sleep(POLL_S)


def _call_once(method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    with open(f"{IDENTITY}/token") as file:
        headers = {"Authorization": f"Bearer {file.read()}", "Content-Type": "application/json"}
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    request = urllib.request.Request(
        f"https://{f'[{host}]' if ':' in host else host}:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        headers,
        method=method,
    )
    context = ssl.create_default_context(cafile=f"{IDENTITY}/ca.crt")
    with urllib.request.urlopen(request, context=context, timeout=ANSWER_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def job(name: str, rows: int) -> dict[str, Any]:
    spec = {
        "sources": {"numbers": {"generator": {"fields": {"n": "sequence"}, "rows": rows}}},
        "sinks": {"out": {"from": "numbers", "blackhole": {}}},
        # It keeps no checkpoints, and would fail for good if a pod were lost while it starts.
        "restart": {"strategy": "fixed-delay", "attempts": 5, "delay": "2s"},
        "kubernetes": {"deletion": {"policy": "Abort"}},
    }
    resource = {"apiVersion": "headgate.io/v1alpha1", "kind": "StreamJob"}
    return {**resource, "metadata": {"name": name}, "spec": spec}


def wait(path: str, until: Deadline) -> bool:
    """Print every change until the job ended; whether it ended well."""
    said = None
    while time.monotonic() < until:
        status = call("GET", path, until).get("status") or {}
        now = (status.get("phase", "Pending"), status.get("message", ""))
        if now != said:
            print(*now, flush=True)
            said = now
        if now[0] in ("Finished", "Failed"):
            return bool(now[0] == "Finished")
        time.sleep(POLL_S)
    print(
        "the job did not end in time; `kubectl describe` it, and read the operator's log, "
        "or set test.timeoutSeconds higher"
    )
    return False


def delete(path: str, until: Deadline) -> bool:
    """Delete the job. Returns whether there was one."""
    try:
        call("DELETE", path, until)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return False
    return True


def gone(path: str, until: Deadline) -> bool:
    """Wait until the operator has let the job go, which nobody does once it is uninstalled."""
    while time.monotonic() < until:
        try:
            call("GET", path, until)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return True
        time.sleep(POLL_S)
    return False


def make(jobs: str, name: str, rows: int, until: Deadline) -> None:
    """Make the job. No job of that name is there, except if an earlier answer to this request was lost.

    Raises:
        SystemExit: the API server refuses it.
    """
    try:
        call("POST", jobs, until, job(name, rows))
    except urllib.error.HTTPError as error:
        if error.code != 409:
            sys.exit(f"the job was refused: {error.read().decode(errors='replace')}")


def main(namespace: str, name: str, rows: str, seconds: str) -> None:
    until = time.monotonic() + int(seconds)
    jobs = f"/apis/headgate.io/v1alpha1/namespaces/{namespace}/streamjobs"
    path = f"{jobs}/{name}"
    if delete(path, until):
        print("a job of an earlier test was still there, and is deleted")
        if not gone(path, until):
            sys.exit(f"the job of an earlier test is still there after {seconds} s")
    make(jobs, name, int(rows), until)
    # A job that failed stays, so that one can look at it.
    if not wait(path, until):
        sys.exit(1)
    until = max(until, time.monotonic() + DELETE_S)
    delete(path, until)
    if not gone(path, until):
        sys.exit("the job was deleted, and is still there when the time of the test is over")


if __name__ == "__main__":
    main(*sys.argv[1:])
