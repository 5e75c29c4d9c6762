"""Looks at directories without changing them: what they hold, and whether it is intact.

``verify`` reads every byte once, ``show`` reads headers only.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from checkpoint.formats.atomic import stored_crc32
from checkpoint.formats.copy import check_source, differing
from checkpoint.formats.files import DTYPE_NAMES, read_stored
from checkpoint.formats.hf import HFDirectory
from checkpoint.formats.layout import Layout
from checkpoint.formats.manifest import Entry
from checkpoint.formats.mindspeed import MMDirectory
from checkpoint.formats.source import open_hf, open_source
from checkpoint.formats.training import MANIFEST_FILE, find_checkpoint, find_load_kind
from checkpoint.formats.training import read_manifest as read_training_manifest
from mm.errors import UserError
from mm.weights.plan import make_plan
from mm.weights.views import Stored


def verify_directory(
    path: Path, hf_dir: str | None, given: Layout | None, flag: str, num_workers: int
) -> list[str]:
    """Compare every tensor with the manifest's checksum, and every bit with ``hf_dir`` if it is given.

    ``path`` is of MindSpeed-MM's layout or a training checkpoint.  ``given`` is the layout where there is no manifest,
    and ``flag`` gives it.  Returns what was found in order.

    Raises:
        UserError: naming each file and tensor that is missing, damaged or left over.
    """
    num_workers = num_workers or len(os.sched_getaffinity(0))
    entries, contents, done = _listed(path)
    if entries is None and hf_dir is None:
        raise UserError(f"{path} has no {MANIFEST_FILE} to be compared with; give --cfg.hf_config.hf_dir.")
    if entries is not None:
        problems = list(_manifest_problems(contents, entries, num_workers))
        if problems:
            raise UserError(problems)
        done.append(f"{path}: {len(entries)} tensors are as {MANIFEST_FILE} says.")
    if hf_dir is not None:
        num_tensors = _compare_with_hf(path, hf_dir, given, flag, num_workers)
        done.append(f"{path}: {num_tensors} tensors are those of {hf_dir}.")
    return done


Contents = Mapping[Path, Mapping[str, Stored]]
"""Tensors by file and name."""


def _listed(path: Path) -> tuple[Sequence[Entry] | None, Contents, list[str]]:
    """What the manifest says (None without one), what is there, and notes.  Files in entries are whole paths."""
    match find_load_kind(path, "--cfg.mm_dir"):
        case "mm":
            directory, notes = MMDirectory.open(path), []
            entries = directory.manifest and directory.manifest.tensors
            folder = path
            contents = {path / directory.folder / file: stored for file, stored in directory.contents.items()}
        case "training":
            folder, notes = find_checkpoint(path)
            pieces = read_training_manifest(folder).pieces
            entries = [Entry(piece.file, piece.key, piece.dtype, piece.shape, piece.crc32) for piece in pieces]
            contents = {file: read_stored(file, file.name) for file in sorted(folder.glob("*.safetensors"))}
        case _:
            raise UserError(
                f"{path} is a Hugging Face directory, which has no checksums; give it as --cfg.hf_config.hf_dir to be "
                f"compared with --cfg.mm_dir, or compare two of them with diff."
            )
    located = entries and [replace(entry, file=str(folder / entry.file)) for entry in entries]
    return located, contents, list(notes)


def _manifest_problems(contents: Contents, entries: Sequence[Entry], num_workers: int) -> Iterator[str]:
    by_file: dict[Path, list[Entry]] = {}
    for entry in entries:
        by_file.setdefault(Path(entry.file), []).append(entry)
    for file in sorted(contents.keys() - by_file.keys()):
        if contents[file]:
            yield f"{file} is not in {MANIFEST_FILE}; remove it."
    for file in sorted(by_file.keys() - contents.keys()):
        yield f"{file} is missing; convert again."
    with tqdm(total=len(entries), unit="tensor", disable=None) as bar, ThreadPoolExecutor(num_workers) as pool:
        files = [(file, contents[file], by_file[file], bar) for file in sorted(by_file.keys() & contents.keys())]
        for problems in pool.map(lambda arguments: _file_problems(*arguments), files):
            yield from problems


def _file_problems(path: Path, stored: Mapping[str, Stored], entries: list[Entry], bar: tqdm) -> list[str]:
    problems = [
        f"{path} holds {name}, which is not in {MANIFEST_FILE}."
        for name in sorted(stored.keys() - {entry.name for entry in entries})
    ]
    with path.open("rb", buffering=0) as opened:
        for entry in entries:
            tensor = stored.get(entry.name)
            if tensor is None:
                problems.append(f"{path} lacks {entry.name}; convert again.")
            elif (DTYPE_NAMES[tensor.dtype], tensor.shape) != (entry.dtype, entry.shape):
                problems.append(
                    f"{path}: {entry.name} is {DTYPE_NAMES[tensor.dtype]} {list(tensor.shape)}; "
                    f"{MANIFEST_FILE} says {entry.dtype} {list(entry.shape)}."
                )
            elif stored_crc32(opened, tensor) != entry.crc32:
                problems.append(
                    f"{path}: {entry.name} is damaged or belongs to another file (its crc32 differs from "
                    f"{MANIFEST_FILE}); convert again."
                )
            bar.update(1)
    return problems


def _compare_with_hf(path: Path, hf_dir: str, given: Layout | None, flag: str, num_workers: int) -> int:
    expected = open_hf(hf_dir)
    found = open_source(path, "--cfg.mm_dir", given, flag, expected.model)
    plan = make_plan(expected.views, found.views, ())
    check_source(plan, expected.path)
    total = sum(view.stored.num_bytes for view in found.views)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        wrong = differing(plan, expected.path, found.path, num_workers, bar.update)
    if wrong:
        raise UserError(
            f"{found.path / tensor.file}: {tensor.name} is not what {expected.path} gives." for tensor in wrong
        )
    return len(found.views)


def show_directory(path: Path) -> list[str]:
    """Layout, files, sizes and dtypes, a line for each.

    Raises:
        UserError: it is of no kind that can be converted.
    """
    match find_load_kind(path, "--cfg.dir"):
        case "mm":
            lines, contents = _show_mm(MMDirectory.open(path))
        case "training":
            lines, contents = _show_training(path)
        case _:
            directory = HFDirectory.open(path)
            lines = [f"{path}: Hugging Face directory", f"layers: {Layout.of(directory.model_config(), 1)}"]
            contents = {file: read_stored(path / file, file)
                        for file in sorted({tensor.file.name for tensor in directory.tensors.values()})}
    everything = [tensor for stored in contents.values() for tensor in stored.values()]
    lines += [f"  {file}  {_summary(list(stored.values()))}" for file, stored in contents.items()]
    return [*lines, f"{len(contents)} files, {_summary(everything)}"]


def _show_mm(directory: MMDirectory) -> tuple[list[str], Mapping[str, Mapping[str, Stored]]]:
    manifest = directory.manifest
    lines = [f"{directory.path}: MindSpeed-MM's layout, {directory.folder}, {directory.kind}"]
    if manifest is None:
        lines.append(f"layout: {directory.layout} (no {MANIFEST_FILE}; as the files show it)")
    else:
        lines += [f"layout: {manifest.layout}", f"source: {manifest.source['kind']}, written by {manifest.tool}"]
    return lines, {f"{directory.folder}/{file}": stored for file, stored in sorted(directory.contents.items())}


def _show_training(path: Path) -> tuple[list[str], Mapping[str, Mapping[str, Stored]]]:
    folder, notes = find_checkpoint(path)
    manifest = read_training_manifest(folder)
    source = open_source(folder, "--cfg.dir", None, "")
    lines = [*notes, f"{folder}: training checkpoint, iteration {manifest.iteration}, "
                     f"{manifest.consumed_samples} samples", f"layout: {source.layout}"]
    files = sorted({view.stored.file for view in source.views})
    return lines, {file: {view.stored.name: view.stored for view in source.views if view.stored.file == file}
                   for file in files}


def _summary(stored: list[Stored]) -> str:
    dtypes = Counter(DTYPE_NAMES[tensor.dtype] for tensor in stored)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items())) or "no"
    return f"{kinds} tensors, {sum(tensor.num_bytes for tensor in stored):,} bytes"
