"""``mm-data``: the command line for data files, independent of training.

    mm-data index --mm-data data.json --mm-model model.json --seq-length 8192
    mm-data check --mm-data data.json --mm-model model.json --seq-length 8192 --deep --html report.html
    mm-data stats --mm-data data.json --mm-model model.json --seq-length 8192
    mm-data show --mm-data data.json --mm-model model.json --seq-length 8192 --sample 3 --html sample.html
    mm-data mock --output ./data/mock --num-samples 1000 --num-images 2
    mm-data convert llava --input llava.json --media-folder ./data/COCO2017/train2017 --output samples.json

The commands are in ``mm.data_tool.commands``.  They are imported inside ``run_command``, so that Ctrl-C during the
import of torch also ends with a single line.
"""

import sys
from collections.abc import Sequence

from mm.process import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.  Returns the exit status: 0, 2 for errors that the user can fix, or 130 after Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv),
                       lambda: "finished indexes and pages are kept; run the same command again for the rest")


def _run(words: Sequence[str]) -> int:
    from mm.progress import loading

    with loading():
        from mm.data_tool.commands import run

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
