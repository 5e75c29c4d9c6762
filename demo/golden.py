"""The golden run: committed losses of the demo's first steps, which detect unintended changes of the training.

All layouts train the same model, so the losses must match whichever layouts took these steps.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from demo.stages import ROOT, DemoError

PATH = ROOT / "demo/golden.json"
NUM_STEPS = 20
TOLERANCE = 1e-5
"""Largest relative difference of a loss.

Measured: 2.6e-7 between the two layouts, 5.0e-7 with plain SSE kernels instead of AVX2 ones.  A change as small as an
Adam epsilon of 1e-7 instead of 1e-8 makes a difference of 1.6e-5 in step 4 and 1.5e-4 in step 14.
"""


def write(losses: Sequence[float], path: Path = PATH) -> None:
    """Save ``losses``, those of the first steps, as the reference."""
    path.write_text(json.dumps(list(losses), indent=1) + "\n", encoding="utf-8")


def check(losses: Sequence[float], path: Path = PATH) -> float:
    """The largest relative difference of ``losses`` from the committed ones.  Raises DemoError above ``TOLERANCE``."""
    expected = json.loads(path.read_text(encoding="utf-8"))
    differences = [abs(loss - golden) / golden for loss, golden in zip(losses, expected, strict=True)]
    for step, (loss, golden, difference) in enumerate(zip(losses, expected, differences, strict=True), start=1):
        if not difference <= TOLERANCE:  # true for NaN too
            raise DemoError(
                f"step {step} has loss {loss!r}; {path.name} has {golden!r}, a relative difference of "
                f"{difference:.1e} where rounding explains at most {TOLERANCE:.0e}. Something changed the training: "
                f"the model, the data, their order or the optimizer. If that is intended, write the file again with "
                f"python -m demo.run --quick --write-golden, and explain it in the commit"
            )
    return max(differences)
