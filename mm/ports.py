"""A free TCP port, for a launcher that was given none."""

import random
import socket

_PORTS = range(20_000, 32_768)
"""Below Linux's ephemeral ports (``ip_local_port_range``): another process would often take one of those in the seconds
before the launcher listens."""


def free_port() -> int:
    """A port on which nobody listens at the moment, drawn at random, so that simultaneous launches get different ones.

    Raises OSError if there is none.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as trial:
            try:
                trial.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no TCP port from {_PORTS.start} to {_PORTS.stop - 1} is free")
