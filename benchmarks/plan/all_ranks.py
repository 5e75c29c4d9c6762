"""What a ViT that is divided over all pipeline stages could gain over the best lists, by simulation.

    python -m benchmarks.plan.all_ranks [--device 910b3] [--size 7b ...] [--data documents ...]

With the best lists, the layers of the ViT are on the first stages.  If instead every stage encoded an equal share of
each microbatch's images, the lists would hold the LLM alone.  The table gives this advantages that no program has: the
shares are exactly equal, they are there when the LLM needs them, and moving visual tokens and their gradients between
the stages costs nothing.  Both have the fastest recomputation that fits, and no chunks.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.measure import command, report
from benchmarks.plan.shipped import DATA, MEMORY_SHARE, NUM_SAMPLES, NUM_STEPS, SCRIPTS, run_of
from mm.config.run import Run
from mm.device.platform import KnownDevice
from mm.device.platforms import KNOWN_DEVICES
from mm.parallel.simulation import step_costs
from mm.plan.by_device import calibration_by_device
from mm.plan.choices import PACKS, RECOMPUTE, choices
from mm.plan.costs import VISION_PLACES
from mm.plan.distributions import mixed
from mm.plan.lists import Lists
from mm.plan.predict import Predictor
from mm.plan.search import LayoutSearch
from mm.plan.sizes import chunk_size, longest_microbatches, peak_bytes, stage_memory
from mm.plan.stage_memory import StageMemory
from tests.files import table

SIZES = ("7b", "32b", "72b")
"""The script of 3B has one stage."""


def rows_of(size: str, data: str, device: KnownDevice) -> Iterator[dict[str, Any]]:
    """With the frozen ViT of the script, and with a trained one."""
    assert device.memory_bytes is not None, "devices with a peak have a memory"
    given, script = run_of(size, data), SCRIPTS[size]
    for is_frozen in (True, False):
        model = replace(given.model, vision=replace(given.model.vision, freeze=is_frozen),
                        projector=replace(given.model.projector, freeze=is_frozen))
        run = replace(given, model=model)
        max_bytes = int(MEMORY_SHARE * device.memory_bytes)
        search = LayoutSearch(run, lambda one: calibration_by_device(one, device, device.links),
                              mixed(DATA[data], NUM_SAMPLES, run.args.seed, run.args.seq_length), max_bytes, NUM_STEPS)
        kept = {"tp_size": [script.tp_size], "num_stages": [len(script.lists[0])], "cp_size": [1], "num_chunks": [1],
                "micro_batch_size": [1], "sampler": [PACKS], "encoder": ["cut"]}  # fmt: skip
        lists, everywhere = list[float](), list[float]()
        for recompute in RECOMPUTE:
            found = search.best(choices(run, kept | {"recompute": [recompute]}, device.links.node_size), 1)
            for best in found.ranking or filter(None, [found.smallest]):
                steps = [best.predictor.slowest(step) for step in best.workload.steps]
                if best.peak_bytes <= max_bytes:
                    lists.append(fmean(with_lists(best.predictor, counts, best.run) for counts in steps))
                own = replace(best.choice, recompute=recompute).applied(best.run)
                if divided_bytes(own) <= max_bytes:
                    predictor = Predictor(own, calibration_by_device(own, device, device.links))
                    everywhere.append(fmean(divided(predictor, counts, own) for counts in steps))
        yield {"size": size, "data": data, "vision": "frozen" if is_frozen else "trained", "lists": min(lists),
               "divided": min(everywhere), "gain": min(lists) / min(everywhere) - 1}  # fmt: skip


def with_lists(predictor: Predictor, counts: np.ndarray, run: Run) -> float:
    """The pipeline with the lists of ``run``."""
    costs, messages = predictor.ordered(counts, [run.model.placement()])
    return float(step_costs(costs, run.num_stages, messages)[0])


def divided_bytes(run: Run) -> int:
    """Memory of the fullest rank if every stage holds an even part of the LLM, and the ViT with an equal share of each
    microbatch's images.

    As many microbatches are in flight as there are stages, so the shares make up one microbatch.
    """
    num_stages, num_layers = run.num_stages, run.model.language.num_layers
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    lists = Lists(((run.model.vision.num_layers, *[0] * (num_stages - 1)),),
                  (tuple(stop - start for start, stop in pairwise(ends)),))
    nothing = {"vision_layers": range(0), "has_patch_embedding": False, "has_projector": False}
    slots, found = tuple(replace(spec, **nothing) for spec in lists.placement.slots), list[int]()
    vision = stage_memory(run, lists.placement, 0).chunks[0]
    states = chunk_size(run, lists.placement[0]).total_bytes - chunk_size(run, slots[0]).total_bytes
    for rows in longest_microbatches(run).values():
        text = replace(rows, num_patches=0)
        more = states + vision.kept_bytes(rows) - vision.kept_bytes(text)
        for slot in slots:
            memory = StageMemory((replace(vision, spec=slot),))
            found.append(peak_bytes(memory, text, run, chunk_size(run, slot)) + more)
    return max(found)


def divided(predictor: Predictor, counts: np.ndarray, run: Run) -> float:
    """The pipeline of the LLM alone, with an equal share of the ViT's work on every stage."""
    of_blocks, num_stages = predictor.costs.of_blocks(predictor.shared(predictor.entering(counts))), run.num_stages
    is_vision = np.array([place in VISION_PLACES for place, _ in predictor.costs.places])
    share = of_blocks[..., is_vision].sum(axis=-1, keepdims=True) / num_stages
    language = of_blocks[..., ~is_vision]
    middles = np.cumsum(work := language.sum(axis=(0, 1))) - work / 2
    stages = np.minimum(middles * num_stages / work.sum(), num_stages - 1).astype(int)
    costs = np.stack([language[..., stages == stage].sum(axis=-1) for stage in range(num_stages)], axis=-1) + share
    return float(step_costs(costs[..., None], num_stages)[0])


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--device", default="910b3")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    flags = parser.parse_args(argv)
    device = next(one for one in KNOWN_DEVICES if flags.device in one.label.casefold() and one.peak_flops is not None)
    rows = [row for size in flags.size for data in flags.data for row in rows_of(size, data, device)]
    cells = [(row["size"].upper(), row["data"], row["vision"], f"{row['lists']:.3f}", f"{row['divided']:.3f}",
              f"{row['gain']:+.1%}") for row in rows]
    print("\n".join(table(("model", "data", "ViT", "best lists, s", "divided, s", "gain"), cells)))
    report(rows, flags.output, prints=False)


if __name__ == "__main__":
    main(sys.argv[1:])
