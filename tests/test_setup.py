"""The range of torch takes what pip finds installed, NVIDIA's pre-releases too."""

import re

import pytest
from packaging.requirements import Requirement

from tests.files import ROOT

RANGE = Requirement(*re.findall(r'"(torch>=[^"]+)"', (ROOT / "setup.py").read_text())).specifier


@pytest.mark.parametrize(("version", "is_taken"), [
    ("2.11.0a0+eb65b36914.nv26.2", True), ("2.12.0a0+5a7b7a1.nv26.5", True), ("2.11.0", True), ("2.13.0+cu130", True),
    ("2.10.0", False), ("2.10.0a0+b4e4ee81d3.nv25.12", False), ("2.14.0a0+x.nv26.10", False), ("2.14.0", False),
])  # fmt: skip
def test_versions_of_torch(version: str, is_taken: bool) -> None:
    """As pip asks of a package that is installed already."""
    assert RANGE.contains(version, prereleases=True) is is_taken
