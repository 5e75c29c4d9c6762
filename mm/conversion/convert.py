"""The conversions: Hugging Face to MindSpeed-MM's layout, back, and from one layout to another.

Each function plans one conversion; ``Conversion.run`` executes it.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mm.config.flags import VitQkvOrder
from mm.conversion.compare import is_right
from mm.conversion.options import Options
from mm.ending import print_notes
from mm.errors import UserError, counted
from mm.formats.atomic import (
    MEGATRON_MODES,
    PLAIN_MODES,
    Crc32s,
    Modes,
    Output,
    is_complete,
    is_intact,
    left_bytes,
    tidy,
)
from mm.formats.checkpoints import LATEST_FILE
from mm.formats.copy import execute
from mm.formats.hf import HFDirectory
from mm.formats.hf_target import hf_targets, is_hf_target, write_other_files
from mm.formats.layout import Layout, check_layout
from mm.formats.manifest import MANIFEST_FILE
from mm.formats.mindspeed import TOOL, ConvertedManifest
from mm.formats.qkv_order import QkvOrder
from mm.formats.source import Source, open_hf
from mm.formats.source import open as open_source
from mm.formats.storage import RELEASE, Format, Storage, Structure, mindspeed_targets
from mm.progress import Progress, ongoing
from mm.weights.plan import CopyPlan, TargetFile, make_plan
from mm.weights.views import View

SOURCE_LAYOUT, TARGET_LAYOUT = "--cfg.source_parallel_config", "--cfg.target_parallel_config"
LAYOUT = "--cfg.parallel_config"
HF_DIR = "--cfg.hf_config.hf_dir"
QKV_ORDER = "--cfg.common_model_config.vit_qkv_order"
IS_IDENTICAL = "is already identical; nothing was written."
"""Said of a target whose files and tensors are already those that would be written."""


@dataclass(frozen=True)
class Conversion:
    """A planned conversion; nothing is written yet."""

    source: Source
    target: Path
    views: Sequence[View]
    """Which part of the model each tensor of the target holds."""
    plan: CopyPlan
    write_others: Callable[[Path, Mapping[str, Crc32s]], None]
    """Writes the small files into the finished directory, given the checksums by file and tensor."""
    is_ours: Callable[[Path], bool]
    """Whether a directory is of the target's kind, so that it may be replaced."""
    modes: Modes
    """Permissions of the target."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of source and target; it identifies the journal of an interrupted conversion."""
        return fingerprint_of((self.source,), self.plan.files)

    def run(self, options: Options) -> None:
        """Write the target, or with ``dry_run`` print the plan.

        Raises UserError if the target must not or cannot be written, or the source is damaged.
        """
        num_workers = num_threads(options.num_workers)
        print_notes(self.source.notes)
        if options.dry_run:
            print("\n".join(self.describe()))
            return
        target = self.target.resolve()
        if is_complete(target, self.fingerprint, self.plan.files):
            tidy(target)
        elif not options.overwrite and self._is_done(target, num_workers):
            print(f"{target} {IS_IDENTICAL}")
            return
        else:
            check_replaceable(target, (self.source,), self.plan.num_bytes, self.is_ours, options.overwrite)
            with ongoing(f"checking {self.source.path}"):
                self.source.check()
            write(target, self.fingerprint, self.plan.files, self.modes,
                  lambda output: self._fill(output, num_workers), self.write_others)
        print(f"{target} is complete: {counted(len(self.plan.files), 'weight file')}, {self.plan.num_bytes:,} bytes.")

    def _is_done(self, target: Path, num_workers: int) -> bool:
        """Whether all files of the target exist, and all their tensors match the source."""
        if not self.is_ours(target):
            return False
        found = replace(self.source, path=target, views=tuple(self.views))
        with ThreadPoolExecutor(num_workers) as pool:
            if not all(pool.map(lambda file: is_intact(target, file), self.plan.files)):
                return False
            are_right = pool.map(lambda view: is_right(view, found, self.source), self.views)
            return all(Progress(f"comparing with {target}", len(self.views), "tensors").each(are_right))

    def _fill(self, output: Output, num_workers: int) -> None:
        sizes = {file.name: sum(tensor.num_bytes for tensor in file.tensors) for file in self.plan.files}
        done = sum(sizes[name] for name in output.finished)
        with Progress(f"writing {self.target}", sum(sizes.values()), "B", done) as progress:
            execute(self.plan, self.source.path, output, num_workers, progress.update)

    def describe(self) -> list[str]:
        """The plan, with a line for every file."""
        files, copies = self.plan.files, self.source.index.copies
        num_moves = sum(len(job.moves) * job.num_rows for job in self.plan.jobs)
        return [
            f"{self.source.path} -> {self.target}",
            *(f"  {file.name}  {counted(len(file.tensors), 'tensor')}  {file.num_bytes:,} bytes" for file in files),
            f"{counted(len(files), 'file')}, {counted(sum(len(file.tensors) for file in files), 'tensor')}, "
            f"{self.plan.num_bytes:,} bytes in {counted(num_moves, 'range')}; copies in the source, which are only "
            f"compared: {counted(len(copies), 'tensor')}. Nothing was written.",
        ]


def hf_to_mm(
    hf_dir: str | Path,
    mm_dir: str | Path,
    layout: Layout,
    storage: Storage | None = None,
    language_dir: str | Path | None = None,
) -> Conversion:
    """Hugging Face directory -> MindSpeed-MM's layout; the LLM comes from ``language_dir`` if given.

    Raises UserError if the source is incomplete, or the layout is invalid.
    """
    source = open_hf(HFDirectory.open(hf_dir), language_dir)
    check_layout(layout, source.model, LAYOUT)
    return to_mindspeed(source, Path(mm_dir), layout, storage or Storage())


def resplit(
    source_dir: str | Path,
    target_dir: str | Path,
    source_layout: Layout | None,
    target_layout: Layout,
    hf_dir: str | Path | None = None,
    format: Format | None = None,
    structure: Structure | None = None,
    vit_qkv_order: VitQkvOrder | None = None,
) -> Conversion:
    """From any layout, or a training checkpoint, to another layout.

    ``source_layout`` and ``hf_dir`` are only needed without a manifest.  Format and structure are those of the source
    unless given.  Raises UserError if the source is incomplete, or a layout is invalid.
    """
    given = HFDirectory.open(hf_dir, weights_required=False).model_config() if hf_dir else None
    order = QkvOrder(vit_qkv_order, hf_dir, QKV_ORDER)
    source = open_source(
        source_dir, "--cfg.source_dir", layout=source_layout, layout_flag=SOURCE_LAYOUT, model=given, qkv=order)
    check_layout(target_layout, source.model, TARGET_LAYOUT)
    kept = source.storage or Storage()
    storage = replace(
        kept, format=format or kept.format, structure=structure or kept.structure, whole_vision_qkv=False)
    return to_mindspeed(source, Path(target_dir), target_layout, storage)


def mm_to_hf(
    mm_dir: str | Path,
    hf_dir: str | Path,
    save_hf_dir: str | Path,
    layout: Layout | None = None,
    structure: Structure | None = None,
    vit_qkv_order: VitQkvOrder | None = None,
) -> Conversion:
    """Any layout, or a training checkpoint -> a Hugging Face directory modelled on ``hf_dir``.

    The other files of ``hf_dir`` are copied.  Weights keep the dtype of the source, and config.json states it.  Raises
    UserError if the source is incomplete or not of the stated ``structure``, or ``hf_dir`` is of another model.
    """
    base = HFDirectory.open(hf_dir, weights_required=False)
    source = open_source(
        mm_dir, "--cfg.mm_dir", layout=layout, layout_flag=LAYOUT, model=base.model_config(),
        qkv=QkvOrder(vit_qkv_order, hf_dir, QKV_ORDER))
    if structure and source.storage and source.storage.structure is not structure:
        raise UserError(
            f"--cfg.common_model_config.enable_canonical_hf_struct means that {source.path} has the "
            f"{structure.value} structure, but its tensors are named as in the {source.storage.structure.value} one; "
            f"leave the flag out, or give the right directory."
        )
    if source.is_vit_only:
        raise UserError(f"{source.path} holds ViT and projector only (save_vit_only), not a Hugging Face model.")
    base.check(source.model)
    target_views, files = hf_targets(base, source.model, source.dtypes)

    def write_others(folder: Path, _: Mapping[str, Crc32s]) -> None:
        write_other_files(base, folder, files)

    return Conversion(
        source, Path(save_hf_dir), target_views, make_plan(source.index, target_views, files), write_others,
        is_hf_target, PLAIN_MODES,
    )  # fmt: skip


def to_mindspeed(source: Source, target: Path, layout: Layout, storage: Storage) -> Conversion:
    """A source of any kind -> MindSpeed-MM's layout; raises UserError if it is not possible."""
    model = layout.place(source.model)
    if storage.vit_only:
        source = replace(source, views=tuple(view for view in source.views if view.weight.part != "language"))
    target_views, files = mindspeed_targets(model, layout.tp_size, storage, source.dtypes)

    def write_others(folder: Path, crc32s: Mapping[str, Crc32s]) -> None:
        tensors = tuple(
            replace(tensor, crc32=crc32s[file.name][tensor.name]) for file in files for tensor in file.tensors
        )
        origin = {"kind": source.kind.name.lower(), "fingerprint": source.fingerprint}
        manifest = ConvertedManifest(TOOL, model, layout.tp_size, storage, origin, tensors)
        (folder / MANIFEST_FILE).write_text(manifest.text(), encoding="utf-8")
        (folder / LATEST_FILE).write_text(RELEASE, encoding="utf-8")

    return Conversion(
        source, target, target_views, make_plan(source.index, target_views, files), write_others,
        lambda path: (path / LATEST_FILE).is_file(), MEGATRON_MODES,
    )  # fmt: skip


def fingerprint_of(sources: Sequence[Source], files: Sequence[TargetFile]) -> str:
    """Digest of the sources and of the planned files."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.fingerprint.encode())
    for file in files:
        digest.update(repr((file.name, file.tensors, file.num_bytes)).encode())
    return digest.hexdigest()


def write(
    target: Path, fingerprint: str, files: Sequence[TargetFile], modes: Modes, fill: Callable[[Output], None],
    write_others: Callable[[Path, Mapping[str, Crc32s]], None],
) -> None:
    """Write ``target``, a resolved path, which appears complete or not at all.

    ``fill`` writes those of ``files`` that no earlier run of the same ``fingerprint`` has finished.  Raises UserError
    if a file cannot be read or written.
    """
    output = Output.begin(target, fingerprint, modes)
    try:
        for name in output.drop_damaged(files):
            print(f"note: {output.folder / name} changed after it was finished; it is written again")
        if output.finished:
            print(f"note: an earlier run finished {len(output.finished)} of {len(files)} files")
        fill(output)
        output.commit(write_others)
    except OSError as error:
        raise UserError(
            f"{error.filename or target} cannot be read or written ({error.strerror}); fix that and run the same "
            f"command again, which continues after the {len(output.finished)} of {len(files)} finished files."
        ) from error
    finally:
        output.close()


def num_threads(num_workers: int) -> int:
    """The number of threads for ``--cfg.num_workers``; 0 means one per core.

    Raises UserError if it is negative.
    """
    if num_workers < 0:
        raise UserError(f"--cfg.num_workers is {num_workers}; expected 0 (one thread per core) or more.")
    return num_workers or len(os.sched_getaffinity(0))


def check_replaceable(
    target: Path, sources: Sequence[Source], num_bytes: int, is_ours: Callable[[Path], bool], overwrite: bool
) -> None:
    """Raise UserError for a target that overlaps a source, or that ``check_target`` rejects.

    With ``overwrite``, a target that is not empty is rejected only if ``is_ours`` is false for it.
    """
    for source in (one.path.resolve() for one in sources):
        if source.is_relative_to(target) or target.is_relative_to(source):
            raise UserError(f"The target {target} is, contains or is inside the source {source}; give another target.")
    if overwrite and not is_ours(target) and target.is_dir() and any(target.iterdir()):
        raise UserError(
            f"The target {target} is not empty and was not written by this command, so it is not overwritten; give "
            f"another one."
        )
    check_target(target, num_bytes, None if overwrite else ", or --cfg.overwrite true to replace it")


def check_target(target: Path, num_bytes: int, hint: str | None = "") -> None:
    """Raise UserError, before any work, for a target (a resolved path) that must not or cannot be written.

    ``hint`` suggests what else to do about a target that is not empty; None means that it is replaced.
    """
    if target.exists() and not target.is_dir():
        raise UserError(f"The target {target} is a file; give a directory that does not exist yet.")
    if hint is not None and target.is_dir() and any(target.iterdir()):
        raise UserError(f"The target {target} is not empty; give another one{hint}.")
    existing = next(folder for folder in target.parents if folder.exists())
    if not existing.is_dir():
        raise UserError(f"The target {target} cannot be written: {existing} is a file; give another directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"The target {target} cannot be written: no permission for {existing}.")
    free_bytes = shutil.disk_usage(existing).free + left_bytes(target)
    if num_bytes > free_bytes:
        raise UserError(
            f"The target {target} needs {num_bytes:,} bytes, but only {free_bytes:,} are free; make room or give "
            f"another disk."
        )
