"""Start a command as process 1 of namespaces of its own, and end with its exit code.

The code of a killed command is 128 and the number of the signal, while unshare(1) would say 1. Arguments: a
file for the number of the process, the network namespace (a file) that is entered, and the command.
"""

import ctypes
import os
import signal
import sys

NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_PID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
NETWORK = 0x40000000
PR_SET_PDEATHSIG = 1


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # If the process kubelet dies, so do we, and with process 1 of the namespace all that it has started.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if libc.unshare(NEW_MOUNT | NEW_UTS | NEW_IPC | NEW_PID):
        sys.exit(f"no new namespaces: {os.strerror(ctypes.get_errno())}")
    with open(sys.argv[2]) as network:
        if libc.setns(network.fileno(), NETWORK):
            sys.exit(f"no network: {os.strerror(ctypes.get_errno())}")
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execvp(sys.argv[3], sys.argv[3:])
    with open(f"{sys.argv[1]}.new", "w") as file:
        file.write(str(child))
    os.rename(f"{sys.argv[1]}.new", sys.argv[1])
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
