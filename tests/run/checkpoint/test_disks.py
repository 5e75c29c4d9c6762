"""Nodes with disks of their own: recognised, refused without the flag, and with it saved, resumed and gathered.

The ranks are nodes whose working directories differ, so that a relative path names another directory on each.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from mm.checkpoint import convert
from mm.checkpoint.directories import LATEST_FILE
from mm.errors import UserError
from tests.files import json_lines
from tests.launch import run_ranks
from tests.tiny_inputs import flags_of, write_inputs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What tests/parallel/disks_worker.py has found, in one launch of two ranks."""
    directory = tmp_path_factory.mktemp("disks")
    run_ranks(2, "tests.parallel.disks_worker", str(directory))
    return json.loads((directory / "results.json").read_text())


def test_disks_are_recognised_and_no_probe_is_left(results: dict) -> None:
    for found, flag, cure in (("refused", "--save save", "or add --save-on-each-node"),
                              ("refused_export", "--export-hf hf", "give one that all machines share")):
        (problem,), other = results[found]
        assert other == [problem] and problem.startswith(f"{flag}: ") and cure in problem
        assert re.search(r"is not one directory: \S+ \(rank 1\) did not see .* that \S+ \(rank 0\) wrote", problem)
    assert results["shared"] == [[0, 0], []] and results["disks"] == [0, 1] and results["probes"] == [[], []]


def test_each_rank_resumes_bit_for_bit_from_its_own_disk(results: dict) -> None:
    for name, found in results["resume"].items():
        assert found["resumed_losses"] == found["losses"] and found["different"] == [], name
        assert found["is_random_equal"], name
        for rank, names in enumerate(found["files"]):
            assert f"random_{rank:05d}.safetensors" in names and f"random_{1 - rank:05d}.safetensors" not in names
            assert any(one.startswith("optimizer_") for one in names)


def test_the_gathered_parts_load_under_another_layout(results: dict) -> None:
    for name, found in results["elsewhere"].items():
        assert found["different"] == [] and found["num_compared"] > 200, name
    assert results["elsewhere"]["dp2"]["problems"] == [[], []]  # each disk holds all of it
    for rank, problems in enumerate(results["elsewhere"]["tp2"]["problems"]):
        text = re.compile(r"save/tp2/iter_0000002 lacks \S+: each node saved on its own disk \(--save-on-each-node\).* "
                          rf"rsync -a \$node:(\S+/node{rank}/save/tp2/iter_0000002/) \1; done`$")
        assert any(map(text.search, problems)), problems


def test_rank_0s_disk_has_a_checkpoint_last(results: dict) -> None:
    """So whatever it holds is on the others too, and the next save replaces what they hold beyond that."""
    found = results["interrupted"]
    assert found["problems"] == [["rank 0: killed"]] * 2
    assert found["before"] == [["iter_0000001", LATEST_FILE], ["iter_0000001", "iter_0000002", LATEST_FILE]]
    assert found["after"] == [["iter_0000002", LATEST_FILE]] * 2


def test_a_disk_without_the_checkpoint_of_rank_0_is_named(results: dict) -> None:
    """Or with another one of its iteration: a mixture of two would be loaded."""
    same, *others = results["interrupted"]["mixed"]
    assert same == [[], []] and len(others) == 2
    for (problem,), second in others:
        assert second == [problem]
        assert re.match(r"save/late/iter_0000002, from which \S+ \(rank 0\) continues, is missing or another one on "
                        r"\S+ \(rank 1\): start the nodes in the order .*--node_rank", problem)


def test_a_save_of_replicas_that_differ_is_refused(results: dict) -> None:
    found = results["unequal"]
    (problem,), other = found["problems"]
    assert other == [problem] and found["left"] == [[], []]
    assert problem.startswith(f"replicas hold different values of {found['name']} (weight)")


def test_checkpoints_of_another_run_on_another_disk_are_refused(results: dict) -> None:
    """The check before the run has looked at rank 0's disk alone."""
    (problem,), other = results["used"]
    assert other == [problem]
    assert re.match(r"\S+: --save is 'save/used', but save/used holds checkpoints of another run \(iterations: 2\): "
                    r"give --load save/used", problem)


# The command


def launch(inputs: Path, name: str, killed: str, *flags: str) -> str:
    """Six steps on two stages; each is a node."""
    words = flags_of(inputs, name, 2, "--save", "save", "--load", "save", "--log-dir", "logs", "--save-interval", "2",
                     "--pretrained-checkpoint", str(inputs / "hf"), "--num-workers", "0", "--async-save",
                     "--deterministic-mode", "--save-on-each-node", "--no-store-param-remainders", *flags)
    return run_ranks(2, "tests.run.nodes_worker", str(inputs / name), killed, *words)


def test_a_run_that_is_killed_while_it_commits_equals_an_undisturbed_one(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    launch(inputs, "whole", "-")
    with pytest.raises(AssertionError, match="ended with -9"):
        launch(inputs, "killed", "0@4")  # rank 1's disk has the checkpoint, and rank 0's not
    with pytest.raises(AssertionError, match=r"iter_0000006 lacks weights_tp00_pp01.safetensors.*rsync -a") as failed:
        launch(inputs, "killed", "-", "--export-hf", "hf")
    said = str(failed.value)
    assert "loaded a training checkpoint from save, iteration 2" in said, said
    assert "iter_0000004.tmp-" in said and "left over from an interrupted save and has been deleted" in said
    assert "is not used; delete it" not in said
    rows = {name: json_lines(inputs / name / "node1" / "logs" / "metrics.jsonl") for name in ("whole", "killed")}
    for key in ("iteration", "loss", "grad_norm", "lr", "consumed_samples"):
        assert [row[key] for row in rows["killed"]] == [row[key] for row in rows["whole"]], key
    folders = [Path(f"node{node}", "save", f"iter_000000{iteration}") for node in range(2) for iteration in (2, 4, 6)]
    for folder in folders:
        files = sorted(path.name for path in (inputs / "whole" / folder).glob("*.safetensors"))
        assert len(files) == 3
        for file in files:
            ours, theirs = (inputs / name / folder / file for name in ("killed", "whole"))
            assert ours.read_bytes() == theirs.read_bytes(), (folder, file)
    assert not list((inputs / "killed").glob("node*/save/.mm-*")), "locks and probes are removed"
    own, other = (inputs / "killed" / f"node{node}" / "save" / "iter_0000006" for node in range(2))
    with pytest.raises(UserError, match=r"lacks weights_tp00_pp01.safetensors: .*rsync -a"):
        convert.mm_to_hf(own, inputs / "hf", inputs / "none").run(num_workers=1)
    shutil.copytree(other, own, dirs_exist_ok=True)
    convert.mm_to_hf(own, inputs / "hf", inputs / "converted").run(num_workers=1)
