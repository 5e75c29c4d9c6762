"""The choice of the next token: pure functions of logits, earlier tokens, and random numbers from a seed.

The rules and their order are transformers': the repetition penalty, then temperature, top-k and top-p.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mm.config.generate import Decoding


def drawn_number(seed: int, prompt: int, position: int) -> float:
    """The random number in [0, 1) for token ``position`` of the answer to prompt ``prompt``.

    It depends on nothing else: neither the layout nor the other prompts of the batch.
    """
    digest = hashlib.blake2b(f"{seed} {prompt} {position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


def penalized(logits: Tensor, was_there: Tensor, penalty: float) -> Tensor:
    """Make earlier tokens, ``was_there`` bool [rows, vocabulary], less likely (Keskar et al., arXiv:1909.05858)."""
    return torch.where(was_there, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def probabilities(logits: Tensor, decoding: Decoding) -> Tensor:
    """Probability of each token, float32 [rows, vocabulary]; 0 for tokens that are never drawn."""
    warpers = [TemperatureLogitsWarper(float(decoding.temperature)),
               *([TopKLogitsWarper(decoding.top_k)] if decoding.top_k else ()),
               *([TopPLogitsWarper(decoding.top_p)] if decoding.top_p < 1 else ())]
    ids = torch.empty(0, dtype=torch.int64)  # they ask for earlier tokens, and do not look at them
    for warper in warpers:
        logits = warper(ids, logits)
    return logits.softmax(dim=1)


def next_tokens(logits: Tensor, decoding: Decoding, prompts: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Token ids, int64 [rows], on the device of ``logits``, float32 [rows, vocabulary], which may be penalized.

    Row i is token ``positions[i]`` of the answer to prompt ``prompts[i]``.  A random number picks the first token
    at which the cumulative sum of the probabilities exceeds it.  The sum is taken on the host in float64, which some
    devices do not have.
    """
    if decoding.temperature == 0.0:
        return logits.argmax(dim=1)
    sums = probabilities(logits, decoding).cpu().double().cumsum(dim=1)
    numbers = [drawn_number(decoding.seed, prompt, position)
               for prompt, position in zip(prompts, positions, strict=True)]
    falls_at = torch.tensor(numbers, dtype=torch.float64)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, falls_at, right=True).squeeze(1).to(logits.device)
