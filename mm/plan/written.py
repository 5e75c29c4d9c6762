"""Writes a layout to files that the trainer and its scripts read."""

import copy
import json
import shlex
from pathlib import Path
from typing import Any

from mm.config.run import Run
from mm.config.strict_json import read_json
from mm.errors import UserError, writing
from mm.files import write_whole
from mm.plan.lists import Lists
from mm.plan.search import Planned

_SHARDING_FLAGS = {"no_shard": (), "optim": ("--use-distributed-optimizer",),
                   **{name: ("--data-parallel-sharding-strategy", name)
                      for name in ("optim_grads", "optim_grads_params")}}  # fmt: skip


def write_layout(folder: Path, best: Planned, given: Run) -> str:
    """Write model.json, data.json and layout.sh into ``folder``; returns instructions for using them.

    The JSON files are those of ``given`` with nothing but the layout changed.
    """
    run, folder = best.run, folder.absolute()
    if run.global_batch_size % (run.args.micro_batch_size * run.dp_size):
        raise UserError(f"--write: the training scripts need {run.global_batch_size} samples per step to be a multiple "
                        f"of MBS x DP = {run.args.micro_batch_size} x {run.dp_size}; add --fix MBS=1, or call python "
                        f"-m mm.train without a script")
    model, data = (copy.deepcopy(read_json(path).root) for path in (given.args.mm_model, given.args.mm_data))
    _set_layout(model, run)
    if run.data != given.data:
        data.setdefault("dataloader_param", {})["sampler_type"] = run.data.sampler_type
        parameters = data.setdefault("dataset_param", {}).setdefault("basic_parameters", {})
        parameters |= {"packing": run.data.packing, "truncation": run.data.truncation}
    with writing(folder, "--write"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("model.json", model), ("data.json", data)):
            write_whole(folder / name, (json.dumps(content, indent=4, ensure_ascii=False) + "\n").encode())
        write_whole(folder / "layout.sh", _script(folder, run).encode())
    return (f"Written   {folder}: model.json, data.json, layout.sh; train with: source "
            f'{shlex.quote(str(folder / "layout.sh"))}; bash SCRIPT "${{LAYOUT_FLAGS[@]}}"')


def _set_layout(model: dict[str, Any], run: Run) -> None:
    """Set the lists, what becomes of activations, and the placement and batch of the encoder."""
    sections = model["image_encoder"]["vision_encoder"], model["text_decoder"]
    towers = run.model.vision, run.model.language
    for section, values, tower in zip(sections, Lists.of(run.model).values(), towers, strict=True):
        recompute, offload = tower.recompute, tower.offload
        keys = {
            "recompute_granularity": recompute.granularity, "recompute_method": recompute.method,
            "recompute_num_layers": recompute.num_layers, "recompute_modules": list(recompute.modules) or None,
            "cpu_offloading_activations": offload.activations, "cpu_offloading_num_layers": offload.num_layers,
        }  # fmt: skip
        for key in keys:
            section.pop(key, None)
        section |= {key: value for key, value in keys.items() if value is not None} | {"pipeline_num_layers": values}
    if run.model.encodes_whole or "encoder_placement" in model:
        model["encoder_placement"] = run.model.encoder_placement
    if run.model.encoder_batch_microbatches > 1 or "encoder_batch_microbatches" in model:
        model["encoder_batch_microbatches"] = run.model.encoder_batch_microbatches


def _script(folder: Path, run: Run) -> str:
    """The content of layout.sh: variables of the training scripts, and flags that have no variable."""
    flags = [*["--sequence-parallel"] * run.args.sequence_parallel, *_SHARDING_FLAGS[run.args.sharding]]
    variables = {
        "TP": run.tp_size, "PP": run.num_stages, "CP": run.cp_size, "MBS": run.args.micro_batch_size,
        "GBS": run.global_batch_size, "MM_MODEL": folder / "model.json", "MM_DATA": folder / "data.json",
    }
    lines = [f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()]
    return "\n".join([f"# {run.world_size} ranks: NNODES x NPUS_PER_NODE must be {run.world_size}.", *lines,
                      f"LAYOUT_FLAGS=({' '.join(flags)})", ""])
