"""One rank of ``mm-plan calibrate``: ``python -m mm.plan.rank FILE TOKENS PATCHES FLAGS`` under a launcher."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mm.config.run import load_run
from mm.environment import launcher_problems
from mm.errors import refuse
from mm.process import end_with_launcher, is_first_rank, run_command, status_of


def main(argv: Sequence[str] | None = None) -> int:
    """Measure microbatches of up to TOKENS and PATCHES; rank 0 writes FILE.  Returns the exit status."""
    end_with_launcher()
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: status_of(lambda: _measure(words)), lambda: "nothing was written", is_rank=True)


def _measure(words: Sequence[str]) -> int:
    refuse(launcher_problems(os.environ))
    output, (num_tokens, num_patches) = Path(words[0]), map(int, words[1:3])
    run = load_run([*words[3:], "--dry-run"], environment={})
    from mm.device.device import Device

    device = Device.pick(run.args.device, run.args.deterministic_mode)
    # megatron looks at the device while it is imported, so everything built on it comes after this
    from mm.parallel import mesh as parallel
    from mm.plan.measure import ProbeSizes, measure

    sizes = ProbeSizes(num_tokens, num_patches)
    found = measure(device, run.args, run.model, sorted({1, run.tp_size}), sizes)
    if is_first_rank():
        found.write(output)
    parallel.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
