"""One sample as the model sees it: its images after resizing, and its tokens with the target tokens marked."""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image

from mm.batch import IGNORE_INDEX, Microbatch
from mm.data.encode.encoder import SampleEncoder
from mm.data.sample import Sample
from mm.errors import printable
from mm.report import page

_LEGEND = ('<p class="legend"><span class="target">target tokens: the loss is computed on them</span> '
           '<span class="media">tokens of an image or video</span> <span>no colour: context</span></p>')


@dataclass(frozen=True)
class Shown:
    """A sample, prepared for display."""

    where: str
    groups: tuple[tuple[str, str], ...]
    """Consecutive tokens of one kind ("target", "context" or "media"), and their text."""
    num_tokens: int
    num_target_tokens: int
    frames: tuple[np.ndarray, ...]
    """uint8 [height, width, 3]: each image, and each frame of a video."""

    @classmethod
    def of(cls, sample: Sample, encoder: SampleEncoder) -> "Shown":
        """Raises UserError as the encoder does."""
        encoded = encoder.encode(sample)
        return cls(sample.where, tuple(_groups(encoded, encoder)), encoded.num_tokens, encoded.num_target_tokens,
                   tuple(_frames(encoded, encoder)))

    def text(self) -> str:
        """For the terminal, with target tokens between [[ and ]]."""
        body = "".join(f"[[{text}]]" if kind == "target" else text for kind, text in self.groups)
        return printable(f"{self.where}: {self._counts}\n\n{body}")

    def html(self) -> str:
        """A self-contained page."""
        spans = "".join(f'<span class="{kind}">{escape(text)}</span>' for kind, text in self.groups)
        images = "".join(f'<div><img alt="as the model sees it" src="data:image/png;base64,{_png(frame)}">'
                         f"<small>{frame.shape[1]:,} x {frame.shape[0]:,} pixels</small></div>"
                         for frame in self.frames)
        return page(self.where, f'<p>{self._counts}</p>\n<div class="frames">{images}</div>\n{_LEGEND}\n'
                                f'<div class="turns">{spans}</div>')

    @property
    def _counts(self) -> str:
        return (f"{self.num_tokens:,} tokens, {self.num_target_tokens:,} of them targets, {len(self.frames):,} images "
                f"and frames")


def _groups(encoded: Microbatch, encoder: SampleEncoder) -> Iterator[tuple[str, str]]:
    """Runs of tokens of one kind; the tokens of an image or video are replaced by their number."""
    media, ids = encoder.chat.media_token_ids, encoded.token_ids.tolist()
    is_target = [False, *(label != IGNORE_INDEX for label in encoded.labels.tolist()[:-1])]
    kinds = ["media" if token in media else "target" if is_one else "context"
             for token, is_one in zip(ids, is_target, strict=True)]
    start = 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or kinds[stop] != kinds[start]:
            text = f"[{stop - start} visual tokens]" if kinds[start] == "media" else (
                str(encoder.chat.tokenizer.decode(ids[start:stop])))
            yield kinds[start], text
            start = stop


def _frames(encoded: Microbatch, encoder: SampleEncoder) -> Iterator[np.ndarray]:
    if encoded.pixel_values is None:
        return
    sizes = [t * h * w for t, h, w in encoded.image_grids]
    for patches, grid in zip(encoded.pixel_values.split(sizes), encoded.image_grids, strict=True):
        frames = encoder.images.joined(patches, grid)
        is_still = grid[0] == 1 and bool((frames == frames[0]).all())
        yield from (frame.numpy() for frame in (frames[:1] if is_still else frames))


def _png(frame: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(frame).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()
