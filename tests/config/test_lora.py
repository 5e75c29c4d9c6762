"""Settings of adapters: flags and the model JSON together, and their errors."""

import json
from pathlib import Path

import pytest

from mm.config.args import parse
from mm.config.lora import LoraConfig, lora_notes, lora_problems
from mm.config.model import read_model
from mm.errors import UserError
from tests.config.test_args import REQUIRED
from tests.files import EXAMPLES

MODEL = EXAMPLES / "model_7b.json"


def written(tmp_path: Path, **keys: object) -> Path:
    (tmp_path / "model.json").write_text(json.dumps(json.loads(MODEL.read_text()) | keys))
    return tmp_path / "model.json"


def test_flags_are_one_setting() -> None:
    args = parse([*REQUIRED, "--lora-target-modules", "q_proj,v_proj", "mlp.0", "--lora-r", "4", "--lora-alpha", "32",
                  "--lora-dropout", "0.05", "--lora-use-rslora", "--lora-rank-pattern", "q_proj=2",
                  "--lora-alpha-pattern", "v_proj=7.5"])
    assert args.lora == LoraConfig(("q_proj", "v_proj", "mlp.0"), 4, 32.0, 0.05, True, (("q_proj", 2),),
                                   (("v_proj", 7.5),))
    assert not parse(REQUIRED).lora.is_on


@pytest.mark.parametrize(("flag", "word", "what"), [
    ("--lora-rank-pattern", "q_proj=0", "an integer of at least 1"),
    ("--lora-rank-pattern", "4", "an integer of at least 1"),
    ("--lora-alpha-pattern", "q_proj=-1", "a number from 1e-9 to 1e9"),
])
def test_numbers_of_patterns_have_bounds(flag: str, word: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        parse([*REQUIRED, flag, "k_proj=3", word])
    assert f"{flag} is k_proj=3 {word}; expected patterns, each with = and {what}, such as" in str(caught.value)


def test_keys_of_the_model_json(tmp_path: Path) -> None:
    keys = {"lora_target_modules": ["q_proj"], "lora_r": 4, "lora_rank_pattern": {"k_proj": 2},
            "lora_apply_modules": ["text_decoder"], "lora_mixed_training": True}
    lora = read_model(written(tmp_path, **keys)).value.lora
    assert lora == LoraConfig(("q_proj",), 4, rank_pattern=(("k_proj", 2),), apply_modules=("text_decoder",),
                              mixed_training=True)
    assert lora.parts == {"language"}
    assert [lora.freezes(part) for part in ("vision", "projector", "language")] == [False, False, True]


@pytest.mark.parametrize(("stated", "given"), [(4, "16"), (8, "16"), (4, "8")])  # 8 is the default
def test_contradictions_between_json_and_flags_are_reported(stated: int, given: str, tmp_path: Path) -> None:
    path = written(tmp_path, lora_r=stated)
    read, words = read_model(path), {"--lora-target-modules": ["q_proj"], "--lora-r": [given]}
    (problem,) = lora_problems(read.value.lora, LoraConfig(("q_proj",), int(given)), read.document, words)
    assert problem.startswith(f"--lora-r is {given}, but {path}: lora_r is {stated}; both set")
    assert not [*lora_problems(read.value.lora, LoraConfig(("q_proj",), stated), read.document, words)]
    assert not [*lora_problems(read.value.lora, LoraConfig(("q_proj",)), read.document, {})]


def test_settings_without_effect_are_noted() -> None:
    (note,) = lora_notes(LoraConfig(), LoraConfig(r=4, dropout=0.5), "m.json")
    assert note == "--lora-r, --lora-dropout: no effect: without --lora-target-modules there are no adapters"
    (note,) = lora_notes(LoraConfig(apply_modules=("text_decoder",)), LoraConfig(("q_proj",)), "m.json")
    assert note.startswith("lora_apply_modules of m.json: no effect: it needs lora_mixed_training")


def test_scales_are_pefts() -> None:
    assert LoraConfig().scale(8, 16.0) == 2.0
    assert LoraConfig(use_rslora=True).scale(16, 8.0) == 2.0
