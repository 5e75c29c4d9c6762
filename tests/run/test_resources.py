"""Requirements of a node: amounts follow from the run's settings, and each finding suggests a fix."""

import dataclasses
import os
import re
import resource
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mm.config.run import Run, load_run
from mm.cost.stage_memory import activation_bytes_on_host, num_model_params, stage_sizes
from mm.environment import DECISIVE
from mm.run import resources
from mm.run.resources import Node, has_lazy_gloo, microbatch_pixel_bytes, node_problems
from tests.files import ROOT
from tests.tiny_inputs import write_inputs

PLENTY = Node(0, 8, 1 << 20, 1 << 40, 1 << 40, {"torch": "2.13.0", "megatron-core": "0.16.1", "transformers": "5.23.0"})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("machine"))


def run_of(inputs: Path, world_size: int, *flags: str, model: str = "model_1") -> Run:
    words = ["--mm-model", str(inputs / f"{model}.json"), "--mm-data", str(inputs / "data.json"), "--micro-batch-size",
             "1", "--seq-length", "4096", "--train-iters", "1", "--lr", "1e-3", *flags]  # fmt: skip
    return load_run(words, world_size, {})


def findings(run: Run, **changes: object) -> tuple[list[str], list[str]]:
    notes: list[str] = []
    return node_problems(run, dataclasses.replace(PLENTY, **changes), notes), notes


def test_a_node_with_enough_of_everything_has_no_findings_nor_has_this_machine_for_one_rank(inputs: Path) -> None:
    assert findings(run_of(inputs, 8)) == ([], [])
    node = Node.here({})
    assert (node.first_rank, node.num_ranks) == (0, 1) and node.versions["torch"].startswith("2.")
    assert node_problems(run_of(inputs, 1, "--num-workers", "0"), node, []) == []


def test_the_limits_are_those_of_this_process() -> None:
    node, (_, hard), shared = Node.here(), resource.getrlimit(resource.RLIMIT_NOFILE), os.statvfs("/dev/shm")
    assert node.open_files in (hard, 1 << 62)
    assert node.shared_bytes == pytest.approx(shared.f_bavail * shared.f_frsize, rel=0.5)


def test_open_files_of_1024_ranks(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lazy connections: to all ranks, and as owners of data to all of them again."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    run = run_of(inputs, 1024)
    (problem,), notes = findings(run, open_files=1024)
    assert notes == []
    assert re.search(r"may open 1,024 files.*needs about 2,304: let root raise the hard limit to 2304 \(", problem)
    assert findings(run, open_files=1024, first_rank=512)[0][0].startswith("node of rank 512: ")
    problems, (note,) = findings(run, open_files=2100)
    assert problems == [] and "`docker run --ulimit nofile=2304`" in note
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    assert findings(run, open_files=1024) == ([], [])
    assert findings(run, open_files=1024, versions={**PLENTY.versions, "torch": "2.7.1"})[0] == [problem]


def test_old_releases_connect_all_ranks_whatever_the_variable_says() -> None:
    assert [has_lazy_gloo(one) for one in ("2.7.1", "2.8.0", "2.13.0+cpu", None)] == [False, True, True, False]


def test_shared_memory_of_a_container(inputs: Path) -> None:
    run = run_of(inputs, 8, "--num-workers", "4")
    one = microbatch_pixel_bytes(run)
    assert one == 4096 * 4 * 1176 * 4
    (problem,), _ = findings(run, shared_bytes=64 << 20)
    assert "/dev/shm has 0.06 GiB free" in problem and "--num-workers 4 x prefetch_factor 2" in problem
    assert "`docker run --shm-size 5g`" in problem and "remount,size=5g" in problem
    problems, (note,) = findings(run, shared_bytes=8 * one)
    assert problems == [] and "bus error" in note
    assert findings(run, shared_bytes=64 * one) == ([], [])
    assert findings(run, shared_bytes=None) == ([], [])
    assert findings(run_of(inputs, 8, "--num-workers", "0"), shared_bytes=0) == ([], [])
    # a node of later stages owns no data
    later = run_of(inputs, 16, model="model_2")
    assert findings(later, shared_bytes=0, first_rank=8) == ([], []) != findings(later, shared_bytes=0)


def test_host_memory(inputs: Path) -> None:
    run = run_of(inputs, 8, "--global-batch-size", "64")
    (problem,), _ = findings(run, host_bytes=2 << 30)
    assert re.search(r"2\.00 GiB of host memory are free, but the 8 ranks.*3\.00 for their processes", problem)
    problems, (note,) = findings(run, host_bytes=4 << 30)
    assert problems == [] and "docker run --memory" in note


def test_states_and_activations_need_host_memory(inputs: Path) -> None:
    """8 bytes of each of the model's parameters on each of the eight ranks; activations depend on the samples."""
    run = run_of(inputs, 8, "--optimizer-cpu-offload", "--global-batch-size", "64")
    (size,) = stage_sizes(run, run.model.placement())
    states = 8 * 8 * size.num_params
    (problem,), _ = findings(run, host_bytes=(3 << 30) + states - (1 << 20))
    assert f"3.00 for their processes, {states / (1 << 30):.2f} for optimizer states" in problem
    assert findings(run, host_bytes=(3 << 30) + states)[0] == []
    run, plain = (run_of(inputs, 8, "--global-batch-size", "64", "--num-workers", "0", *more)
                  for more in (("--cpu-offload-activations",), ()))
    (activations,) = activation_bytes_on_host(run, run.model.placement())
    least = next(size for size in range(3 << 30, 99 << 30, 1 << 26) if findings(plain, host_bytes=size) == ([], []))
    problems, (_,) = findings(run, host_bytes=least)
    assert problems == [] and findings(run, host_bytes=least + 8 * activations) == ([], [])


def test_versions_outside_the_tested_range(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [Requirement(one) for one in re.findall(r'^        "((?:torch|megatron-core|transformers)>=.*)",$',
                                                     (ROOT / "setup.py").read_text(), re.MULTILINE)]
    assert [one.name for one in ranges] == list(DECISIVE)
    monkeypatch.setattr(resources, "declared", lambda: ranges)  # an install may be older than the file
    run, tested = run_of(inputs, 8), PLENTY.versions
    _, (note,) = findings(run, versions={**tested, "transformers": "4.57.0"})
    assert note.startswith("transformers 4.57.0 is outside the tested range, <6,>=5.20.1")
    assert "pip install 'transformers<6,>=5.20.1'" in note
    assert findings(run, versions={**tested, "torch": "2.11.0a0+eb65b36914.nv26.2"}) == ([], [])
    (problem,), _ = findings(run, versions={**tested, "torch_npu": "2.12.0.post3"})
    assert "torch is 2.13.0, but torch_npu is 2.12.0.post3, which needs a matching torch" in problem
    assert "`python -m pip install 'torch==2.12.*'" in problem
    assert findings(run, versions={**tested, "torch_npu": "2.13.0"}) == ([], [])


def test_copies_of_background_saves_need_host_memory(inputs: Path) -> None:
    words = ("--save", "out", "--bf16", "--num-workers", "0")
    params = num_model_params(run_of(inputs, 1, *words))
    plain = resources._copy_bytes(run_of(inputs, 8, *words), PLENTY)
    waits, split = (resources._copy_bytes(run_of(inputs, 8, *words, "--async-save", *more), PLENTY)
                    for more in ((), ("--use-distributed-optimizer",)))
    assert plain == 0 and waits == pytest.approx(14 * params, rel=0.01) and split == pytest.approx(waits, rel=0.01)
