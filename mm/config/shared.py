"""Which settings must be equal on all ranks: every machine reads its own command line and JSON files."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from pydantic_core import to_jsonable_python

from mm.config.command_line import flag_name
from mm.config.run import Run

_OF_A_START = frozenset({
    "finetune", "load", "no_load_optim", "no_load_rng", "load_base_model", "pretrained_checkpoint",
})  # fmt: skip
"""Rank 0 decides these for all ranks, by what ``--save`` holds."""
_OF_A_MACHINE = frozenset({
    "num_workers", "world_size", "vision_feature_cache_gib",
    "preprocessing_num_workers", "prefetch_factor", "overwrite_cache",
})  # fmt: skip
_PATHS = frozenset({
    "mm_model", "mm_data", "save", "export_hf", "export_merged_hf",
    "log_dir", "tensorboard_dir", "vision_feature_cache", "wandb_project", "wandb_exp_name", "wandb_save_dir",
    "swanlab_project", "swanlab_exp_name", "swanlab_save_dir", "profile_save_path", "eval_generate_questions",
    "model_name_or_path", "dataset", "dataset_dir", "media_roots", "dataset_info", "cache_dir", "val_dataset",
})  # fmt: skip
"""Paths may differ per node; contents are checked elsewhere."""


def shared_settings(run: Run) -> dict[str, str]:
    """The settings that all ranks must have in common, by the name that messages use."""
    return {
        **{flag_name(name): text for name, text in _leaves(vars(run.args))},
        **{f"{name} of --mm-model": text for name, text in _leaves({"": run.model})},
        **{f"{name} of --mm-data": text for name, text in _leaves(vars(run.data))},
    }


def with_own_paths(run: Run, own: Run) -> Run:
    """``run``, which rank 0 has decided, with the paths and data workers of this machine's command line."""
    kept = {name: value for name, value in vars(own.args).items() if name in _OF_A_MACHINE | _PATHS}
    return replace(run, args=replace(run.args, **kept), data=own.data)


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in to_jsonable_python(settings).items():
        if key in _OF_A_START | _OF_A_MACHINE | _PATHS:
            continue
        name = f"{prefix}.{key}".strip(".")
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), name)
        else:
            yield name, json.dumps(value)
