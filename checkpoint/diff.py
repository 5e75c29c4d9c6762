"""``diff``: two directories of any kind and layout compared to the last bit, and a guess at what went wrong.

The byte plan cannot serve here, because it needs two complete sets of weights; this reads tensor by tensor of the model
whatever both directories hold of it, once.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from checkpoint.diff_compare import Finding, Unequal, compare_weight
from checkpoint.diff_guess import guess, misfit_cause, missing_head_cause
from checkpoint.diff_sides import Misfit, Side, open_sides
from checkpoint.formats.hf_config import differences
from checkpoint.formats.layout import Layout
from checkpoint.formats.safetensors import DTYPE_NAMES
from checkpoint.formats.source import Kind
from mm.config.model import ModelConfig
from mm.weights.table import HF_EMBEDDING_NAME, Weight, model_weights

NUM_SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """What ``diff`` found."""

    lines: tuple[str, ...]
    """To be printed."""
    is_equal: bool
    """Whether both directories hold the same weights of the same model."""


def diff_directories(
    source_dir: str | Path, target_dir: str | Path, hf_dir: str | Path | None, num_workers: int
) -> Difference:
    """Compare every tensor of the model, its copies and its padding; ``source_dir`` is taken to be right.

    ``hf_dir`` says what model it is where neither directory does and it is none of the published sizes; 0 workers are
    one for each core.

    Raises:
        UserError: a directory cannot be opened: it is of no kind, damaged, or nobody says what model it holds.
    """
    source, target = open_sides(source_dir, target_dir, hf_dir)
    sides = (source, target)
    general = [*_model_lines(source, target), *(problem for side in sides for problem in side.problems)]
    can_compare = all(side.placed or side.misfits for side in sides)
    weights = _all_weights(source.model, target.model) if can_compare else []
    without = [side for side in sides if side.is_vit_only and can_compare]
    if len(without) == 1:
        general.append(f"{without[0].path} holds no LLM (save_vit_only); only the rest is compared.")
    if without:
        weights = [weight for weight in weights if weight.part != "language"]
    findings = _compared(weights, source, target, num_workers or len(os.sched_getaffinity(0)))
    entries = [_Entry(finding, _lacking(finding.weight, source, target), _misfits(finding.weight, source, target))
               for finding in findings]
    wrong = [entry for entry in entries if not entry.is_empty]
    shown = [line for entry in wrong[:NUM_SHOWN] for line in _entry_lines(entry, source, target, weights)]
    if len(wrong) > NUM_SHOWN:
        shown.append(f"{len(wrong) - NUM_SHOWN} more weights differ in the model after these.")
    some = general[:NUM_SHOWN] + [f"{len(general) - NUM_SHOWN} more of this kind."] * (len(general) > NUM_SHOWN)
    lines = (*map(_description, sides), _count(entries), *some, *shown)
    return Difference(lines, not (general or wrong))


def _description(side: Side) -> str:
    layout = "" if side.kind is Kind.HUGGING_FACE else f", {Layout.of(side.model, side.tp_size)}"
    return f"{side.path}: {side.kind.value}{layout}"


def _model_lines(source: Side, target: Side) -> Iterator[str]:
    """In what the two say of the model they differ."""
    if source.is_stated and target.is_stated:
        for one in differences(source.model, target.model):
            yield f"the model: {one.field} is {one.one} in {source.path}, but {one.other} in {target.path}"


def _all_weights(model: ModelConfig, other: ModelConfig) -> list[Weight]:
    """Of both models, those of both once."""
    weights = {weight.hf_names: weight for weight in model_weights(model)}
    for weight in model_weights(other):
        weights.setdefault(weight.hf_names, weight)
    return list(weights.values())


def _compared(weights: Sequence[Weight], source: Side, target: Side, num_workers: int) -> list[Finding]:
    keys = {key: shape for weight in weights for key, shape in zip(weight.hf_names, weight.hf_shapes, strict=True)}
    held = [source.held(key, shape) for key, shape in keys.items() if target.held(key, shape) is not None]
    total = sum(one.num_bytes for one in held if one is not None)
    with (tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar,
          ThreadPoolExecutor(num_workers) as pool):
        futures = [pool.submit(compare_weight, weight, source, target, bar.update) for weight in weights]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _Entry:
    """All that is to be told of one weight."""

    finding: Finding
    lacking: tuple[str, ...]
    """Tensors that cannot be compared."""
    misfits: tuple[tuple[Side, Side, Misfit], ...]
    """Each with its own directory and the other one."""

    @property
    def is_empty(self) -> bool:
        return self.finding.is_empty and not self.lacking and not self.misfits


def _lacking(weight: Weight, source: Side, target: Side) -> tuple[str, ...]:
    return tuple(key for key, shape in zip(weight.hf_names, weight.hf_shapes, strict=True)
                 if source.held(key, shape) is None or target.held(key, shape) is None)


def _misfits(weight: Weight, source: Side, target: Side) -> tuple[tuple[Side, Side, Misfit], ...]:
    keys = set(weight.hf_names)
    return tuple((side, other, misfit) for side, other in ((source, target), (target, source))
                 for misfit in side.misfits if keys & set(misfit.weight.hf_names))


def _count(entries: Sequence[_Entry]) -> str:
    findings = [entry.finding for entry in entries]
    num_all = sum(len(finding.weight.hf_names) for finding in findings)
    num_unequal, num_copies, num_padded = (sum(len(getattr(finding, name)) for finding in findings)
                                           for name in ("unequal", "unlike_copies", "padding"))
    num_lacking = sum(len(entry.lacking) for entry in entries)
    counts = [f"{num_all - num_unequal - num_lacking} of {num_all} tensors of the model are equal to the last bit"]
    counts += [f"{number} {what}" for number, what in (
        (num_unequal, "differ"),
        (num_lacking, "are not complete in both directories"),
        (num_copies, "copies differ within one directory"),
        (num_padded, "stored tensors have padding that is not zero"),
    ) if number]
    return "; ".join(counts) + "."


# What is told of one weight


def _entry_lines(entry: _Entry, source: Side, target: Side, weights: Sequence[Weight]) -> Iterator[str]:
    finding = entry.finding
    names = ", ".join(finding.weight.hf_names)
    if entry.lacking or entry.misfits:
        yield f"{', '.join(entry.lacking) or names}: not complete in both directories"
        yield from _lacking_lines(entry, source, target)
    if finding.unequal:
        yield ", ".join(one.key for one in finding.unequal)
        for one in finding.unequal:
            yield from _unequal_lines(one, source, target, len(finding.unequal) > 1)
        yield f"    likely cause: {guess(finding, source, target, weights)}"
    for side, one, other in finding.unlike_copies:
        is_head = HF_EMBEDDING_NAME in finding.weight.hf_names
        yield f"{names}: copies within {side.path} that should be equal"
        yield f"    {side.where(one)}"
        yield f"    {side.where(other)}"
        yield "    likely cause: " + ("tied head: the output layer is a stale copy of the embedding" if is_head else
                                      "one of the files is damaged or of another model")
    for side, stored in finding.padding:
        yield f"{names}: padding that is not zero"
        yield f"    {side.where(stored)}"
        if not finding.unequal:
            yield "    likely cause: padding: it was trained, is damaged, or stands in the wrong place"


def _lacking_lines(entry: _Entry, source: Side, target: Side) -> Iterator[str]:
    causes = []
    for side, other, misfit in entry.misfits:
        yield f"    {misfit.text}"
        causes.append(misfit_cause(misfit, side, other))
    weight = entry.finding.weight
    shapes = dict(zip(weight.hf_names, weight.hf_shapes, strict=True))
    for key in entry.lacking:
        for side, other in ((source, target), (target, source)):
            dtypes, held = side.dtypes(key), side.held(key, shapes[key])
            if held is not None:
                yield f"    {side.where(held.parts[0].view.stored)}"
                causes.append(None if other.dtypes(key) else missing_head_cause(side, weight))
            elif len(dtypes) > 1:
                yield f"    {side.path} holds {key} as {' and '.join(sorted(DTYPE_NAMES[one] for one in dtypes))}"
            elif not any(side is other for other, _, _ in entry.misfits):
                yield f"    {side.path} has no {key}" + (f" of shape {list(shapes[key])}" if dtypes else "")
    yield from (f"    likely cause: {cause}" for cause in dict.fromkeys(causes) if cause is not None)


def _unequal_lines(unequal: Unequal, source: Side, target: Side, is_one_of_several: bool) -> Iterator[str]:
    name = f"{unequal.key}: " if is_one_of_several else ""
    dtypes = [DTYPE_NAMES[held.dtype] for held in (unequal.source, unequal.target)]
    if unequal.source.dtype != unequal.target.dtype:
        yield f"    {name}{dtypes[0]} and {dtypes[1]}"
    index = 0
    if unequal.first is not None:
        first, index = unequal.first, unequal.first.index
        held = unequal.source
        rest = held.parts[0].view.stored.shape[held.dim + 1 :]
        place = (first.row, first.index) if held.dim else (first.index, *np.unravel_index(first.place, rest))
        at = ", ".join(str(int(number)) for number in place)
        amount = f"by at most {unequal.largest:.6g}" if math.isfinite(unequal.largest) else "some infinite or NaN"
        yield (f"    {name}{unequal.num_different:,} of {unequal.num_elements:,} elements differ, {amount}; the first "
               f"is [{at}]")
    for side, held in ((source, unequal.source), (target, unequal.target)):
        yield f"    {side.where(held.part_of(index).view.stored)}"
