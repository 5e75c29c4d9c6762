"""One rank of ``mm-plan calibrate``: ``python -m mm.planner.rank FILE FLAGS`` under a launcher."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mm.config.run import load_run
from mm.ending import is_first_rank, run_command, status_of


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; rank 0 writes the file.  Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: status_of(lambda: _measure(words)), lambda: "nothing was written", is_rank=True)


def _measure(words: Sequence[str]) -> int:
    output, training = Path(words[0]), [*words[1:], *([] if "--dry-run" in words else ["--dry-run"])]
    run = load_run(training, environment={})
    from mm.device.device import Device

    device = Device.pick(run.args.device, run.args.deterministic_mode)
    # megatron looks at the device while it is imported, so everything built on it comes after this
    from mm.parallel import mesh as parallel
    from mm.planner.measure import ProbeSizes, measure

    num_tokens = run.args.seq_length * run.args.micro_batch_size
    sizes = ProbeSizes(num_tokens, num_tokens * run.model.vision.spatial_merge_size**2 // 2)
    found = measure(device, run.args, run.model, sorted({1, run.tp_size}), sizes)
    if is_first_rank():
        found.write(output)
    parallel.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
