"""Records and pictures for the data tests, and transformers' results for them."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2Tokenizer, Qwen2VLImageProcessorPil

from mm.batch import Microbatch, normalised
from mm.config.data import Attributes, DataConfig
from mm.data.encode import SampleEncoder
from mm.data.sample import Sample, Video
from mm.data.sampler.sampler import SampleOrder, in_turn, shuffled

PREPROCESSOR = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
"""``preprocessor_config.json`` of the published Qwen2.5-VL checkpoints."""

TEXTS = [
    "You are a helpful assistant.",
    "system user assistant\n\nWhat is in this picture? It shows two cats and a dog.",
    "Describe the image in one sentence.\n\n\nA red square on a white background, 3 by 4.",
    "请描述这张图片。 图中有一只猫。 Ça va, naïve café? Ωmega \U0001f600",
]

MAX_PIXELS = 128 * 128

ATTRIBUTES = Attributes(messages="messages", images="images", role_tag="role", content_tag="content", user_tag="user",
                        assistant_tag="assistant", system_tag="system")

RECORDS = [
    {"messages": [("user", "Hello, what can you do?"), ("assistant", "I can describe pictures.")]},
    {"messages": [("user", "<image>\nWhat is in this picture?"), ("assistant", "Two cats and a dog.\n\nNo more.")],
     "images": ["wide.png"]},
    {"messages": [("system", "Answer in one word."), ("user", "Compare <image> with <image>."),
                  ("assistant", "Different."), ("user", "Sure?"),
                  ("assistant", "Yes, \U0001f600 naïve café 图中有一只猫。")], "images": ["tall.jpg", "wide.png"]},
    {"messages": [("user", "First a question."), ("assistant", "Ask!\n"), ("user", "<image>"),
                  ("assistant", "  A picture with <|box_start|>(1,2)<|box_end|> in it.")], "images": "tall.jpg"},
    {"messages": [("user", "   Spaces\n\n\n"), ("assistant", "Cafe\u0301 in two code points")], "images": None},
]  # fmt: skip
"""Text only; one image; system, two turns, two images; image in the second turn, path as a string; null images."""


def pixel_numbers(encoded: Microbatch) -> torch.Tensor:
    """The normalised values of its bytes."""
    sizes = [t * h * w for t, h, w in encoded.image_grids]
    assert encoded.pixel_values.dtype == torch.uint8 and len(encoded.normalisations) == len(sizes)
    return torch.cat([normalised(one, rule.constants()) for one, rule in
                      zip(encoded.pixel_values.split(sizes), encoded.normalisations, strict=True)])


def transformers_inputs(encoder: SampleEncoder, sample: Sample, encoded: Microbatch) -> dict[str, torch.Tensor]:
    """The output of ``encoder`` for one sample or prompt, in the form that transformers' models take."""
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


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Smooth colours with noise on them."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = smooth + random.integers(-20, 21, smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode)


def data_config(hf_directory: Path, media_directory: Path, *paths: Path, **changes) -> DataConfig:
    return DataConfig(**{
        "model_name_or_path": str(hf_directory), "dataset": tuple(map(str, paths)),
        "dataset_dir": str(media_directory), "attr": ATTRIBUTES, "image_max_pixels": MAX_PIXELS, "image_min_pixels": 0,
        **changes})


class Transformers:
    """transformers' result for one record of ``RECORDS``, from the raw data."""

    def __init__(self, tokenizer: Qwen2Tokenizer, hf_directory: Path, media_directory: Path) -> None:
        self._tokenizer = tokenizer
        self._media_directory = media_directory
        settings = json.loads((hf_directory / "preprocessor_config.json").read_text())
        self.processor = Qwen2VLImageProcessorPil(**{**settings, "max_pixels": MAX_PIXELS})
        config = Qwen2_5_VLConfig(
            vision_config={"depth": 1, "hidden_size": 16, "num_heads": 1, "out_hidden_size": 16},
            text_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
                         "num_key_value_heads": 1, "vocab_size": len(tokenizer)})
        with torch.device("meta"):
            self._model = Qwen2_5_VLModel(config)

    def images(self, record: dict) -> dict[str, torch.Tensor] | None:
        """``pixel_values`` and ``image_grid_thw``."""
        paths = record.get("images") or []
        paths = [paths] if isinstance(paths, str) else paths
        if not paths:
            return None
        return self.processor([Image.open(self._media_directory / path) for path in paths], return_tensors="pt")

    def messages(self, record: dict) -> list[dict]:
        messages = []
        for role, text in record["messages"]:
            content = []
            for number, piece in enumerate(text.split("<image>")):
                content += [{"type": "image"}] * bool(number) + [{"type": "text", "text": piece}] * bool(piece)
            messages.append({"role": role, "content": content})
        return messages

    def token_ids(self, messages: list[dict], grids: list[list[int]], **options) -> list[int]:
        """The rendered and tokenized text, with image tokens repeated as by transformers' processor."""
        first, *others = self._tokenizer.apply_chat_template(messages, tokenize=False, **options).split("<|image_pad|>")
        text = first
        for grid, piece in zip(grids, others, strict=False):
            text += "<|image_pad|>" * (grid[0] * grid[1] * grid[2] // 4) + piece
        return self._tokenizer(text)["input_ids"]

    def labels(self, messages: list[dict], grids: list[list[int]], last_only: bool = False) -> list[int]:
        """Unshifted, as transformers' models take them: found by tokenizing the conversation up to each turn."""
        token_ids = self.token_ids(messages, grids)
        labels = [-100] * len(token_ids)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for number in answers[-1:] if last_only else answers:
            prompt = self.token_ids(messages[:number], grids, add_generation_prompt=True)
            whole = self.token_ids(messages[: number + 1], grids)
            assert token_ids[: len(whole)] == whole and whole[: len(prompt)] == prompt
            labels[len(prompt) : len(whole)] = whole[len(prompt) :]
        return labels

    def positions(self, token_ids: list[int], grids: torch.Tensor | None) -> torch.Tensor:
        ids = torch.tensor([token_ids])
        is_image = (ids == self._tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
        return self._model.get_rope_index(ids, is_image, grids)[0][:, 0]


def plain_order(
    num_samples: int, seed: int, shuffle: bool, global_batch_size: int, micro_batch_size: int, dp_rank: int,
    dp_size: int, consumed_samples: int = 0,
) -> SampleOrder:
    """Microbatches of ``micro_batch_size`` samples, dealt in turn."""
    deal = partial(in_turn, micro_batch_size=micro_batch_size, dp_size=dp_size)
    return SampleOrder(shuffled(num_samples, seed, shuffle), deal, global_batch_size, dp_rank, consumed_samples)
