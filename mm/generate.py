"""Asking the model, top to bottom: flags and JSON -> weights -> device -> mesh -> stage -> answers.

Run by ``python -m mm.generate FLAGS`` in one process, or by ``torchrun ... -m mm.generate FLAGS`` on any layout.
Answers to one question or in a talk go to the standard output; all else goes to the standard error.
"""

import sys
from collections.abc import Sequence

from mm.config.generate import Asking, load_asking
from mm.ending import end_with_launcher, is_first_rank, refused, run_command, say_notes, status_of, tell
from mm.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Answer and return the exit status: 0, 2 after reporting every mistake that the user can mend, or 130 after
    Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: _kept(words), is_rank=True)


def _kept(words: Sequence[str]) -> str:
    """What an interruption leaves."""
    from mm.config.generate import GENERATE

    output = GENERATE.split(words).last("--output")
    return "no answer is kept, because there is no --output" if output is None else (
        f"answers so far are kept in {output}; the same command goes on from them")


def _run(words: Sequence[str]) -> int:
    end_with_launcher()
    try:
        asking = load_asking(words)
    except UserError as error:
        return refused(error)
    return status_of(lambda: answer(asking))


def answer(asking: Asking) -> int:
    """Answer on this process's device, as one rank of the launcher's world; returns the status, 0."""
    from mm.generation.source import find
    from mm.parallel.meeting import Meeting
    from mm.parallel.watchdog import Watchdog

    args = asking.args
    with Watchdog(Meeting.of_launcher(args.distributed_timeout_minutes), None) as watchdog:
        found = find(asking) if is_first_rank() else None  # one rank reports what all of them would
        store = watchdog.meet()
        found = found or find(asking)
        if is_first_rank():
            say_notes((*asking.notes, *found.notes), sys.stderr)
        from mm.device.device import Device

        device = Device.pick(args.device)
        tell(device.notes)
        # megatron looks at the device while it is imported, so everything built on it comes after the line above
        from mm.generation.batches import FileOfPrompts
        from mm.generation.prompts import prompt_of, read_prompts
        from mm.generation.session import Session
        from mm.generation.terminal import Chat, ask_once
        from mm.parallel import mesh as parallel

        mesh = parallel.start(
            device, found.model, args.tensor_model_parallel_size, args.distributed_timeout_minutes, store=store)
        watchdog.place(mesh)
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
