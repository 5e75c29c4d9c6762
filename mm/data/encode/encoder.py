"""Samples as tensors: each one a microbatch with one segment, ready to be packed with others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mm.batch import Grid, Microbatch
from mm.config.data import DataConfig, ResizeRule
from mm.config.model import ModelConfig
from mm.data.encode.chat import ChatEncoder, EncodedText, load_tokenizer
from mm.data.media.image_patches import ImagePlan, ImageProcessor
from mm.data.media.video_patches import VideoPlan, VideoProcessor
from mm.data.sample import Image, Media, Sample, Turn, Video
from mm.errors import UserError, naming, refuse
from mm.model.arithmetic import Arithmetic, VideoTimes
from mm.model.families import arithmetic_of


def image_processor(data: DataConfig, rule: ResizeRule | None = None) -> ImageProcessor:
    """The image processor for ``data``, or with another ``rule``.  Raises UserError as ``from_directory`` does."""
    rule = rule or data.image_resize or "transformers"
    is_upright = rule == "transformers" if data.image_exif is None else data.image_exif
    return ImageProcessor.from_directory(
        data.model_name_or_path, data.image_min_pixels, data.image_max_pixels, rule, is_upright, data.image_backend)


@dataclass(frozen=True)
class SampleEncoder:
    """Everything that turns a ``Sample`` into tensors.  Pickles into data workers."""

    chat: ChatEncoder
    images: ImageProcessor
    videos: VideoProcessor
    tokens_per_second: int
    """Positions per second of video, from the model JSON."""
    arithmetic: Arithmetic
    """Computes the positions of tokens, as the model's family does."""

    @classmethod
    def from_config(cls, data: DataConfig, model: ModelConfig, seq_length: int) -> "SampleEncoder":
        """Read the tokenizer, the chat template and the image and video constants from ``data.model_name_or_path``.

        Raises UserError when they do not match the model JSON.
        """
        directory = data.model_name_or_path
        images = image_processor(data)
        videos = VideoProcessor.from_config(data, images)
        chat = ChatEncoder(
            load_tokenizer(directory, [model.family]),
            seq_length=seq_length,
            spatial_merge_size=model.vision.spatial_merge_size,
            family=model.family,
            train_on_prompt=data.train_on_prompt,
            mask_history=data.mask_history,
            drops_turns=data.drops_turns,
        )
        vision, tokens = model.vision, model.family.tokens
        pairs = [
            (f"the id of {tokens.image}", chat.image_token_id, "img_context_token_id", model.image_token_id),
            (f"the id of {tokens.video}", chat.video_token_id, "video_token_id", model.video_token_id),
            (f"the id of {tokens.vision_start}", chat.vision_start_token_id,
             "vision_start_token_id", model.vision_start_token_id),
        ]
        sizes = (("patch_size", "patch_size"), ("temporal_patch_size", "temporal_patch_size"),
                 ("merge_size", "spatial_merge_size"))
        for name, key in sizes:
            found, of_videos = getattr(images, name), getattr(videos.constants, name)
            pairs.append((name, found, key, getattr(vision, key)))
            if of_videos != found:
                pairs.append((f"{name} of videos", of_videos, key, getattr(vision, key)))
        refuse(
            f"{name} is {found} in {directory}, but {key} is {expected} in the model JSON; they must be equal."
            for name, found, key, expected in pairs if found != expected)
        largest = max(chat.tokenizer.get_vocab().values())
        if largest >= model.language.vocab_size:
            raise UserError(
                f"the tokenizer in {directory} has ids up to {largest}, but text_decoder.vocab_size is "
                f"{model.language.vocab_size}: some tokens would have no embedding; give the tokenizer of this model.")
        # Encoding a conversation with every kind of part detects another model's template early.
        conversation = [Turn("user", (Image(""), "question", Video(""))), Turn("assistant", ("answer",))]
        with naming(directory):
            chat.encode(conversation, [(1, chat.spatial_merge_size, chat.spatial_merge_size)] * 2)
        return cls(chat, images, videos, vision.tokens_per_second, arithmetic_of(model))

    def encode(self, sample: Sample) -> Microbatch:
        """One sample as a microbatch with one segment.  Raises UserError as ``outline`` and ``filled`` do."""
        return self.filled(self.outline(sample))

    def filled(self, outline: "Outline") -> Microbatch:
        """Add the pixels.  Raises UserError naming the sample and the image or video that cannot be decoded."""
        with naming(outline.where):
            pixels = [self._pixels(one) for one in outline.media]
        return replace(outline.microbatch, pixel_values=torch.cat(pixels) if pixels else None)

    def outline(self, sample: Sample) -> "Outline":
        """One sample without its pixels, from the headers of its media.

        Raises UserError naming the sample and, if an image or video causes it, that file; see ``ChatEncoder.encode``.
        """
        return self._outline(sample, self.chat.encode)

    def encode_prompt(self, prompt: Sample) -> Microbatch:
        """Like ``encode``, for a ``prompt``, whose last turn is a question.  It is not truncated and has no targets."""
        return self.filled(self._prompt(prompt))

    def prompt_length(self, prompt: Sample) -> int:
        """Number of tokens of a prompt.  Raises UserError also if no position remains for an answer."""
        return self._prompt(prompt).microbatch.num_tokens

    def _prompt(self, prompt: Sample) -> "Outline":
        outline, most = self._outline(prompt, self.chat.encode_prompt), self.chat.seq_length
        if (num_tokens := outline.microbatch.num_tokens) >= most:
            raise UserError(f"{prompt.where}: has {num_tokens} tokens, but the model has {most} positions, including "
                            f"the answer; shorten it, or lower image_max_pixels (mm.generate: --image-max-pixels)")
        return outline

    def _outline(self, sample: Sample, encode: Callable[[Sequence[Turn], Sequence[Grid]], EncodedText]) -> "Outline":
        with naming(sample.where):
            planned = [self.planned(one) for one in sample.media]
            text = encode(sample.turns, [one.grid for one in planned])
        kept = tuple(planned[number] for number in text.media)
        grids = tuple(one.grid for one in kept)
        seconds = tuple(one.seconds if isinstance(one, VideoPlan) else None for one in kept)
        positions = self.arithmetic.positions(
            text.token_ids, grids, self.chat.image_token_id, self.chat.vision_start_token_id, self.images.merge_size,
            VideoTimes(self.chat.video_token_id, self.tokens_per_second, seconds),
        )
        microbatch = Microbatch(
            token_ids=text.token_ids,
            labels=text.labels,
            positions=positions,
            segment_lengths=(text.token_ids.numel(),),
            image_grids=grids,
            pixel_values=None,
            num_omitted_images=len(planned) - len(kept),
            normalisations=tuple(self.videos.normalisation if isinstance(one, VideoPlan) else self.images.normalisation
                                 for one in kept),
        )
        return Outline(microbatch, kept, sample.where)

    def planned(self, media: Media) -> ImagePlan | VideoPlan:
        """How an image or video will be read, from its header.  Raises UserError naming its file."""
        if isinstance(media, Video):
            return self.videos.plan(media)
        return self.images.within(media).plan(media.path)

    def _pixels(self, planned: ImagePlan | VideoPlan) -> Tensor:
        if isinstance(planned, VideoPlan):
            return self.videos.patches(planned)
        return planned.processor.patches(planned)


@dataclass(frozen=True)
class Outline:
    """A sample without its pixels."""

    microbatch: Microbatch
    """With one segment."""
    media: tuple[ImagePlan | VideoPlan, ...]
    """One per grid.  Media cut off at ``seq_length`` are not included, and not decoded."""
    where: str
    """See ``Sample.where``."""
