"""Looks at directories without changing them: what they hold, and whether it is intact.

``verify`` reads every byte once, ``show`` reads headers only.
"""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from checkpoint.copy import check_twins, differing
from checkpoint.hf_directory import hf_sources
from checkpoint.layout import Layout
from checkpoint.manifest import Entry, Manifest
from checkpoint.mm_directory import MMDirectory
from checkpoint.output import stored_crc32
from checkpoint.plan import Stored, make_plan
from checkpoint.safetensors_file import DTYPE_NAMES, read_stored
from mm.checkpoint_files import LATEST_FILE, MANIFEST_FILE
from mm.errors import UserError
from mm.hf import HFDirectory


def verify_directory(
    path: Path, hf_dir: str | None, given: Layout | None, flag: str, num_workers: int
) -> list[str]:
    """Compare every tensor with the manifest's checksum, and every bit with ``hf_dir`` if it is given.

    ``given`` is the layout where there is no manifest, and ``flag`` gives it.  Returns what was found in order.

    Raises:
        UserError: naming each file and tensor that is missing, damaged or left over.
    """
    directory = MMDirectory.open(path)
    if directory.manifest is None and hf_dir is None:
        raise UserError(f"{path} has no {MANIFEST_FILE} to be compared with; give --cfg.hf_config.hf_dir.")
    num_workers = num_workers or len(os.sched_getaffinity(0))
    done = []
    if directory.manifest is not None:
        problems = list(_manifest_problems(directory, directory.manifest, num_workers))
        if problems:
            raise UserError(problems)
        done.append(f"{path}: {len(directory.manifest.tensors)} tensors are as {MANIFEST_FILE} says.")
    if hf_dir is not None:
        num_tensors = _compare_with_hf(directory, HFDirectory.open(hf_dir), given, flag, num_workers)
        done.append(f"{path}: {num_tensors} tensors are those of {hf_dir}.")
    return done


def _manifest_problems(directory: MMDirectory, manifest: Manifest, num_workers: int) -> Iterator[str]:
    by_file: dict[str, list[Entry]] = {}
    for entry in manifest.tensors:
        by_file.setdefault(entry.file, []).append(entry)
    present = {str(file.relative_to(directory.path)) for file in directory.files()}
    for file in sorted(present - by_file.keys()):
        if read_stored(directory.path / file, file):
            yield f"{directory.path / file} is not in {MANIFEST_FILE}; remove it."
    for file in sorted(by_file.keys() - present):
        yield f"{directory.path / file} is missing; convert again."
    with (
        tqdm(total=len(manifest.tensors), unit="tensor", disable=None) as bar,
        ThreadPoolExecutor(num_workers) as pool,
    ):
        files = [(directory.path, file, by_file[file], bar) for file in sorted(by_file.keys() & present)]
        for problems in pool.map(lambda arguments: _file_problems(*arguments), files):
            yield from problems


def _file_problems(path: Path, file: str, entries: list[Entry], bar: tqdm) -> list[str]:
    try:
        stored = read_stored(path / file, file)
    except UserError as error:
        return list(error.problems)
    problems = [
        f"{path / file} holds {name}, which is not in {MANIFEST_FILE}."
        for name in sorted(stored.keys() - {entry.name for entry in entries})
    ]
    with (path / file).open("rb", buffering=0) as opened:
        for entry in entries:
            tensor = stored.get(entry.name)
            if tensor is None:
                problems.append(f"{path / file} lacks {entry.name}; convert again.")
            elif (DTYPE_NAMES[tensor.dtype], tensor.shape) != (entry.dtype, entry.shape):
                problems.append(
                    f"{path / file}: {entry.name} is {DTYPE_NAMES[tensor.dtype]} {list(tensor.shape)}; "
                    f"{MANIFEST_FILE} says {entry.dtype} {list(entry.shape)}."
                )
            elif stored_crc32(opened, tensor) != entry.crc32:
                problems.append(
                    f"{path / file}: {entry.name} is damaged or belongs to another file (its crc32 differs from "
                    f"{MANIFEST_FILE}); convert again."
                )
            bar.update(1)
    return problems


def _compare_with_hf(
    directory: MMDirectory, source: HFDirectory, given: Layout | None, flag: str, num_workers: int
) -> int:
    model, tp_size = directory.placed_model(given, flag, source.model_config())
    views = directory.sources(model, tp_size)
    plan = make_plan(hf_sources(source, model), views, ())
    check_twins(plan, source.path)
    total = sum(view.stored.num_bytes for view in views)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        wrong = differing(plan, source.path, directory.path, num_workers, bar.update)
    if wrong:
        raise UserError(
            f"{directory.path / tensor.file}: {tensor.name} is not what {source.path} gives." for tensor in wrong
        )
    return len(views)


def show_directory(path: Path) -> list[str]:
    """Layout, files, sizes and dtypes, a line for each.

    Raises:
        UserError: it is neither a directory of MindSpeed-MM's layout nor a Hugging Face directory.
    """
    if (path / LATEST_FILE).is_file():
        directory = MMDirectory.open(path)
        manifest = directory.manifest
        lines = [f"{path}: MindSpeed-MM's layout, {directory.folder}"]
        lines.append(f"layout: {manifest.layout if manifest else f'not stated (no {MANIFEST_FILE})'}")
        if manifest:
            lines.append(f"source: {manifest.source['kind']}, written by {manifest.tool}")
        files = [str(file.relative_to(path)) for file in directory.files()]
    else:
        opened = HFDirectory.open(path)
        lines = [f"{path}: Hugging Face directory", f"layers: {Layout.of(opened.model_config(), 1)}"]
        files = sorted({tensor.file.name for tensor in opened.tensors.values()})
    everything: list[Stored] = []
    for file in files:
        stored = list(read_stored(path / file, file).values())
        everything += stored
        lines.append(f"  {file}  {_summary(stored)}")
    return [*lines, f"{len(files)} files, {_summary(everything)}"]


def _summary(stored: list[Stored]) -> str:
    dtypes = Counter(DTYPE_NAMES[tensor.dtype] for tensor in stored)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items())) or "no"
    return f"{kinds} tensors, {sum(tensor.num_bytes for tensor in stored):,} bytes"
