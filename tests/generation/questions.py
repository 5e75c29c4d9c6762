"""Prompts of every kind for the demo's model, and transformers' answers to them."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import Qwen2_5_VLForConditionalGeneration

from mm.config.generate import load_asking
from mm.config.model import read_model
from mm.data.encode import SampleEncoder
from mm.generation.prompts import Prompt
from tests.data.clips import even, write_clip
from tests.data.oracle import photo, transformers_inputs
from tests.tiny_inputs import write_inputs

NUM_PROMPTS, MAX_NEW_TOKENS = 24, 8
SAMPLING = ("--temperature", "1.3", "--top-k", "40", "--top-p", "0.95", "--repetition-penalty", "1.1", "--seed", "7")
WORDS = ("How", "many", "pictures", "are", "there", "in", "it,", "and", "what", "is", "to", "be", "seen", "1", "2", "3")


def write_questions(directory: Path) -> Path:
    """The demo's checkpoint, pictures, a video, and ``prompts.jsonl``: text, one picture, two, a video, both.

    Their texts have seven lengths, from two words to eight.
    """
    write_inputs(directory)
    photo(84, 56, seed=1).save(directory / "wide.png")
    photo(56, 112, seed=2).save(directory / "tall.png")
    write_clip(directory / "clip.mp4", even(30))
    media = ({}, {"image": "wide.png"}, {"images": ["tall.png", "wide.png"]}, {"videos": ["clip.mp4"]},
             {"images": ["wide.png"], "videos": ["clip.mp4"]})
    records = []
    for number in range(NUM_PROMPTS):
        words = [WORDS[(number * step + 3) % len(WORDS)] for step in range(1, 3 + number % 7)]
        records.append({"id": f"q{number}", "prompt": " ".join(words), **media[number % len(media)]})
    (directory / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


def encoder_of(root: Path, *flags: str) -> SampleEncoder:
    """The encoder of ``mm.generate`` with ``flags``, for the checkpoint and the tiny model in ``root``."""
    media = load_asking(["--load", str(root / "hf"), "--prompt", "-", *flags]).media_config(str(root / "hf"))
    return SampleEncoder.from_config(media, read_model(root / "model_1.json").value, 4096)


class Reference:
    """transformers, which answers one prompt at a time; with ``adapters``, a directory, PEFT on top of it."""

    def __init__(self, directory: Path, encoder: SampleEncoder, adapters: Path | None = None) -> None:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, local_files_only=True).eval()
        self._model = model if adapters is None else PeftModel.from_pretrained(model, adapters).eval()
        self._encoder = encoder

    def answer(self, prompt: Prompt, **settings) -> tuple[list[int], torch.Tensor]:
        """Token ids, and the logits [num_tokens, vocabulary] from which they were chosen."""
        inputs = transformers_inputs(self._encoder, prompt.sample, self._encoder.encode_prompt(prompt.sample))
        found = self._model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, output_logits=True,
                                     return_dict_in_generate=True, **settings)
        return found.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(found.logits)
