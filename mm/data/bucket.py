"""Samples of like cost side by side: the two ways of MindSpeed-MM's BucketBatchSampler.

Like there, what one data-parallel rank computes is like what the others compute beside it.  Other than there, cost is
that of the whole sample and not only of its pictures, nothing is dropped, the seed counts, and no rank tells another
the order: each computes it.
"""

import numpy as np

from mm.data.order import Step, Stream, generator, in_turn

NUM_BUCKETS = 16
"""Of equally many samples.  MindSpeed-MM has 7, by patches, for pictures of 262,144 pixels."""
RUN_SAMPLES = 64
"""Samples of one bucket that follow one another in the stream.  MindSpeed-MM takes what one microbatch of all ranks
holds, which makes another stream of every layout; this is 8 nodes of 8 devices with one sample each."""


def bucket_stream(costs: np.ndarray, seed: int, shuffle: bool) -> Stream:
    """``data_bucketing_img``: runs of samples of one bucket, in random order.

    What a bucket has left over after its last full run is mixed with what the others have.
    """
    num_buckets = max(1, min(NUM_BUCKETS, len(costs) // RUN_SAMPLES))
    buckets = np.array_split(np.argsort(costs, kind="stable"), num_buckets)

    def of_epoch(epoch: int) -> np.ndarray:
        random = generator(seed, epoch)
        rows = [random.permutation(bucket) if shuffle else bucket for bucket in buckets]
        whole = [row[: len(row) // RUN_SAMPLES * RUN_SAMPLES] for row in rows]
        left = np.concatenate([row[len(full) :] for row, full in zip(rows, whole, strict=True)])
        left = random.permutation(left) if shuffle else left
        runs = np.split(np.concatenate([*whole, left]), np.arange(RUN_SAMPLES, len(costs), RUN_SAMPLES))
        order = random.permutation(len(runs)) if shuffle else range(len(runs))
        return np.concatenate([runs[number] for number in order])

    return Stream(len(costs), of_epoch)


def sorted_in_turn(samples: np.ndarray, costs: np.ndarray, micro_batch_size: int, dp_size: int) -> list[Step]:
    """``data_reordering_img``: the samples of a global batch are dealt by rising cost, so costly microbatches coincide.

    Every second turn goes backwards through the ranks, or the last of them would always have the costliest.
    """
    ordered = samples[np.argsort(costs[samples], kind="stable")].reshape(-1, dp_size, micro_batch_size)
    ordered[1::2] = ordered[1::2, ::-1].copy()
    return in_turn(ordered.reshape(-1), micro_batch_size, dp_size)
