"""The tables of a run: validations, scores, bad steps, slow ranks, memory, bad samples, checkpoints and settings."""

from collections.abc import Iterator

from mm.page.facts import GIB, settings
from mm.page.history import MetricsRow
from mm.page.plot import number_text
from mm.page.record import RunRecord
from mm.report import Table

MAX_OPEN = 12
"""The page folds longer tables."""
_MAX_SAMPLES = 8
"""Most numbers of samples in a cell."""

_KINDS = {"text": "all tokens text", "visual": "all tokens visual", "stated": "with --dry-run-patches"}
"""Kinds of microbatches in ``mm.plan.stage_memory`` -> how a header names them."""


def tables(record: RunRecord) -> Iterator[Table]:
    """All tables that have rows, except the settings."""
    history = record.history
    yield from _latest("Validations", history.num_validations, ("step", "loss", "best", "samples", "seconds"), [
        (f"{row['iteration']:,}", _value(row["validation_loss"]), _best(row), f"{row['num_samples']:,}",
         f"{row['validation_seconds']:,.1f}") for row in history.validations])
    yield from _latest("Scored answers", history.num_scores, ("step", "score", "questions", "truncated", "seconds"), [
        (f"{row['iteration']:,}", f"{row['validation_score_percent']:.2f}%", f"{row['num_questions']:,}",
         f"{row['num_truncated_answers']:,}", f"{row['answer_seconds']:,.1f}") for row in history.score_rows])
    yield from _latest("Bad steps and spikes", history.num_spikes, ("step", "why", "weights", "samples"), [
        (f"{row['iteration']:,}", str(row["why"]), "unchanged" if row["skipped"] else "updated",
         _samples(row["samples"], row["num_samples"])) for row in history.spikes])
    yield from _slowest(record)
    yield from _memory(record)
    yield from _latest("Samples left out", record.num_bad_samples, ("where", "what"), [
        (one.where, one.what) for one in record.bad_samples], are="the first")
    yield from _latest("Checkpoints in --save", len(record.checkpoints), ("step", "written"), [
        (f"{step:,}", f"{written:%Y-%m-%d %H:%M:%S}") for step, written in record.checkpoints])


def settings_table(record: RunRecord) -> Table:
    """All settings, folded."""
    return Table("All settings", ("setting", "value"), tuple(settings(record).items()), is_folded=True)


def _latest(title: str, count: int, header: tuple[str, ...], rows: list[tuple[str, ...]],
            are: str = "the latest") -> Iterator[Table]:
    """A table of some of ``count`` things, if there are any."""
    if rows:
        some = f"; {are} {len(rows):,}" if count > len(rows) else ""
        yield Table(f"{title} ({count:,}{some})", header, tuple(rows), is_folded=len(rows) > MAX_OPEN)


def _value(value: float | None) -> str:
    return "not finite" if value is None else number_text(value)


def _best(row: MetricsRow) -> str:
    loss = row["best_validation_loss"]
    return "none" if loss is None else f"{number_text(loss)}, step {row['best_iteration']:,}"


def _samples(numbers: list[int], count: int) -> str:
    more = f" and {count - _MAX_SAMPLES:,} more" if count > _MAX_SAMPLES else ""
    return ", ".join(map(str, numbers[:_MAX_SAMPLES])) + more


def _slowest(record: RunRecord) -> Iterator[Table]:
    row = record.history.compared
    if row is None:
        return
    header = ("ranks", "stage", "replica", "device", "own time in a step", "against the median")
    yield Table(f"Slowest ranks at step {row['iteration']:,}", header, tuple(
        (", ".join(map(str, one["ranks"])), str(one["stage"]), str(one["replica"]),
         ", ".join(f"{host} {device}" for host, device in zip(one["hosts"], one["devices"], strict=True)),
         f"{1000 * one['own_seconds']:,.0f} ms",
         f"{one['share']:+,.0%}, other {one['compared_with']}") for one in row["slowest_ranks"]))


def _memory(record: RunRecord) -> Iterator[Table]:
    """Peak memory of the stages as predicted, for each kind of microbatch, and as measured."""
    predicted, measured = record.fact("predicted_peak_bytes") or [], record.history.stage_memory_bytes
    kinds = list(predicted[0]) if predicted else []
    rows = [(str(stage), *(f"{of_stage / GIB:,.2f}" if of_stage is not None else "-" for of_stage in (
        *(predicted[stage][kind] for kind in kinds), measured[stage] if stage < len(measured) else None)))
            for stage in range(len(predicted) or len(measured))]
    if rows:
        yield Table("Peak memory of the stages (GiB; measured: the rank with most)", (
            "stage", *(f"predicted, {_KINDS.get(kind, kind)}" for kind in kinds), "measured"), tuple(rows))
