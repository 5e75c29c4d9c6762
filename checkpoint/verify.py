"""``verify`` checks that a directory is intact, reading every byte once; ``show`` prints what its headers contain."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mm.conversion.compare import is_right
from mm.conversion.convert import HF_DIR, LAYOUT, num_threads
from mm.errors import UserError, counted, naming, refuse
from mm.formats.files import Files
from mm.formats.hf import HFDirectory
from mm.formats.layout import Layout
from mm.formats.manifest import MANIFEST_FILE
from mm.formats.source import Directory, cure_of_damage, find, open_hf
from mm.formats.source import open as open_source
from mm.formats.training_reader import TrainingDirectory
from mm.progress import Progress
from mm.weights.plan import dtype_name
from mm.weights.views import Stored


def verify_directory(path: Path, hf_dir: str | None, layout: Layout | None, num_workers: int) -> list[str]:
    """Compare every tensor with the manifest's checksum, and every bit with ``hf_dir`` if given.

    ``path`` is in MindSpeed-MM's layout or a training checkpoint.  ``layout`` is needed if there is no manifest and the
    files do not show it; 0 workers means one per core.  Returns lines on the successful checks.  Raises UserError
    naming each file and tensor that is missing, damaged or left over.
    """
    num_workers = num_threads(num_workers)
    directory = find(path, "--cfg.mm_dir")
    if isinstance(directory, HFDirectory):
        raise UserError(
            f"{path} is a Hugging Face directory, which has no checksums; give it as --cfg.hf_config.hf_dir to compare "
            f"--cfg.mm_dir with it, or compare two Hugging Face directories with diff."
        )
    done = list(directory.notes)
    if directory.stated is None and hf_dir is None:
        raise UserError(f"{path} has no {MANIFEST_FILE} to compare with; give --cfg.hf_config.hf_dir.")
    if directory.stated is not None:
        refuse(_manifest_problems(directory, directory.stated, num_workers))
        done.append(f"{path}: {len(directory.stated):,} tensors match {MANIFEST_FILE}.")
    if hf_dir is not None:
        num_tensors = _compare_with_hf(path, hf_dir, layout, num_workers)
        done.append(f"{path}: {num_tensors:,} tensors match those of {hf_dir}.")
    return done


def _manifest_problems(directory: Directory, stated: Sequence[Stored], num_workers: int) -> Iterator[str]:
    root, contents, cure = directory.path, directory.contents, cure_of_damage(directory)
    files, names = {entry.file for entry in stated}, {(entry.file, entry.name) for entry in stated}
    for file in sorted(contents.keys() - files):
        if contents[file]:
            yield f"{root / file} is not in {MANIFEST_FILE}; remove it."
    if isinstance(directory, TrainingDirectory):
        directory.check_here(files)
    yield from (f"{root / file} is missing; {cure}." for file in sorted(files - contents.keys()))
    for file in sorted(files & contents.keys()):
        for name in sorted(contents[file]):
            if (file, name) not in names:
                yield f"{root / file} holds {name}, which is not in {MANIFEST_FILE}."
    present = [entry for entry in stated if entry.file in contents]
    with ThreadPoolExecutor(num_workers) as pool:
        checked = pool.map(lambda entry: _problem(root, contents[entry.file].get(entry.name), entry, cure), present)
        yield from filter(None, Progress(f"verifying {root}", len(present), "tensors").each(checked))


def _problem(root: Path, stored: Stored | None, stated: Stored, cure: str) -> str | None:
    """How a tensor differs from its entry ``stated`` in the manifest; None if it does not."""
    path = root / stated.file
    if stored is None:
        return f"{path} lacks {stated.name}; {cure}."
    if (stored.dtype, stored.shape) != (stated.dtype, stated.shape):
        return (f"{path}: {stated.name} is {dtype_name(stored.dtype)} {list(stored.shape)}; {MANIFEST_FILE} says "
                f"{dtype_name(stated.dtype)} {list(stated.shape)}.")
    with Files(root) as files:
        if files.crc32(stored) == stated.crc32:
            return None
    return (f"{path}: {stated.name} is damaged or belongs to another file (its crc32 differs from {MANIFEST_FILE}); "
            f"{cure}.")


def _compare_with_hf(path: Path, hf_dir: str, layout: Layout | None, num_workers: int) -> int:
    with naming(HF_DIR):
        expected = open_hf(HFDirectory.open(hf_dir))
    found = open_source(path, "--cfg.mm_dir", layout=layout, layout_flag=LAYOUT, model=expected.model)
    expected.check()
    with ThreadPoolExecutor(num_workers) as pool:
        are_right = pool.map(lambda view: is_right(view, found, expected), found.views)
        progress = Progress(f"comparing with {hf_dir}", len(found.views), "tensors").each(are_right)
        wrong = [view.stored for view, fits in zip(found.views, progress, strict=True) if not fits]
    if wrong:
        problems = [f"{found.path / stored.file}: {stored.name} differs from {expected.path}." for stored in wrong]
        found_dtypes, expected_dtypes = (
            " and ".join(sorted(map(dtype_name, {*side.dtypes.values()}))) for side in (found, expected))
        if found_dtypes != expected_dtypes:
            problems.insert(0, f"{found.path} holds {found_dtypes}, but {expected.path} {expected_dtypes}.")
        raise UserError(problems)
    return len(found.views)


def show_directory(path: Path) -> list[str]:
    """Lines on the layout, and on each file's size and dtypes.

    Raises UserError if it is not a kind of directory that can be converted.
    """
    directory = find(path, "--cfg.dir")
    contents = directory.contents
    everything = [tensor for stored in contents.values() for tensor in stored.values()]
    lines = [f"  {file}  {_summary(list(contents[file].values()))}" for file in sorted(contents)]
    return [*directory.describe(), *lines, f"{counted(len(contents), 'file')}, {_summary(everything)}"]


def _summary(stored: list[Stored]) -> str:
    dtypes = Counter(dtype_name(tensor.dtype) for tensor in stored)
    kinds = [counted(count, f"{dtype} tensor") for dtype, count in sorted(dtypes.items())] or ["no tensors"]
    return ", ".join([*kinds, f"{sum(tensor.num_bytes for tensor in stored):,} bytes"])
