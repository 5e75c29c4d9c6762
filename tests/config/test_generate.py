"""The flags of ``mm.generate``, MindSpeed-MM's inference JSON, and which of them determine how tokens are selected."""

import json
import re
from pathlib import Path

import pytest

from mm.config.generate import (
    DEFAULT,
    GENERATION_KEYS,
    GenerationSettings,
    InferenceConfig,
    load_asking,
    read_generation,
    read_inference,
)
from mm.config.mindspeed import FLAGS, SameAs
from mm.errors import UserError
from tests.test_examples import EXAMPLES

SIZES = ("3b", "7b", "32b", "72b", "tiny")
NEUTRAL = {"bos_token_id": 1, "kv_cache": True, "output_attentions": False, "max_length": 20, "min_length": 0,
           "num_beams": 1, "diversity_penalty": 0.0, "typical_p": 1.0, "bad_words_ids": None, "stop_strings": None,
           "num_assistant_tokens_schedule": "heuristic", "transformers_version": "4.41.2"}


@pytest.fixture
def write(tmp_path: Path):
    """The 7B's inference JSON with changes; a path of keys joined by dots."""

    def write(**changes) -> str:
        document = json.loads((EXAMPLES / "inference_qwen2_5_vl_7b.json").read_text())
        for path, value in changes.items():
            inner, (*outer, key) = document, path.split(".")
            for one in outer:
                inner = inner[one]
            inner[key] = value
        (tmp_path / "i.json").write_text(json.dumps(document))
        return str(tmp_path / "i.json")

    return write


def asking(tmp_path: Path, *argv: str, **environment: str):
    return load_asking(["--load", str(tmp_path), *argv], environment)


def test_the_number_of_ranks_comes_from_the_launcher(tmp_path: Path):
    assert asking(tmp_path, "--prompt", "A", WORLD_SIZE="2", RANK="0").world_size == 2
    what = "The environment variable WORLD_SIZE is '{}'; expected the number of ra"
    for text in ("0", "x", ""):
        with pytest.raises(UserError, match=what.format(text)):
            asking(tmp_path, "--prompt", "A", WORLD_SIZE=text, RANK="0")
    with pytest.raises(UserError, match="WORLD_SIZE is set, but RANK is not"):
        asking(tmp_path, "--prompt", "A", WORLD_SIZE="2")


@pytest.mark.parametrize("size", SIZES)
def test_every_inference_json_loads(size: str):
    inference = read_inference(EXAMPLES / f"inference_qwen2_5_vl_{size}.json", InferenceConfig).value
    assert inference.prompts and inference.directory
    trained = read_inference(EXAMPLES / f"model_{size}.json", InferenceConfig).value
    assert trained.generation == GenerationSettings() and trained.prompts is None
    assert inference.model.language.hidden_size == trained.model.language.hidden_size


def test_a_file_of_the_peer_loads(write):
    """With its additional keys: no model_id, an encoder's name, the settings of all kinds of search."""
    changes = {f"generation_config.{key}": value for key, value in NEUTRAL.items()}
    path = write(**changes, **{
        "dtype": "bf16", "device": "npu", "text_decoder.tokenizer_type": "PretrainedFromHF",
        "text_decoder.is_encoder_decoder": False, "text_decoder.use_infer_fa": True, "min_pixels": 1003520,
        "max_pixels": 12845056, "video_path": "v.mp4", "patch": {"infer_fa": True},
        "image_encoder.vision_encoder.pipeline_num_layers": [32, 0, 0, 0],
        "text_decoder.pipeline_num_layers": [1, 10, 10, 7], "text_decoder.parallel_output": False})
    read = read_inference(path, InferenceConfig)
    assert (read.value.min_pixels, read.value.video_path, read.value.model.num_stages) == (1003520, "v.mp4", 4)
    assert read.value.generation == GenerationSettings(True, 0.1, 1, 0.001, 1.05, 256, (151645, 151643))
    assert any("--device decides" in note for note in read.notes)


@pytest.mark.parametrize(("key", "value", "what"), [
    ("generation_config.num_beams", 4, "num_beams is 4; supported: null or 1"),
    ("generation_config.stop_strings", ["x"], "use --stop-tokens"),
    ("generation_config.temperatur", 1, "did you mean 'temperature'"),
    ("generation_config.top_p", 1.5, "top_p is 1.5; expected a number above 0 and at most 1"),
    ("generation_config.eos_token_id", "x", 'eos_token_id is "x"; expected a token id'),
    ("pipeline_class", "InternVLPipeline", 'supported: "Qwen2VlPipeline"'),
    ("min_pixels", 10**9, "min_pixels is 1000000000, above max_pixels = 12845056"),
    ("tokenizer", [], "expected an object"),
])
def test_unsupported_settings_are_refused(write, key: str, value, what: str):
    with pytest.raises(UserError, match=what):
        read_inference(write(**{"max_pixels": 12845056, key: value}), InferenceConfig)


def test_no_key_is_both_supported_and_foreign():
    fields = {"do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens", "eos_token_id"}
    assert not fields & GENERATION_KEYS.keys() and set(DEFAULT) == fields


def test_every_key_of_transformers_is_known(tmp_path: Path):
    """Every key in a checkpoint that the installed version saves."""
    from transformers import GenerationConfig

    assert set(GenerationConfig().to_dict()) <= {*GENERATION_KEYS, *DEFAULT}
    GenerationConfig(eos_token_id=5, top_k=3, do_sample=True).save_pretrained(tmp_path)
    assert read_generation(tmp_path / "generation_config.json") == GenerationSettings(
        do_sample=True, top_k=3, eos_token_id=(5,))


def test_flags_override_the_json_and_the_json_overrides_the_checkpoint(write, tmp_path: Path):
    checkpoint = GenerationSettings(temperature=0.7, top_k=9, repetition_penalty=1.2, eos_token_id=(4,))
    plain = asking(tmp_path, "--prompt", "A").decoding(checkpoint)
    assert (plain.temperature, plain.top_k, plain.repetition_penalty, plain.max_new_tokens) == (0.0, 9, 1.2, 512)
    assert plain.stop_token_ids == (4,)
    theirs = asking(tmp_path, "--mm-model", write()).decoding(checkpoint)
    assert (theirs.temperature, theirs.top_k, theirs.stop_token_ids) == (0.1, 1, (151645, 151643))
    ours = asking(tmp_path, "--mm-model", write(), "--temperature", "2", "--max-new-tokens", "3").decoding(checkpoint)
    assert (ours.temperature, ours.top_k, ours.max_new_tokens) == (2.0, 1, 3)


@pytest.mark.parametrize(("flags", "temperature"), [
    ((), 0.0), (("--temperature", "0.5"), 0.5), (("--temperature", "0"), 0.0), (("--top-k", "5"), 0.7),
    (("--greedy", "--top-k", "5"), 0.0),
])
def test_settings_of_sampling(tmp_path: Path, flags: tuple[str, ...], temperature: float):
    found = asking(tmp_path, "--prompt", "A", *flags).decoding(GenerationSettings(do_sample=None, temperature=0.7))
    assert found.temperature == temperature


@pytest.mark.parametrize(("flags", "what"), [
    ((), "no question is given: use --prompt TEXT"),
    (("--prompt", "A", "--chat"), "--prompt and --chat are both given; keep one"),
    (("--prompts", "p.jsonl"), "--output is missing"),
    (("--prompts", "none.jsonl", "--output", "o"), "'none.jsonl', which is not a file"),
    (("--prompt", "A", "--output", "o"), "--prompts is missing"),
    (("--prompt", "A", "--greedy", "--temperature", "1"), "--greedy and --temperature 1 are both given"),
    (("--prompt", "A", "--top-p", "2"), "--top-p is 2; expected a number above 0 and at most 1"),
    (("--prompt", "A", "--bf16", "--fp16"), "--bf16 and --fp16 are both given"),
    (("--prompt", "A", "--temprature", "1"), "--temprature is not a known flag (did you mean '--temperature'?)"),
    (("--prompt", "A", "--load", "nowhere"), "'nowhere', which is not a directory"),
    (("--prompt", "A", "--context-parallel-size", "2"), "expected 1"),
    (("--prompt", "A", "--check"), "--check is not available here: each run reports every mistake"),
])
def test_flags_that_contradict_each_other(tmp_path: Path, monkeypatch, flags: tuple[str, ...], what: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text("{}")
    with pytest.raises(UserError, match=re.escape(what)):
        asking(tmp_path, *flags)


@pytest.mark.parametrize("flag", [flag for flag, row in FLAGS.items() if isinstance(row, SameAs)])
def test_other_words_for_flags_of_a_training_have_no_effect(tmp_path: Path, flag: str):
    assert any("it affects training only" in note and flag in note
               for note in asking(tmp_path, "--prompt", "A", flag).notes)


def test_sizes_of_pictures(write, tmp_path: Path):
    plain = asking(tmp_path, "--prompt", "A").media_config("hf")
    assert plain.image_max_pixels > 12845056 and plain.image_min_pixels == 0
    assert (plain.video_max_pixels, plain.video_min_pixels, plain.video_maxlen, plain.video_fps) == (
        602112, 100352, 768, 2.0)
    theirs = asking(tmp_path, "--mm-model", write(min_pixels=1003520, max_pixels=2007040))
    media = theirs.media_config("hf")
    assert (media.image_min_pixels, media.image_max_pixels) == (1003520, 2007040)
    assert any("MindSpeed-MM's pipeline uses the checkpoint's" in note for note in theirs.notes)
    data = str(EXAMPLES / "data_7b.json")
    trained = asking(tmp_path, "--prompt", "A", "--mm-data", data, "--video-maxlen", "7")
    assert (trained.media_config("hf").image_max_pixels, trained.media_config("hf").video_maxlen) == (262144, 7)
    assert trained.directory()[0] == "./ckpt/hf_path/Qwen2.5-VL-7B-Instruct"
