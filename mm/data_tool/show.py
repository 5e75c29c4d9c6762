"""One sample as the model sees it: its images after resizing, and its tokens with the target tokens marked."""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image
from torch import Tensor

from mm.batch import IGNORE_INDEX, Microbatch
from mm.data.encode.encoder import SampleEncoder
from mm.data.sample import Sample
from mm.errors import printable
from mm.report import page

_LEGEND = ('<p class="legend"><span class="target">target tokens: the loss is computed on them</span> '
           '<span class="media">tokens of an image or video</span> <span>no colour: context</span></p>')
_GREEN, _BLUE, _DIM, _END = "\033[32m", "\033[34m", "\033[2m", "\033[0m"


@dataclass(frozen=True)
class TokenGroup:
    """Consecutive tokens of the same kind."""

    text: str
    kind: str
    """"target", "context" or "media"."""


@dataclass(frozen=True)
class Shown:
    """A sample, prepared for display."""

    where: str
    pieces: tuple[TokenGroup, ...]
    num_tokens: int
    num_target_tokens: int
    frames: tuple[np.ndarray, ...]
    """uint8 [height, width, 3]: each image, and each frame of a video."""

    @classmethod
    def of(cls, sample: Sample, encoder: SampleEncoder) -> "Shown":
        """Raises UserError as the encoder does."""
        encoded = encoder.encode(sample)
        return cls(sample.where, tuple(_pieces(encoded, encoder)), encoded.num_tokens, encoded.num_target_tokens,
                   tuple(_frames(encoded, encoder)))

    def text(self, has_colours: bool) -> str:
        """For the terminal; without colours, target tokens are between [[ and ]]."""
        marks = {"target": (_GREEN, _END), "media": (_BLUE, _END), "context": (_DIM, _END)} if has_colours else {
            "target": ("[[", "]]"), "media": ("", ""), "context": ("", "")}
        body = "".join(marks[piece.kind][0] + printable(piece.text) + marks[piece.kind][1] for piece in self.pieces)
        return f"{printable(self.where)}: {self._counts}\n\n{body}"

    def html(self) -> str:
        """A self-contained page."""
        spans = "".join(f'<span class="{piece.kind}">{escape(piece.text)}</span>' for piece in self.pieces)
        images = "".join(f'<div><img alt="as the model sees it" src="data:image/png;base64,{_png(frame)}">'
                         f"<small>{frame.shape[1]:,} x {frame.shape[0]:,} pixels</small></div>"
                         for frame in self.frames)
        return page(self.where, f'<p>{self._counts}</p>\n<div class="frames">{images}</div>\n{_LEGEND}\n'
                                f'<div class="turns">{spans}</div>')

    @property
    def _counts(self) -> str:
        num_frames = len(self.frames)
        return (f"{self.num_tokens:,} tokens, {self.num_target_tokens:,} of them targets, {num_frames:,} "
                f"{'image or frame' if num_frames == 1 else 'images or frames'}")


def _pieces(encoded: Microbatch, encoder: SampleEncoder) -> Iterator[TokenGroup]:
    """Runs of tokens of one kind; the tokens of an image or video are replaced by their number."""
    media = encoder.chat.media_token_ids
    ids = encoded.token_ids.tolist()
    is_target = [False, *(label != IGNORE_INDEX for label in encoded.labels.tolist()[:-1])]
    kinds = ["media" if token in media else "target" if is_one else "context"
             for token, is_one in zip(ids, is_target, strict=True)]
    start = 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or kinds[stop] != kinds[start]:
            some = ids[start:stop]
            words = str(encoder.chat.tokenizer.decode(some))
            yield TokenGroup(f"[{len(some)} visual tokens]" if kinds[start] == "media" else words, kinds[start])
            start = stop


def _frames(encoded: Microbatch, encoder: SampleEncoder) -> Iterator[np.ndarray]:
    if encoded.pixel_values is None:
        return
    sizes = [t * h * w for t, h, w in encoded.image_grids]
    for patches, grid in zip(encoded.pixel_values.split(sizes), encoded.image_grids, strict=True):
        frames: Tensor = encoder.images.joined(patches, grid)
        is_still = grid[0] == 1 and bool((frames == frames[0]).all())
        yield from (frame.numpy() for frame in (frames[:1] if is_still else frames))


def _png(frame: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(frame).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()
