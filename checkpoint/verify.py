"""Commands that only read: ``verify`` checks every byte of a directory, ``show`` lists its headers, ``diff`` compares
two directories of any kind and layout bit by bit."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mm.checkpoint.convert import HF_DIR, LAYOUT, num_threads
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.hf_config import differences
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.mindspeed_layout import Layout
from mm.checkpoint.source import Directory, Kind, Source, cure_of_damage, find, find_kind, open_hf, open_source
from mm.checkpoint.tensor_io import Files
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.console import Progress
from mm.errors import UserError, counted, naming, refuse
from mm.weights.table import Weight, model_weights
from mm.weights.views import Stored, View, cut_dim, dtype_name, whole_view


def verify_directory(path: Path, hf_dir: str | None, layout: Layout | None, num_workers: int) -> list[str]:
    """Compare every tensor with the manifest's checksum, and every bit with ``hf_dir`` if given.

    ``path`` is in MindSpeed-MM's layout or a training checkpoint.  ``layout`` is needed if neither manifest nor files
    show it; 0 workers means one per core.  Returns lines on the successful checks.
    """
    num_workers = num_threads(num_workers)
    directory = find(path, "--cfg.mm_dir")
    if isinstance(directory, HFDirectory):
        raise UserError(f"{path} is a Hugging Face directory, which has no checksums; compare two of them with diff.")
    done = list(directory.notes) if isinstance(directory, TrainingDirectory) else []
    if directory.stated is None and hf_dir is None:
        raise UserError(f"{path} has no {MANIFEST_FILE} to compare with; give {HF_DIR}.")
    if directory.stated is not None:
        refuse(_manifest_problems(directory, directory.stated, num_workers))
        done.append(f"{path}: {len(directory.stated):,} tensors match {MANIFEST_FILE}.")
    if hf_dir is not None:
        num_tensors = _compare_with_hf(path, hf_dir, layout, num_workers)
        done.append(f"{path}: {num_tensors:,} tensors match those of {hf_dir}.")
    return done


def _manifest_problems(directory: Directory, stated: Sequence[Stored], num_workers: int) -> Iterator[str]:
    root, contents, cure = directory.path, directory.contents, cure_of_damage(directory)
    if isinstance(directory, TrainingDirectory):
        directory.check_here(one.file for one in stated)
    found = {(file, name) for file in contents for name in contents[file]}
    yield from (f"{root / file} holds {name}, which is not in {MANIFEST_FILE}; remove it."
                for file, name in sorted(found - {(one.file, one.name) for one in stated}))

    def problem(entry: Stored) -> str | None:
        one = contents.get(entry.file, {}).get(entry.name)
        if one is None:
            return f"{root / entry.file} lacks {entry.name}; {cure}."
        with Files(root) as files:
            if (one.dtype, one.shape, files.crc32(one)) == (entry.dtype, entry.shape, entry.crc32):
                return None
        return (f"{root / entry.file}: {entry.name} is damaged or belongs to another file (it differs from "
                f"{MANIFEST_FILE}); {cure}.")

    with ThreadPoolExecutor(num_workers) as pool:
        shown = Progress(f"verifying {root}", len(stated), "tensors").each(pool.map(problem, stated))
        yield from filter(None, shown)


def _compare_with_hf(path: Path, hf_dir: str, layout: Layout | None, num_workers: int) -> int:
    with naming(HF_DIR):
        expected = open_hf(HFDirectory.open(hf_dir))
    found = open_source(path, "--cfg.mm_dir", layout=layout, layout_flag=LAYOUT, model=expected.model)
    expected.check()

    def problem(view: View) -> str | None:
        stored, dtypes = view.stored, {expected.dtypes[span.key] for span in view.spans if span.key is not None}
        if not dtypes <= {stored.dtype}:
            return (f"{found.path / stored.file}: {stored.name} is {dtype_name(stored.dtype)}, but in {expected.path} "
                    f"{' and '.join(map(dtype_name, dtypes))}.")
        with Files(found.path) as files, Files(expected.path) as others:
            if all(files.holds(*block) for block in others.target_blocks(expected.index, [view])):
                return None
        return f"{found.path / stored.file}: {stored.name} differs from {expected.path}."

    with ThreadPoolExecutor(num_workers) as pool:
        problems = pool.map(problem, found.views)
        refuse(filter(None, Progress(f"comparing with {hf_dir}", len(found.views), "tensors").each(problems)))
    return len(found.views)


def show_directory(path: Path) -> list[str]:
    """Lines on the layout, and on each file's size and dtypes."""
    directory = find(path, "--cfg.dir")
    contents = directory.contents
    everything = [tensor for stored in contents.values() for tensor in stored.values()]
    lines = [f"  {file}  {_summary(list(contents[file].values()))}" for file in sorted(contents)]
    return [*directory.describe(), *lines, f"{counted(len(contents), 'file')}, {_summary(everything)}"]


def _summary(stored: list[Stored]) -> str:
    dtypes = Counter(dtype_name(tensor.dtype) for tensor in stored)
    kinds = [counted(count, f"{dtype} tensor") for dtype, count in sorted(dtypes.items())] or ["no tensors"]
    return ", ".join([*kinds, f"{sum(tensor.num_bytes for tensor in stored):,} bytes"])


NUM_SHOWN = 10
BLOCK_BYTES = 1 << 20
"""Bytes of one tensor in one directory that each worker reads at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DiffReport(NamedTuple):
    """The lines of a report, and whether both directories hold the same weights of the same model."""

    lines: tuple[str, ...]
    is_equal: bool


def diff_directories(
    source_dir: str | Path, target_dir: str | Path, hf_dir: str | Path | None, num_workers: int
) -> DiffReport:
    """Compare every tensor of the model, which ``hf_dir`` describes if neither directory does."""
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
