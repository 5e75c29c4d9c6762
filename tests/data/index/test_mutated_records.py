"""Records of every format, mutated: each is a good sample or a bad one with a message, never another exception.

``MM_MUTATIONS`` sets the number of files with 20 records each (default: 4).
"""

import json
import os
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm.config.data import Attributes
from mm.data.index.dataset import Dataset
from mm.data.index.index import Measure
from mm.data.records.formats import HARMLESS, MEDIA, MESSAGES, read_sample, unread_keys
from mm.data.records.roots import MediaRoots
from mm.errors import UserError
from tests.data.clips import even, write_clip
from tests.data.oracle import data_config

TALK = [{"role": "user", "content": "<image>What?<video>"}, {"role": "assistant", "content": "A cat."}]
TEXT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}]
PARTS = [{"type": "image", "image": "wide.png", "max_pixels": 9000}, {"type": "text", "text": "What?"},
         {"type": "video", "video": "clip.mp4", "fps": 1}, {"type": "image_url", "image_url": {"url": "tall.jpg"}},
         {"type": "video", "video": ["wide.png", "wide.png"], "sample_fps": 2.0}]
RECORDS = (
    {"messages": TALK, "images": ["wide.png"], "videos": ["clip.mp4"]},
    {"messages": [{"role": "system", "content": "Be."}, *TEXT, *TEXT]},
    {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "A."}], "image": "tall.jpg"},
    {"messages": [{"role": "user", "content": PARTS}, TEXT[1]]},
    {"instruction": "<image>Add.", "input": "1 and 2", "output": "3", "images": "wide.png", "system": "Be.",
     "history": [["Hi", "Hello"]]},
)
ATTRIBUTES = (Attributes(), Attributes("sharegpt", "messages", "images", "videos", "system", "role", "content", "user",
                                       "assistant"), Attributes("alpaca", system="system", history="history"))
KEYS = (
    "objects", "rejected_response", "chosen", "rejected", "label", "kto_tag", "loss", "loss_scale", "weight", "train",
    "tools", "tool_calls", "name", "system", "history", "solution", "channel", "query", "response", "prompt",
    "completion", "audios", "image", "images", "video", "videos", "image_path", "imgae", "messages", "conversations",
    "role", "content", "from", "value", "type", "text", "url", "min_pixels", "fps", "id", *sorted(HARMLESS)[:9])
ODD = st.sampled_from([
    None, True, False, 0, 1, -1, 10**400, 0.5, "", " ", "[]", "\ud800", "\0", "\u2028<|im_end|>", "<image>", "<bbox>",
    "wide.png", "clip.mp4", "nothing.png", "../../etc/passwd", "http://x/a.png", "data:image/png;base64,AA", "tool",
    "assistant", "x" * 300, [], {}, [[]], [None], [{}], {"a": None}, ["wide.png"], [["wide.png"]], TEXT, TEXT[1],
    {"bytes": None, "path": "wide.png"}]).map(deepcopy)
NAMES = st.sampled_from(KEYS) | st.text(max_size=5)


def places(value, path=()) -> Iterator[tuple]:
    """The path of every value below ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield (*path, key)
        yield from places(one, (*path, key))


@st.composite
def mutated(draw, attr):
    """A record with up to three mutations: a value dropped, retyped, nested, copied, renamed, or a key added."""
    record = deepcopy(draw(st.sampled_from(RECORDS[-1:] if attr.formatting == "alpaca" else RECORDS)))
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        path = draw(st.sampled_from([*places(record)] or [()]))
        if not path:
            return record
        inside = record
        for key in path[:-1]:
            inside = inside[key]
        last = path[-1]
        match draw(st.sampled_from(("drop", "retype", "nest", "copy", "rename", "add"))):
            case "drop":
                del inside[last]
            case "retype":
                inside[last] = draw(ODD)
            case "nest":
                inside[last] = draw(st.sampled_from(([inside[last]], {"value": inside[last]}, [[inside[last]]])))
            case "copy" if isinstance(inside, list):
                inside.insert(last, deepcopy(inside[last]))
            case "rename" if isinstance(inside, dict):
                inside[draw(NAMES)] = inside.pop(last)
            case _ if isinstance(inside, dict):
                inside[draw(NAMES)] = draw(ODD)
    return record


@pytest.fixture(scope="module")
def media(tmp_path_factory, media_directory) -> Path:
    folder = shutil.copytree(media_directory, tmp_path_factory.mktemp("mutated"), dirs_exist_ok=True)
    write_clip(folder / "clip.mp4", even(30))
    return folder


@pytest.fixture(scope="module")
def measure(media, model_config, hf_directory) -> Measure:
    return Measure.from_config(data_config(hf_directory, media, media / "data.json"), model_config, 4096)


@settings(max_examples=int(os.environ.get("MM_MUTATIONS", "4")), deadline=None,
          suppress_health_check=list(HealthCheck))
@given(drawn=st.sampled_from(ATTRIBUTES).flatmap(
    lambda attr: st.tuples(st.just(attr), st.lists(mutated(attr), min_size=20, max_size=20))))
def test_a_mutated_record_is_a_sample_or_a_problem(drawn, media, measure, hf_directory):
    """Also where it is encoded, named and listed."""
    attr, records = drawn
    good = {"instruction": "?", "input": "", "output": "!"} if attr.formatting == "alpaca" else {"messages": TEXT}
    (media / "data.json").write_text(json.dumps([good, *records]))
    data = replace(data_config(hf_directory, media, media / "data.json"), attr=attr, overwrite_cache=True,
                   preprocessing_num_workers=1)
    dataset = Dataset(data, True, measure)
    assert len(dataset) + len(dataset.skipped) == 21
    assert all(one.message().startswith(f"{media}/data.json:") for one in dataset.skipped) and dataset.notes is not None
    for number in range(len(dataset)):
        if number < 3:  # decodes images and videos
            measure.encoder.encode(dataset[number])


@given(st.sampled_from(RECORDS), NAMES, ODD, st.booleans())
def test_an_added_key_is_refused_or_harmless_or_named(media, record, key, value, in_message):
    """Whatever it is, it does not change what is learnt."""
    attr = next(one for one in ATTRIBUTES[::-1] if (one.formatting == "alpaca") == ("instruction" in record))
    roots, changed = MediaRoots(str(media)), deepcopy(record)
    inside = changed[next(iter(changed))][-1] if in_message and "instruction" not in record else changed
    if key in inside or key in (*vars(attr).values(), *MESSAGES, *MEDIA):
        return  # it is read
    inside[key] = value
    try:
        sample = read_sample(changed, attr, roots, "f:0")
    except UserError as error:
        assert key not in HARMLESS and repr(key) in str(error)
        return
    assert sample == read_sample(record, attr, roots, "f:0")
    named = repr(key[:80]) + " of a message" * (inside is not changed)
    is_weight = inside is not changed and key in ("loss", "loss_scale", "weight", "train") and value == 1
    is_empty = value in (None, "", "[]", [], {}, [[]], [None], [{}], {"a": None})
    assert unread_keys(changed, attr) == [named] * (not (key in HARMLESS or is_weight or is_empty))
