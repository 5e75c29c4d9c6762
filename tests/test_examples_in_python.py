"""The shipped shell scripts with the real Python: what it says of the flags and variables that they give it."""

import os
import subprocess

import pytest

from tests.files import EXAMPLES, ROOT
from tests.launch import warm_python


def test_a_flag_of_the_script_given_again_counts_with_a_note():
    outcome = subprocess.run(
        ["bash", str(EXAMPLES / "finetune_qwen2_5_vl_7b.sh"), "--dry-run", "--lr", "2e-5"],
        env={**os.environ, "PYTHON": str(warm_python())}, cwd=ROOT,
        capture_output=True, text=True, timeout=100, check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "--lr is given more than once (1.0e-5, 2e-5); the last one is used" in outcome.stdout


ONE = {"NPUS_PER_NODE": "1", "TP": "1", "PP": "1"}
"""Then a script that asks starts one process."""


@pytest.mark.parametrize(("script", "flag"), [("finetune", "--pretrained-checkpoint"), ("inference", "--load")])
def test_a_load_path_that_does_not_exist_is_named_by_its_variable(tmp_path, script, flag):
    """With the path that the script sets itself, and with a user's."""
    for given in ({}, {"LOAD_PATH": str(tmp_path / "nowhere")}):
        outcome = subprocess.run(
            ["bash", str(EXAMPLES / f"{script}_qwen2_5_vl_7b.sh"), *(["--check"] if script == "finetune" else [])],
            env={name: value for name, value in os.environ.items() if name != "LOAD_PATH"} | ONE | given
            | {"PYTHON": str(warm_python())}, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert outcome.returncode == 2
        path = given.get("LOAD_PATH", "ckpt/mm_path/Qwen2.5-VL-7B-Instruct")
        assert f"error: LOAD_PATH ({flag}) is '{path}', which is not a directory" in outcome.stderr
