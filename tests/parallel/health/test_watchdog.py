"""A rank that dies, fails or stalls ends all ranks, and the first that is read is why.

Only the fault, its report and the statuses are looked at, not the time that it took; the worker's found.json has that.
"""

import json
import math
import re
import socket
from pathlib import Path

import pytest

from mm.device.device import Device
from mm.lock import LOCK_FILE
from tests.launch import run_ranks
from tests.parallel.faults import FAULTS, WHOLE
from tests.tiny_inputs import write_inputs


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_inputs(tmp_path_factory.mktemp("watchdog"))
    model = json.loads((directory / "model_1.json").read_text())
    (directory / f"{WHOLE}.json").write_text(json.dumps(model | {"encoder_placement": "tensor_ranks"}))
    run_ranks(0, "tests.parallel.watchdog_worker", str(directory), timeout_seconds=500)
    return directory


def said(jobs: Path, fault: str) -> str:
    """All that the ranks wrote after the first step, which every job passes; the log of a step may come late.  Without
    torch's stacks of a store that has ended with rank 0."""
    text = (jobs / fault / "output").read_text(encoding="utf-8")
    text = re.sub(r"^(\[rank\d\]:)?\[W.*TCPStore.cpp.*\nException raised.*\n(frame #.*\n|<omitting.*\n)*\n?", "", text,
                  flags=re.MULTILINE)
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("note: ") and "] iteration  " not in line)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_all_ranks_end(fault, jobs: Path) -> None:
    """By themselves: nobody kills them but the fault, and after a minute the guard."""
    found = json.loads((jobs / fault.name / "found.json").read_text())
    refused = fault.name in ("user's mistake", "refused before the start", "set up otherwise")
    status = 130 if fault.name.startswith("interrupted") else 2 if refused else 1
    expected = [status, status]
    if fault.kind in ("killed", "killed before", "stopped"):  # ranks of the same machine kill one that is stopped
        expected[fault.rank] = -9
    assert found["statuses"] == expected and not found["needed_guard"]
    is_held = (jobs / fault.name / LOCK_FILE).exists()
    # nobody else can give the directory back
    assert is_held == (fault.kind in ("killed", "stopped") and fault.rank == 0 and fault.phase != "check")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.kind == "stopped"], ids=lambda fault: fault.name)
def test_a_stopped_rank_is_named_after_the_limit_of_its_phase(fault, jobs: Path) -> None:
    report = said(jobs, fault.name)
    limit = "iteration 2 has taken more than 8 s" if not fault.phase else (
        "rank 1 did not end within 6 s after the first" if fault.phase == "between" else
        f"the phase '{fault.phase}' has taken more than 6 s on rank ")
    errors = [line for line in report.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith(f"error: {limit}") and len(errors) == 1, report
    places = report.partition("Where the ranks were:\n")[2]
    assert re.match(r"  rank 1, last known: .* \(and does not answer: it holds Python's GIL, or", places), report


def test_a_rank_that_waits_for_the_visual_tokens_of_another_says_so(jobs: Path) -> None:
    report = said(jobs, "sleeps over its images")
    assert report.startswith("error: iteration 2 has taken more than 8 s")
    places = r"iteration 2, {} of microbatch (\d), chunk 0 \(samples \d\)\n"
    waits = re.search(r"\n  rank 0, stage 0, tensor-parallel rank 0, .*: " + places.format("visual tokens"), report)
    works = re.search(r"\n  rank 1, stage 0, tensor-parallel rank 1, .*: " + places.format("ViT forward"), report)
    assert waits and works and waits[1] == works[1], report


def test_a_killed_rank_is_named_first(jobs: Path) -> None:
    report = said(jobs, "killed")
    assert report.startswith("error: rank 1 died without an error message: ")
    assert "\n  rank 1, last known: stage 1, " in report and "\n  rank 0, stage 0, " in report
    assert "Traceback" not in report, "the broken connections of the others"


def test_rank_0_may_die_with_its_store(jobs: Path) -> None:
    report = said(jobs, "killed with the store")
    assert "error: the store of the ranks has ended" in report and "Rank 1 was at: stage 1, " in report
    assert "Traceback" not in report


def test_an_error_comes_with_its_place(jobs: Path) -> None:
    report = said(jobs, "raises")
    assert report.startswith("error: rank 1 failed with IndexError: seventeen is too many\nTraceback")
    assert report.count("Traceback") == 1
    place = r"iteration 2, LLM forward of microbatch 1, chunk 0 \(samples \d\)"
    assert re.search(rf"\n  rank 1, stage 1, .*: {place}\n", report)
    assert "\n  rank 0, stage 0, " in report


def test_a_mistake_of_the_user_keeps_its_words(jobs: Path) -> None:
    assert said(jobs, "user's mistake") == "[rank 1] error: sample 17 cannot be used\n"


def test_what_rank_0_refuses_before_the_start_is_said_once(jobs: Path) -> None:
    report = said(jobs, "refused before the start")
    assert report.startswith("error: --freeze-modules has 'no_such_word'") and report.count("\n") == 1


def test_a_rank_with_other_settings_is_named_with_its_machine(jobs: Path) -> None:
    host = socket.gethostname()
    assert said(jobs, "set up otherwise") == (
        f"error: rank 1 on {host} differs from rank 0 on {host}: --lr is 0.002 instead of 0.001. Give every machine "
        f"the same packages, code, flags and JSON files, and start again.\n")


def test_a_rank_may_die_before_the_start(jobs: Path) -> None:
    report = said(jobs, "killed before the start")
    assert "error: the store of the ranks has ended" in report and "Rank 1 was at: prepares" in report


@pytest.mark.parametrize("name", ["interrupted", "interrupted alone"])
def test_an_interruption_is_one_line(name: str, jobs: Path) -> None:
    """Whether all ranks are interrupted at once, as by a terminal, or only one."""
    assert said(jobs, name) == "Interrupted: nothing is kept, because there is no --save.\n"


def test_a_stalled_step_says_what_every_rank_is_at(jobs: Path) -> None:
    report = said(jobs, "sleeps")
    assert re.match("error: iteration 2 has taken more than 8 s on rank [01]; --step-timeout sets this limit\n", report)
    place = r"iteration 2, backward of microbatch 1, chunk 0 \(samples \d\)"
    assert re.search(rf"\n  rank 1, stage 1, .*: {place}\n", report)
    message = (r"(sends|waits for) the (activation|gradient) of microbatch \d between slots 0 and 1 (to|from) rank 1 "
               r"\(stage 1\), \[\d+, 64\] float32 \(samples \d\)")
    assert re.search(f"\n  rank 0, stage 0, .*: iteration 2, messages: {message}", report)
    waiting, sleeping = report.partition("\nStacks of rank 0:\n")[2].split("\nStacks of rank 1:\n")
    assert "in _wait_for\n" in waiting and "time.sleep(" not in waiting
    assert "in begin\n    time.sleep(" in sleeping


def test_the_limit_follows_the_steps_and_the_first_has_more() -> None:
    Device.pick("cpu")  # before megatron is imported
    from mm.parallel.health.watchdog import limit_seconds

    assert limit_seconds(None, []) == limit_seconds(5.0, []) == 1800.0
    assert limit_seconds(3000.0, []) == 3000.0
    assert limit_seconds(None, [700.0, 1.0, 2.0]) == 300.0
    assert limit_seconds(None, [700.0, 60.0, 50.0]) == 600.0
    assert limit_seconds(5.0, [60.0]) == 5.0
    assert limit_seconds(0, []) == limit_seconds(0, [60.0]) == math.inf
