"""Asking the model, top to bottom: flags and JSON -> weights -> device -> mesh -> stage -> answers.

Run by ``python -m mm.generate FLAGS`` in one process, or by ``torchrun ... -m mm.generate FLAGS`` on any layout.
Answers to one question or in a chat go to standard output; everything else goes to standard error.
"""

import sys
from collections.abc import Sequence

from mm.config.generate import GENERATE, Asking, GenerateArguments, kept_answers, load_asking
from mm.console import loading
from mm.process import end_with_launcher, is_first_rank, run_command, status_of


def main(argv: Sequence[str] | None = None) -> int:
    """Answer and return the exit status: 0, 2 after reporting every mistake of the user, or 130 after Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _run(words), lambda: kept_answers(GENERATE, words), is_rank=True)


def _run(words: Sequence[str]) -> int:
    end_with_launcher()
    asking = load_asking(words)
    return status_of(lambda: answer(asking))


def answer(asking: Asking[GenerateArguments]) -> int:
    """Answer on this process's device, as one rank of the launcher's world; returns the exit status, 0."""
    with loading(is_first_rank()):
        from mm.generation.setup import opened

    args = asking.args
    with opened(asking) as (session, phase):
        from mm.generation.answers import Chat, answer_file, ask_once
        from mm.generation.prompts import prompt_of, read_prompts

        path = args.prompts
        if path is not None and args.output is not None:
            answer_file(session, lambda: read_prompts(path, args.media_roots), args.output, args.batch_size, phase)
        elif args.chat:
            Chat(args.system, list(args.image), list(args.video)).run(session)
        else:
            ask_once(session, lambda: prompt_of(asking))
    return 0


if __name__ == "__main__":
    sys.exit(main())
