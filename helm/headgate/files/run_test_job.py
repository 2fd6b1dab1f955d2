"""What `helm test` runs: make a StreamJob, wait for its end, delete it. It needs Python's own library only.

Arguments: the namespace and the name of the job, its number of records, and the seconds it may take.
"""

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


def call(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
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
    with urllib.request.urlopen(request, context=context, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def job(name: str, rows: int) -> dict[str, Any]:
    spec = {
        "sources": {"numbers": {"generator": {"fields": {"n": "sequence"}, "rows": rows}}},
        "sinks": {"out": {"from": "numbers", "blackhole": {}}},
        "kubernetes": {"deletion": {"policy": "Abort"}},
    }
    resource = {"apiVersion": "headgate.io/v1alpha1", "kind": "StreamJob"}
    return {**resource, "metadata": {"name": name}, "spec": spec}


def wait(path: str, seconds: int) -> bool:
    """Print every change until the job ended; whether it ended well."""
    deadline = time.monotonic() + seconds
    said = None
    while time.monotonic() < deadline:
        status = call("GET", path).get("status") or {}
        now = (status.get("phase", "Pending"), status.get("message", ""))
        if now != said:
            print(*now, flush=True)
            said = now
        if now[0] in ("Finished", "Failed"):
            return bool(now[0] == "Finished")
        time.sleep(POLL_S)
    print(
        f"the job did not end within {seconds} s; `kubectl describe` it, and read the operator's log"
    )
    return False


def gone(path: str, seconds: int) -> bool:
    """Wait until the operator has let the job go, as nobody would if it were uninstalled before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            call("GET", path)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return True
        time.sleep(POLL_S)
    return False


def main(namespace: str, name: str, rows: str, seconds: str) -> None:
    jobs = f"/apis/headgate.io/v1alpha1/namespaces/{namespace}/streamjobs"
    try:
        call("DELETE", f"{jobs}/{name}")
        print("a job of an earlier test was still there, and is deleted")
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
    deadline = time.monotonic() + int(seconds)
    while True:
        try:
            call("POST", jobs, job(name, int(rows)))
            break
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if error.code != 409 or time.monotonic() > deadline:
                sys.exit(f"the job was refused: {text}")
            time.sleep(POLL_S)
    good = wait(f"{jobs}/{name}", int(seconds))
    # A job that failed stays, so that one can look at it.
    if not good:
        sys.exit(1)
    call("DELETE", f"{jobs}/{name}")
    if not gone(f"{jobs}/{name}", int(seconds)):
        sys.exit(f"the job was deleted, and is still there after {seconds} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
