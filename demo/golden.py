"""The golden losses: those of the demo's first steps on each device, which detect unintended changes of the training.

They are in ``demo/golden_losses.json``.  All layouts train the same model, so the losses must match whichever layouts
took these steps.  Even a change of Adam's epsilon from 1e-8 to 1e-7 shows: by 1.6e-5 in step 4, and 1.5e-4 in step 14.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from demo.stages import DemoError

NUM_STEPS = 20
FILE = Path(__file__).with_name("golden_losses.json")


@dataclass(frozen=True)
class Golden:
    """The losses on one device."""

    losses: Sequence[float]
    tolerance: float
    """Largest relative difference of a loss that is allowed."""
    measured: str
    """The largest differences that were measured without a fault."""
    ran: str
    """Date, commit and versions of the run."""


def of_device(device: str) -> Golden | None:
    """None if ``device`` has none yet."""
    found = json.loads(FILE.read_text(encoding="utf-8")).get(device)
    return None if found is None else Golden(**found)


def check(losses: Sequence[float], golden: Golden) -> float:
    """The largest relative difference from ``golden``; raises DemoError with the first step above the tolerance."""
    largest = 0.0
    for step, (own, other) in enumerate(zip(losses, golden.losses, strict=True), start=1):
        difference = abs(own - other) / abs(other)
        if not difference <= golden.tolerance:  # true for NaN too
            raise DemoError(
                f"step {step} has loss {own!r}, the golden one is {other!r}: a relative difference of "
                f"{difference:.1e}, above {golden.tolerance:.0e} (measured: {golden.measured}). Something changed the "
                f"training: the model, the data, their order, the optimizer or a library. If that is intended, write "
                f"these losses into {FILE} and explain it in the commit: {json.dumps(list(losses))}")
        largest = max(largest, difference)
    return largest


def compare(losses: Sequence[float], device: str) -> float | None:
    """``check`` the first steps, and print the result; None if ``device`` has no golden losses yet."""
    first, golden = losses[:NUM_STEPS], of_device(device)
    difference = None if golden is None else check(first, golden)
    print(f"    {said(first, difference, device, golden)}", flush=True)
    return difference


def said(losses: Sequence[float], difference: float | None, device: str, golden: Golden | None) -> str:
    """The result of the comparison."""
    if golden is None:
        entry = asdict(Golden(losses, 1e-5, "not yet", "DATE, COMMIT, VERSIONS"))
        return f"There are no golden losses for {device} yet; add them to {FILE}: {json.dumps({device: entry})}"
    return (f"The losses of the first {len(golden.losses)} steps differ by at most {difference:.1e} from the golden "
            f"ones for {device} (allowed: {golden.tolerance:.0e}; {golden.ran}).")
