"""``mm-convert``: a command line compatible with MindSpeed-MM's.

    mm-convert CONVERTER hf_to_mm --cfg.mm_dir DIR --cfg.hf_config.hf_dir DIR \\
        --cfg.parallel_config.llm_pp_layers [[12,16]] --cfg.parallel_config.vit_pp_layers [[32,0]]

The commands are in ``checkpoint.commands``, which is imported inside ``run_command``: Ctrl-C while torch loads then
prints one line as well.
"""

import sys
from collections.abc import Sequence

from mm.process import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0, 1 if ``diff`` found differences, 2 for user errors, 130 after
    Ctrl-C."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv),
                       lambda: "finished files are kept, and the same command continues from them")


def _run(words: Sequence[str]) -> int:
    from mm.progress import loading

    with loading():
        from checkpoint.commands import run

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
