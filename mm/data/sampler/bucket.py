"""Samples of similar cost side by side: the two modes of MindSpeed-MM's BucketBatchSampler.

As in MindSpeed-MM, data-parallel ranks compute similar amounts at the same time.  Differences: cost covers the whole
sample and not only its images, nothing is dropped, the seed has an effect, and every rank computes the order itself
instead of receiving it.
"""

import numpy as np

from mm.data.sampler.balance import HasSizes
from mm.data.sampler.sample_stream import StepSamples, Stream, generator, in_turn

NUM_BUCKETS = 16
"""Buckets have the same number of samples.  MindSpeed-MM has 7, by patches, for images of 262,144 pixels."""
BLOCK_SAMPLES = 64
"""Consecutive samples of one bucket in the stream.  MindSpeed-MM uses one microbatch of all ranks, which makes the
stream depend on the layout.  64 corresponds to 8 nodes of 8 devices with one sample each."""


def bucket_stream(costs: np.ndarray, seed: int, shuffle: bool) -> Stream:
    """``data_bucketing_img``: blocks of samples from one bucket, in random order.

    What remains of each bucket after its last full block is mixed together.
    """
    num_samples = len(costs)
    num_buckets = max(1, min(NUM_BUCKETS, num_samples // BLOCK_SAMPLES))
    by_cost = np.argsort(costs, kind="stable").astype(np.uint32 if num_samples < 2**32 else np.int64)
    buckets = np.array_split(by_cost, num_buckets)

    def of_epoch(epoch: int) -> np.ndarray:
        random = generator(seed, epoch)
        rows = [random.permutation(bucket) if shuffle else bucket for bucket in buckets]
        whole = [row[: len(row) // BLOCK_SAMPLES * BLOCK_SAMPLES] for row in rows]
        left = np.concatenate([row[len(full) :] for row, full in zip(rows, whole, strict=True)])
        left = random.permutation(left) if shuffle else left
        samples = np.concatenate([*whole, left])
        if not shuffle:
            return samples
        num_whole = num_samples // BLOCK_SAMPLES
        whole_samples, rest = samples[: num_whole * BLOCK_SAMPLES], samples[num_whole * BLOCK_SAMPLES :]
        order = random.permutation(num_whole + bool(len(rest)))
        blocks = whole_samples.reshape(num_whole, BLOCK_SAMPLES)
        if not len(rest):
            return blocks[order].reshape(-1)
        place = int(np.flatnonzero(order == num_whole)[0])  # position of the shorter block
        return np.concatenate([blocks[order[:place]].reshape(-1), rest, blocks[order[place + 1 :]].reshape(-1)])

    return Stream(num_samples, of_epoch)


def sorted_in_turn(samples: np.ndarray, sizes: HasSizes, micro_batch_size: int, dp_size: int) -> list[StepSamples]:
    """``data_reordering_img``: deal the samples of a global batch by ascending cost, so costly microbatches coincide.

    Every second round runs backwards through the ranks; otherwise the last rank would always get the costliest.
    """
    ordered = samples[np.argsort(sizes.of(samples).costs, kind="stable")].reshape(-1, dp_size, micro_batch_size)
    ordered[1::2] = ordered[1::2, ::-1].copy()
    return in_turn(ordered.reshape(-1), micro_batch_size, dp_size)
