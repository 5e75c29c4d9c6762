"""How a program ends that cannot even begin."""

import subprocess
import sys

import pytest

from tests.files import ROOT


@pytest.mark.parametrize("program", ["pretrain_vlm.py", "inference_vlm.py", "evaluate_vlm.py"])
def test_a_python_without_the_packages_says_how_to_get_them(program):
    """-S -E: without site-packages, as outside of the environment."""
    done = subprocess.run([sys.executable, "-S", "-E", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {sys.executable} has no package 'pydantic")
    assert "source .venv/bin/activate" in done.stderr and "Traceback" not in done.stderr
