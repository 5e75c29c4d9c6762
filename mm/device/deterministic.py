"""Deterministic mode: the same run on the same machines gives the same bits.

Without it sums may be added in another order each time: by attention's backward on CUDA (atomic additions), by
libraries that pick an algorithm as they go, and by collectives that reduce inside of the network.
"""

import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import torch

from mm.errors import refuse


@dataclass(frozen=True)
class Variable:
    """An environment variable that a library reads when it starts on the device."""

    default: str
    """What it is set to."""
    others: tuple[str, ...] | None
    """What else a user may have set, upper or lower case; None: whatever is there is replaced."""
    source: str


def make_deterministic(
    variables: Mapping[str, Variable], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set torch and, by their ``variables``, the libraries below it; before the first work on the device.

    Operators without a deterministic form raise RuntimeError from here on.  Raises UserError for a variable whose
    value lets results differ.
    """
    refuse(_contrary(variables, environment))
    for name, variable in variables.items():
        if variable.others is None:
            environment[name] = variable.default
        else:
            environment.setdefault(name, variable.default)
    torch.use_deterministic_algorithms(True)


def _contrary(variables: Mapping[str, Variable], environment: Mapping[str, str]) -> Iterator[str]:
    for name, variable in variables.items():
        if variable.others is None or name not in environment:
            continue
        legal = (variable.default, *variable.others)
        if environment[name].lower() not in [value.lower() for value in legal]:
            yield (f"--deterministic-mode, but the environment variable {name} is {environment[name]!r}, with which "
                   f"results may differ from run to run; unset it, or set one of {', '.join(legal)}")
