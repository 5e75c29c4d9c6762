"""A process with limits, for tests: it does what a request says."""

import os
import signal
import time
from typing import Any

import numpy as np

from mm.data import limited
from mm.data.limited import Alarm, Replies
from mm.errors import UserError

ROOM_BYTES = 256 << 20


def serve(memory: int) -> None:
    limited.serve(_answer, memory, ROOM_BYTES)


def _answer(request: dict[str, Any], content: bytes, replies: Replies) -> None:
    match request["task"]:
        case "echo":
            np.frombuffer(replies.shared(len(content)), dtype=np.uint8)[:] = np.frombuffer(content, dtype=np.uint8)
            replies.send({"shape": [len(content)], "environment": dict(os.environ)})
        case "allocate":
            replies.send({"size": len(bytearray(request["num_bytes"]))})
        case "share":
            replies.shared(request["num_bytes"])
        case "stop in a message":
            replies._stream.write(b'{"size')
            replies._stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        case "compute":
            with Alarm(0.2, is_computing=True):
                while True:
                    pass
        case "sleep":
            with Alarm(0.1, is_computing=True):  # takes no CPU time
                time.sleep(0.4)
            with Alarm(0.2):
                time.sleep(60)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "refuse":
            raise UserError("not this one.")
        case "fail":
            raise ZeroDivisionError("a mistake in the program")
