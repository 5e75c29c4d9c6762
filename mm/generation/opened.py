"""What ``mm.generate`` and ``mm.evaluate`` open before they ask: weights -> device -> mesh -> stage."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mm.config.generate import Asking
from mm.config.notes import sorted_notes
from mm.environment import software
from mm.process import is_first_rank, print_notes, print_notes_once
from mm.progress import loading, ongoing

if TYPE_CHECKING:
    from mm.generation.session import Session
    from mm.parallel.health.watchdog import Phase


@contextmanager
def opened(asking: Asking[Any], read: Callable[[], Sequence[str]] = tuple) -> Iterator[tuple["Session", "Phase"]]:
    """The model on this process's device, as one rank of the launcher's world, and the phases of its watchdog.

    ``read`` reads what is asked, on rank 0 before anything is loaded, and returns notes.  Raises UserError.
    """
    is_first = is_first_rank()
    with loading(is_first):
        from mm.generation.source import find
        from mm.parallel.health.rendezvous import Rendezvous
        from mm.parallel.health.watchdog import Watchdog

    args = asking.args
    with Watchdog(Rendezvous.of_launcher(args.distributed_timeout_minutes), None, facts=software()) as watchdog:
        with watchdog.phase("check"):
            notes = read() if is_first else ()
            found = find(asking) if is_first else None  # one rank reports what all of them would
        with ongoing("waiting for the other ranks", is_first):
            store = watchdog.meet()
        found = found or find(asking)
        if is_first:
            print_notes(sorted_notes((*asking.notes, *notes, *found.notes)), sys.stderr)
        with loading(is_first, "starting the device"):
            from mm.device.device import Device

            device = Device.pick(args.device)
            print_notes_once(device.notes)
            # megatron looks at the device while it is imported, so everything built on it comes after this
            from mm.generation.session import Session
            from mm.parallel import mesh as parallel

        with ongoing("connecting the ranks", is_first):
            mesh = parallel.start(
                device, found.model, args.tensor_model_parallel_size, args.distributed_timeout_minutes, store=store)
        watchdog.place(mesh)
        with watchdog.phase("load"):
            session = Session.open(asking, found, device, mesh)
        yield session, watchdog.phase
    parallel.stop()
