"""A run that lists which checkpoints exist whenever it compares the ranks' weights: ``checked_worker OUTPUT FLAGS...``,
with flags of mm.train.

Launched by tests/run/checkpoint/test_weight_check.py on one rank.  OUTPUT gets the step of each comparison and the
names of the checkpoints, as JSON.
"""

import json
import sys
from pathlib import Path

from mm import train
from mm.device.device import Device

Device.pick("cpu")

from mm.run.checkpoint import weight_check  # noqa: E402
from mm.run.step import Setup  # noqa: E402

found: list[tuple[int, list[str]]] = []
check_weights = weight_check.check_weights


def listing(setup: Setup, iteration: int) -> None:
    save = Path(sys.argv[sys.argv.index("--save") + 1])
    found.append((iteration, sorted(str(path.relative_to(save)) for path in save.rglob("iter_*") if path.is_dir())))
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    check_weights(setup, iteration)


if __name__ == "__main__":
    weight_check.check_weights = listing  # not in the warm process, which imports this module
    sys.exit(train.main(sys.argv[2:]))
