"""A loss that differs from the committed one is reported with its step, both losses and the fix."""

import json
import math
import re
from pathlib import Path

import pytest

from demo import golden
from demo.stages import DemoError


def test_equal_losses_pass_and_the_largest_difference_is_returned(tmp_path: Path):
    golden.write([4.0, 2.0], tmp_path / "golden.json")
    assert golden.check([4.0, 2.0], tmp_path / "golden.json") == 0
    assert golden.check([4.0, 2.0 + 1e-6], tmp_path / "golden.json") == pytest.approx(5e-7, rel=1e-6)


def test_the_first_difference_is_reported(tmp_path: Path):
    golden.write([4.0, 2.0, 1.0], tmp_path / "golden.json")
    text = "step 2 has loss 2.001; golden.json has 2.0, a relative difference of 5.0e-04"
    with pytest.raises(DemoError, match=re.escape(text)) as error:
        golden.check([4.0, 2.001, 1.5], tmp_path / "golden.json")
    assert "python -m demo.run --quick --write-golden" in str(error.value)


def test_a_nan_loss_differs(tmp_path: Path):
    golden.write([4.0], tmp_path / "golden.json")
    with pytest.raises(DemoError, match="step 1 has loss nan"):
        golden.check([math.nan], tmp_path / "golden.json")


def test_the_committed_file_has_one_loss_per_step():
    losses = json.loads(golden.PATH.read_text())
    assert len(losses) == golden.NUM_STEPS
    assert all(loss > 0 for loss in losses)
