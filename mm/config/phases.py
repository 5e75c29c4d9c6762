"""How long each phase of a run may take before it counts as a hang, and ``--phase-timeouts``, which changes that.

Steps and validation steps have their own limit, ``--step-timeout``.
"""

from collections.abc import Iterator, Mapping, Sequence

from mm.console import whole_number
from mm.errors import nearest

PHASE_SECONDS: Mapping[str, float] = {
    "check": 6 * 3600.0,
    "start": 1800.0,
    "load": 3600.0,
    "data": 6 * 3600.0,
    "answers": 3600.0,
    "save": 3600.0,
    "export": 3 * 3600.0,
    "between": 600.0,
}
"""Phase -> seconds.  ``check`` and ``data`` build the index of the samples where there is none: 450 s for a million
samples on two cores.  ``answers`` is one batch of answers; ``export`` writes the whole model from one process;
``between`` is the time between two phases or steps of a training, and at its end."""
_GONE = ("dying",)
"""Phases of earlier versions, whose limits have no effect."""


def phase_seconds(words: Sequence[str]) -> dict[str, float]:
    """``PHASE_SECONDS`` with the limits in ``words``, NAME=SECONDS each, which must have no ``phase_problems``."""
    return {**PHASE_SECONDS, **{name: float(seconds) for name, _, seconds in (word.partition("=") for word in words)}}


def phase_problems(words: Sequence[str]) -> Iterator[str]:
    """Mistakes in ``--phase-timeouts``."""
    for word in words:
        name, _, seconds = word.partition("=")
        if name not in (*PHASE_SECONDS, *_GONE):
            yield (f"--phase-timeouts has {word!r}, but {name!r} is no phase{nearest(name, PHASE_SECONDS)}; expected "
                   f"NAME=SECONDS with a name of {', '.join(PHASE_SECONDS)}")
        elif whole_number(seconds) is None:
            yield f"--phase-timeouts has {word!r}; expected a whole number of seconds after {name}=, 0 for no limit"
