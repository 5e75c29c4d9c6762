"""How messages name ranks."""

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks as text, such as ``ranks 1, 4 to 7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join(" to ".join(map(str, span)) for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def death_of(rank: int) -> str:
    """The report for a connection that closed without ``leaves``."""
    return (f"rank {rank} died without an error message: it crashed or was killed (out of memory?); the launcher and "
            f"the system log show the signal")
