"""``diff``: compares two directories of any kind and layout bit by bit."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mm.checkpoint.convert import HF_DIR, num_threads
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.hf_config import differences
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.source import Kind, Source, find_kind, open_source
from mm.checkpoint.tensor_io import Files
from mm.errors import counted, naming
from mm.progress import Progress
from mm.weights.table import Weight, model_weights
from mm.weights.views import Stored, cut_dim, dtype_name, whole_view

NUM_SHOWN = 10
BLOCK_BYTES = 1 << 20
"""Bytes of one tensor in one directory that each worker reads at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class DiffReport:
    """The result of ``diff``."""

    lines: tuple[str, ...]
    """The report."""
    is_equal: bool
    """Whether both directories hold the same weights of the same model."""


def diff_directories(
    source_dir: str | Path, target_dir: str | Path, hf_dir: str | Path | None, num_workers: int
) -> DiffReport:
    """Compare every tensor of the model.

    ``hf_dir`` describes the model if neither directory does and it is not one of the published sizes; 0 workers means
    one per core.  Raises UserError if a directory cannot be opened: unknown kind, damage, or an unknown model.
    """
    source, target = sides = _open_both(source_dir, target_dir, hf_dir)
    lines = [f"{side.path}: {side.kind.value}, {side.layout}" for side in sides]
    wrong = [f"the model: {one.field} is {one.first} in {source.path}, but {one.second} in {target.path}"
             for one in differences(source.model, target.model)]
    if wrong:
        return DiffReport((*lines, *wrong), False)
    without_llm = [side for side in sides if side.is_vit_only]
    if len(without_llm) == 1:
        wrong.append(f"{without_llm[0].path} holds no LLM (save_vit_only); only the rest is compared.")
    compared = [(weight, number) for weight in model_weights(source.model)
                if not (without_llm and weight.part == "language") for number in range(len(weight.hf_names))]
    shown = Progress("comparing", len(compared), "tensors")
    with ThreadPoolExecutor(num_threads(num_workers)) as pool:
        found = shown.each(pool.map(lambda one: _difference(one[0], one[1], source, target), compared))
        differing = [line for line in found if line]
    num_equal = len(compared) - len(differing)
    lines.append(f"{num_equal:,} of {counted(len(compared), 'tensor')} of the model are bit-equal.")
    more = [f"{len(differing) - NUM_SHOWN:,} more tensors differ."] if len(differing) > NUM_SHOWN else []
    return DiffReport((*lines, *wrong, *differing[:NUM_SHOWN], *more), not (wrong or differing))


def _open_both(source_dir: str | Path, target_dir: str | Path, hf_dir: str | Path | None) -> tuple[Source, Source]:
    """Open both directories.  One without a manifest is read as the model of ``hf_dir``, or of the other."""
    with naming(HF_DIR):
        model = HFDirectory.open(hf_dir, weights_required=False).model_config() if hf_dir else None
    paths = {"--cfg.source_dir": Path(source_dir), "--cfg.target_dir": Path(target_dir)}
    found: dict[str, Source] = {}
    for flag in sorted(paths, key=lambda flag: find_kind(paths[flag], flag) is Kind.MINDSPEED and not (
            paths[flag] / MANIFEST_FILE).is_file()):  # those that state their model first
        found[flag] = open_source(paths[flag], flag, model=model)
        found[flag].check()
        model = model or found[flag].model
    return found["--cfg.source_dir"], found["--cfg.target_dir"]


def _difference(weight: Weight, number: int, source: Source, target: Source) -> str | None:
    """How one Hugging Face tensor differs; of two dtypes, after rounding the finer to the coarser."""
    key, shape = weight.hf_names[number], weight.hf_shapes[number]
    dtypes = source.dtypes[key], target.dtypes[key]
    rounded = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    num_different, first, largest = 0, None, 0.0
    view = whole_view(Stored("", key, max(dtypes, key=lambda dtype: dtype.itemsize), shape, 0), key, weight)
    with Files(source.path) as left, Files(target.path) as right:
        for rows, indices in view.blocks(range(shape[cut_dim(weight)]), BLOCK_BYTES):
            one, other = (files.block(side.index, key, rows, indices)
                          for files, side in ((left, source), (right, target)))
            unlike = _bits(one.to(rounded)) != _bits(other.to(rounded))
            if not unlike.any():
                continue
            if first is None:
                row, index, place = unlike.nonzero()[0].tolist()
                flat = ((rows.start + row) * view.num_indices + indices.start + index) * one.shape[2] + place
                first = [int(at) for at in torch.unravel_index(torch.tensor(flat), shape)]
            amounts = (one.double() - other.double())[unlike].abs().nan_to_num(nan=math.inf, posinf=math.inf)
            num_different, largest = num_different + len(amounts), max(largest, amounts.max().item())
    if not num_different and dtypes[0] == dtypes[1]:
        return None
    text = key if dtypes[0] == dtypes[1] else f"{key}: {' and '.join(map(dtype_name, dtypes))}"
    return text if first is None else (f"{text}: {num_different:,} of {math.prod(shape):,} elements differ, by at most "
                                       f"{largest:.6g}; the first is {first}")


def _bits(tensor: Tensor) -> Tensor:
    """The same bytes as integers, so that comparisons are bitwise."""
    return tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize])
