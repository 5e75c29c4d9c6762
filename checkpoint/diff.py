"""``diff``: compares two directories of any kind and layout bit by bit.

Both are opened leniently: tensors that do not fit the model are reported, not raised as an error.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm.config.model import ModelConfig
from mm.conversion.compare import Finding, Unequal, compare, held_dtype
from mm.conversion.convert import HF_DIR, num_threads
from mm.errors import UserError, counted, naming
from mm.formats.hf import HFDirectory
from mm.formats.hf_config import differences
from mm.formats.manifest import MANIFEST_FILE
from mm.formats.mindspeed import MindSpeedDirectory
from mm.formats.source import Kind, Source, find_kind
from mm.formats.source import open as open_source
from mm.weights.cut import Span
from mm.weights.plan import dtype_name
from mm.weights.table import Weight, model_weights
from mm.weights.views import Misfit, Stored

NUM_SHOWN = 10


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
    """Compare every tensor of the model, its copies and its padding.

    ``hf_dir`` describes the model if neither directory does and it is not one of the published sizes; 0 workers means
    one per core.  Raises UserError if a directory cannot be opened: unknown kind, damage, or an unknown model.
    """
    num_workers = num_threads(num_workers)
    source, target = sides = _open_both(source_dir, target_dir, hf_dir)
    general = [misfit.text for side in sides for misfit in side.problems if misfit.weight is None]
    if source.is_stated and target.is_stated:
        general[:0] = (f"the model: {differing.field} is {differing.first} in {source.path}, but {differing.second} in "
                       f"{target.path}" for differing in differences(source.model, target.model))
    weights: dict[tuple[str, ...], Weight] = {}
    if all(side.views or any(misfit.weight for misfit in side.problems) for side in sides):
        for weight in (*model_weights(source.model), *model_weights(target.model)):
            weights.setdefault(weight.hf_names, weight)
    without_llm = [side for side in sides if side.is_vit_only]
    if weights and len(without_llm) == 1:
        general.append(f"{without_llm[0].path} holds no LLM (save_vit_only); only the rest is compared.")
    compared = [weight for weight in weights.values() if not (without_llm and weight.part == "language")]
    findings = compare(compared, source, target, num_workers)
    wrong = [finding for finding in findings if not finding.is_empty]
    lines = [*map(_description, sides), _count(findings), *general[:NUM_SHOWN]]
    if len(general) > NUM_SHOWN:
        lines.append(f"{len(general) - NUM_SHOWN:,} more of this kind.")
    for finding in wrong[:NUM_SHOWN]:
        lines += _finding_lines(finding, source, target)
    if len(wrong) > NUM_SHOWN:
        lines.append(f"{len(wrong) - NUM_SHOWN:,} more weights differ in the model after these.")
    return DiffReport(tuple(lines), not (general or wrong))


# Opening


def _open_both(source_dir: str | Path, target_dir: str | Path, hf_dir: str | Path | None) -> tuple[Source, Source]:
    """Open both directories.  One without a manifest is assumed to hold the model of ``hf_dir``, or of the other."""
    with naming(HF_DIR):
        model = HFDirectory.open(hf_dir, weights_required=False).model_config() if hf_dir else None
    paths = {"--cfg.source_dir": Path(source_dir), "--cfg.target_dir": Path(target_dir)}
    found: dict[str, Source] = {}
    for flag in sorted(paths, key=lambda flag: not _is_stated(paths[flag], flag)):
        found[flag] = _open(paths[flag], flag, model)
        model = model or found[flag].model
    return found["--cfg.source_dir"], found["--cfg.target_dir"]


def _is_stated(path: Path, flag: str) -> bool:
    return find_kind(path, flag) is not Kind.MINDSPEED or (path / MANIFEST_FILE).is_file()


def _open(path: Path, flag: str, model: ModelConfig | None) -> Source:
    """Open a directory.  One that states no model is read as ``model``, or as a published size, or as empty."""
    try:
        found = open_source(path, flag, model=model, lenient=True)
        found.check_here()
        return found
    except UserError as error:
        if model is None or _is_stated(path, flag):
            raise
        problems = tuple(Misfit("left over", text) for text in error.problems)
    directory = MindSpeedDirectory.open(path)
    try:
        return open_source(path, flag, lenient=True)
    except UserError:  # not one of the published sizes
        return Source(path, Kind.MINDSPEED, model, 1, (), (), directory, directory.storage, problems,
                      is_stated=False)


def _description(side: Source) -> str:
    return f"{side.path}: {side.kind.value}" + (f", {side.layout}" if side.kind is not Kind.HUGGING_FACE else "")


# Report


def _count(findings: Sequence[Finding]) -> str:
    num_all = sum(len(finding.weight.hf_names) for finding in findings)
    num_unequal = sum(len(finding.unequal) for finding in findings)
    num_lacking = sum(len(finding.lacking) for finding in findings)
    counts = [f"{num_all - num_unequal - num_lacking:,} of {counted(num_all, 'tensor')} of the model are bit-equal"]
    counts += [f"{what}: {counted(number, 'tensor')}" for what, number in (
        ("different", num_unequal),
        ("incomplete in one or both directories", num_lacking),
        ("copies that differ within one directory", sum(len(finding.copies) for finding in findings)),
        ("stored with padding that is not zero", sum(len(finding.padding) for finding in findings)),
    ) if number]
    return "; ".join(counts) + "."


def _finding_lines(finding: Finding, source: Source, target: Source) -> Iterator[str]:
    names = ", ".join(finding.weight.hf_names)
    if finding.lacking or finding.misfits:
        lacking = ", ".join(hf_weight.hf_names[0] for hf_weight in finding.lacking)
        yield f"{lacking or names}: incomplete in one or both directories"
        yield from _lacking_lines(finding, source, target)
    if finding.unequal:
        yield ", ".join(one.key for one in finding.unequal)
        for one in finding.unequal:
            yield from _unequal_lines(one, source, target, f"{one.key}: " * (len(finding.unequal) > 1))
    for side, *copies in finding.copies:
        yield f"{names}: copies within {side.path} that should be equal"
        yield from (f"    {_where(side, stored)}" for stored in copies)
    for stored, side in finding.padding.items():
        yield f"{names}: padding that is not zero"
        yield f"    {_where(side, stored)}"


def _lacking_lines(finding: Finding, source: Source, target: Source) -> Iterator[str]:
    yield from (f"    {misfit.text}" for _, misfit in finding.misfits)
    for hf_weight in finding.lacking:
        (key,) = hf_weight.hf_names
        for side in (source, target):
            held = [stretch.view.stored for stretch in side.index.stretches(key)]
            names = sorted({dtype_name(stored.dtype) for stored in held})
            if held_dtype(side, hf_weight) is not None:
                yield f"    {_where(side, held[0])}"
            elif len(names) > 1:
                yield f"    {side.path} holds {key} as {' and '.join(names)}"
            elif not any(side is one for one, _ in finding.misfits):
                yield f"    {side.path} has no {key}" + (f" of shape {list(hf_weight.shape)}" if held else "")


def _unequal_lines(one: Unequal, source: Source, target: Source, name: str) -> Iterator[str]:
    if one.dtypes[0] != one.dtypes[1]:
        yield f"    {name}{' and '.join(map(dtype_name, one.dtypes))}"
    if one.num_different:
        amount = f"by at most {one.largest:.6g}" if math.isfinite(one.largest) else "some infinite or NaN"
        yield (f"    {name}{one.num_different:,} of {math.prod(one.hf_weight.shape):,} elements differ, {amount}; the "
               f"first is {list(one.index)}")
    for side in (source, target):
        yield f"    {_where(side, next(side.index.find(Span(one.key, one.at[0], 1))).view.stored)}"


def _where(side: Source, stored: Stored) -> str:
    return f"{side.path / stored.file}: {stored.name}"
