"""``mm-data``: checks, measures and shows data files, independent of training.

    mm-data check --mm-data data.json --mm-model model.json --seq-length 8192 --deep --html report.html
    mm-data show --mm-data data.json --mm-model model.json --seq-length 8192 --sample 3 --html sample.html
    mm-data mock --output ./data/mock --num-samples 1000 --num-images 2

The commands themselves are in ``mm.data_tool.commands``, which loads torch.
"""

import sys
from collections.abc import Sequence

from mm.config.command_line import CommandLine, Commands
from mm.config.mindspeed import Fixed, Inert
from mm.data_tool.flags import CheckFlags, MockFlags, ShowFlags
from mm.process import run_command

_CHECK = CommandLine(
    "mm-data check", "Find all samples that cannot be used, report statistics of the others, and keep the index for "
    "training: reads all records and the headers of media; with --deep it also decodes all media.  The exit status is "
    "2 if there are any problems.", CheckFlags,
    foreign={"--num-workers": Inert("preprocessing_num_workers of the data JSON sets it"),
             "--bad-sample": Inert("bad samples are listed in any case")})
COMMANDS = Commands("mm-data", "Checks, measures and shows data files.", {
    "check": _CHECK, "index": _CHECK, "stats": _CHECK,
    "show": CommandLine(
        "mm-data show", "Show a sample as the model sees it: its tokens, with the target tokens marked.", ShowFlags,
        foreign={"--part": Fixed((), "write --split")}),
    "mock": CommandLine(
        "mm-data mock", "Generate random images and texts, for trying out memory use and speed.", MockFlags),
})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  Returns the exit status: 0, 2 for errors that the user can fix, or 130 after Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv),
                       lambda: "finished indexes and pages are kept; run the same command again for the rest")


def _run(words: Sequence[str]) -> int:
    from mm.console import loading

    flags = COMMANDS.read(words)
    with loading():
        from mm.data_tool import commands

    commands.run(flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
