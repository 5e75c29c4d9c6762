"""Asking the model, top to bottom: flags and JSON -> weights -> device -> mesh -> stage -> answers.

Run by ``python -m mm.generate FLAGS`` in one process, or by ``torchrun ... -m mm.generate FLAGS`` on any layout.
Answers to one question or in a talk go to the standard output; all else goes to the standard error.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mm.config.generate import Asking, load_asking
from mm.ending import is_first_rank, refused, status_of
from mm.errors import UserError

if TYPE_CHECKING:
    from mm.generation.source import Found


def main(argv: Sequence[str] | None = None) -> int:
    """Answer and return the exit status: 0, or 2 after reporting every mistake that the user can mend."""
    try:
        asking = load_asking(sys.argv[1:] if argv is None else argv)
        from mm.generation.source import find  # loads torch, which a mistake in the flags should not wait for

        found = find(asking)
    except UserError as error:
        return refused(error)
    if is_first_rank():
        sys.stderr.write("".join(f"note: {note}\n" for note in (*asking.notes, *found.notes)))
    return status_of(lambda: answer(asking, found))


def answer(asking: Asking, found: "Found") -> int:
    """Answer on this process's device, as one rank of the launcher's world; returns the status, 0."""
    from mm.device.device import Device

    args = asking.args
    device = Device.pick(args.device)
    # megatron looks at the device while it is imported, so everything built on it comes after the line above
    from mm.generation.batches import FileOfPrompts
    from mm.generation.prompts import prompt_of, read_prompts
    from mm.generation.session import Session
    from mm.generation.terminal import Chat, ask_once
    from mm.parallel import mesh as parallel
    from mm.parallel.watchdog import Watchdog

    mesh = parallel.start(device, found.model, args.tensor_model_parallel_size, args.distributed_timeout_minutes)
    with Watchdog(mesh, None):
        session = Session.open(asking, found, device, mesh)
        if args.prompts is not None and args.output is not None:
            path, roots = args.prompts, args.media_roots
            FileOfPrompts(session, lambda: read_prompts(path, roots), args.output, args.batch_size).answer()
        elif args.chat:
            Chat(args.system, list(args.image), list(args.video)).run(session)
        else:
            ask_once(session, lambda: prompt_of(asking))
    parallel.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
