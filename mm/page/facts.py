"""The headline of a run: model and layout, progress, speed, quality, and whether it still runs."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from mm.errors import counted
from mm.page.plot import number_text
from mm.page.record import RunRecord
from mm.progress import duration

GIB = 2**30
_SILENT_STEPS, _SILENT_SECONDS = 20, 600.0
"""A run may have ended if its last row is older than ``_SILENT_SECONDS``, and older than ``_SILENT_STEPS`` steps at the
present speed."""
_HIDDEN = ("weights",)
"""Settings that are not shown, because they are long lists."""
_MAX_CHARACTERS = 200


class Status(NamedTuple):
    """Whether a run has ended, in a sentence."""

    text: str
    is_bad: bool
    """Whether somebody should look at it."""


def status(record: RunRecord, now: datetime) -> Status:
    """Whether the run has ended and how, as far as its files say."""
    how = record.fact("ended", "how")
    if how is not None:
        return Status(f"Ended at {record.fact('ended', 'at')}: {how}.", False)
    if record.history.last is None or record.last_written is None:
        return Status("No step has been recorded yet.", False)
    age = max(0.0, (now - record.last_written).total_seconds())  # the clock of a file server may be ahead
    step = record.history.last["iteration"]
    if age > max(_SILENT_SECONDS, _SILENT_STEPS * (record.history.recent_median("step_seconds") or 0.0)):
        return Status(f"No row for {duration(age)} after step {step:,}, and no record of an end: the run is stuck or "
                      f"in a long pause, or it was killed. Its output says more.", True)
    return Status(f"Running: step {step:,} was recorded last, {duration(age)} before this page was written.", False)


def run_facts(record: RunRecord, now: datetime) -> Iterator[tuple[str, str]]:
    """Names and values of the facts, first of those that change; what the files lack is left out."""
    yield "status", status(record, now).text
    yield from _progress(record)
    yield from _quality(record)
    yield from _speed(record)
    yield from _settings(record)


def _settings(record: RunRecord) -> Iterator[tuple[str, str]]:
    if (model := record.fact("arguments", "mm_model")) is not None:
        layers = " + ".join(f"{record.fact('model', tower, 'num_layers')} {name} layers"
                            for tower, name in (("vision", "ViT"), ("language", "LLM")))
        yield "model", f"{Path(model).name} ({layers})"
    if (world_size := record.fact("world_size")) is not None:
        sizes = (("tensor", record.fact("arguments", "tensor_model_parallel_size")),
                 ("context", record.fact("arguments", "context_parallel_size")),
                 ("pipeline", record.fact("pipeline_model_parallel_size")), ("data", record.fact("data_parallel_size")))
        yield "layout", f"{' x '.join(f'{name} {size}' for name, size in sizes)} = {counted(world_size, 'rank')}"
    if (device := record.fact("ran_on", "device")) is not None:
        yield "device", f"{device}, {record.fact('ran_on', 'backend')}"
    if (precision := record.fact("precision")) is not None:
        yield "precision", str(precision)
    if (batch := record.fact("global_batch_size")) is not None:
        yield "global batch", counted(batch, "sample")
    versions = record.fact("ran_on", "versions")
    if isinstance(versions, Mapping):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if (started := record.fact("started_at")) is not None:
        yield "started", f"{started} (this launch)"


def _progress(record: RunRecord) -> Iterator[tuple[str, str]]:
    last, total = record.history.last, record.fact("arguments", "train_iters")
    if last is None:
        return
    done, epoch = last["iteration"], last.get("epoch")
    of_total = f" of {total:,} ({done / total:.1%})" if total else ""
    yield "step", f"{done:,}{of_total}" + (f", epoch {epoch:.2f}" if epoch is not None else "")
    seconds = record.history.recent_median("step_seconds")
    if total and seconds is not None and done < total:
        yield "time left", f"{duration((total - done) * seconds)}, without validations and checkpoints"
    yield "time in steps", duration(record.history.seconds)
    yield "tokens", f"{record.history.num_tokens:,}"


def _speed(record: RunRecord) -> Iterator[tuple[str, str]]:
    history = record.history
    if (seconds := history.recent_median("step_seconds")) is None:
        return
    num_recent = f"median of the last {counted(len(history.recent), 'step')}"
    yield "step time", f"{number_text(seconds)} s, {num_recent}"
    yield "tokens/s per device", f"{history.recent_median('tokens_per_second_per_device'):,.0f}, {num_recent}"
    mfu = history.recent_median("mfu")
    yield "MFU", "unknown: no peak of this device is known" if mfu is None else f"{mfu:.1%}, {num_recent}"
    if (peak := history.peak_memory_bytes) is not None:
        yield "peak memory", f"{peak / GIB:,.2f} GiB, last rank"


def _quality(record: RunRecord) -> Iterator[tuple[str, str]]:
    history = record.history
    if history.last is not None and history.last["loss"] is not None:
        yield "loss", f"{number_text(history.last['loss'])}, last step"
    best = history.validations[-1] if history.validations else None
    if best is not None and best["best_validation_loss"] is not None:
        yield "best validation loss", f"{number_text(best['best_validation_loss'])}, step {best['best_iteration']:,}"
    if history.score_rows:
        row = history.score_rows[-1]
        yield "score", f"{row['validation_score_percent']:.2f}%, step {row['iteration']:,}"
    if history.last is not None:
        unchanged = f"; weights unchanged in {counted(history.num_unchanged, 'step')}"
        yield "bad steps and spikes", f"{history.num_spikes:,}{unchanged if history.num_unchanged else ''}"
    if record.num_bad_samples:
        yield "samples left out", f"{record.num_bad_samples:,}"


def settings(record: RunRecord) -> dict[str, str]:
    """All settings and facts of ``run.json`` by their path, such as ``arguments.lr``; those not set are left out."""
    return dict(_flat("", record.facts))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _HIDDEN:
                yield from _flat(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for number, inner in enumerate(value):
            yield from _flat(f"{path}.{number}", inner)
    elif value not in (None, [], ""):
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield path, text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."
