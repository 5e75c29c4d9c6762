"""The socket at which the hub listens, and the number of connections that rank 0 may keep open."""

import resource
import socket
from ipaddress import ip_address

LOOPBACK = "127.0.0.1"
"""The address at which only this machine's processes can connect."""
_OTHER_FILES = 512
"""Open files of rank 0 besides its connections to all ranks."""


def open_door(address: str | None, num_ranks: int) -> socket.socket:
    """A socket that listens at a free port of ``address``; None means all addresses of this machine."""
    is_dual = address is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in (address or "") else socket.AF_INET
    return socket.create_server((address or "", 0), family=family, dualstack_ipv6=is_dual, backlog=num_ranks)


def own_address(host: str) -> str | None:
    """The address at which other machines, which call this one ``host``, reach it.  The hub listens there.

    None if it cannot be determined: this machine does not know the name, or knows several addresses for it or a
    loopback address (as Debian does), or another machine forwards the connections.
    """
    if host in (LOOPBACK, "localhost"):
        return LOOPBACK
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        if len(found) > 1 or ip_address(min(found)).is_loopback:
            return None
        open_door(min(found), 1).close()
    except OSError:
        return None
    return min(found)


def allow_open_files(num_ranks: int) -> tuple[str, ...]:
    """Raise this process's limit on open files to what rank 0 needs; return the problem if the hard limit forbids it.

    Rank 0 has a connection to each rank for the hub, and one more for gloo's gathers.
    """
    needed = 2 * num_ranks + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return ()
    if hard < needed and hard != resource.RLIM_INFINITY:
        return (f"rank 0 of {num_ranks} may open {hard} files (ulimit -Hn), but needs about {needed}: two connections "
                f"to each rank and {_OTHER_FILES} others; raise the limit of the process that starts the launcher",)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return ()
