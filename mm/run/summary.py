"""The lines that begin the short log of a run: model, data, layout, batch, memory and output.

Rank 0 computes them from what the check has opened, before a device is used.
"""

import math
from collections.abc import Iterator

import numpy as np

from mm.cost.stage_memory import num_model_params, peaks, stage_sizes
from mm.errors import counted
from mm.run.sources import Checked
from mm.weights.table import model_weights
from mm.weights.trained import is_frozen


def summary(checked: Checked) -> Iterator[str]:
    """Six lines of at most 120 columns where paths are short."""
    run = checked.run
    args, placement = run.args, run.model.placement()
    trained = sum(math.prod(weight.shape) for weight in model_weights(run.model) if not is_frozen(weight, run.model))
    what = "adapters" if run.model.lora.is_on else "the rest frozen"
    yield (f"model    {run.model.family.title}, {_millions(num_model_params(run))} parameters; trained "
           f"{_millions(trained)} ({what})")
    yield f"data     {_data(checked)}"
    sizes = {"TP": run.tp_size, "CP": run.cp_size, "PP": run.num_stages, "DP": run.dp_size}
    towers = [_lists(tower.pipeline_num_layers) for tower in (run.model.vision, run.model.language)]
    lists = "" if run.num_stages == 1 else "; layers of the ViT {}, of the LLM {}".format(*towers)
    yield (f"layout   {counted(run.world_size, 'rank')}: {', '.join(f'{name} {size}' for name, size in sizes.items())}"
           f"{lists}")
    pack = f"packs of up to {args.seq_length * args.micro_batch_size:,} tokens" if run.data.packs else (
        f"microbatches of {counted(args.micro_batch_size, 'sample')}")
    yield f"batch    {counted(run.global_batch_size, 'sample')} per step in {pack}; {counted(args.train_iters, 'step')}"
    most = max(peaks(run, placement, stage_sizes(run, placement)).values())
    yield f"memory   {most / 2**30:.1f} GiB expected on the fullest device" if most >> 27 else (
        f"memory   {most / 2**20:.1f} MiB expected on the fullest device")
    yield f"output   {', '.join(filter(None, (args.save, args.log_dir, args.export_hf)))}"


def _data(checked: Checked) -> str:
    if checked.samples is None:
        return "none"
    dataset = checked.samples.splits["training"]
    every = np.arange(len(dataset))
    num_tokens, num_media = (int(dataset.columns.values(name, every).sum(dtype=np.int64))
                             for name in ("num_tokens", "num_media"))
    mean = num_tokens / max(len(dataset), 1)
    return (f"{counted(len(dataset), 'sample')}, {num_tokens:,} tokens ({mean:,.0f} each), "
            f"{counted(num_media, 'image or video', 'images and videos')}")


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _lists(chunks: tuple[tuple[int, ...], ...]) -> str:
    return " / ".join(" ".join(map(str, chunk)) for chunk in chunks)
