"""The choice of the next token: pure functions of logits, earlier tokens, and random numbers from a seed.

The rules and their order are transformers': the repetition penalty, then temperature, top-k and top-p.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

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
    logits = logits / decoding.temperature
    if 0 < decoding.top_k < logits.shape[1]:
        least = logits.topk(decoding.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if decoding.top_p < 1.0:
        rising, order = logits.sort(dim=1)
        is_left_out = rising.softmax(dim=1).cumsum(dim=1) <= 1.0 - decoding.top_p
        is_left_out[:, -1] = False  # the likeliest always stays
        logits = logits.masked_fill(is_left_out.scatter(1, order, is_left_out), float("-inf"))
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
