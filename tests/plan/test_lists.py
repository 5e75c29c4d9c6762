"""The search for pipeline lists: against every legal pair of lists, and within the memory that is allowed."""

from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.cost.by_device import calibration_by_flops
from mm.cost.costs import Cutting
from mm.cost.predict import Predictor
from mm.cost.workload import workload_of
from mm.parallel.pipeline_schedule import SlotCost, step_cost
from mm.placement import PipelineLayout
from mm.plan import lists
from mm.plan.layouts import llava
from mm.plan.lists import LEAST_GAIN, Costs, Lists, best_lists, rate_lists
from tests.plan.test_dry_run import run_of


def of_many(cost, least, unevenness, fits) -> Costs:
    """Costs from functions of one pair of lists."""
    return Costs(*((lambda some, one=one: np.array([one(lists) for lists in some], dtype=float))
                   for one in (cost, least, unevenness)), fits=fits)


def every(num_layers: int, num_stages: int, num_chunks: int) -> Iterator[PipelineLayout]:
    """All ways to divide the layers of a tower."""
    num_slots = num_stages * num_chunks
    for cuts in combinations_with_replacement(range(num_layers + 1), num_slots - 1):
        counts = [end - start for start, end in pairwise((0, *cuts, num_layers))]
        yield tuple(tuple(counts[first : first + num_stages]) for first in range(0, num_slots, num_stages))


@given(num_vision=st.integers(1, 4), num_language=st.integers(1, 4), num_stages=st.integers(1, 3),
       num_chunks=st.integers(1, 2))  # fmt: skip
def test_possible_lists_are_all_legal_ones(num_vision, num_language, num_stages, num_chunks) -> None:
    one = Lists(*(next(every(count, num_stages, num_chunks)) for count in (num_vision, num_language)))
    found = list(one.possible())
    vision, language = (list(every(count, num_stages, num_chunks)) for count in (num_vision, num_language))
    legal = {pair for v in vision for k in language if (pair := Lists(v, k)).is_legal}
    assert len(found) == len(set(found)) == one.num_possible
    assert set(found) == legal
    assert all(moved in legal for moved in found[0].moves())


@settings(max_examples=25)
@given(data=st.data(), are_few=st.booleans(), shape=st.sampled_from([(2, 1), (3, 1), (2, 2)]))
def test_the_search_finds_the_best_lists_or_nearly_so(data, are_few, shape) -> None:
    """Layers of drawn costs, several microbatches; every legal pair of lists is tried here.

    ``are_few``: the search tries all of them, too; else it may end above the best.  Of eight layers, whose moves are
    coarse, one of 10,000 drawn cases ended more than 20% above, by 28%.
    """
    (num_stages, num_chunks), num_vision, num_language = shape, 3, 5
    seconds = st.floats(0.5, 2.0)
    vision, language = data.draw(seconds), data.draw(seconds)
    factors = data.draw(st.lists(seconds, min_size=4, max_size=6))
    is_trained = data.draw(st.booleans())

    def slots(lists: Lists, factor: float) -> list[SlotCost]:
        counts = zip(*([count for chunk in layout for count in chunk] for layout in (lists.vision, lists.language)),
                     strict=True)
        return [SlotCost(factor * (vision * v + language * k), 2 * factor * (language * k + vision * v * is_trained))
                for v, k in counts]  # fmt: skip

    def cost(lists: Lists) -> float:
        return step_cost([slots(lists, factor) for factor in factors], num_stages)

    def work(lists: Lists) -> list[float]:
        of_slots = [one.forward + one.backward for one in slots(lists, sum(factors))]
        return [sum(of_slots[stage::num_stages]) for stage in range(num_stages)]

    first = Lists(*(next(every(count, num_stages, num_chunks)) for count in (num_vision, num_language)))
    possible = list(first.possible())
    start = data.draw(st.sampled_from(possible))
    costs = of_many(cost, lambda one: max(work(one)), lambda one: sum(x * x for x in work(one)), lambda _: True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "MAX_COMPARED", 1000 if are_few else 0)
        found, least = best_lists(start, costs)
    assert cost(found) == least <= cost(start)
    best = min(map(cost, possible))
    assert least <= (1 + LEAST_GAIN if are_few else 6 / 5) * best * (1 + 1e-9)


def test_lists_that_do_not_fit_are_not_proposed() -> None:
    """The best lists put more on the last stage, whose memory is limited here."""
    start = Lists(((4, 0),), ((4, 2),))
    costs = of_many(lambda one: one.language[0][0], lambda one: one.language[0][0], lambda one: one.language[0][0],
                    lambda one: one.language[0][1] <= 4)  # fmt: skip
    found, least = best_lists(start, costs)
    assert (found, least) == (Lists(((4, 0),), ((2, 4),)), 2)


@pytest.mark.parametrize("num_gib", [None, 40])
def test_the_shipped_lists_are_found_from_those_of_mindspeed_mm(num_gib: int | None) -> None:
    run = run_of("7b", [32, 0], [12, 16], 2, freeze="v", micro_batch_size=4, global_batch_size=48)
    workload = workload_of(run, llava(192))
    predictor = Predictor(run, calibration_by_flops(run.model, Cutting(1, False), "fp32"))
    present, best, even = rate_lists(run, predictor, workload, None if num_gib is None else num_gib << 30)
    assert present.lists == Lists(((32, 0),), ((12, 16),))
    assert even <= best.seconds <= present.seconds
    assert num_gib is None or best.peak_bytes <= num_gib << 30 or best.lists == present.lists
    if num_gib is None:
        assert best.lists == Lists(((32, 0),), ((14, 14),))
        assert best.busy / best.seconds > present.busy / present.seconds + 0.05
