"""Asking the model, top to bottom: flags and JSON -> weights -> device -> mesh -> stage -> answers.

Run by ``python -m mm.generate FLAGS`` in one process, or by ``torchrun ... -m mm.generate FLAGS`` on any layout.
Answers to one question or in a chat go to standard output; everything else goes to standard error.  With ``--check``
it needs no launcher, and no device but one given by name.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mm.config.generate import GENERATE, Asking, GenerateArguments, kept_answers, load_asking
from mm.config.notes import notes_at_start, sorted_notes
from mm.ending import end_with_launcher, is_first_rank, print_notes, print_notes_once, run_command, status_of
from mm.progress import loading, ongoing
from mm.version import software

if TYPE_CHECKING:
    from mm.data.sample import Sample


def main(argv: Sequence[str] | None = None) -> int:
    """Answer and return the exit status: 0, 2 after reporting every mistake that the user can fix, or 130 after
    Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: kept_answers(GENERATE, words), is_rank=True)


def _run(words: Sequence[str]) -> int:
    end_with_launcher()
    asking = load_asking(words)
    if asking.args.check:
        check(asking)
        return 0
    return status_of(lambda: answer(asking))


def check(asking: Asking[GenerateArguments]) -> None:
    """Print all notes, and that everything is in order; raises UserError with all problems.  Needs no device."""
    with loading():
        from mm.generation.prompts import prompt_of, read_prompts
        from mm.generation.rehearsal import ALL_IN_ORDER, rehearse

    args = asking.args
    output = None if args.output is None else str(Path(args.output).parent)

    def read() -> "tuple[list[Sample], list[str]]":
        if args.prompts is not None:
            prompts, problems = read_prompts(args.prompts, args.media_roots)
            return [prompt.sample for prompt in prompts], problems
        return [] if args.chat else [prompt_of(asking)], []

    found = rehearse(asking, read, output, decodes=args.prompts is None)
    print_notes(sorted_notes((*asking.notes, *found.notes)), sys.stderr)
    sys.stderr.write(f"{ALL_IN_ORDER}\n")


def answer(asking: Asking) -> int:
    """Answer on this process's device, as one rank of the launcher's world; returns the exit status, 0."""
    with loading(is_first_rank()):
        from mm.generation.source import find
        from mm.parallel.rendezvous import Rendezvous
        from mm.parallel.watchdog import Watchdog

    args = asking.args
    with Watchdog(Rendezvous.of_launcher(args.distributed_timeout_minutes), None, facts=software()) as watchdog:
        with watchdog.phase("check"):
            found = find(asking) if is_first_rank() else None  # one rank reports what all of them would
        with ongoing("waiting for the other ranks", is_first_rank()):
            store = watchdog.meet()
        found = found or find(asking)
        if is_first_rank():
            print_notes(notes_at_start((*asking.notes, *found.notes)), sys.stderr)
        with loading(is_first_rank(), "starting the device"):
            from mm.device.device import Device

            device = Device.pick(args.device)
            print_notes_once(device.notes)
            # megatron looks at the device while it is imported, so everything built on it comes after this
            from mm.generation.batches import FileOfPrompts
            from mm.generation.prompts import prompt_of, read_prompts
            from mm.generation.session import Session
            from mm.generation.terminal import Chat, ask_once
            from mm.parallel import mesh as parallel

        with ongoing("connecting the ranks", is_first_rank()):
            mesh = parallel.start(
                device, found.model, args.tensor_model_parallel_size, args.distributed_timeout_minutes, store=store)
        watchdog.place(mesh)
        with watchdog.phase("load"):
            session = Session.open(asking, found, device, mesh)
        if args.prompts is not None and args.output is not None:
            path, roots = args.prompts, args.media_roots
            FileOfPrompts(
                session, lambda: read_prompts(path, roots), args.output, args.batch_size, watchdog.phase).answer()
        elif args.chat:
            Chat(args.system, list(args.image), list(args.video)).run(session)
        else:
            ask_once(session, lambda: prompt_of(asking))
    parallel.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
