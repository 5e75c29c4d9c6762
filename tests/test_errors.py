"""Suggestions for an unknown word, notes below an error, secrets that no message shows, and notes on valid settings."""

import pickle
import traceback

import pytest

from mm.config.args import TRAIN
from mm.errors import (
    NoEffect,
    UserError,
    add_note,
    collected,
    nearest,
    notes_at_start,
    printable,
    redacted,
    sorted_notes,
)


@pytest.mark.parametrize(("word", "known", "expected"), [
    ("--seq-lenght", ["--seq-length", "--save"], "--seq-length"),
    ("--vision_tower_lr", ["--vision-tower-lr"], "--vision-tower-lr"),
    ("num_layer", ["num_layers", "num_query_groups"], "num_layers"),
    ("mmmu_val", ["mmmu_dev_val", "ai2d"], "mmmu_dev_val"),
    ("layers.9.mlp.up_proj", ["layers.3.mlp.up_proj"], "layers.3.mlp.up_proj"),
    ("embd", ["embedding", "norm"], "embedding"),
])
def test_a_misspelling_gets_a_suggestion(word, known, expected):
    assert nearest(word, known) == f" (did you mean {expected!r}?)"


@pytest.mark.parametrize("flag", [
    "--log-params-norm", "--fp8-format", "--fp8-param-gather", "--disable-mamba-mem-eff-path",
    "--microbatch-group-size-per-virtual-pipeline-stage", "--log-loss-scale-to-tensorboard",
])
def test_a_flag_of_another_program_gets_no_suggestion(flag):
    """They share most letters with unrelated flags of this program, such as --lora-r."""
    assert nearest(flag, TRAIN.flags) == ""


@pytest.mark.parametrize(("text", "expected"), [
    ("https://user:pa$$:word@host.x/a.jpg", "https://[hidden]@host.x/a.jpg"),
    ("['s3://key@bucket/a', 'b@c.org']", "['s3://[hidden]@bucket/a', 'b@c.org']"),
    ("http://h/a?X-Amz-Signature=abc&size=3&access_token=d%20e#f",
     "http://h/a?X-Amz-Signature=[hidden]&size=3&access_token=[hidden]#f"),
    ("https://host/path@2x.png?monkey=no", "https://host/path@2x.png?monkey=[hidden]"),
    ("num_key_value_heads=2 and a@b", "num_key_value_heads=2 and a@b"),
])
def test_credentials_in_urls_are_hidden(text, expected):
    assert redacted(text) == redacted(expected) == printable(text) == str(UserError(text)) == expected


def test_a_traceback_shows_notes():
    """On every Python: 3.10 knows none."""
    error = RuntimeError("shapes differ")
    add_note(error, "while reading picture.png")
    add_note(error, "while encoding sample 3")
    shown = "".join(traceback.format_exception(error)).splitlines()
    assert shown[-3:] == ["RuntimeError: shapes differ", "while reading picture.png", "while encoding sample 3"]


def test_a_failed_read_that_names_no_file():
    problems: list[str] = []
    for error in (OSError(5, "Input/output error"), OSError("cannot identify image"), OSError(5, "bad", "x.json")):
        with collected(problems, "data: "):
            raise error
    assert problems == ["data: a file: cannot be read: Input/output error",
                        "data: a file: cannot be read: cannot identify image", "data: x.json: cannot be read: bad"]


def test_a_note_leaves_what_an_error_of_the_system_says():
    error = FileNotFoundError(2, "No such file or directory", "picture.png")
    add_note(error, "while encoding sample 3")
    assert (error.errno, error.strerror, error.filename) == (2, "No such file or directory", "picture.png")


IDLE = [NoEffect(["--a", "--b"], "the device decides"), NoEffect(["x.y"], "not read", "m.json")]


def test_notes_about_results_come_first_and_once():
    assert sorted_notes([IDLE[0], "the loss differs", IDLE[1], "random weights", "the loss differs"]) == [
        "the loss differs", "random weights", *IDLE]


def test_several_settings_without_effect_are_one_line():
    assert notes_at_start([IDLE[0], "the loss differs", IDLE[1]]) == [
        "the loss differs",
        "3 settings have no effect here; the same command with --check lists them, with the reasons"]
    assert notes_at_start([IDLE[0], "the loss differs"]) == ["the loss differs", IDLE[0]]
    assert notes_at_start([]) == []


def test_notes_pickle_as_rank_0_sends_its_run_to_other_nodes() -> None:
    sent = pickle.loads(pickle.dumps(IDLE))
    assert sent == IDLE and [one.num_settings for one in sent] == [one.num_settings for one in IDLE]
