"""How fast images are loaded on one core, compared with transformers' Pillow-based processor.

    python -m benchmarks.data [--rounds 9] [--output FILE.json]

JPEG files of three sizes, from the file to the patches of a sample, in turn by transformers'
``Qwen2VLImageProcessorPil`` and by ours with ``image_backend`` "pillow" (bitwise equal to it) and "torch".  A ratio is
the median over the rounds.
"""

import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from benchmarks.measure import command, median_ratio, report, seconds_of
from mm.batch import normalised
from mm.data.media.image_patches import ImageProcessor

SIZES = {"640 x 480": (640, 480), "1280 x 960": (1280, 960), "4000 x 3000": (4000, 3000)}
MAX_PIXELS = 1_003_520
"""1,280 tokens of 28 x 28 pixels, which qwen-vl-utils and the README of Qwen2.5-VL name."""
SETTINGS: dict[str, Any] = {
    "min_pixels": 3136, "max_pixels": MAX_PIXELS, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711),
}  # fmt: skip


def write_photo(path: Path, size: tuple[int, int]) -> None:
    """Smooth colours with noise, about as many bytes per pixel as a photograph."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (size[1] // 40, size[0] // 40, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = smooth + random.normal(0, 6, smooth.shape).astype(np.int16)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    theirs = Qwen2VLImageProcessorPil(**SETTINGS)
    exact, fast = (ImageProcessor(**SETTINGS, backend=backend) for backend in ("pillow", "torch"))
    found = {}
    for name, size in SIZES.items():
        path = str(directory / f"{size[0]}.jpg")
        write_photo(Path(path), size)
        expected = theirs([Image.open(path)], return_tensors="pt")["pixel_values"]
        assert torch.equal(normalised(exact.patches(exact.plan(path)), exact.normalisation.constants()), expected)
        works = (partial(lambda path: theirs([Image.open(path)], return_tensors="pt"), path),
                 *(partial(lambda one, path: one.patches(one.plan(path)), one, path) for one in (exact, fast)))
        taken = [[seconds_of(work) for work in works] for _ in range(rounds)]
        peer_seconds, exact_seconds, fast_seconds = zip(*taken, strict=True)
        found[name] = {
            "their_milliseconds": 1000 * statistics.median(peer_seconds),
            "exact_speed_ratio": median_ratio(peer_seconds, exact_seconds)["median"],
            "fast_speed_ratio": median_ratio(peer_seconds, fast_seconds)["median"],
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        report(measure(Path(name), flags.rounds), flags.output, prints=False)


if __name__ == "__main__":
    main()
