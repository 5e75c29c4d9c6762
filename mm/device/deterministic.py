"""Deterministic mode: the same run on the same machines gives the same bits.

Without it the order of sums may change from run to run: in attention's backward pass on CUDA (atomic additions), in
libraries that pick an algorithm at run time, and in collectives that reduce inside the network.
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
    """The value it is set to."""
    others: tuple[str, ...] | None
    """Other values that a user may have set, in upper or lower case; None: any value is replaced."""
    reference: str
    """Who asks for it."""


def make_deterministic(
    variables: Mapping[str, Variable], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Make torch and, through ``variables``, the libraries below it deterministic, before the first work on the device.

    From then on, operators without a deterministic form raise RuntimeError.  Raises UserError for a variable whose
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
            yield (f"--deterministic-mode is set, but the environment variable {name} is {environment[name]!r}, which "
                   f"lets results differ from run to run; unset it, or set it to one of {', '.join(legal)}")
