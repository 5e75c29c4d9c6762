"""How much of each turn of a conversation remains when it has too many tokens.  Pure functions of numbers of tokens."""

from collections.abc import Sequence

import numpy as np


def kept_lengths(
    lengths: Sequence[tuple[int, int]], limit: int, last_first: bool = False
) -> list[tuple[int, int]]:
    """How many tokens of the question and answer of each turn to keep, given their ``lengths``; at most ``limit`` in
    total.

    LLaMA-Factory's rule (``infer_seqlen`` in its data/processor): turns take what they need, from the first one on or
    from the last one back.  In the turn that does not fit, the longer part is cut; both are cut in proportion if each
    takes more than half.
    """
    kept = [(0, 0)] * len(lengths)
    for turn in reversed(range(len(lengths))) if last_first else range(len(lengths)):
        question, answer = lengths[turn]
        if 2 * answer < limit:
            num_answer = answer
        elif 2 * question < limit:
            num_answer = min(answer, limit - question)
        else:
            num_answer = min(answer, int(limit * (answer / (question + answer))))
        kept[turn] = min(question, limit - num_answer), num_answer
        limit -= sum(kept[turn])
    return kept


def kept_turns(lengths: Sequence[int], limit: int, last_first: bool = False) -> range:
    """Which turns, given their ``lengths`` in tokens, are kept whole so that they fit in ``limit`` tokens.

    As many as fit from the first one on, or with ``last_first`` from the last one back; none if that one alone is too
    long.
    """
    num_kept = int(np.searchsorted(np.cumsum(lengths[::-1] if last_first else lengths), limit, side="right"))
    return range(len(lengths) - num_kept, len(lengths)) if last_first else range(num_kept)
