"""One step, without its pixels, as an int64 vector that a replica's owner sends to the other ranks.

    | failed | bad | totals ... | image passes | number of microbatches | counts, ids, labels, ... of each one |
    |<-------- Head ----------->|<------ or, if an owner failed, its problems as JSON, one byte each ------->|
"""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch
from torch import Tensor

from mm.batch import BatchTotals, Images, Microbatch, Normalisation

_NO_KEY = "0" * 32
"""Encodes "" in ``Microbatch.feature_keys``."""


@dataclass(frozen=True)
class Head:
    """The state of a step.  Every number is a count, so the owners' vectors add up to the head of the whole step."""

    num_failed: int
    """Owners that failed."""
    num_bad: int
    """Samples that they left out."""
    totals: BatchTotals

    def numbers(self) -> Tensor:
        return torch.tensor([self.num_failed, self.num_bad, *astuple(self.totals)], dtype=torch.int64)

    @classmethod
    def of(cls, numbers: Tensor) -> "Head":
        """The inverse of ``numbers``."""
        num_failed, num_bad, *totals = numbers.tolist()
        return cls(num_failed, num_bad, BatchTotals(*totals))


_HEAD_NUMBERS = 2 + len(fields(BatchTotals))


def to_message(
    head: Head, problems: Sequence[str], microbatches: list[Microbatch], image_passes: Sequence[Images]
) -> Tensor:
    """``problems``, if any, replace what follows.  ``image_passes``: as in ``StepPlan``."""
    if problems:
        return torch.cat([head.numbers(), torch.tensor(list(json.dumps(problems).encode()))])
    passes = torch.tensor([len(image_passes), *image_passes], dtype=torch.int64)
    return torch.cat([head.numbers(), passes, *_to_numbers(microbatches)])


def from_message(message: Tensor) -> tuple[Head, list[str], list[Microbatch], tuple[Images, ...]]:
    """The inverse of ``to_message``: microbatches without pixels and features."""
    head, contents = Head.of(message[:_HEAD_NUMBERS]), message[_HEAD_NUMBERS:]
    if head.num_failed:
        return head, json.loads(contents.to(torch.uint8).numpy().tobytes()), [], ()
    end = 1 + int(contents[0])
    return head, [], _from_numbers(contents[end:]), tuple(map(Images, contents[1:end].tolist()))


def _to_numbers(microbatches: list[Microbatch]) -> list[Tensor]:
    """Microbatches without pixels as int64 vectors: their number, then for each one six counts and its contents."""
    tensors = [torch.tensor([len(microbatches)])]
    for m in microbatches:
        tensors += [
            torch.tensor([m.num_tokens, len(m.segment_lengths), len(m.image_grids), len(m.samples), m.feature_bytes,
                          len(m.feature_keys)]),
            m.token_ids,
            m.labels,
            m.positions.flatten(),
            torch.tensor(m.segment_lengths, dtype=torch.int64),
            torch.tensor(m.image_grids, dtype=torch.int64).flatten(),
            torch.tensor(m.samples, dtype=torch.int64),
            _bits(m.normalisations),
            _key_numbers(m.feature_keys),
        ]
    return tensors


def _from_numbers(payload: Tensor) -> list[Microbatch]:
    """The inverse of ``_to_numbers``."""
    offset = 0

    def read(count: int) -> Tensor:
        nonlocal offset
        offset += count
        return payload[offset - count : offset]

    microbatches = []
    for _ in range(int(read(1))):
        num_tokens, num_segments, num_images, num_samples, feature_bytes, num_keys = read(6).tolist()
        microbatches.append(
            Microbatch(
                token_ids=read(num_tokens),
                labels=read(num_tokens),
                positions=read(3 * num_tokens).view(3, num_tokens),
                segment_lengths=tuple(read(num_segments).tolist()),
                image_grids=tuple(tuple(grid) for grid in read(3 * num_images).view(-1, 3).tolist()),
                pixel_values=None,
                samples=tuple(read(num_samples).tolist()),
                normalisations=_normalisations(read(7 * num_images)),
                feature_bytes=feature_bytes,
                feature_keys=_keys(read(2 * num_keys)),
            )
        )
    assert offset == payload.numel()
    return microbatches


def _bits(normalisations: Sequence[Normalisation]) -> Tensor:
    """Seven float64 per image, bit-cast to int64."""
    values = [(one.divisor, *one.mean, *one.std) for one in normalisations]
    return torch.tensor(values, dtype=torch.float64).view(torch.int64).flatten()


def _normalisations(bits: Tensor) -> tuple[Normalisation, ...]:
    rows = bits.clone().view(torch.float64).view(-1, 7).tolist()
    return tuple(Normalisation(row[0], tuple(row[1:4]), tuple(row[4:])) for row in rows)


def _key_numbers(keys: Sequence[str]) -> Tensor:
    """Two int64 per key: its 16 bytes, or zeros for no key."""
    numbers = np.frombuffer(bytes.fromhex("".join(key or _NO_KEY for key in keys)), dtype=np.int64)
    return torch.from_numpy(numbers.copy())


def _keys(numbers: Tensor) -> tuple[str, ...]:
    found = (pair.tobytes().hex() for pair in numbers.numpy().reshape(-1, 2))
    return tuple("" if key == _NO_KEY else key for key in found)
