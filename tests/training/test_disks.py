"""Nodes with disks of their own: recognised, refused without the flag, and with it saved, resumed and gathered.

The ranks are nodes whose working directories differ, so that a relative path names another directory on each.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mm.conversion import convert
from mm.conversion.convert import Options
from mm.errors import UserError
from mm.formats.checkpoints import LATEST_FILE
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
    (problem,), other = results["refused"]
    assert other == [problem]
    assert re.search(r"--save save is not one directory: .*: \S+ \(rank 0\); \S+ \(rank 1\) \(a file that", problem)
    assert "--save-on-each-node" in problem
    assert results["after_refusal"] == [[], []]
    assert results["shared"] == [[0, 0], []] and results["disks"] == [0, 1] and results["probes"] == [[], []]


def test_ranks_share_a_disk_if_one_sees_the_others_probe(one_rank: Any) -> None:
    """Even if the other does not, because its cache is old; ranks that see no probe have a disk each."""
    from mm.training.disks import Disks, _grouped

    groups = _grouped([[0], [0], [2, 4], [2], [4], [], []])
    assert groups == (0, 0, 2, 2, 2, 5, 6)
    hosts = ("a", "a", "b", "b", "c", "d", "e")
    shown = Disks(0, groups, hosts).describe([0, 2, 5, 6])
    assert shown == "a (ranks 0 to 1); b, c (ranks 2 to 4); d (rank 5); e (rank 6)"


def test_best_on_another_disk_is_refused(results: dict) -> None:
    (problem,), other = results["linked"]
    assert other == [problem]
    assert re.match(r"linked/best is not shared by the same ranks as --save linked: by \S+ \(ranks 0 to 1\), but "
                    r"--save by \S+ \(rank 0\); \S+ \(rank 1\); remove the link", problem)


@pytest.mark.parametrize(
    "name", ["pp2", "pp2-tied", "pp2-tied-distributed-bf16", "dp2", "dp2-distributed", "dp2-weight-shards",
             "dp2-weight-shards-bf16-remainders", "tp2"])
def test_each_rank_resumes_bit_for_bit_from_its_own_disk(name: str, results: dict) -> None:
    found = results["resume"][name]
    assert found["resumed_losses"] == found["losses"] and found["different"] == [] and found["is_random_equal"]
    for rank, names in enumerate(found["files"]):
        assert f"random_{rank:05d}.safetensors" in names and f"random_{1 - rank:05d}.safetensors" not in names
        assert any(one.startswith("optimizer_") for one in names)
        assert any("copies" in one for one in names) == (rank == 1 and ("tied" in name or name == "tp2"))


@pytest.mark.parametrize("name", ["pp2", "pp2-tied", "dp2", "dp2-distributed", "dp2-weight-shards", "tp2"])
def test_the_gathered_parts_load_under_another_layout(name: str, results: dict) -> None:
    found = results["elsewhere"][name]
    assert found["different"] == [] and found["num_compared"] > 200
    if name == "dp2":  # each disk holds all of it
        assert found["problems"] == [[], []]
        return
    (problem,), other = found["problems"]
    assert other == [problem]
    assert re.search(r"need files that their own disk lacks: optimizer_\S+( and \d more)? on \S+ \(first rank 0\); "
                     r"optimizer_\S+( and \d more)? on \S+ \(first rank 1\)", problem)
    assert "rsync -a" in problem and "--node_rank" in problem


def test_a_disk_that_is_late_catches_up(results: dict) -> None:
    found = results["recovered"]
    assert found["problems"] == [["rank 1: killed"]] * 2
    first, second = found["before"]
    assert first == ["iter_0000001", "iter_0000002", LATEST_FILE]
    assert second[0] == "iter_0000001" and second[1].startswith("iter_0000002.tmp-")
    assert found["after"] == [first, first]
    ((note,), other) = found["notes"]
    assert other == [note] and "(rank 1): the save of save/late/iter_0000002 was interrupted" in note


def test_a_lost_checkpoint_is_named_with_the_newest_that_all_disks_hold(results: dict) -> None:
    (problem,), other = results["recovered"]["lost"]
    assert other == [problem]
    assert re.match(r"save/late/iter_0000003, from which \S+ \(rank 0\) continues, is missing or different on \S+ "
                    r"\(rank 1\); the newest that all disks hold is iteration 2: .*, write 2 into", problem)


def test_interval_newest_and_best_do_not_delete_each_other(results: dict) -> None:
    kept = ["best", "iter_0000003", "iter_0000006", "iter_0000007", LATEST_FILE]
    best = ["iter_0000004", LATEST_FILE]
    assert results["kept"] == [kept, kept, best, best]


def test_all_weights_come_to_rank_0_for_an_export(results: dict) -> None:
    names = ["manifest.json", "weights_tp00_pp00.safetensors", "weights_tp00_pp01.safetensors"]
    assert results["brought"] == {"before": [["linked", "save"]] * 2, "names": [names, []], "is_equal": True}


def test_a_save_of_replicas_that_differ_is_refused(results: dict) -> None:
    found = results["unequal"]
    (problem,), other = found["problems"]
    assert other == [problem] and found["left"] == [[], []]
    assert problem.startswith(f"replicas hold different values of {found['name']} (weight)")


def test_a_disk_that_another_run_writes_to_is_refused(results: dict) -> None:
    (problem,), other = results["claimed"]
    assert other == [problem]
    assert re.match(r"\S+: --save save is being written by another run, process \d+", problem)


# The command


def launch(inputs: Path, name: str, killed: str, *flags: str) -> str:
    """Six steps on two stages; each is a node."""
    words = flags_of(inputs, name, 2, "--save", "save", "--load", "save", "--log-dir", "logs", "--save-interval", "2",
                     "--pretrained-checkpoint", str(inputs / "hf"), "--num-workers", "0", "--async-save",
                     "--deterministic-mode", "--export-hf", "hf", *flags)
    return run_ranks(2, "tests.training.nodes_worker", str(inputs / name), killed, *words)


def test_a_run_that_is_killed_while_it_commits_equals_an_undisturbed_one(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    with pytest.raises(AssertionError, match=r"error: --save save is not one directory") as refused:
        launch(inputs, "killed", "-")
    assert "Elapsed Time Per iteration" not in str(refused.value)
    assert [path.name for path in (inputs / "killed").glob("node*/save/*")] == []
    launch(inputs, "whole", "-", "--save-on-each-node")
    for killed in ("1@2", "0@4"):  # rank 0's disk has the checkpoint and the other not yet; neither has it
        with pytest.raises(AssertionError, match="ended with -9"):
            launch(inputs, "killed", killed, "--save-on-each-node")
    said = launch(inputs, "killed", "-", "--save-on-each-node")
    assert "loaded a training checkpoint from save, iteration 2" in said, said
    assert "iter_0000004.tmp-" in said and "left over from an interrupted save and has been deleted" in said
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
    exports(inputs, tmp_path / "gathered")
    shutil.copytree(inputs / "whole" / "node1" / "save", inputs / "used" / "node1" / "save")
    of_another = r"error: \S+: --save is 'save', but save holds checkpoints of another run"
    with pytest.raises(AssertionError, match=of_another):
        launch(inputs, "used", "-", "--save-on-each-node")


def exports(inputs: Path, gathered: Path) -> None:
    """The run's export is that of the gathered checkpoint; one node's part is refused."""
    parts = [inputs / "killed" / f"node{node}" / "save" / "iter_0000006" for node in range(2)]
    for part in parts:
        shutil.copytree(part, gathered, dirs_exist_ok=True)
    convert.mm_to_hf(gathered, inputs / "hf", inputs / "converted").run(Options(num_workers=1))
    exported = inputs / "killed" / "node0" / "hf" / "model.safetensors"
    assert exported.read_bytes() == (inputs / "converted" / "model.safetensors").read_bytes()
    assert not list((inputs / "killed").glob("node*/hf.checkpoint"))
    with pytest.raises(UserError, match=r"one node's part .* without weights_tp00_pp01.safetensors on .*rsync -a"):
        convert.mm_to_hf(parts[0], inputs / "hf", inputs / "none")
