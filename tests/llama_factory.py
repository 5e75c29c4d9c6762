"""LLaMA-Factory's published rules for supervised samples of Qwen2.5-VL, written anew for comparison.

From its files ``data/template.py`` (template qwen2_vl), ``data/mm_plugin.py`` (``Qwen2VLPlugin``),
``data/processor/supervised.py`` and ``data/processor/processor_utils.py``; MindSpeed-MM has the same rules.
"""

import math
from collections.abc import Sequence

from PIL import Image
from transformers import PreTrainedTokenizerBase

from mm.data.sample import Turn

IGNORED = -100
DEFAULT_SYSTEM = "You are a helpful assistant."


def encoded_pairs(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], num_image_tokens: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """(question, answer) of each turn in tokens, each slot of the template tokenized alone."""
    counts = iter(num_image_tokens)
    system = turns[0].text if turns[0].role == "system" else DEFAULT_SYSTEM
    texts = [turn.text for turn in turns if turn.role != "system"]
    for index, text in enumerate(texts):
        while "<image>" in text and index % 2 == 0:
            text = text.replace("<image>", f"<|vision_start|>{'<|image_pad|>' * next(counts)}<|vision_end|>", 1)
        texts[index] = text

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    pairs = []
    for index in range(0, len(texts), 2):
        question = ids(f"<|im_start|>system\n{system}<|im_end|>\n") if index == 0 else []
        question += ids(f"<|im_start|>user\n{texts[index]}<|im_end|>\n<|im_start|>assistant\n")
        pairs.append((question, ids(f"{texts[index + 1]}<|im_end|>\n")))
    return pairs


def infer_seqlen(source_len: int, target_len: int, cutoff_len: int) -> tuple[int, int]:
    if target_len * 2 < cutoff_len:
        max_target_len = cutoff_len
    elif source_len * 2 < cutoff_len:
        max_target_len = cutoff_len - source_len
    else:
        max_target_len = int(cutoff_len * (target_len / (source_len + target_len)))
    new_target_len = min(max_target_len, target_len)
    return min(max(cutoff_len - new_target_len, 0), source_len), new_target_len


def sample(
    pairs: list[tuple[list[int], list[int]]], cutoff_len: int, mask_history: bool = False, train_on_prompt: bool = False
) -> tuple[list[int], list[int]]:
    """Token ids, and labels that are not shifted."""
    input_ids: list[int] = []
    labels: list[int] = []
    if mask_history:
        pairs = pairs[::-1]
    for number, (source, target) in enumerate(pairs):
        if len(input_ids) >= cutoff_len:
            break
        num_source, num_target = infer_seqlen(len(source), len(target), cutoff_len - len(input_ids))
        source, target = source[:num_source], target[:num_target]
        source_labels = source if train_on_prompt else [IGNORED] * num_source
        target_labels = [IGNORED] * num_target if mask_history and number != 0 else target
        if mask_history:
            input_ids, labels = source + target + input_ids, source_labels + target_labels + labels
        else:
            input_ids, labels = input_ids + source + target, labels + source_labels + target_labels
    return input_ids, labels


def preprocessed(image: Image.Image, min_pixels: int, max_pixels: int) -> Image.Image:
    """The picture that it passes to transformers' processor."""
    if image.width * image.height > max_pixels:
        factor = math.sqrt(max_pixels / (image.width * image.height))
        image = image.resize((int(image.width * factor), int(image.height * factor)), Image.Resampling.NEAREST)
    if image.width * image.height < min_pixels:
        factor = math.sqrt(min_pixels / (image.width * image.height))
        image = image.resize((int(image.width * factor), int(image.height * factor)), Image.Resampling.NEAREST)
    if image.mode != "RGB":
        image = image.convert("RGB")
    if min(image.width, image.height) < 28:
        image = image.resize((max(image.width, 28), max(image.height, 28)))
    if image.width / image.height > 200:
        image = image.resize((image.height * 180, image.height))
    if image.height / image.width > 200:
        image = image.resize((image.width, image.width * 180))
    return image
