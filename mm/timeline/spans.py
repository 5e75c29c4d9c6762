"""What each rank did during one step, as spans that do not overlap, and its shares of time.

Pure functions of seconds, whether they were measured or predicted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mm.batch import BatchTotals
from mm.config.args import Arguments
from mm.config.model import ModelConfig
from mm.parallel.activity import Activity, Work
from mm.placement import StageSpec

COMPUTING = frozenset({Work.INPUTS, Work.FORWARD, Work.VISION_FORWARD, Work.LANGUAGE_FORWARD, Work.BACKWARD})
"""Useful work of a stage.  A pipeline whose stages do nothing else from first to last has no bubble."""

TIMED = tuple(work for work in Work if work is not Work.SAVE)
"""The kinds of work in a step."""

WAITS = frozenset({Work.EXCHANGE, Work.VISUAL_EXCHANGE, Work.GATHER, Work.REDUCTION, Work.UPDATE_WAIT})
"""Waits for other ranks, with the transfers themselves."""

_INSTANT = 1e-12
Meetings = tuple[tuple[float, float], ...]
"""When a rank arrived at each of several barriers and when it left, on its own clock."""


@dataclass(frozen=True)
class Moment:
    """An activity begins, or, if ``begins`` is None, the innermost one ends."""

    seconds: float
    begins: Activity | None


@dataclass(frozen=True)
class ActivitySpan:
    """One activity of a rank from ``start`` to ``end``, in seconds."""

    activity: Activity
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class RankRecord:
    """One rank's step."""

    rank: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    holds: str
    """Description of its stage's content."""
    meetings: Meetings
    spans: tuple[ActivitySpan, ...]
    """In order of time."""
    microbatches: tuple[BatchTotals, ...] = ()
    """Counts of the microbatches of its replica, in the order in which they enter the pipeline; empty if unknown."""


@dataclass(frozen=True)
class StepSettings:
    """What the time of a step depends on besides its microbatches."""

    model: ModelConfig
    world_size: int
    tp_size: int
    cp_size: int
    sequence_parallel: bool
    precision: str
    use_distributed_optimizer: bool
    grad_reduce_in_bf16: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    context_parallel_algo: str
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    kept_copy: str = "fp32"
    shards_gradients: bool = False
    shards_weights: bool = False
    host_share: float = 0.0

    @classmethod
    def of(cls, args: Arguments, model: ModelConfig, world_size: int) -> "StepSettings":
        """The settings of a run."""
        return cls(model, world_size, args.tensor_model_parallel_size, args.context_parallel_size,
                   args.sequence_parallel, args.precision, args.splits_optimizer, args.grad_reduce_in_bf16,
                   args.overlap_grad_reduce, args.overlap_param_gather, args.context_parallel_algo,
                   args.exp_avg_dtype, args.exp_avg_sq_dtype, args.kept_copy, args.shards_gradients,
                   args.shards_weights, args.host_share)


@dataclass(frozen=True)
class StepTimeline:
    """One step of a run, measured or predicted."""

    iteration: int
    records: tuple[RankRecord, ...]
    """By rank, on one clock."""
    settings: StepSettings
    is_predicted: bool = False

    @property
    def microbatches(self) -> tuple[tuple[BatchTotals, ...], ...]:
        """The microbatches of each replica."""
        replicas = {record.dp_rank: record.microbatches for record in self.records}
        return tuple(replicas[one] for one in sorted(replicas))

    @property
    def rows(self) -> tuple[RankRecord, ...]:
        """The first rank of each stage, by stage."""
        stages = sorted({record.pp_rank for record in self.records})
        return tuple(min((one for one in self.records if one.pp_rank == stage), key=lambda one: one.rank)
                     for stage in stages)

    @property
    def name(self) -> str:
        """The name of its files, without their suffixes."""
        return f"{'predicted' if self.is_predicted else 'pipeline'}_step_{self.iteration}"


@dataclass(frozen=True)
class TimeShares:
    """How one rank spent a step.  The first four are fractions of the step and sum to 1."""

    busy: float
    """Forward and backward, including preparation of their inputs."""
    waits: float
    """Waits for messages, visual tokens, data and gradient reduction, and for other ranks in the update."""
    update: float
    """The update, without its waits for other ranks."""
    idle: float
    """Nothing recorded."""
    bubble: float
    """Not busy, as a fraction of the time from the first forward to the last backward of any stage."""


def label(work: Work) -> str:
    """The name of a kind of work in spans that do not overlap."""
    return "other forward" if work is Work.FORWARD else work.value


def seconds_key(work: Work) -> str:
    """The key of its time in metrics.jsonl."""
    return f"{work.name.lower()}_seconds"


def held(specs: Iterable[StageSpec]) -> str:
    """What a stage with these slots holds, in words."""
    specs = list(specs)
    num_vision, num_language = (sum(len(getattr(spec, name)) for spec in specs) for name in (
        "vision_layers", "language_layers"))
    return f"{num_vision} ViT, {num_language} LLM layers"


def flat_spans(moments: Sequence[Moment]) -> tuple[ActivitySpan, ...]:
    """Spans of the innermost running activities.

    Two adjacent parts of an inner activity (layers of the LLM, and its loss) are merged, dropping the outer activity's
    instant between them.  Between two gathers of weights, and between two reductions in a backward pass, lies more
    than an instant: the pass of a layer.
    """
    spans: list[ActivitySpan] = []
    running: list[Activity] = []
    for now, then in pairwise(moments):
        if now.begins is None:
            running.pop()
        else:
            running.append(now.begins)
        if not running:
            continue
        span = ActivitySpan(running[-1], now.seconds, max(now.seconds, then.seconds))
        last = spans[-2:]
        may_merge = (len(running) > 1 and running[-2].work is not Work.BACKWARD
                     and running[-1].work is not Work.GATHER)
        if may_merge and [one.activity for one in last] == [running[-1], running[-2]] and (
                last[0].end == last[1].start):
            span = replace(span, start=last[0].start)
            del spans[-2:]
        spans.append(span)
    return tuple(spans)


def seconds_of(spans: Iterable[ActivitySpan], works: Iterable[Work]) -> float:
    """Time spent at these kinds of work."""
    return sum(span.seconds for span in spans if span.activity.work in works)


def clock_offset(meetings: Meetings, reference: Meetings) -> float:
    """How far a rank's clock is ahead of the reference rank's, from common barriers; 0 if they allow it.

    No rank leaves a barrier before all have arrived.  Ranks on one machine share a clock, so 0 is always consistent.
    """
    pairs = list(zip(meetings, reference, strict=True))
    least = max((came - left for (came, _), (_, left) in pairs), default=0.0)
    most = min((left - came for (_, left), (came, _) in pairs), default=0.0)
    return 0.0 if least <= 0.0 <= most else (least + most) / 2


def aligned(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Records by rank, on the clock of the first rank, with the first start at 0."""
    records = sorted(records, key=lambda record: record.rank)
    offsets = [clock_offset(record.meetings, records[0].meetings) for record in records]
    starts = [record.spans[0].start - offset for record, offset in zip(records, offsets, strict=True) if record.spans]
    zero = min(starts, default=0.0)
    return [replace(record, spans=tuple(_moved(record.spans, -offset - zero)))
            for record, offset in zip(records, offsets, strict=True)]


def _moved(spans: Iterable[ActivitySpan], seconds: float) -> Iterator[ActivitySpan]:
    return (replace(span, start=span.start + seconds, end=span.end + seconds) for span in spans)


def extent(records: Iterable[RankRecord], works: Iterable[Work] = tuple(Work)) -> tuple[float, float]:
    """The first start and the last end of these kinds of work on any rank."""
    spans = [span for record in records for span in record.spans if span.activity.work in works]
    return min((span.start for span in spans), default=0.0), max((span.end for span in spans), default=0.0)


def shares(record: RankRecord, records: Iterable[RankRecord]) -> TimeShares:
    """The shares of one rank; ``records`` are all ranks of the step."""
    records = list(records)
    (start, end), (first, last) = extent(records), extent(records, COMPUTING)
    step, pipeline = max(end - start, _INSTANT), max(last - first, _INSTANT)
    computing = seconds_of(record.spans, COMPUTING)
    waits = seconds_of(record.spans, {Work.DATA, *WAITS})
    update = seconds_of(record.spans, {Work.UPDATE})
    idle = max(step - computing - waits - update, 0.0)  # rounding
    return TimeShares(computing / step, waits / step, update / step, idle / step, 1 - computing / pipeline)


def numeral(activity: Activity, num_chunks: int) -> str:
    """Microbatch, counted from 0, and chunk: "3", or "3b" if there is more than one chunk."""
    if activity.microbatch is None:
        return ""
    chunk = chr(ord("a") + (activity.chunk or 0)) if num_chunks > 1 else ""
    return f"{activity.microbatch}{chunk}"


def count_chunks(records: Iterable[RankRecord]) -> int:
    """Chunks of each stage; 1 without virtual chunks."""
    return max((span.activity.chunk or 0 for record in records for span in record.spans), default=0) + 1
