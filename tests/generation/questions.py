"""A hundred prompts of every kind for the demo's model, and transformers' own answers to them."""

import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import Qwen2_5_VLForConditionalGeneration

from mm.batch import Microbatch
from mm.data.encode import SampleEncoder
from mm.data.sample import Sample, Video
from mm.generation.prompts import Prompt
from tests.data.clips import even, write_clip
from tests.data.oracle import photo, pixel_numbers
from tests.tiny_inputs import write_inputs

NUM_PROMPTS, MAX_NEW_TOKENS = 100, 8
SAMPLING = ("--temperature", "1.3", "--top-k", "40", "--top-p", "0.95", "--repetition-penalty", "1.1", "--seed", "7")
WORDS = ("How", "many", "pictures", "are", "there", "in", "it,", "and", "what", "is", "to", "be", "seen", "1", "2", "3")


def write_questions(directory: Path) -> Path:
    """The demo's checkpoint, pictures, a video, and ``prompts.jsonl``: text, one picture, two, a video, both."""
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


def transformers_inputs(encoder: SampleEncoder, sample: Sample, encoded: Microbatch) -> dict[str, torch.Tensor]:
    """What ``encoder`` has made of one sample or prompt, as transformers' models take it."""
    ids, chat = encoded.token_ids, encoder.chat
    is_video = [isinstance(one, Video) for one in sample.media]
    seconds = [encoder.planned(one).seconds for one in sample.media if isinstance(one, Video)]
    inputs = {
        "input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None],
        "mm_token_type_ids": ((ids == chat.image_token_id) + 2 * (ids == chat.video_token_id)).int()[None],
    }
    numbers = pixel_numbers(encoded).split([t * h * w for t, h, w in encoded.image_grids]) if is_video else ()
    for wanted, names in ((False, ("pixel_values", "image_grid_thw")),
                          (True, ("pixel_values_videos", "video_grid_thw"))):
        chosen = [number for number, one in enumerate(is_video) if one == wanted]
        if chosen:
            inputs[names[0]] = torch.cat([numbers[number] for number in chosen])
            inputs[names[1]] = torch.tensor([encoded.image_grids[number] for number in chosen])
    return inputs | ({"second_per_grid_ts": torch.tensor(seconds)} if seconds else {})


class Reference:
    """transformers, which answers one prompt at a time; with ``adapters``, a directory, PEFT on top of it."""

    def __init__(self, directory: Path, encoder: SampleEncoder, adapters: Path | None = None) -> None:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, local_files_only=True).eval()
        self._model = model if adapters is None else PeftModel.from_pretrained(model, adapters).eval()
        self._encoder = encoder

    def answer(self, prompt: Prompt, **settings) -> tuple[list[int], torch.Tensor]:
        """Token ids, and the logits [num_tokens, vocabulary] that they were chosen by."""
        inputs = transformers_inputs(self._encoder, prompt.sample, self._encoder.encode_prompt(prompt.sample))
        found = self._model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, output_logits=True,
                                     return_dict_in_generate=True, **settings)
        return found.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(found.logits)
