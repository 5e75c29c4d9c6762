"""Damaged files and flags lead to data or to a message that a user can read, never to another exception."""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.source import open_hf
from mm.config.data import read_data
from mm.config.model import read_model
from mm.config.run import load_run, resolved
from mm.data.index.dataset import Dataset
from mm.data.index.index import Measure
from mm.errors import UserError, file_error
from mm.plan.dry_run import stage_report
from mm.weights.table import model_weights
from tests.mm_convert.models import SmallModel
from tests.tiny_inputs import write_inputs

ODD = (
    None, True, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, 1e308, math.nan, math.inf, "", "x", "-1", "nan", "\x00", "\ud800",
    "a" * 10_000, "[", "..", "/etc/passwd", [], {}, [[]], [None], ["x"], {"x": {"y": []}}, [0] * 300,
)  # fmt: skip


@st.composite
def damaged_json(draw: st.DrawFn, value: Any) -> bytes:
    """JSON with one value removed, doubled, wrapped or replaced; or with damaged bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged_bytes(json.dumps(value).encode()))
    root = [copy.deepcopy(value)]
    parent, key = draw(st.sampled_from(list(_places(root))))
    match draw(st.sampled_from(("delete", "wrap", "rename", "odd", "odd", "odd"))):
        case "delete":
            del parent[key]
        case "wrap":
            parent[key] = [parent[key]]
        case "rename" if isinstance(parent, dict):
            parent[f"{key}x"] = parent.pop(key)
        case _:
            parent[key] = draw(st.sampled_from(ODD))
    return json.dumps(root[0] if root else None).encode()


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with a part of the beginning flipped, cut out or doubled."""
    begin = draw(st.integers(0, min(len(content), 2000) - 1))
    part = content[begin : begin + draw(st.sampled_from((1, 2, 16, 200)))]
    instead = draw(st.sampled_from((b"", part * 2, b"-1", b"\xff" * len(part), bytes(one ^ 4 for one in part))))
    rest = b"" if draw(st.integers(0, 9)) == 0 else content[begin + len(part) :]
    return content[:begin] + instead + rest


def _places(root: list[Any]) -> Iterator[tuple[Any, Any]]:
    left: list[Any] = [root]
    while left:
        one = left.pop()
        for key, value in one.items() if isinstance(one, dict) else enumerate(one):
            yield one, key
            if isinstance(value, dict | list):
                left.append(value)


def accepted(read: Callable[[], object]) -> bool:
    """Whether ``read`` returns; a refusal must say something.  Any other exception fails the test."""
    try:
        read()
    except UserError as error:
        assert all(problem.strip() for problem in error.problems)
        return False
    except OSError as error:
        assert file_error(error) is not None
        return False
    return True


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    write_inputs(folder)
    SmallModel(2, vision_ffn=6, num_shards=2).save(folder / "small")
    shutil.copytree(folder / "small", folder / "damaged")
    return folder


def flags(inputs: Path, model: str = "model_2.json", data: str = "data.json") -> list[str]:
    return ["--dry-run", "--world-size", "2", "--mm-model", str(inputs / model), "--mm-data", str(inputs / data),
            "--micro-batch-size", "1", "--global-batch-size", "4", "--seq-length", "512", "--train-iters", "6", "--lr",
            "1e-3", "--freeze-modules", "encoder.blocks", "--lora-target-modules", "q_proj", "layers.0-1.*",
            "--lora-rank-pattern", "q_proj=4", "--load", str(inputs / "hf")]  # fmt: skip


def dry_run(words: list[str]) -> None:
    run = load_run(words, environment={})
    resolved(run)
    stage_report(run)


# files are written anew by each example, so one folder serves all
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", ["model", "data"])
@given(draw=st.data())
@many
def test_settings(name: str, draw: st.DataObject, inputs: Path) -> None:
    whole = json.loads((inputs / {"model": "model_2.json", "data": "data.json"}[name]).read_text())
    (inputs / "damaged.json").write_bytes(draw.draw(damaged_json(whole)))
    accepted(lambda: dry_run(flags(inputs, **{name: "damaged.json"})))


@given(draw=st.data())
@many
def test_flags(draw: st.DataObject, inputs: Path) -> None:
    words = flags(inputs)
    place, odd = draw.draw(st.integers(0, len(words) - 1)), draw.draw(st.sampled_from(ODD))
    word = odd if isinstance(odd, str) else json.dumps(odd)
    text = re.sub("[\x00\ud800]", "", word)  # the system passes no such characters
    instead = draw.draw(st.sampled_from(([text], [], words[place : place + 1] * 2)))
    words[place : place + draw.draw(st.integers(0, 1))] = instead
    accepted(lambda: dry_run(words))


@pytest.mark.parametrize("pattern", ["config.json", "*.index.json", "*.safetensors"])
@given(draw=st.data())
@many
def test_weights(pattern: str, draw: st.DataObject, inputs: Path) -> None:
    whole = sorted((inputs / "small").glob(pattern))[0]
    content, damaged = whole.read_bytes(), inputs / "damaged" / whole.name
    changed = damaged_bytes(content) if pattern == "*.safetensors" else damaged_json(json.loads(content))
    damaged.write_bytes(draw.draw(changed))
    model = SmallModel(2, vision_ffn=6).model

    def read() -> None:
        directory = HFDirectory.open(inputs / "damaged")
        directory.check(model)
        source = open_hf(directory)
        source.check()
        for weight in (model_weights(source.model)[0], model_weights(source.model)[-1]):
            source.read(weight, 1, 0, torch.float32)

    try:
        accepted(read)
    finally:
        shutil.copy(whole, damaged)


@pytest.mark.parametrize("name", ["list.json", "lines.jsonl"])
@given(draw=st.data())
@settings(many, max_examples=60)
def test_records(name: str, draw: st.DataObject, inputs: Path) -> None:
    records = json.loads((inputs / "samples.json").read_text())[:4]
    damaged = draw.draw(damaged_json(records if name == "list.json" else records[0]))
    lines = b"" if name == "list.json" else b"\n" + "\n".join(map(json.dumps, records)).encode()
    (inputs / name).write_bytes(damaged + lines)
    model, config = read_model(inputs / "model_1.json").value, read_data(inputs / "data.json").value
    config = replace(config, dataset=(str(inputs / name),), cache_dir=None, preprocessing_num_workers=1)
    measure = Measure.from_config(config, model, 512)

    def read() -> None:
        dataset = Dataset(config, skips_bad=True, measure=measure)
        for index in range(len(dataset)):
            measure.encoder.encode(dataset[index])

    accepted(read)
