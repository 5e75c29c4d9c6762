"""Samples as tensors: each one a microbatch of one segment, ready to be joined with others."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mm.batch import Grid, Microbatch
from mm.config.data import DataConfig, ResizeRule
from mm.config.model import ModelConfig
from mm.data.chat import IMAGE_TOKEN, VISION_START_TOKEN, ChatEncoder, load_tokenizer
from mm.data.image import ImageProcessor
from mm.data.sample import Image, Sample, Turn
from mm.errors import UserError, refuse
from mm.model.positions import mrope_positions


def image_processor(data: DataConfig, rule: ResizeRule | None = None) -> ImageProcessor:
    """What makes numbers of pictures as ``data`` says, or by another ``rule``; raises UserError as it does."""
    rule = rule or data.image_resize or "transformers"
    is_upright = rule == "transformers" if data.image_exif is None else data.image_exif
    return ImageProcessor.from_directory(
        data.model_name_or_path, data.image_min_pixels, data.image_max_pixels, rule, is_upright, data.image_backend)


@dataclass(frozen=True)
class SampleEncoder:
    """Everything that turns a ``Sample`` into tensors.  Pickles into data workers."""

    chat: ChatEncoder
    images: ImageProcessor

    @classmethod
    def from_config(cls, data: DataConfig, model: ModelConfig, seq_length: int) -> "SampleEncoder":
        """Read tokenizer, chat template and image constants from ``data.model_name_or_path``.

        Raises UserError when they do not fit the model JSON.
        """
        directory = data.model_name_or_path
        images = image_processor(data)
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
            (f"the id of {VISION_START_TOKEN}", chat.vision_start_token_id,
             "vision_start_token_id", model.vision_start_token_id),
            ("patch_size", images.patch_size, "patch_size", vision.patch_size),
            ("temporal_patch_size", images.temporal_patch_size, "temporal_patch_size", vision.temporal_patch_size),
            ("merge_size", images.merge_size, "spatial_merge_size", vision.spatial_merge_size),
        ]
        refuse(
            f"{name} is {found} in {directory}, but {key} is {expected} in the model JSON; they must be equal."
            for name, found, key, expected in pairs
            if found != expected
        )
        largest = max(chat.tokenizer.get_vocab().values())
        if largest >= model.language.vocab_size:
            raise UserError(
                f"the tokenizer in {directory} has ids up to {largest}, but text_decoder.vocab_size is "
                f"{model.language.vocab_size}: some tokens would have no embedding; give the tokenizer of this model."
            )
        # A conversation of every kind of part finds a template of another model at once.
        conversation = [Turn("user", (Image(""), "question")), Turn("assistant", ("answer",))]
        try:
            chat.encode(conversation, [(1, chat.spatial_merge_size, chat.spatial_merge_size)])
        except UserError as error:
            raise UserError(f"{directory}: {problem}" for problem in error.problems) from error
        return cls(chat, images)

    def encode(self, sample: Sample) -> Microbatch:
        """One sample as a microbatch of one segment; images that fall to the cut at ``seq_length`` are not decoded.

        Raises UserError naming the sample and, where it is one's fault, the image.
        """
        try:
            paths = [image.path for image in sample.media]
            grids = tuple(self.images.image_grid(path) for path in paths)
            text = self.chat.encode(sample.turns, grids)
            grids = tuple(grids[number] for number in text.images)
            pixels = [self._pixels(paths[number], grid) for number, grid in zip(text.images, grids, strict=True)]
        except UserError as error:
            raise UserError(f"{sample.source}: {problem}" for problem in error.problems) from error
        positions = mrope_positions(
            text.token_ids, grids, self.chat.image_token_id, self.chat.vision_start_token_id, self.images.merge_size
        )
        return Microbatch(
            token_ids=text.token_ids,
            labels=text.labels,
            positions=positions,
            segment_lengths=(text.token_ids.numel(),),
            image_grids=grids,
            pixel_values=torch.cat(pixels) if pixels else None,
            num_cut_images=len(paths) - len(text.images),
            normalisation=self.images.normalisation if pixels else None,
        )

    def _pixels(self, path: str, grid: Grid) -> Tensor:
        patches, decoded_grid = self.images.patches(path)
        if decoded_grid != grid:
            raise UserError(f"{path}: header and pixels disagree on the size ({grid} and {decoded_grid} patches).")
        return patches
