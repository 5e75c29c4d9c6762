"""What is told of samples that are used otherwise than they stand in their files, or not at all, because they are long.

Each is a sentence with how many, the first few, and what to change.  Where the numbers come from is not known here.
"""

from collections.abc import Callable, Iterator

import numpy as np

_NUM_NAMED = 3
Named = Callable[[int], str]
"""What a sample is called, by its number in the dataset."""


def length_remarks(
    column: Callable[[str], np.ndarray], seq_length: int, drops_turns: bool, named: Named
) -> Iterator[str]:
    """Of the samples of a dataset; ``column`` gives the numbers that ``mm.data.gauge.ROW`` has of each."""
    dropped, turns, words = map(column, ("num_dropped_tokens", "num_dropped_turns", "num_control_words"))
    shortened = np.flatnonzero(dropped)
    if len(shortened):
        longest = int((column("num_tokens") + dropped).max())
        num_turns = int(turns.sum())
        how = f"lose {num_turns} whole turn{'s' * (num_turns != 1)}" if drops_turns else (
            "are cut by LLaMA-Factory's rule")
        yield (f"{len(shortened)} of {len(dropped)} samples are longer than --seq-length {seq_length} and {how}, "
               f"{dropped.sum(dtype=np.int64)} tokens in all; the longest has {longest}: raise --seq-length to keep "
               f"more.  {_first(shortened, named)}")
    with_words = np.flatnonzero(words)
    if len(with_words):
        yield (f"{len(with_words)} of {len(words)} samples have {words.sum(dtype=np.int64)} words in their texts that "
               f"look like control tokens or places of media (<|im_start|>, <image>); these are read as plain text.  "
               f"{_first(with_words, named)}")


def too_long_remark(num_tokens: np.ndarray, seq_length: int, named: Named) -> str:
    """Of samples of which not one question and answer fits, and how many tokens each needs for that."""
    count = len(num_tokens)
    return (f"{count} sample{'s are' if count > 1 else ' is'} left out, because not one question and answer of "
            f"{'each' if count > 1 else 'it'} fits --seq-length {seq_length}: raise it to {num_tokens.max()}, show "
            f"fewer or smaller images and videos (image_max_pixels), or shorten {'them' if count > 1 else 'it'}.  "
            f"{_first(np.arange(count), named)}")


def _first(numbers: np.ndarray, named: Named) -> str:
    some = ", ".join(named(int(number)) for number in numbers[:_NUM_NAMED])
    return f"The first: {some}" if len(numbers) > 1 else f"It is {some}"
