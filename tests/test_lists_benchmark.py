"""The shipped pipeline lists use the stages better than those that they replace."""

import json
from pathlib import Path

import pytest

from mm.config.model import read_model
from tests.files import EXAMPLES
from tests.launch import run_ranks

THEIRS = {"7b": (12, 16), "32b": (1, *(9,) * 7), "72b": (6, *(11,) * 6, 8)}
"""LLM layers of MindSpeed-MM's model JSONs; the whole ViT is on the first stage, here as there."""


def shipped(size: str) -> list[list[int]]:
    model = read_model(EXAMPLES / f"model_{size}.json").value
    return [list(tower.pipeline_num_layers[0]) for tower in (model.vision, model.language)]


def measured(tmp_path: Path, size: str, vision: list[int], language: list[int], *flags: str) -> dict:
    words = [size, *flags, "--vision-layers", *map(str, vision), "--language-layers", *map(str, language)]
    run_ranks(0, "benchmarks.balance.lists", *words, "--output", str(tmp_path / "found.json"))
    (found,) = json.loads((tmp_path / "found.json").read_text())
    return found


@pytest.mark.parametrize("size", THEIRS)
def test_shipped_lists_use_more_of_the_stages(size: str, tmp_path: Path) -> None:
    """docs/performance.md has gains of 0.062, 0.068 and 0.031."""
    vision, language = shipped(size)
    ours = measured(tmp_path, size, vision, language, "--steps", "1", "--no-search")
    theirs = measured(tmp_path, size, vision, list(THEIRS[size]), "--steps", "1", "--no-search")
    assert ours["lists"] == [vision, language] and theirs["lists"] == [vision, list(THEIRS[size])]
    assert ours["utilisation"] > theirs["utilisation"] + 0.02


def test_the_search_finds_the_shipped_lists_from_bad_ones(tmp_path: Path) -> None:
    found = measured(tmp_path, "7b", [32, 0], [4, 24])
    assert found["lists"] == [[32, 0], [4, 24]] and found["best_lists"] == shipped("7b")
    assert found["best_utilisation"] > found["utilisation"] + 1e-4
