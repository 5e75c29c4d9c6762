"""The conversions: Hugging Face to MindSpeed-MM's layout, back, and from one layout to another.

Each function plans one conversion; ``Conversion.run`` executes it.
"""

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from mm.checkpoint import directories
from mm.checkpoint.directories import LATEST_FILE, MEGATRON_MODES, PART, PLAIN_MODES, Crc32s, Modes
from mm.checkpoint.hf import HF_CONFIG_FILE, HFDirectory, hf_targets, write_other_files
from mm.checkpoint.manifest import MANIFEST_FILE
from mm.checkpoint.mindspeed import TOOL, ConvertedManifest
from mm.checkpoint.mindspeed_layout import RELEASE, Format, Layout, Storage, Structure, check_layout, mindspeed_targets
from mm.checkpoint.source import QkvOrder, Source, open_hf, open_source
from mm.checkpoint.tensor_io import Blocks, Files, groups
from mm.config.args import VitQkvOrder
from mm.console import Progress, ongoing
from mm.errors import UserError, counted, refuse
from mm.files import folder_problems
from mm.process import print_notes
from mm.weights.views import Stored, TargetFile, View, dtype_name

SOURCE_LAYOUT, TARGET_LAYOUT = "--cfg.source_parallel_config", "--cfg.target_parallel_config"
LAYOUT = "--cfg.parallel_config"
HF_DIR = "--cfg.hf_config.hf_dir"
QKV_ORDER = "--cfg.common_model_config.vit_qkv_order"


@dataclass(frozen=True)
class Conversion:
    """A planned conversion; nothing is written yet."""

    sources: tuple[Source, ...]
    target: Path
    files: Sequence[TargetFile]
    views: Sequence[View]
    """Which part of the model each tensor of ``files`` holds, in their order."""
    blocks: Callable[[Sequence[View]], Blocks]
    """The bytes of one of ``groups`` of views, or of some of its views."""
    write_others: Callable[[Path, Mapping[str, Crc32s]], None]
    """Writes the small files into the finished directory, given the checksums by file and tensor."""
    marker: str
    """Name of a file that every directory of the target's kind holds; only such a directory is replaced."""
    modes: Modes = PLAIN_MODES
    max_workers: int | None = None
    """Most threads; None: as many as the options say."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def fingerprint(self) -> str:
        """Digest of the sources and the target; an interrupted conversion continues if it is the same."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(source.fingerprint.encode())
        for file in self.files:
            digest.update(repr((file.name, file.tensors, file.num_bytes)).encode())
        return digest.hexdigest()

    def run(self, num_workers: int = 0, dry_run: bool = False, overwrite: bool = False) -> None:
        """Write the target, or with ``dry_run`` print the plan; 0 workers means one per core."""
        num_workers = self.max_workers or num_threads(num_workers)
        print_notes(note for source in self.sources for note in source.notes)
        if dry_run:
            print("\n".join(self.describe()))
            return
        target = self.target.resolve()
        if not overwrite and self._is_done(target, num_workers):
            directories.delete_leftovers(target)
            print(f"{target} is already identical; nothing was written.")
            return
        check_replaceable(target, self.sources, self.num_bytes, self.marker, overwrite)
        for source in self.sources:
            with ongoing(f"checking {source.path}"):
                source.check()
        try:
            with directories.unfinished(target, self.fingerprint, self.modes) as folder:
                self.write_others(folder, self._write(folder, num_workers))
                directories.commit(folder, target)
        except OSError as error:
            raise UserError(f"{error.filename or target} cannot be read or written ({error.strerror}); fix that and "
                            f"run the same command again, which continues after the finished files.") from error
        print(f"{target} is complete: {counted(len(self.files), 'weight file')}, {self.num_bytes:,} bytes.")

    def _is_done(self, target: Path, num_workers: int) -> bool:
        """Whether all files of the target exist, and have the right bytes."""
        return (target / self.marker).is_file() and all(_has_size(target, file) for file in self.files) and len(
            self._finished(target, num_workers)) == len(self.files)

    def _finished(self, folder: Path, num_workers: int) -> dict[str, Crc32s]:
        """The files in ``folder`` that already have the right bytes, with the checksums of their tensors."""
        files = [file for file in self.files if _has_size(folder, file)]
        with ThreadPoolExecutor(num_workers) as pool, Progress(
                f"comparing with {self.target}", _num_tensor_bytes(files), "B") as progress:

            def compare(group: Sequence[View]) -> dict[Stored, int]:
                crc32s = {view.stored: 0 for view in group}
                with Files(folder) as opened:
                    for stored, start, block in self.blocks(group):
                        if stored in crc32s and opened.holds(stored, start, block):
                            crc32s[stored] = zlib.crc32(block, crc32s[stored])
                        else:
                            crc32s.pop(stored, None)
                        progress.update(len(block))
                        if not crc32s:
                            break
                return crc32s

            equal = dict(chain.from_iterable(one.items() for one in pool.map(compare, self._groups(files))))
        finished = {}
        for file in files:
            crc32s = {one.name: equal[one] for one in file.tensors if one in equal}
            if len(crc32s) == len(file.tensors):
                with (folder / file.name).open("rb", buffering=0) as opened:
                    if all(os.pread(opened.fileno(), len(data), at) == data for at, data in file.frame(crc32s)):
                        finished[file.name] = crc32s
        return finished

    def _groups(self, files: Sequence[TargetFile]) -> list[list[View]]:
        names = {file.name for file in files}
        return groups([view for view in self.views if view.stored.file in names])

    def _write(self, folder: Path, num_workers: int) -> dict[str, Crc32s]:
        """Write the files that are not finished; returns the checksums of all tensors by file and name."""
        crc32s = self._finished(folder, num_workers)
        if crc32s:
            print(f"note: an earlier run finished {len(crc32s)} of {len(self.files)} files")
        left = [file for file in self.files if file.name not in crc32s]
        written: dict[str, list[Future[dict[Stored, int]]]] = {file.name: [] for file in left}
        total, num_left = _num_tensor_bytes(self.files), _num_tensor_bytes(left)
        with ThreadPoolExecutor(num_workers) as pool, Progress(
                f"writing {self.target}", total, "B", total - num_left) as progress:
            for file in left:
                directories.begin_file(folder, file, self.modes)
            for group in self._groups(left):
                future = pool.submit(self._write_group, folder, group, progress.update)
                for name in {view.stored.file for view in group}:
                    written[name].append(future)
            try:
                for file in left:
                    found = {stored: crc for one in written[file.name] for stored, crc in one.result().items()}
                    crc32s[file.name] = {one.name: found[one] for one in file.tensors}
                    directories.finish_file(folder, file, crc32s[file.name])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # leaving the with block waits for running work
                raise
        return crc32s

    def _write_group(
        self, folder: Path, group: Sequence[View], progress: Callable[[int], object]
    ) -> dict[Stored, int]:
        crc32s = {view.stored: 0 for view in group}
        with Files(folder, os.O_WRONLY, PART) as files:
            for stored, start, block in self.blocks(group):
                crc32s[stored] = zlib.crc32(block, crc32s[stored])
                files.write(stored, start, block)
                progress(len(block))
        return crc32s

    def describe(self) -> list[str]:
        """The plan, with a line for every file."""
        files = (f"  {file.name}  {counted(len(file.tensors), 'tensor')}  {file.num_bytes:,} bytes"
                 for file in self.files)
        return [f"{' + '.join(str(source.path) for source in self.sources)} -> {self.target}", *files,
                f"{counted(len(self.files), 'file')}, {counted(len(self.views), 'tensor')}, {self.num_bytes:,} bytes. "
                f"Nothing was written."]


def copying(
    source: Source, target: Path, files: Sequence[TargetFile], views: Sequence[View],
    write_others: Callable[[Path, Mapping[str, Crc32s]], None], marker: str, modes: Modes = PLAIN_MODES,
) -> Conversion:
    """The conversion that fills ``files`` from ``source``; raises UserError if one would change a dtype."""
    refuse(
        f"{one.view.stored.file}: {one.view.stored.name} is {dtype_name(one.view.stored.dtype)}, but "
        f"{view.stored.name} in {view.stored.file} would be {dtype_name(view.stored.dtype)}; a conversion does not "
        f"change dtypes. Give a source of the same dtype throughout."
        for view in views for span in view.spans for one in source.index.find(span)
        if one.view.stored.dtype != view.stored.dtype)

    def blocks(group: Sequence[View]) -> Blocks:
        with Files(source.path) as opened:
            yield from opened.target_blocks(source.index, group)

    return Conversion((source,), target, files, views, blocks, write_others, marker, modes)


def hf_to_mm(
    hf_dir: str | Path, mm_dir: str | Path, layout: Layout, storage: Storage | None = None,
    language_dir: str | Path | None = None,
) -> Conversion:
    """Hugging Face directory -> MindSpeed-MM's layout; the LLM comes from ``language_dir`` if given."""
    source = open_hf(HFDirectory.open(hf_dir), language_dir)
    check_layout(layout, source.model, LAYOUT)
    return to_mindspeed(source, Path(mm_dir), layout, storage or Storage())


def resplit(
    source_dir: str | Path, target_dir: str | Path, source_layout: Layout | None, target_layout: Layout,
    hf_dir: str | Path | None = None, format: Format | None = None, structure: Structure | None = None,
    vit_qkv_order: VitQkvOrder | None = None,
) -> Conversion:
    """From any layout, or a training checkpoint, to another layout, by default in the same format and structure.

    ``source_layout`` and ``hf_dir`` are only needed without a manifest.
    """
    given = HFDirectory.open(hf_dir, weights_required=False).model_config() if hf_dir else None
    source = open_source(source_dir, "--cfg.source_dir", layout=source_layout, layout_flag=SOURCE_LAYOUT, model=given,
                         qkv=QkvOrder(vit_qkv_order, hf_dir, QKV_ORDER))
    check_layout(target_layout, source.model, TARGET_LAYOUT)
    kept = source.storage or Storage()
    storage = replace(kept, format=format or kept.format, structure=structure or kept.structure, whole_vision_qkv=False)
    return to_mindspeed(source, Path(target_dir), target_layout, storage)


def mm_to_hf(
    mm_dir: str | Path, hf_dir: str | Path, save_hf_dir: str | Path, layout: Layout | None = None,
    structure: Structure | None = None, vit_qkv_order: VitQkvOrder | None = None,
) -> Conversion:
    """Any layout, or a training checkpoint -> a Hugging Face directory modelled on ``hf_dir``.

    The other files of ``hf_dir`` are copied.  Weights keep the dtype of the source, and config.json states it.
    """
    base = HFDirectory.open(hf_dir, weights_required=False)
    source = open_source(mm_dir, "--cfg.mm_dir", layout=layout, layout_flag=LAYOUT, model=base.model_config(),
                         qkv=QkvOrder(vit_qkv_order, hf_dir, QKV_ORDER))
    if structure and source.storage and source.storage.structure is not structure:
        raise UserError(f"--cfg.common_model_config.enable_canonical_hf_struct says {structure.value}, but "
                        f"{source.path} holds {source.storage.structure.value} tensors; leave the flag out.")
    if source.is_vit_only:
        raise UserError(f"{source.path} holds ViT and projector only (save_vit_only), not a Hugging Face model.")
    base.check(source.model)
    views, files = hf_targets(base, source.model, source.dtypes)
    return copying(source, Path(save_hf_dir), files, views, lambda folder, _: write_other_files(base, folder, files),
                   HF_CONFIG_FILE)


def to_mindspeed(source: Source, target: Path, layout: Layout, storage: Storage) -> Conversion:
    """A source of any kind -> MindSpeed-MM's layout; raises UserError if it is not possible."""
    model = layout.place(source.model)
    if storage.vit_only:
        source = replace(source, views=tuple(view for view in source.views if view.weight.part != "language"))
    views, files = mindspeed_targets(model, layout.tp_size, storage, source.dtypes)

    def write_others(folder: Path, crc32s: Mapping[str, Crc32s]) -> None:
        tensors = tuple(replace(one, crc32=crc32s[file.name][one.name]) for file in files for one in file.tensors)
        origin = {"kind": source.kind.name.lower(), "fingerprint": source.fingerprint}
        manifest = ConvertedManifest(TOOL, model, layout.tp_size, storage, origin, tensors)
        (folder / MANIFEST_FILE).write_text(manifest.text(), encoding="utf-8")
        (folder / LATEST_FILE).write_text(RELEASE, encoding="utf-8")

    return copying(source, target, files, views, write_others, LATEST_FILE, MEGATRON_MODES)


def num_threads(num_workers: int) -> int:
    """The number of threads for ``--cfg.num_workers``; 0 means one per core."""
    return num_workers or len(os.sched_getaffinity(0))


def _has_size(folder: Path, file: TargetFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.num_bytes


def _num_tensor_bytes(files: Sequence[TargetFile]) -> int:
    return sum(one.num_bytes for file in files for one in file.tensors)


def check_replaceable(
    target: Path, sources: Sequence[Source], num_bytes: int, marker: str, overwrite: bool
) -> None:
    """Refuse a target that overlaps a source, that ``check_target`` refuses, or that ``overwrite`` must not replace."""
    for source in (one.path.resolve() for one in sources):
        if source.is_relative_to(target) or target.is_relative_to(source):
            raise UserError(f"The target {target} is, contains or is inside the source {source}; give another target.")
    if overwrite and not (target / marker).is_file() and target.is_dir() and any(target.iterdir()):
        raise UserError(f"The target {target} is not empty and was not written by this command; give another one.")
    check_target(target, num_bytes, None if overwrite else ", or --cfg.overwrite true to replace it")


def check_target(target: Path, num_bytes: int, hint: str | None = "") -> None:
    """Raise UserError, before any work, for a target (a resolved path) that must not or cannot be written.

    ``hint`` suggests what else to do about a target that is not empty; None means that it is replaced.
    """
    if hint is not None and target.is_dir() and any(target.iterdir()):
        raise UserError(f"The target {target} is not empty; give another one{hint}.")
    checked = target.parent if target.is_dir() else target
    refuse(folder_problems("The target", str(checked)))
    existing = next(folder for folder in (checked, *checked.parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free + directories.left_bytes(target)
    if num_bytes > free_bytes:
        raise UserError(f"The target {target} needs {num_bytes:,} bytes, but only {free_bytes:,} are free; make "
                        f"room or give another disk.")
