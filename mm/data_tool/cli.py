"""``mm-data``: checks, measures and converts data files, independent of training.

    mm-data index --mm-data data.json --mm-model model.json --seq-length 8192
    mm-data check --mm-data data.json --mm-model model.json --seq-length 8192 --deep --html report.html
    mm-data show --mm-data data.json --mm-model model.json --seq-length 8192 --sample 3 --html sample.html
    mm-data mock --output ./data/mock --num-samples 1000 --num-images 2
    mm-data convert llava --input llava.json --media-folder ./data/COCO2017/train2017 --output samples.json

The commands themselves are in ``mm.data_tool.commands``, which loads torch.
"""

import sys
from collections.abc import Sequence

from mm.config.command_line import CommandLine, Commands
from mm.config.foreign import Fixed
from mm.data_tool.flags import CheckFlags, IndexFlags, LlavaFlags, MockFlags, ShowFlags, StatsFlags
from mm.process import run_command

COMMANDS = Commands("mm-data", "Checks, measures and converts data files.", {
    "check": CommandLine(
        "mm-data check", "Find all samples that cannot be used, and report statistics of the others: reads all records "
        "and the headers of media; with --deep it also decodes all media.  The exit status is 2 if there are any "
        "problems.", CheckFlags),
    "stats": CommandLine(
        "mm-data stats", "Report statistics of samples, and how samplers would distribute them.", StatsFlags),
    "show": CommandLine(
        "mm-data show", "Show a sample as the model sees it: its tokens, with the target tokens marked.", ShowFlags,
        foreign={"--part": Fixed((), "write --split")}),
    "index": CommandLine(
        "mm-data index", "Check and measure all samples beforehand, so that training with this data JSON, model JSON "
        "and --seq-length starts at once.", IndexFlags),
    "convert": Commands("mm-data convert", "Convert records to another format.", {
        "llava": CommandLine(
            "mm-data convert llava", "LLaVA's conversations to MindSpeed-MM's messages.  Optional: the trainer also "
            "reads LLaVA's files directly.", LlavaFlags)}),
    "mock": CommandLine(
        "mm-data mock", "Generate random images and texts, for trying out memory use and speed.", MockFlags),
})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  Returns the exit status: 0, 2 for errors that the user can fix, or 130 after Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv),
                       lambda: "finished indexes and pages are kept; run the same command again for the rest")


def _run(words: Sequence[str]) -> int:
    from mm.progress import loading

    flags = COMMANDS.read(words)
    with loading():
        from mm.data_tool import commands

    commands.run(flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
