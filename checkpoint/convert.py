"""The conversions: Hugging Face to MindSpeed-MM's layout, back, and from one layout to another.

Each puts sources and targets together into a plan; ``Conversion.run`` carries any of them out.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from checkpoint.formats.atomic import MEGATRON_MODES, PLAIN_MODES, Crc32s, Modes, Output, is_complete, left_bytes, tidy
from checkpoint.formats.copy import check_source, execute
from checkpoint.formats.files import DTYPE_NAMES
from checkpoint.formats.hf import HFDirectory, copy_other_files, write_index
from checkpoint.formats.hf_files import dtype_name
from checkpoint.formats.hf_views import hf_targets
from checkpoint.formats.language_source import only
from checkpoint.formats.layout import Layout, check_layout
from checkpoint.formats.manifest import TOOL, Entry, Manifest, manifest_text
from checkpoint.formats.mindspeed_target import mm_targets
from checkpoint.formats.slots import RELEASE, Format, Kind
from checkpoint.formats.source import Source, open_hf, open_source
from checkpoint.formats.structure import Structure
from checkpoint.formats.training import LATEST_FILE, MANIFEST_FILE
from mm.errors import UserError
from mm.weights.plan import Plan, TargetFile, make_plan
from mm.weights.views import View

SOURCE_LAYOUT, TARGET_LAYOUT = "--cfg.source_parallel_config", "--cfg.target_parallel_config"
LAYOUT = "--cfg.parallel_config"
STRUCTURE = "--cfg.common_model_config.enable_canonical_hf_struct"


@dataclass(frozen=True)
class Options:
    """What every conversion understands."""

    dry_run: bool = False
    overwrite: bool = False
    num_workers: int = 0
    """Threads; 0 = one for each core."""


@dataclass(frozen=True)
class Conversion:
    """A conversion that was found possible; nothing is written yet."""

    source: Path
    target: Path
    plan: Plan
    fingerprint: str
    """Of source and target, to know an interrupted run of the same conversion by."""
    write_others: Callable[[Path, Mapping[str, Crc32s]], None]
    """Writes the small files of the finished directory; given the checksums by file and tensor."""
    is_ours: Callable[[Path], bool]
    """Whether a directory is of the kind that is written, so that it may be replaced."""
    modes: Modes
    """Permissions of that kind."""

    def run(self, options: Options) -> None:
        """Write the target, or with ``dry_run`` print the plan.

        Raises:
            UserError: the target must not or cannot be written, or the source is damaged.
        """
        if options.dry_run:
            print("\n".join(self.describe()))
            return
        num_workers = options.num_workers or len(os.sched_getaffinity(0))
        target = self.target.resolve()
        if is_complete(target, self.fingerprint, self.plan.files):
            tidy(target)
        else:
            check_target(self, target, options.overwrite)
            check_source(self.plan, self.source)
            self._write(target, num_workers)
        print(f"{target} is complete: {len(self.plan.files)} weight files, {self.plan.num_bytes:,} bytes.")

    def _write(self, target: Path, num_workers: int) -> None:
        output = Output.begin(target, self.fingerprint, self.modes)
        try:
            self._fill(output, num_workers)
            output.commit(self.write_others)
        except OSError as error:
            raise UserError(
                f"{error.filename or target} cannot be read or written ({error.strerror}); mend that and give the "
                f"same command again, which goes on after the {len(output.finished)} of {len(self.plan.files)} files "
                f"that are finished."
            ) from error
        finally:
            output.close()

    def _fill(self, output: Output, num_workers: int) -> None:
        for name in output.drop_damaged(self.plan.files):
            print(f"note: {output.folder / name} is not as it was finished; it is written again")
        if output.finished:
            print(f"note: {len(output.finished)} of {len(self.plan.files)} files are finished from an earlier run")
        done = sum(tensor.num_bytes for file in self.plan.files if file.name in output.finished
                   for tensor in file.tensors)
        total = sum(tensor.num_bytes for file in self.plan.files for tensor in file.tensors)
        with tqdm(total=total, initial=done, unit="B", unit_scale=True, disable=None) as bar:
            execute(self.plan, self.source, output, num_workers, bar.update)

    def describe(self) -> list[str]:
        """What would be written, a line for every file."""
        lines = [f"{self.source} -> {self.target}"]
        for file in self.plan.files:
            lines.append(f"  {file.name}  {len(file.tensors)} tensors  {file.num_bytes:,} bytes")
        num_moves = sum(len(job.moves) * job.num_rows for job in self.plan.jobs)
        lines.append(
            f"{len(self.plan.files)} files, {sum(len(file.tensors) for file in self.plan.files)} tensors, "
            f"{self.plan.num_bytes:,} bytes in {num_moves:,} ranges; {len(self.plan.twins)} copies in the source are "
            f"compared, not read twice. Nothing was written."
        )
        return lines


def hf_to_mm(
    hf_dir: str | Path,
    mm_dir: str | Path,
    layout: Layout,
    kind: Kind | None = None,
    language_dir: str | Path | None = None,
) -> Conversion:
    """Hugging Face directory -> MindSpeed-MM's layout; the LLM is taken from ``language_dir`` if that is given.

    Raises:
        UserError: the source is not complete, or the layout is not legal.
    """
    source = open_hf(hf_dir, language_dir)
    check_layout(layout, source.model, LAYOUT)
    return _to_mm(source, Path(mm_dir), layout, kind or Kind())


def resplit(
    source_dir: str | Path,
    target_dir: str | Path,
    source_layout: Layout | None,
    target_layout: Layout,
    hf_dir: str | Path | None = None,
    format: Format | None = None,
    structure: Structure | None = None,
) -> Conversion:
    """From any layout, or a training checkpoint, to another layout.

    ``source_layout`` and ``hf_dir`` are only needed without a manifest.  Format and structure stay what they are in
    the source unless they are given.

    Raises:
        UserError: the source is not complete, or a layout is not legal.
    """
    given = HFDirectory.open(hf_dir, weights_required=False).model_config() if hf_dir else None
    source = open_source(source_dir, "--cfg.source_dir", source_layout, SOURCE_LAYOUT, given)
    check_layout(target_layout, source.model, TARGET_LAYOUT)
    kept = source.kept or Kind()
    kind = replace(kept, format=format or kept.format, structure=structure or kept.structure)
    return _to_mm(source, Path(target_dir), target_layout, kind)


def mm_to_hf(
    mm_dir: str | Path,
    hf_dir: str | Path,
    save_hf_dir: str | Path,
    layout: Layout | None = None,
    structure: Structure | None = None,
) -> Conversion:
    """Any layout, or a training checkpoint -> a Hugging Face directory like ``hf_dir``, whose other files are copied.

    Raises:
        UserError: the source is not complete or not of the stated ``structure``, or ``hf_dir`` is of another model.
    """
    base = HFDirectory.open(hf_dir, weights_required=False)
    source = open_source(mm_dir, "--cfg.mm_dir", layout, LAYOUT, base.model_config())
    if None not in (structure, source.kept) and source.kept.structure is not structure:
        raise UserError(
            f"{STRUCTURE} says that {source.path} has the {structure.value} structure, but its tensors are named as in "
            f"the {source.kept.structure.value} one; leave the flag out, or give the right directory."
        )
    if source.is_vit_only:
        raise UserError(f"{source.path} holds ViT and projector only (save_vit_only), which are no Hugging Face model.")
    base.check(source.model)
    dtypes = _dtypes(source.views)
    target_views, files = hf_targets(base, source.model, dtypes)
    plan = make_plan(source.views, target_views, files)

    def write_others(folder: Path, _: Mapping[str, Crc32s]) -> None:
        copy_other_files(base, folder, None if base.tensors else _dtype_to_state(base.config, dtypes))
        if base.index is not None:
            shutil.copyfile(base.path / "model.safetensors.index.json", folder / "model.safetensors.index.json")
        elif len(files) > 1:
            write_index(folder, {file.name: {t.name: t.num_bytes for t in file.tensors} for file in files}, None)

    mark = _conversion_mark(source, files)
    return Conversion(
        source.path, Path(save_hf_dir), plan, mark, write_others, lambda path: _has(path, "config.json"), PLAIN_MODES
    )


def _to_mm(source: Source, target: Path, layout: Layout, kind: Kind) -> Conversion:
    model = layout.place(source.model)
    views = only(source.views, model, "vision", "projector") if kind.vit_only else source.views
    target_views, files = mm_targets(model, layout.tp_size, kind, _dtypes(views))
    plan = make_plan(views, target_views, files)

    def write_others(folder: Path, crc32s: Mapping[str, Crc32s]) -> None:
        entries = tuple(
            Entry(file.name, tensor.name, DTYPE_NAMES[tensor.dtype], tensor.shape, crc32s[file.name][tensor.name])
            for file in files
            for tensor in file.tensors
        )
        origin = {"kind": source.kind, "fingerprint": source.fingerprint}
        manifest = Manifest(TOOL, model, layout.tp_size, kind, origin, entries)
        (folder / MANIFEST_FILE).write_text(manifest_text(manifest), encoding="utf-8")
        (folder / LATEST_FILE).write_text(RELEASE, encoding="utf-8")

    mark = _conversion_mark(source, files)
    return Conversion(
        source.path, target, plan, mark, write_others, lambda path: _has(path, LATEST_FILE), MEGATRON_MODES
    )


def _dtypes(views: Sequence[View]) -> dict[str, Any]:
    """Of every tensor of the model in the source; where one is held in two, the plan says so."""
    return {run.key: view.stored.dtype for view in views for run in view.runs if run.key is not None}


def _dtype_to_state(config: Mapping[str, Any], dtypes: Mapping[str, Any]) -> Any:
    """What a config.json must say of weights in the source's ``dtypes``; None when what it says is among them."""
    found = list(dtypes.values())
    return None if f"torch.{dtype_name(config)}" in map(str, found) else found[0]


def _conversion_mark(source: Source, files: Sequence[TargetFile]) -> str:
    digest = hashlib.sha256(source.fingerprint.encode())
    for file in files:
        digest.update(repr((file.name, file.tensors, file.num_bytes)).encode())
    return digest.hexdigest()


def _has(directory: Path, name: str) -> bool:
    return (directory / name).is_file()


def check_target(conversion: Conversion, target: Path, overwrite: bool) -> None:
    """Refuse, before any work, a target that must not or cannot be written.  ``target`` is resolved."""
    source = conversion.source.resolve()
    if source.is_relative_to(target) or target.is_relative_to(source):
        raise UserError(f"The target {target} is, contains or lies in the source {source}; give another target.")
    if target.exists() and not target.is_dir():
        raise UserError(f"The target {target} is a file; give a directory that does not exist yet.")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise UserError(
                f"The target {target} is not empty; give another one, or --cfg.overwrite true to replace it."
            )
        if not conversion.is_ours(target):
            raise UserError(
                f"The target {target} is not empty and holds something else than this command writes, so it is not "
                f"overwritten; give another one."
            )
    existing = next(folder for folder in target.parents if folder.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(f"The target {target} cannot be written: no permission for {existing}.")
    free_bytes = shutil.disk_usage(existing).free + left_bytes(target)
    if conversion.plan.num_bytes > free_bytes:
        raise UserError(
            f"The target {target} needs {conversion.plan.num_bytes:,} bytes, but only {free_bytes:,} are free; make "
            f"room or give another disk."
        )
