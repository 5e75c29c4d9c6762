"""The surviving ranks of a failed run save what they hold where that is a whole model, and training continues from it.

All ranks are real processes that are killed, stopped or fail in a backward pass.
"""

import json
import re
from pathlib import Path

import pytest

from tests.launch import run_ranks
from tests.tiny_inputs import metrics, write_inputs
from tests.training.dying_cases import CASES

LAST = 6
FAILED = [case for case in CASES if case.fault]
LEFT = {
    "killed replica": ["iter_0000002", "iter_0000004", "iter_0000005.dying"],
    "stopped replica": ["iter_0000002.dying"],
    "failed shard": ["iter_0000003.dying"],
    "killed shard": ["iter_0000002", "iter_0000003.dying"],
    "stage with a mistake": ["iter_0000002.dying"],
    "killed stage": ["iter_0000002"],
    "saved replica": ["iter_0000002", "iter_0000004"],
    "forbidden": ["iter_0000002", "iter_0000004"],
}
SAID = {
    "killed replica": r"note: the surviving ranks saved iteration 5: \S*killed replica/save/iter_0000005\.dying\n",
    "stopped replica": r"note: the surviving ranks saved iteration 2: .+/iter_0000002\.dying\n",
    "failed shard": r"note: the surviving ranks saved iteration 3: .+/iter_0000003\.dying\n",
    "killed shard": r"note: the surviving ranks saved iteration 3: .+/iter_0000003\.dying, without optimizer state, "
                    r"because nobody else holds that of rank 1\n",
    "stage with a mistake": r"note: the surviving ranks saved iteration 2: .+/iter_0000002\.dying\n",
    "killed stage": r"note: the surviving ranks save nothing: nobody else holds the weights of rank 1\n",
}
CONTINUED = {
    "killed replica": (5, r"saved after \S*killed replica/save/iter_0000004; move it away to continue without it"),
    "stopped replica": (2, r"saved before the first regular checkpoint; move it away to continue without it"),
    "failed shard": (3, r"saved before the first regular checkpoint; move it away to continue without it"),
    "killed shard": (2, r"iter_0000003.dying holds weights that the surviving ranks of the failed run saved after .+"
                        r"iter_0000002; the optimizer state was lost, so it is used only with --load .+dying "
                        r"--no-load-optim"),
    "stage with a mistake": (2, r"saved before the first regular checkpoint"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_inputs(tmp_path_factory.mktemp("dying"))
    run_ranks(0, "tests.training.dying_worker", str(directory), timeout_seconds=500)
    return directory


def said(runs: Path, name: str, output: str) -> str:
    return (runs / name / output).read_text(encoding="utf-8").replace(str(runs) + "/", "")


@pytest.mark.parametrize("case", FAILED, ids=lambda case: case.name)
def test_the_survivors_save_what_is_whole(case, runs: Path) -> None:
    left = [name for name in json.loads((runs / case.name / "left.json").read_text()) if name.startswith("iter_")]
    assert left == LEFT[case.name], said(runs, case.name, "failed")
    statuses = json.loads((runs / case.name / "failed.json").read_text())
    assert statuses == ([2, 2] if case.fault == "user's mistake" else [1, 1] if case.fault == "raises" else [1, -9])
    report = said(runs, case.name, "failed")
    if case.name in SAID:
        assert re.search(SAID[case.name], report), report
    else:  # the state is saved already, or must not be
        assert "surviving ranks" not in report, report


@pytest.mark.parametrize("case", FAILED, ids=lambda case: case.name)
def test_the_same_command_continues_to_the_bit(case, runs: Path) -> None:
    report = said(runs, case.name, "again")
    assert json.loads((runs / case.name / "again.json").read_text()) == [0, 0], report
    if case.name in CONTINUED:
        iteration, note = CONTINUED[case.name]
        assert f"loaded a training checkpoint from {case.name}/save, iteration {iteration}\n" in report, report
        assert re.search(note, report), report
    rows = [[row[key] for key in ("iteration", "loss", "grad_norm", "lr", "consumed_samples")]
            for row in metrics(runs, case.name)]
    whole = [[row[key] for key in ("iteration", "loss", "grad_norm", "lr", "consumed_samples")]
             for row in metrics(runs, case.like)]
    assert rows == whole and len(rows) == LAST
    folders = [runs / name / "save" / f"iter_{LAST:07d}" for name in (case.name, case.like)]
    files = sorted(path.name for path in folders[1].glob("*.safetensors") if not path.name.startswith("random_"))
    assert len(files) >= 2
    for file in files:
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file


@pytest.mark.parametrize("case", FAILED, ids=lambda case: case.name)
def test_a_later_checkpoint_replaces_it(case, runs: Path) -> None:
    left = sorted(path.name for path in (runs / case.name / "save").glob("iter_*"))
    assert all(re.fullmatch(r"iter_\d+", name) for name in left), left
