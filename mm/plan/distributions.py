"""Lengths of samples drawn at random like those of published datasets; each function cites its figures.

Pictures and frames have the sizes that ``smart_resize`` computes for 14-pixel patches merged 2 x 2; a sample beyond
``seq_length`` tokens loses text and whole pictures.
"""

import math
from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from mm.batch import image_pairs, window_pairs
from mm.data.media.image_patches import smart_resize
from mm.data.sample import Lengths

SEQ_LENGTH = 8192
WINDOW = 8
"""Patches along a window's side."""
_MIN_TEXT = 50
"""Number of tokens reserved for text: the system's message, the template around two turns, and a few words."""


def llava(num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """LLaVA-Instruct-158K on COCO pictures of at most 262,144 pixels, as MindSpeed-MM's script has it.

    58 k conversations, 23 k descriptions and 77 k answers that reason, of 568, 233 and 271 tokens (from the bytes of
    its JSON, at 3.8 a token); with pictures of about 315 tokens a mean of 691, where MindSpeed-MM's README says 689.
    Three of four COCO pictures are 640 x 480 or upright.  The spread within a kind (log-normal, 0.35) is our guess.
    """
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, num_samples, p=np.array([58, 23, 77]) / 158)
    text = _log_normal(rng, np.array([568.0, 233.0, 271.0])[kind], 0.35)
    height, width = rng.integers(333, 641, num_samples), rng.integers(500, 641, num_samples)
    usual = rng.random(num_samples)
    height, width = np.where(usual < 0.75, 480, height), np.where(usual < 0.75, 640, width)
    upright = rng.random(num_samples) < 0.3
    sides = np.where(upright, width, height).tolist(), np.where(upright, height, width).tolist()
    grids = [[(1, *_patches(*side, 262_144))] for side in zip(*sides, strict=True)]
    return _lengths(text, grids, 0.8, seq_length)


def documents(num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """Questions on scanned pages, charts and documents of several pages, pictures of at most 4,000,000 pixels.

    Half is one letter page of 100 to 240 dpi, a quarter a chart or figure of 400 to 1,000 pixels a side, an eighth two
    to eight pages at 70 to 110 dpi (MP-DocVQA has 48 k pages in 6 k documents), an eighth text.  The shares are ours.
    """
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, num_samples, p=[0.5, 0.25, 0.125, 0.125])
    text = np.where(kind == 3, _log_normal(rng, np.full(num_samples, 1200.0), 0.8), rng.integers(30, 201, num_samples))
    media = []
    for one in kind.tolist():
        if one == 0:
            dpi = rng.uniform(100, 240)
            media.append([(1, *_patches(round(11 * dpi), round(8.5 * dpi), 4_000_000))])
        elif one == 1:
            height, width = rng.integers(400, 1001, 2).tolist()
            media.append([(1, *_patches(height, width, 4_000_000))])
        elif one == 2:
            dpi = rng.uniform(70, 110)
            media.append([(1, *_patches(round(11 * dpi), round(8.5 * dpi), 4_000_000))] * int(rng.integers(2, 9)))
        else:
            media.append([])
    return _lengths(text, media, 0.3, seq_length)


def videos(num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """LLaVA-Video-178K, by MindSpeed-MM's settings: 2 frames a second, at most 128, frames of at most 65,536 pixels.

    Videos last 3 to 180 s, 40 s on average; nine of ten are 16:9, the others upright.  Text: captions of several
    hundred tokens for a quarter, answers of 30 to 150 for the rest; the shares are ours.
    """
    rng = np.random.default_rng(seed)
    seconds = np.clip(_log_normal(rng, np.full(num_samples, 42.0), 0.75), 3, 180)
    frames = np.clip(2 * seconds, 4, 128).astype(int)
    text = np.where(rng.random(num_samples) < 0.25, _log_normal(rng, np.full(num_samples, 450.0), 0.5),
                    rng.integers(30, 151, num_samples))  # fmt: skip
    wide, tall = _patches(720, 1280, 65_536), _patches(1280, 720, 65_536)
    is_wide = rng.random(num_samples) < 0.9
    grids = [[(-(-count // 2), *(wide if one else tall))]
             for count, one in zip(frames.tolist(), is_wide.tolist(), strict=True)]  # fmt: skip
    return _lengths(text, grids, 0.5, seq_length)


def text(num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """Conversations without images: log-normal lengths with a mean of 600 tokens, which is our choice."""
    rng = np.random.default_rng(seed)
    words = _log_normal(rng, np.full(num_samples, 600.0), 0.8)
    return _lengths(words, [[]] * num_samples, 0.6, seq_length)


def mixed(shares: Mapping[str, float], num_samples: int, seed: int = 0, seq_length: int = SEQ_LENGTH) -> Lengths:
    """A shuffled mix of ``DISTRIBUTIONS``; ``shares`` need not add up to 1."""
    rng, total = np.random.default_rng(seed), sum(shares.values())
    drawn = [DISTRIBUTIONS[name](max(1, round(num_samples * share / total)), seed, seq_length)
             for name, share in shares.items()]  # fmt: skip
    order = rng.permutation(sum(map(len, drawn)))
    return Lengths(*(np.concatenate([getattr(one, field.name) for one in drawn])[order] for field in fields(Lengths)))


DISTRIBUTIONS = {"llava": llava, "documents": documents, "videos": videos, "text": text}


def _log_normal(rng: np.random.Generator, means: np.ndarray, sigma: float) -> np.ndarray:
    return np.maximum(5, rng.lognormal(np.log(means) - sigma**2 / 2, sigma)).astype(int)


def _patches(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    rows, columns = smart_resize(height, width, 28, 3136, max_pixels)
    return rows // 14, columns // 14


def _lengths(
    text: np.ndarray, media: list[list[tuple[int, int, int]]], targets: float, seq_length: int
) -> Lengths:
    """``targets``: the share of the text that has a loss."""
    rows = []
    for words, grids in zip(text.tolist(), media, strict=True):
        kept, left = [], seq_length - _MIN_TEXT
        for grid in grids:
            if math.prod(grid) // 4 + 2 <= left:
                kept.append(grid)
                left -= math.prod(grid) // 4 + 2
        num_tokens = min(seq_length, seq_length - _MIN_TEXT - left + words)
        rows.append((
            num_tokens, int(min(words, num_tokens) * targets), len(kept), sum(map(math.prod, kept)),
            sum(map(image_pairs, kept)), sum(window_pairs(grid, WINDOW) for grid in kept),
        ))  # fmt: skip
    tokens, num_targets, num_media, patches, full, windows = np.array(rows, dtype=np.int64).T
    return Lengths(tokens.astype(np.int32), num_targets.astype(np.int32), num_media.astype(np.int32),
                   patches.astype(np.int32), full, windows)  # fmt: skip
