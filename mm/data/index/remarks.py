"""Notes about samples that are changed or left out because of their length or their text, and about unread keys.

Each note is a sentence with a count, the first few samples, and what to change.
"""

from collections.abc import Callable, Iterator

import numpy as np

from mm.data.index.columns import Columns
from mm.errors import counted
from mm.families.known import names_of

_NUM_NAMED = 3
_TURN_STARTS = ", ".join(names_of(lambda family: [family.tokens.turn_start]))
Named = Callable[[int], str]
"""Gives the name of a sample or record for messages, by its number."""


def length_remarks(samples: Columns, seq_length: int, drops_turns: bool, named: Named) -> Iterator[str]:
    """Notes about the samples of a dataset."""
    shortened = samples.nonzero("num_dropped_tokens")
    if len(shortened):
        dropped, tokens, turns = (samples.values(name, shortened).astype(np.int64) for name in (
            "num_dropped_tokens", "num_tokens", "num_dropped_turns"))
        num_turns = int(turns.sum())
        how = f"lose {num_turns} whole turn{'s' * (num_turns != 1)}" if drops_turns else (
            "are truncated by LLaMA-Factory's rule")
        yield (f"{len(shortened)} of {len(samples)} samples are longer than --seq-length {seq_length} and {how}, "
               f"{dropped.sum()} tokens in total; the longest has {(tokens + dropped).max()}: raise --seq-length to "
               f"keep more.  {_first(shortened, named)}")
    with_words = samples.nonzero("num_control_words")
    if len(with_words):
        num_words = samples.values("num_control_words", with_words).sum(dtype=np.int64)
        yield (f"{len(with_words)} of {len(samples)} samples contain words ({num_words}) that look like control tokens "
               f"or media placeholders ({_TURN_STARTS}, <image>); these are read as plain text.  "
               f"{_first(with_words, named)}")


def too_long_remark(numbers: np.ndarray, num_tokens: np.ndarray, seq_length: int, named: Named) -> str:
    """A note about the records ``numbers``, in which not even one question and answer fit.

    ``num_tokens``: what one question and answer of each would need.
    """
    count = len(numbers)
    return (f"{count} sample{'s are' if count > 1 else ' is'} left out, because not even one question and answer of "
            f"{'each' if count > 1 else 'it'} fit in --seq-length {seq_length}: raise it to {num_tokens.max()}, use "
            f"fewer or smaller images and videos (image_max_pixels), or shorten {'them' if count > 1 else 'it'}.  "
            f"{_first(numbers, named)}")


def unread_remark(key: str, count: int, first: str) -> str:
    """A note about a ``key`` that nothing reads; "" stands for several.  ``first`` names the first of its records."""
    return (f"nothing reads {key or 'the other unknown keys'}, which {counted(count, 'record')} ha"
            f"{'s' if count == 1 else 've'} (the first is {first}); docs/data.md lists the keys that are read")


def _first(numbers: np.ndarray, named: Named) -> str:
    some = ", ".join(named(int(number)) for number in numbers[:_NUM_NAMED])
    return f"The first: {some}" if len(numbers) > 1 else f"It is {some}"
