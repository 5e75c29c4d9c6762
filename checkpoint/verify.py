"""``verify`` checks that a directory is intact, reading every byte once; ``show`` prints what its headers contain."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mm.checkpoint.convert import HF_DIR, LAYOUT, num_threads
from mm.checkpoint.hf import HFDirectory
from mm.checkpoint.layout import Layout
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.source import Directory, cure_of_damage, find, open_hf, open_source
from mm.checkpoint.tensor_io import Files
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.errors import UserError, counted, naming, refuse
from mm.progress import Progress
from mm.weights.views import Stored, View, dtype_name


def verify_directory(path: Path, hf_dir: str | None, layout: Layout | None, num_workers: int) -> list[str]:
    """Compare every tensor with the manifest's checksum, and every bit with ``hf_dir`` if given.

    ``path`` is in MindSpeed-MM's layout or a training checkpoint.  ``layout`` is needed if there is no manifest and the
    files do not show it; 0 workers means one per core.  Returns lines on the successful checks.  Raises UserError
    naming each file and tensor that is missing, damaged or left over.
    """
    num_workers = num_threads(num_workers)
    directory = find(path, "--cfg.mm_dir")
    if isinstance(directory, HFDirectory):
        raise UserError(f"{path} is a Hugging Face directory, which has no checksums; compare two of them with diff.")
    done = list(directory.notes)
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
