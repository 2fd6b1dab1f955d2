"""`python -m headgate.tests.support.kube`: a cluster to try things in, until Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from pathlib import Path

from headgate.testing.servers.programs import NotAvailableError
from headgate.tests.support.kube import cluster, programs


def main() -> None:
    try:
        built = programs.build()
    except NotAvailableError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as directory, cluster.running(built, Path(directory)) as one:
        one.start_nodes("node-a", "node-b")
        print(f"export KUBECONFIG={one.plane.kubeconfig}")
        print(f'export PATH="{built.kubectl.parent}:{built.helm.parent}:$PATH"')
        print("The logs are beside the kubeconfig. Ctrl-C ends the cluster.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


main()
