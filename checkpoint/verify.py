"""``verify`` and ``show``: whether a directory is intact, which reads every byte once, and what its headers say."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from checkpoint.convert import LAYOUT, num_threads
from checkpoint.formats.copy import differing
from checkpoint.formats.files import Files
from checkpoint.formats.hf import HFDirectory
from checkpoint.formats.layout import Layout
from checkpoint.formats.manifest import MANIFEST_FILE
from checkpoint.formats.safetensors import dtype_name
from checkpoint.formats.source import Directory, find, open_hf
from checkpoint.formats.source import open as open_source
from mm.errors import UserError
from mm.weights.plan import make_plan
from mm.weights.views import Stored


def verify_directory(path: Path, hf_dir: str | None, layout: Layout | None, num_workers: int) -> list[str]:
    """Compare every tensor with the manifest's checksum, and every bit with ``hf_dir`` if it is given.

    ``path`` is of MindSpeed-MM's layout or a training checkpoint.  ``layout`` is needed where there is no manifest and
    the files do not show it; 0 workers are one for each core.  Returns what was found in order.

    Raises:
        UserError: naming each file and tensor that is missing, damaged or left over.
    """
    num_workers = num_threads(num_workers)
    directory = find(path, "--cfg.mm_dir")
    if isinstance(directory, HFDirectory):
        raise UserError(
            f"{path} is a Hugging Face directory, which has no checksums; give it as --cfg.hf_config.hf_dir to be "
            f"compared with --cfg.mm_dir, or compare two of them with diff."
        )
    done = list(directory.notes)
    if directory.stated is None and hf_dir is None:
        raise UserError(f"{path} has no {MANIFEST_FILE} to be compared with; give --cfg.hf_config.hf_dir.")
    if directory.stated is not None:
        problems = list(_manifest_problems(directory, directory.stated, num_workers))
        if problems:
            raise UserError(problems)
        done.append(f"{path}: {len(directory.stated)} tensors are as {MANIFEST_FILE} says.")
    if hf_dir is not None:
        num_tensors = _compare_with_hf(path, hf_dir, layout, num_workers)
        done.append(f"{path}: {num_tensors} tensors are those of {hf_dir}.")
    return done


def _manifest_problems(directory: Directory, stated: Sequence[Stored], num_workers: int) -> Iterator[str]:
    root, contents = directory.path, directory.contents
    by_file: dict[str, list[Stored]] = {}
    for tensor in stated:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file in sorted(contents.keys() - by_file.keys()):
        if contents[file]:
            yield f"{root / file} is not in {MANIFEST_FILE}; remove it."
    for file in sorted(by_file.keys() - contents.keys()):
        yield f"{root / file} is missing; convert again."
    with tqdm(total=len(stated), unit="tensor", disable=None) as bar, ThreadPoolExecutor(num_workers) as pool:
        files = sorted(by_file.keys() & contents.keys())
        for problems in pool.map(lambda file: _file_problems(root, file, contents[file], by_file[file], bar), files):
            yield from problems


def _file_problems(
    root: Path, file: str, stored: Mapping[str, Stored], stated: list[Stored], bar: tqdm
) -> list[str]:
    path = root / file
    problems = [
        f"{path} holds {name}, which is not in {MANIFEST_FILE}."
        for name in sorted(stored.keys() - {one.name for one in stated})
    ]
    with Files(root) as files:
        for entry in stated:
            tensor = stored.get(entry.name)
            if tensor is None:
                problems.append(f"{path} lacks {entry.name}; convert again.")
            elif (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
                problems.append(
                    f"{path}: {entry.name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}; "
                    f"{MANIFEST_FILE} says {dtype_name(entry.dtype)} {list(entry.shape)}."
                )
            elif files.crc32(tensor) != entry.crc32:
                problems.append(
                    f"{path}: {entry.name} is damaged or belongs to another file (its crc32 differs from "
                    f"{MANIFEST_FILE}); convert again."
                )
            bar.update(1)
    return problems


def _compare_with_hf(path: Path, hf_dir: str, layout: Layout | None, num_workers: int) -> int:
    expected = open_hf(HFDirectory.open(hf_dir))
    found = open_source(path, "--cfg.mm_dir", layout=layout, layout_flag=LAYOUT, model=expected.model)
    plan = make_plan(expected.index, found.views, ())
    expected.check()
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
    directory = find(path, "--cfg.dir")
    contents = directory.contents
    everything = [tensor for stored in contents.values() for tensor in stored.values()]
    lines = [f"  {file}  {_summary(list(contents[file].values()))}" for file in sorted(contents)]
    return [*directory.describe(), *lines, f"{len(contents)} files, {_summary(everything)}"]


def _summary(stored: list[Stored]) -> str:
    dtypes = Counter(dtype_name(tensor.dtype) for tensor in stored)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items())) or "no"
    return f"{kinds} tensors, {sum(tensor.num_bytes for tensor in stored):,} bytes"
