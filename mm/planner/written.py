"""Writes a layout to files that the trainer and its scripts read."""

import copy
import json
import shlex
from pathlib import Path
from typing import Any

from mm.config.model import Tower
from mm.config.read import read_json
from mm.config.run import Run
from mm.errors import UserError
from mm.files import write_whole
from mm.plan.lists import Lists
from mm.plan.search import Planned

_TOWERS = (("image_encoder", "vision_encoder"), ("text_decoder",))


def write_layout(folder: Path, best: Planned, given: Run) -> str:
    """Write model.json, data.json and layout.sh into ``folder``; returns instructions for using them.

    The JSON files are those of ``given`` with nothing but the layout changed.
    """
    run, folder = best.run, folder.absolute()
    if run.global_batch_size % (run.args.micro_batch_size * run.dp_size):
        raise UserError(f"--write: the training scripts need {run.global_batch_size} samples per step to be a multiple "
                        f"of MBS x DP = {run.args.micro_batch_size} x {run.dp_size}, which does not hold for the "
                        f"best layout; add --fix MBS=1, or call python -m mm.train without a script")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--write is {folder}, which is a file; expected a directory")
    folder.mkdir(parents=True, exist_ok=True)
    model, data = (copy.deepcopy(read_json(path).root) for path in (given.args.mm_model, given.args.mm_data))
    _set_layout(model, best)
    if best.run.data != given.data:
        _set_sampler(data, best.run)
    for name, content in (("model.json", model), ("data.json", data)):
        write_whole(folder / name, (json.dumps(content, indent=4, ensure_ascii=False) + "\n").encode())
    write_whole(folder / "layout.sh", _script(folder, best.run).encode())
    script = shlex.quote(str(folder / "layout.sh"))
    return (f"Written   {folder}: model.json, data.json, layout.sh; train with: source {script}; bash SCRIPT "
            f'"${{LAYOUT_FLAGS[@]}}"')


def _set_layout(model: dict[str, Any], best: Planned) -> None:
    """Set the lists, what becomes of activations, and the placement and batch of the encoder."""
    for keys, values, tower in zip(_TOWERS, Lists.of(best.run.model).values(),
                                   (best.run.model.vision, best.run.model.language), strict=True):
        section = model
        for key in keys:
            section = section[key]
        section["pipeline_num_layers"] = values
        for key, value in _activation_keys(tower).items():
            section.pop(key, None)
            if value is not None:
                section[key] = value
    if best.run.model.encodes_whole or "encoder_placement" in model:
        model["encoder_placement"] = best.run.model.encoder_placement
    if best.run.model.encoder_batch_microbatches > 1 or "encoder_batch_microbatches" in model:
        model["encoder_batch_microbatches"] = best.run.model.encoder_batch_microbatches


def _activation_keys(tower: Tower) -> dict[str, Any]:
    """What becomes of a tower's activations, by key of the model JSON; None: the key is left out."""
    recompute, offload = tower.recompute, tower.offload
    return {
        "recompute_granularity": recompute.granularity, "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers, "recompute_modules": list(recompute.modules) or None,
        "cpu_offloading_activations": offload.activations, "cpu_offloading_num_layers": offload.num_layers,
    }  # fmt: skip


def _set_sampler(data: dict[str, Any], run: Run) -> None:
    data.setdefault("dataloader_param", {})["sampler_type"] = run.data.sampler_type
    parameters = data.setdefault("dataset_param", {}).setdefault("basic_parameters", {})
    parameters |= {"packing": run.data.packing, "truncation": run.data.truncation}


_SHARDING_FLAGS = {"no_shard": (), "optim": ("--use-distributed-optimizer",),
                   **{name: ("--data-parallel-sharding-strategy", name)
                      for name in ("optim_grads", "optim_grads_params")}}  # fmt: skip


def _script(folder: Path, run: Run) -> str:
    """The content of layout.sh: variables of the training scripts, and flags that have no variable."""
    flags = [*(["--sequence-parallel"] if run.args.sequence_parallel else []),
             *_SHARDING_FLAGS[run.args.sharding]]
    variables = {
        "TP": run.tp_size, "PP": run.num_stages, "CP": run.cp_size, "MBS": run.args.micro_batch_size,
        "GBS": run.global_batch_size, "MM_MODEL": folder / "model.json", "MM_DATA": folder / "data.json",
    }
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()]
    return "\n".join([f"# {run.world_size} ranks: NNODES x NPUS_PER_NODE must be {run.world_size}.", *lines,
                      f"LAYOUT_FLAGS=({' '.join(flags)})", ""])
