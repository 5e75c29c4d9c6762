"""Whatever flags, JSON files and the launcher's variables say, a run is either read or refused by a message."""

import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.config.args import TRAIN
from mm.config.run import load_run, resolved
from mm.errors import UserError
from tests.files import EXAMPLES

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 5e-324, 1e16, 1e308, float("nan"), float("inf"),
    "", " ", "x", "-1", "1e9", "nan", "\x00", "\ud800", "\u202e", "a" * 3000, "*" * 50, "(a+)+$", "0-5", "../..",
    [], {}, [[]], [0], [None], [[1, 2], [3]], ["x"], {"": None}, {"x": {"y": []}}, [0] * 50,
]  # fmt: skip
WORDS = [str(one) for one in ODD if isinstance(one, str | int | float)] + [
    "-1e-3", "-.5", "-inf", "9" * 5000, "[1,", "-1,", "--", "-", "--lr=", "=", "q_proj=1e308",
    f"q_proj={'9' * 20}", "²"]  # fmt: skip
LINE = ["--bf16", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "4",
        "--global-batch-size", "192", "--seq-length", "1024", "--train-iters", "100", "--lr", "1.0e-5",
        "--lr-warmup-fraction", "0.1", "--save", "save", "--save-interval", "5", "--use-distributed-optimizer",
        "--lora-target-modules", "q_proj", "--world-size", "8"]  # fmt: skip
FLAGS = sorted({*TRAIN.flags, *TRAIN.foreign, "--no-such-flag", "--sed"})
VARIABLES = {"WORLD_SIZE": "8", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in JSON, as the container and the key."""
    if not isinstance(value, dict | list):
        return []
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [(value, key) for key, _ in items] + [place for _, inner in items for place in places(inner)]


@st.composite
def documents(draw: st.DrawFn, name: str) -> str:
    """The shipped file with up to three places dropped, replaced, negated, nested, renamed or added."""
    root = json.loads((EXAMPLES / name).read_text())
    for _ in range(draw(st.integers(0, 3))):
        found = places(root)
        if not found:
            break
        parent, key = draw(st.sampled_from(found))
        match draw(st.integers(0, 5)):
            case 0:
                del parent[key]
            case 1:
                parent[key] = [parent[key]]
            case 2 if isinstance(parent, dict):
                parent[f"{key}{draw(st.sampled_from(['', 'x', '_']))}"] = copy.deepcopy(draw(st.sampled_from(ODD)))
            case 3 if type(parent[key]) in (int, float):
                parent[key] *= draw(st.sampled_from([-1, 2, 0.5, 10**6]))
            case 4 if isinstance(parent[key], str | int | float):
                parent[key] = str(parent[key])
            case _:
                parent[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return json.dumps(root)


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """Flags with up to three words dropped, replaced or added."""
    words = list(LINE)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(words) - 1))
        match draw(st.integers(0, 3)):
            case 0:
                del words[at]
            case 1:
                words[at] = draw(st.sampled_from(WORDS))
            case 2:
                words[at:at] = [draw(st.sampled_from(FLAGS))]
            case _:
                words += [draw(st.sampled_from(FLAGS)), draw(st.sampled_from(WORDS))]
    return words


@settings(max_examples=60, deadline=None)
@given(words=lines(), model=documents("model_7b.json"), data=documents("data_7b.json"),
       variables=st.dictionaries(st.sampled_from(sorted(VARIABLES)), st.sampled_from(WORDS), max_size=2),
       is_launched=st.booleans())  # fmt: skip
def test_settings_are_read_or_refused(
        tmp_path_factory: pytest.TempPathFactory, words: list[str], model: str, data: str, variables: dict[str, str],
        is_launched: bool) -> None:
    folder = tmp_path_factory.mktemp("settings")
    paths = {"--mm-model": folder / "model.json", "--mm-data": folder / "data.json"}
    for path, text in zip(paths.values(), (model, data), strict=True):
        path.write_text(text)
    environment = {**VARIABLES, **variables} if is_launched else variables
    try:
        run = load_run([*(str(one) for pair in paths.items() for one in pair), "--dry-run", *words], None, environment)
    except UserError as refusal:
        assert refusal.problems and all(one.strip() for one in refusal.problems)
        return
    assert json.dumps(resolved(run))
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.world_size = 0  # type: ignore[misc]
