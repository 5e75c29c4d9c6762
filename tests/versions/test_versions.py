"""The combinations of ``make test-versions`` hold the ends of all ranges; docs/install.md says what was recorded."""

import re
from itertools import pairwise

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mm.environment import declared
from tests.files import ROOT, json_lines
from tests.launch import run_ranks
from tests.versions.combinations import COMBINATIONS, Combination, Others, lower_end
from tests.versions.render import BEGIN, END, KEPT, PAGES, STEPS, block

RANGES = {one.name: one for one in declared()}
HELD = {"torch": "torch", "megatron-core": "megatron_core", "transformers": "transformers"}
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def test_names_are_different_and_there_are_at_least_five() -> None:
    names = [one.name for one in COMBINATIONS]
    assert len(set(names)) == len(names) >= 5


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda one: one.name)
def test_a_combination_lies_within_the_ranges(combination: Combination) -> None:
    pins = [Requirement(line) for line in combination.pins()]
    assert {one.name for one in pins} >= set(HELD)
    for pin in pins:
        (version,) = [one.version for one in pin.specifier]
        if pin.name in RANGES:
            assert RANGES[pin.name].specifier.contains(version), pin
    (python,) = re.findall(r'python_requires="(.+)"', SETUP)
    assert SpecifierSet(python).contains(f"{combination.python}.0")


@pytest.mark.parametrize("package", HELD)
def test_both_ends_of_a_range_are_in_a_combination(package: str) -> None:
    """The upper end is a minor version that was not tested, so the one before it must have been."""
    used = {Version(getattr(one, HELD[package])) for one in COMBINATIONS}
    specifiers = {one.operator: Version(one.version) for one in RANGES[package].specifier}
    assert min(used).release[:2] == specifiers[">="].release[:2] and min(used) >= specifiers[">="]
    assert max(used).major == specifiers["<"].major - 1 or max(used).minor == specifiers["<"].minor - 1


def test_every_python_of_the_classifiers_is_in_a_combination() -> None:
    classified = set(re.findall(r"Python :: (3\.\d+)", SETUP))
    assert {one.python for one in COMBINATIONS} == classified
    minors = sorted(int(one.partition(".")[2]) for one in classified)
    assert f'python_requires=">=3.{minors[0]}"' in SETUP
    assert all(after == before + 1 for before, after in pairwise(minors))


def test_the_oldest_has_every_lower_end() -> None:
    (oldest,) = [one for one in COMBINATIONS if one.others is Others.OLDEST]
    pinned = {one.name: str(one.specifier).removeprefix("==") for one in map(Requirement, oldest.pins())}
    ends = {name: end for name, one in RANGES.items() if (end := lower_end(one)) is not None}
    assert len(ends) > 8
    assert {name: Version(pinned[name]) for name in ends} == {name: Version(end) for name, end in ends.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_table_is_what_was_recorded(page) -> None:
    found = page.read_text(encoding="utf-8").partition(f"{BEGIN}\n")[2].partition(END)[0]
    assert found.strip() == block(json_lines(KEPT), PAGES[page]).strip()


def test_a_record_of_other_versions_is_refused() -> None:
    """Else a changed combination would keep the result of the one before it."""
    one = COMBINATIONS[0]
    versions = {"python": f"{one.python}.1", "torch": f"{one.torch}+cpu", "megatron-core": one.megatron_core,
                "transformers": one.transformers}  # fmt: skip
    record = {"combination": one.name, "step": STEPS[0], "passed": True, "seconds": 7, "date": "2026-11-28",
              "versions": versions}  # fmt: skip
    words = next(iter(PAGES.values()))
    assert "passed, 2026-11-28, 7 s" in block([record], words)
    assert "failed, 2026-11-28, 7 s" in block([record, record | {"passed": False}], words)
    with pytest.raises(SystemExit, match="Run the combination again"):
        block([record | {"versions": versions | {"torch": "2.6.0"}}], words)


def test_what_could_not_run_is_said(tmp_path) -> None:
    """An interpreter that is missing neither stops the others nor counts as a result."""
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho no interpreter found for Python $3 >&2\nexit 2\n")
    uv.chmod(0o755)
    before = KEPT.read_bytes()
    with pytest.raises(AssertionError) as failed:
        run_ranks(0, "tests.versions", "oldest", "newest", "--uv", str(uv), "--directory", str(tmp_path))
    assert KEPT.read_bytes() == before
    for name in ("oldest", "newest"):
        assert f"{name}: not run, for its environment could not be made" in str(failed.value)
    assert "no interpreter found for Python 3.10" in str(failed.value)
