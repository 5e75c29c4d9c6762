"""Which settings must be equal on all ranks: every machine reads its own command line and JSON files."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from pydantic_core import to_jsonable_python

from mm.config.command_line import flag_name
from mm.config.run import Run
from mm.config.schema import LOCAL, fields_of

_OF_A_START = frozenset({
    "finetune", "load", "no_load_optim", "no_load_rng", "load_base_model", "pretrained_checkpoint",
})  # fmt: skip
"""Rank 0 decides these for all ranks, by what ``--save`` holds."""


def shared_settings(run: Run) -> dict[str, str]:
    """The settings that all ranks must have in common, by the name that messages use."""
    args, data = (
        {name: getattr(one, name) for name, field in fields_of(type(one)).items() if LOCAL not in field.metadata}
        for one in (run.args, run.data))
    return {**{flag_name(name): text for name, text in _leaves(args)},
            **{f"{name} of --mm-model": text for name, text in _leaves({"": run.model})},
            **{f"{name} of --mm-data": text for name, text in _leaves(data)}}


def with_own_paths(run: Run, own: Run) -> Run:
    """``run``, which rank 0 has decided, with the paths and data workers of this machine's command line."""
    kept = {name: getattr(own.args, name) for name, field in fields_of(type(own.args)).items()
            if LOCAL in field.metadata and name not in _OF_A_START}
    return replace(run, args=replace(run.args, **kept), data=own.data)


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in to_jsonable_python(settings).items():
        name = f"{prefix}.{key}".strip(".")
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), name)
        else:
            yield name, json.dumps(value)
