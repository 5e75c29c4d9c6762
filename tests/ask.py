"""Asks the warm process of ``tests.launch`` for a fork that runs a module or a script, and waits for it.

As a program it replaces Python: ``ask.py SOCKET COMMAND [PYTHON'S ARGUMENTS]``, where COMMAND is the path by which it
was started.  Its imports are quick, so it starts in some hundredths of a second; Python and torch need seconds.
"""

import json
import os
import signal
import socket
import sys


def request(path: str, wanted: dict, files: list[int]) -> socket.socket:
    """Request a fork with these files as standard input, output and error; ``answer`` receives the answers."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    socket.send_fds(connection, [json.dumps(wanted).encode()], files)
    return connection


def answer(connection: socket.socket) -> int:
    """The next answer.  The first is the process id; the second its status, negative for a signal.  A process that
    SIGKILL has ended sends none."""
    reported = connection.recv(64)
    return int(reported) if reported else -signal.SIGKILL


def what(arguments: list[str]) -> dict | None:
    """The part of a request that says what to run; None for arguments that need a real Python."""
    while arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if arguments[:1] == ["-m"]:
        return {"program": arguments[1], "is_script": False, "arguments": arguments[2:]}
    if arguments and not arguments[0].startswith("-"):
        return {"program": arguments[0], "is_script": True, "arguments": arguments[1:]}
    return None


def main(path: str, command: str, arguments: list[str]) -> int:
    wanted = what(arguments)
    if wanted is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    wanted |= {"num_ranks": 0, "environment": dict(os.environ), "directory": os.getcwd(), "python": command}
    with request(path, wanted, [0, 1, 2]) as connection:
        process = answer(connection)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, _: os.killpg(process, number))
        status = answer(connection)
    if status < 0:
        if -status != signal.SIGKILL:  # cannot be handled
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
