"""What is trained to time and to count steps: pictures by their patch grids, texts by their lengths, and flags."""

import random

Sample = tuple[tuple[tuple[int, int, int], ...], int]
"""Grids of the images, and how many text tokens follow them."""

SAMPLE: Sample = (((1, 30, 42),), 372)
"""A picture of 420 x 588 pixels, COCO's usual size (1260 patches, 315 visual tokens and two around them), and its text.
With 689 tokens it is as long as the mean sample of the data set in MindSpeed-MM's published figures."""
SAMPLE_TOKENS = 315 + 2 + 372

ROUNDED_MOMENTS = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
REMAINDERS = ("--store-param-remainders",)
NO_COPIES = ("--main-params-dtype", "bf16")
OFFLOADED = ("--optimizer-cpu-offload",)

TINY_SAMPLE: Sample = (((1, 16, 12),), 30)

NUM_PICTURES = (0, 1, 1, 1, 2)
"""Numbers of pictures in a mixed sample, each entry equally likely."""
SIDE_TOKENS = (8, 22)
"""Least and most visual tokens along one side of a picture: 224 to 616 pixels."""
MAX_PICTURE_TOKENS = 334
"""Most visual tokens of a picture with the examples' ``image_max_pixels`` of 262144."""
TEXT_TOKENS = (40, 700)
MIN_TEXT_TOKENS = 16
"""Least number of tokens in the text-only sample that fills what is left."""


def num_tokens(sample: Sample) -> int:
    grids, num_text = sample
    return num_text + sum(t * h * w // 4 + 2 for t, h, w in grids)


def num_targets(sample: Sample) -> int:
    """The last half of the text, without the token that begins it, as ``tests.microbatches`` makes it."""
    return (sample[1] + 1) // 2 - 1


def num_patches(sample: Sample) -> int:
    return sum(t * h * w for t, h, w in sample[0])


def equal_samples(tokens: int) -> list[Sample]:
    """Copies of ``SAMPLE``, at least one, with about ``tokens`` tokens in total."""
    return [SAMPLE] * max(1, round(tokens / SAMPLE_TOKENS))


def mixed_samples(tokens: int, seed: int) -> list[Sample]:
    """Samples of different lengths with pictures of different sizes, ``tokens`` in total, shortest first.

    One is text only, as long as needed for the total.
    """
    rng, samples, left = random.Random(seed), [], tokens
    while True:
        sample = (tuple(_grid(rng) for _ in range(rng.choice(NUM_PICTURES))), rng.randint(*TEXT_TOKENS))
        if num_tokens(sample) + MIN_TEXT_TOKENS > left:
            return sorted([*samples, ((), left)], key=num_tokens)
        samples.append(sample)
        left -= num_tokens(sample)


def microbatches_of(tokens: int, num_microbatches: int, is_mixed: bool) -> list[list[Sample]]:
    """The samples of each microbatch of a timed step; ``tokens`` are those of one microbatch."""
    return [mixed_samples(tokens, seed) if is_mixed else equal_samples(tokens) for seed in range(num_microbatches)]


def _grid(rng: random.Random) -> tuple[int, int, int]:
    height = rng.randint(*SIDE_TOKENS)
    width = min(rng.randint(*SIDE_TOKENS), MAX_PICTURE_TOKENS // height)
    return 1, 2 * height, 2 * width
