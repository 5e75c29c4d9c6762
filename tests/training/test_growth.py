"""A run holds no more after many steps than after a few: objects, memory, open files and threads of each rank.

Background saves, validations and data workers take part.  benchmarks.faults watches the memory of longer runs.
"""

import json
from pathlib import Path

from tests.launch import run_ranks
from tests.tiny_inputs import flags_of, write_inputs

EARLY, LATE = range(26, 36, 2), range(56, 66, 2)
"""Steps whose counts are compared, as in the worker."""
LEAST_GROWTH = {"objects": 60, "blocks": 600, "bytes": 128 << 10, "files": 4, "threads": 1}
"""Growth over 30 steps that counts as growth: 0.4 MiB per 100 steps.  Measured: 0, 270, 52 KiB, 0 and 0, most of it in
the windows of the latest 100 steps, which still fill."""


def test_no_rank_grows(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    data = json.loads((inputs / "data.json").read_text())
    data["dataset_param"]["basic_parameters"] |= {"val_rate": 0.1}
    (inputs / "data.json").write_text(json.dumps(data))
    run_ranks(2, "tests.training.growth_worker", str(tmp_path), *flags_of(
        inputs, "growth", 2, "--num-workers", "1", "--train-iters", "65", "--micro-batch-size", "1",
        "--global-batch-size", "2", "--load", str(inputs / "hf"), "--async-save",
        "--save-interval", "5", "--keep-last-checkpoints", "2", "--eval-interval", "10"))  # fmt: skip
    for rank in (0, 1):
        counts = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert [row["step"] for row in counts] == [*EARLY, *LATE]
        # the least of each: a save or a validation holds more for a while
        early, late = ({name: min(row[name] for row in counts if row["step"] in steps) for name in LEAST_GROWTH}
                       for steps in (EARLY, LATE))
        more = {name: late[name] - early[name] for name in LEAST_GROWTH}
        grown = {name: number for name, number in more.items() if number >= LEAST_GROWTH[name]}
        assert not grown, f"rank {rank} has grown by {grown}: {counts}"
