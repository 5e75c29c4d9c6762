"""Samples as tensors, and several of them packed into a microbatch.

Knows nothing of parallelism or of the order of samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm.batch import Grid, Microbatch
from mm.config.data import DataConfig
from mm.config.model import ModelConfig
from mm.data.chat import IMAGE_TOKEN, VISION_START_TOKEN, ChatEncoder, load_tokenizer
from mm.data.dataset import ImagePart, Message, Sample
from mm.data.image import ImageProcessor, load_image
from mm.errors import UserError
from mm.model.rope import mrope_positions


@dataclass(frozen=True)
class EncodedSample:
    """One sample ready to be packed; shapes as in ``Microbatch``, for this sample alone."""

    token_ids: Tensor
    labels: Tensor
    positions: Tensor
    grids: tuple[Grid, ...]
    pixel_values: Tensor | None


@dataclass(frozen=True)
class SampleEncoder:
    """Everything that turns a ``Sample`` into an ``EncodedSample``.  Pickles into data workers."""

    chat: ChatEncoder
    images: ImageProcessor

    @classmethod
    def from_config(cls, data: DataConfig, model: ModelConfig, seq_length: int) -> "SampleEncoder":
        """Read tokenizer, chat template and image constants from ``data.model_name_or_path``.

        Raises UserError when they do not fit the model JSON.
        """
        directory = data.model_name_or_path
        images = ImageProcessor.from_directory(directory, data.image_min_pixels, data.image_max_pixels)
        chat = ChatEncoder(
            load_tokenizer(directory),
            seq_length=seq_length,
            spatial_merge_size=model.vision.spatial_merge_size,
            train_on_prompt=data.train_on_prompt,
            mask_history=data.mask_history,
        )
        vision = model.vision
        pairs = [
            (f"the id of {IMAGE_TOKEN}", chat.image_token_id, "img_context_token_id", model.image_token_id),
            (
                f"the id of {VISION_START_TOKEN}",
                chat.vision_start_token_id,
                "vision_start_token_id",
                model.vision_start_token_id,
            ),
            ("patch_size", images.patch_size, "patch_size", vision.patch_size),
            ("temporal_patch_size", images.temporal_patch_size, "temporal_patch_size", vision.temporal_patch_size),
            ("merge_size", images.merge_size, "spatial_merge_size", vision.spatial_merge_size),
        ]
        problems = [
            f"{name} is {found} in {directory}, but {key} is {expected} in the model JSON; they must be equal."
            for name, found, key, expected in pairs
            if found != expected
        ]
        if problems:
            raise UserError(problems)
        _try_template(chat, directory)
        return cls(chat, images)

    def encode(self, sample: Sample) -> EncodedSample:
        """Encode one sample; images that fall to the cut at ``seq_length`` are not decoded.

        Raises UserError naming the sample and, where it is one's fault, the image.
        """
        try:
            paths = sample.image_paths
            grids = tuple(self.images.image_grid(path) for path in paths)
            text = self.chat.encode(sample.messages, grids)
            grids = grids[: text.num_images]
            pixels = [self._pixels(path, grid) for path, grid in zip(paths, grids, strict=False)]
        except UserError as error:
            raise UserError(f"{sample.source}: {problem}" for problem in error.problems) from error
        positions = mrope_positions(
            text.token_ids,
            grids,
            self.chat.image_token_id,
            self.chat.vision_start_token_id,
            self.images.merge_size,
        )
        return EncodedSample(text.token_ids, text.labels, positions, grids, torch.cat(pixels) if pixels else None)

    def _pixels(self, path: str, grid: Grid) -> Tensor:
        values, decoded_grid = self.images.patches(load_image(path))
        if decoded_grid != grid:
            raise UserError(f"{path}: header and pixels disagree on the size ({grid} and {decoded_grid} patches).")
        return values


def _try_template(chat: ChatEncoder, directory: str) -> None:
    """Encode a conversation of every kind of part, so that a template of another model is found at once."""
    side = math.isqrt(chat.merge_area)
    conversation = [Message("user", (ImagePart(""), "question")), Message("assistant", ("answer",))]
    try:
        chat.encode(conversation, [(1, side, side)])
    except UserError as error:
        raise UserError(f"{directory}: {problem}" for problem in error.problems) from error


def pack(samples: Sequence[EncodedSample]) -> Microbatch:
    """Lay samples one after another, shortest first, equal lengths in the given order.

    The loss is a sum over tokens, so their order inside a microbatch is free; equal lengths that lie together can
    share one attention call.
    """
    ordered = sorted(samples, key=lambda sample: sample.token_ids.numel())
    pixels = [sample.pixel_values for sample in ordered if sample.pixel_values is not None]
    return Microbatch(
        token_ids=torch.cat([sample.token_ids for sample in ordered]),
        labels=torch.cat([sample.labels for sample in ordered]),
        positions=torch.cat([sample.positions for sample in ordered], dim=1),
        segment_lengths=tuple(sample.token_ids.numel() for sample in ordered),
        image_grids=tuple(grid for sample in ordered for grid in sample.grids),
        pixel_values=torch.cat(pixels) if pixels else None,
    )
