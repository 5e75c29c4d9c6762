"""Random records of a step, for tests of its spans, trace and picture."""

from hypothesis import strategies as st

from mm.parallel.activity import Activity
from mm.timeline.spans import TIMED, Moment, RankRecord, StepSettings, StepTimeline, flat_spans
from tests.tiny import our_config

SETTINGS = StepSettings(
    model=our_config(((4, 0),), ((1, 3),)), world_size=2, tp_size=1, cp_size=1, sequence_parallel=False,
    precision="fp32", use_distributed_optimizer=False, grad_reduce_in_bf16=False, overlap_grad_reduce=False,
    overlap_param_gather=False, context_parallel_algo="ulysses_cp_algo")


@st.composite
def activities(draw_one, depth: int = 2) -> list:
    """Consecutive activities, each with nested ones."""
    one = st.builds(Activity, st.sampled_from(TIMED), st.integers(0, 1), st.integers(0, 9))
    inner = activities(depth - 1) if depth else st.just([])
    return draw_one(st.lists(st.tuples(one, inner), max_size=3))


@st.composite
def steps(draw_one, min_moments: int = 0) -> list[Moment]:
    """A rank's record of a step."""
    found: list[Activity | None] = []

    def walk(nested: list) -> None:
        for activity, inner in nested:
            found.append(activity)
            walk(inner)
            found.append(None)

    walk(draw_one(activities()))
    gaps = draw_one(st.lists(st.floats(1e-6, 1.0), min_size=len(found), max_size=len(found)))
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    return [Moment(when, activity) for when, activity in zip(times, found, strict=True)]


def record(rank: int, moments: list[Moment], meetings: tuple = (), stage: int | None = None) -> RankRecord:
    stage = rank if stage is None else stage
    return RankRecord(rank, stage, 0, 0, "1 ViT, 1 LLM layers", meetings, flat_spans(moments))


records = st.lists(steps(), min_size=1, max_size=3).map(
    lambda found: [record(rank, moments) for rank, moments in enumerate(found)])


def timeline(found: list[RankRecord], iteration: int = 7, is_predicted: bool = False) -> StepTimeline:
    """One step of these ranks, on a clock that they share already."""
    return StepTimeline(iteration, tuple(found), SETTINGS, is_predicted)
