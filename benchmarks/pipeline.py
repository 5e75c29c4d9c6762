"""How close a pipeline's step comes to the ideal, a step whose messages take no time.

    python -m benchmarks.pipeline [--only NAME ...] [--rounds 5] [--output FILE.json]

``sleep`` measures the schedule alone: four stages whose chunks sleep a known time, for 1F1B, virtual chunks, and a
frozen prefix, each against its simulated ideal.

``compute`` compares two processes of one thread each, so that two cores stand for two devices, with one process of one
thread.  It reports the share of the ideal m p / (m + p - 1), also for two virtual chunks; a frozen ViT on a separate
stage, whose ideal is simulated from the times of ViT, LLM and backward pass in one process; and batches of changing
lengths against equal ones with the same tokens.  Unlike two devices, two cores share caches and memory, so a copy of
the one process runs on the other core.

Both sides of a ratio run in turn, ``--rounds`` times; medians over the rounds are printed as JSON.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import command, report, run_ranks
from mm.config.model import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from mm.parallel.activity import Work
from mm.parallel.pipeline_schedule import SlotCost, step_cost
from mm.weights.trained import GradientPath

NUM_MICROBATCHES = 16
SLEEP_FORWARD, SLEEP_BACKWARD = 0.03, 0.06
"""Seconds that a stage, with all its chunks, sleeps in one pass over a microbatch."""
IMAGE = (1, 32, 32)
TOKENS = 256
"""Mean number of text tokens in a microbatch."""
FROZEN = ("vision", "projector")


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout to measure."""

    vision: tuple[tuple[int, ...], ...]
    language: tuple[tuple[int, ...], ...]
    freeze: tuple[str, ...] = ()
    lengths: str = "equal"
    """"equal"; or "changing": microbatches of different lengths, with as many tokens in total."""
    has_images: bool = False
    sleeps: bool = False
    """Whether chunks sleep instead of computing."""

    @property
    def num_stages(self) -> int:
        return len(self.vision[0])


SLEEP_CASES = {
    "1F1B": Case(((4, 0, 0, 0),), ((2, 2, 2, 2),), sleeps=True),
    "2 virtual chunks": Case(((4, 0, 0, 0), (0,) * 4), ((1, 1, 1, 1), (1, 1, 1, 1)), sleeps=True),
    "frozen ViT on 2 of 4 stages": Case(((2, 2, 0, 0),), ((0, 0, 4, 4),), FROZEN, has_images=True,
                                        sleeps=True),
}
ONE = Case(((4,),), ((8,),))
COMPUTE_CASES = {
    # name: the measured case, and the one that it is compared with
    "PP 2 over PP 1": (Case(((4, 0),), ((4, 4),)), ONE),
    "PP 2, 2 virtual chunks, over PP 1": (Case(((4, 0), (0, 0)), ((2, 2), (2, 2))), ONE),
    "frozen ViT on a stage of its own, over PP 1": (
        Case(((4, 0),), ((0, 8),), FROZEN, has_images=True), dataclasses.replace(ONE, freeze=FROZEN, has_images=True)),
    "changing over equal lengths, PP 2": (Case(((4, 0),), ((4, 4),), lengths="changing"), Case(((4, 0),), ((4, 4),))),
}


def model_of(case: Case) -> ModelConfig:
    vision, language = (64, 64) if case.sleeps else (256, 384)
    num_vision, num_language = (sum(map(sum, lists)) for lists in (case.vision, case.language))
    return ModelConfig(
        VisionConfig(num_vision, case.vision, vision, 2 * vision, 4, 112, (1, 3), freeze="vision" in case.freeze),
        ProjectorConfig(vision, 4 * vision, language, freeze="projector" in case.freeze),
        LanguageConfig(num_language, case.language, language, 3 * language, 4, 2, 512, 4096,
                       (language // 32, language // 32, language // 16)),
        image_token_id=500, video_token_id=501, vision_start_token_id=502,
    )  # fmt: skip


def plan_of(case: Case, model: ModelConfig) -> Any:
    from mm.batch import BatchTotals, StepPlan
    from mm.data.sampler.cost import in_pipeline_order
    from tests.microbatches import random_microbatch

    spread = (0.25, 0.5, 0.75, 1.0, 1.0, 1.25, 1.5, 1.75) if case.lengths == "changing" else (1.0,) * 8
    factors = [spread[(5 * number) % 8] for number in range(NUM_MICROBATCHES)]
    grids = (IMAGE,) if case.has_images else ()
    batch = [random_microbatch(model, [(grids, int(TOKENS * factor))], seed) for seed, factor in enumerate(factors)]
    return StepPlan(tuple(in_pipeline_order(model, batch)), BatchTotals.of(batch, model.vision))


def sleep(is_forward: bool, num_chunks: int) -> None:
    time.sleep((SLEEP_FORWARD if is_forward else SLEEP_BACKWARD) / num_chunks)


def worker(case: Case, num_steps: int) -> dict[str, Any]:
    """For each step: the seconds of its forward and backward passes on the slowest rank, and this rank's seconds in
    them by kind of work."""
    from mm.device.device import Device

    device = Device.pick("cpu")
    import torch
    import torch.distributed as dist

    from mm.config import args as arguments
    from mm.model.load import initialize
    from mm.model.stage import Stage
    from mm.parallel import mesh as parallel
    from mm.run.step import Setup, forward_backward
    from mm.run.watch.watcher import Recorder
    from mm.timeline import seconds_of
    from tests.parallel.messages import stand_in

    torch.set_num_threads(1)
    model = model_of(case)
    mesh = parallel.start(device, model, tp_size=1)
    stage = Stage(model, mesh, "fp32", device)
    initialize(stage, stage.weights, mesh, seed=0, std=0.02)
    for chunk in stage.chunks if case.sleeps else ():
        stand_in(chunk, partial(sleep, num_chunks=len(stage.chunks)))
    args = arguments.parse(["--lr", "1e-4", "--train-iters", "1", "--micro-batch-size", "1", "--seq-length", "4096",
                            "--mm-model", "-", "--mm-data", "-"])  # fmt: skip
    setup, plan, seconds, works = Setup.build(stage, mesh, args), plan_of(case, model), [], []
    stage.journal.listeners.append(recorder := Recorder(device))
    for _ in range(num_steps + 1):
        dist.barrier(group=mesh.control_group)
        started = time.perf_counter()
        forward_backward(setup, plan)
        taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=mesh.control_group)
        seconds.append(float(taken))
        spans = recorder.spans()
        works.append({work.value: seconds_of(spans, [work]) for work in Work})
    return {"seconds": seconds[1:], "works": works[1:]}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Medians over the steps of one launch."""

    seconds: float
    """Duration of a step."""
    works: dict[str, float]
    """The first rank's seconds in a step, by kind of work."""


def measure(case: Case, num_steps: int) -> Measured:
    """Run ``case`` in new processes."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "seconds.json"
        request = json.dumps({"case": dataclasses.asdict(case), "num_steps": num_steps})
        run_ranks(case.num_stages, "benchmarks.pipeline", ["--worker", request, "--output", str(output)])
        found = json.loads(output.read_text())
    works = {work: statistics.median(one[work] for one in found["works"]) for work in found["works"][0]}
    return Measured(statistics.median(found["seconds"]), works)


def measure_beside_another(case: Case, num_steps: int) -> Measured:
    """Like ``measure``, with both cores busy: two copies of a case of one process run at the same time."""
    if case.num_stages == 2:
        return measure(case, num_steps)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: measure(case, num_steps), range(2))
    works = {work: (one.works[work] + other.works[work]) / 2 for work in one.works}
    return Measured((one.seconds + other.seconds) / 2, works)


def sleep_ideal(case: Case) -> float:
    """Seconds of the simulated step, in which a slot without a backward pass sleeps only in forward passes."""
    model, num_chunks = model_of(case), len(case.vision)
    path = GradientPath.of(model)
    flows = [path.comes_back(slot, case.has_images) or slot.has_head for slot in model.placement().slots]
    slots = [SlotCost(SLEEP_FORWARD / num_chunks, flow * SLEEP_BACKWARD / num_chunks) for flow in flows]
    return step_cost([slots] * NUM_MICROBATCHES, case.num_stages)


def sleep_part(names: list[str], rounds: int, num_steps: int) -> dict[str, Any]:
    found = {}
    for name in (name for name in SLEEP_CASES if name in names):
        case = SLEEP_CASES[name]
        seconds, ideal = [measure(case, num_steps).seconds for _ in range(rounds)], sleep_ideal(case)
        found[name] = {"ideal_seconds": ideal, "seconds": seconds,
                       "share_of_ideal": ideal / statistics.median(seconds)}  # fmt: skip
        print(name, json.dumps(found[name]), flush=True)
    return found


def compute_part(names: list[str], rounds: int, num_steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (name for name in COMPUTE_CASES if name in names):
        case, base = COMPUTE_CASES[name]
        pairs = [(measure(case, num_steps), measure_beside_another(base, num_steps)) for _ in range(rounds)]
        ratios = [of_base.seconds / of_case.seconds for of_case, of_base in pairs]
        seconds = [(of_case.seconds, of_base.seconds) for of_case, of_base in pairs]
        found[name] = {"seconds": seconds, "speed_ratios": ratios, "speed_ratio": statistics.median(ratios)}
        if base.num_stages == 1:
            ideals = [ideal_ratio(case, of_base) for _, of_base in pairs]
            shares = [ratio / ideal for ratio, ideal in zip(ratios, ideals, strict=True)]
            found[name] |= {"ideals": ideals, "shares": shares, "share_of_ideal": statistics.median(shares)}
        print(name, json.dumps(found[name]), flush=True)
    return found


def ideal_ratio(case: Case, one: Measured) -> float:
    """The speed of two processes over one, if messages took no time; ``one`` was measured on one process."""
    if case.freeze:  # the first stage has the ViT, the second the LLM
        vision, *rest = (one.works[work.value] / NUM_MICROBATCHES
                         for work in (Work.VISION_FORWARD, Work.LANGUAGE_FORWARD, Work.BACKWARD))
        return one.seconds / step_cost([[SlotCost(vision, 0.0), SlotCost(*rest)]] * NUM_MICROBATCHES, 2)
    even = [SlotCost(1.0, 2.0)] * (2 * len(case.vision))
    return NUM_MICROBATCHES * 3 * len(even) / step_cost([even] * NUM_MICROBATCHES, 2)


def main() -> None:
    parser = command(__doc__)
    names = [*SLEEP_CASES, *COMPUTE_CASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each launch")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        request = json.loads(flags.worker)
        fields = {name: _tuples(value) for name, value in request["case"].items()}
        measured = worker(Case(**fields), request["num_steps"])
        if os.environ["RANK"] == "0":
            report(measured, flags.output)
        return
    found: dict[str, Any] = {"num_microbatches": NUM_MICROBATCHES, "rounds": flags.rounds, "steps": flags.steps}
    found["sleep"] = sleep_part(flags.only, flags.rounds, flags.steps)
    found["compute"] = compute_part(flags.only, flags.rounds, flags.steps)
    report(found, flags.output, prints=False)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
