"""One rank of ``benchmarks.plan``: calibrates, predicts and measures, in rounds.  Import it after ``Device.pick``."""

import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import model_config, step_arguments
from benchmarks.sides import resized
from mm.batch import BatchTotals, Grid, Microbatch, StepPlan
from mm.config.args import Arguments
from mm.config.data import DataConfig
from mm.config.lora import LoraConfig
from mm.config.model import ModelConfig
from mm.config.run import Run
from mm.cost.calibration import Calibration
from mm.cost.predict import Predictor, StepPrediction
from mm.cost.workload import Workload, counts_of
from mm.data.sampler.cost import in_pipeline_order
from mm.device.device import Device
from mm.model.stage import Stage
from mm.parallel import mesh as parallel
from mm.placement import PipelineLayout
from mm.plan.measure import measure, random_microbatch
from mm.run.step import Setup, step

NUM_MICROBATCHES, NUM_BATCHES = 8, 3
_QUICK_MICROBATCHES, _QUICK_BATCHES = 2, 1
_SIZES, _QUICK_SIZES = (768, 1024), (192, 256)
"""Tokens and patches of the largest microbatch."""
_LORA = LoraConfig(r=8, target_modules=("all-linear",))


@dataclass(frozen=True)
class Case:
    """One layout, and what is trained."""

    name: str
    vision: PipelineLayout
    language: PipelineLayout
    tp_size: int = 1
    is_vision_frozen: bool = False
    has_lora: bool = False
    num_samples: int = 1
    """Samples in each microbatch."""
    is_quick: bool = False
    """Whether the quick benchmark measures it too."""


_ONE, _FIRST, _LAST = ((8,),), ((8, 0),), ((0, 8),)
CASES = {
    1: (
        Case("PP 1", _ONE, _ONE, is_quick=True), Case("PP 1, three samples packed", _ONE, _ONE, num_samples=3),
        Case("PP 1, ViT frozen", _ONE, _ONE, is_vision_frozen=True),
        Case("PP 1, LoRA", _ONE, _ONE, has_lora=True, is_quick=True),
    ),
    2: (
        Case("PP 2, ViT 8 0, LLM 0 8", _FIRST, _LAST), Case("PP 2, ViT 8 0, LLM 2 6", _FIRST, ((2, 6),)),
        Case("PP 2, ViT 5 3, LLM 0 8", ((5, 3),), _LAST),
        Case("PP 2, ViT 8 0, LLM 2 6, three samples packed", _FIRST, ((2, 6),), num_samples=3),
        Case("PP 2, ViT 8 0, LLM 2 6, ViT frozen", _FIRST, ((2, 6),), is_vision_frozen=True, is_quick=True),
        Case("PP 2, ViT 8 0, LLM 2 6, LoRA", _FIRST, ((2, 6),), has_lora=True),
        Case("two chunks, PP 2", ((4, 4), (0, 0)), ((0, 0), (4, 4)), is_quick=True),
        Case("TP 2", _ONE, _ONE, tp_size=2), Case("DP 2", _ONE, _ONE),
    ),
}  # fmt: skip
"""By the number of processes."""


def cases_of(num_ranks: int, is_quick: bool) -> tuple[Case, ...]:
    """The cases of ``num_ranks`` processes, or those of the quick benchmark."""
    return tuple(case for case in CASES[num_ranks] if case.is_quick or not is_quick)


def model_of(case: Case, is_quick: bool) -> ModelConfig:
    """8 ViT layers of width 320 and 8 LLM layers of width 512."""
    widths: tuple[dict[str, Any], dict[str, Any]] = ({"hidden_size": 320, "ffn_hidden_size": 856}, {
        "hidden_size": 512, "ffn_hidden_size": 1408, "mrope_section": (16, 24, 24), "kv_channels": 128,
        "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 1024})
    if is_quick:
        widths = {"hidden_size": 64, "ffn_hidden_size": 128}, {"hidden_size": 128, "ffn_hidden_size": 256,
                                                               "kv_channels": 32, "mrope_section": (4, 6, 6)}
    model = resized(model_config("tiny"),
                    {**widths[0], "num_layers": 8, "pipeline_num_layers": case.vision, "window_attn_size": 112,
                     "fullatt_block_indexes": (3, 7), "freeze": case.is_vision_frozen},
                    {**widths[1], "num_layers": 8, "pipeline_num_layers": case.language})  # fmt: skip
    return replace(model, lora=_LORA if case.has_lora else LoraConfig())


def batch_of(model: ModelConfig, case: Case, seed: int, num_microbatches: int = NUM_MICROBATCHES) -> list[Microbatch]:
    """Images of 100 to 800 patches in three of four samples, and texts of 40 to 250 tokens."""
    rng, found = random.Random(seed), list[Microbatch]()
    for _ in range(num_microbatches):
        samples: list[tuple[Sequence[Grid], int]] = []
        for _ in range(case.num_samples):
            grid = 1, 2 * rng.randint(5, 14), 2 * rng.randint(5, 14)
            samples.append(([grid] if rng.random() < 0.75 else [], rng.randint(40, 250)))
        found.append(random_microbatch(model, samples))
    return in_pipeline_order(model, found)


class Trained:
    """One case, ready to train."""

    def __init__(self, case: Case, device: Device, is_quick: bool, calibration: Calibration) -> None:
        self.case, world_size = case, int(os.environ.get("WORLD_SIZE", "1"))
        model, args = model_of(case, is_quick), arguments(case.tp_size)
        mesh = parallel.start(device, model, case.tp_size)
        stage = Stage(model, mesh, "fp32", device)
        generator = torch.Generator().manual_seed(mesh.pp_rank)
        with torch.no_grad():
            for _, parameter in stage.named_parameters():
                parameter.normal_(0.0, 0.02, generator=generator)
        self._setup = Setup.build(stage, mesh, args)
        run = Run(args, model, DataConfig("hf", ("data.json",)), world_size)
        num_batches, num_microbatches = (_QUICK_BATCHES, _QUICK_MICROBATCHES) if is_quick else (
            NUM_BATCHES, NUM_MICROBATCHES)
        batches = [batch_of(model, case, seed, num_microbatches) for seed in range(num_batches)]
        self._plans = [StepPlan(tuple(batch), BatchTotals.of(batch * run.dp_size, model.vision)) for batch in batches]
        counts = [counts_of([BatchTotals.of([one], model.vision) for one in batch]) for batch in batches]
        workload = Workload(tuple((one,) * run.dp_size for one in counts))
        self.prediction = Predictor(run, calibration).predict(workload)

    def seconds(self) -> Iterator[float]:
        """One step of each batch."""
        for plan in self._plans:
            dist.barrier()
            began = time.perf_counter()
            step(self._setup, plan, 1e-5)
            dist.barrier()
            yield time.perf_counter() - began

    def close(self) -> None:
        parallel.stop_mesh()


def arguments(tp_size: int) -> Arguments:
    return step_arguments("--tensor-model-parallel-size", str(tp_size))


def rows_of_rank(device: Device, rounds: int, is_quick: bool) -> list[dict[str, Any]] | None:
    """In each round calibrate, then predict and measure every case; the rows on rank 0, None on the others."""
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    found: dict[Case, list[_Measured]] = {case: [] for case in cases_of(world_size, is_quick)}
    for _ in range(rounds):
        began = time.perf_counter()
        calibration = _calibrated(device, world_size, is_quick)
        calibrated = time.perf_counter() - began
        for case, of_case in found.items():
            trained = Trained(case, device, is_quick, calibration)
            list(trained.seconds())  # warms up
            of_case.append(_Measured(calibrated, trained.prediction, tuple(trained.seconds())))
            trained.close()
    return None if dist.get_rank() else [_row(case, world_size, of_case) for case, of_case in found.items()]


@dataclass(frozen=True)
class _Measured:
    """One round of one case."""

    calibration_seconds: float
    predicted: StepPrediction
    seconds: tuple[float, ...]
    """The time of one step with each batch."""


def _calibrated(device: Device, world_size: int, is_quick: bool) -> Calibration:
    """A calibration in one round, with adapters too if a case has them."""
    plain, lora = CASES[1][0], CASES[1][3]
    sizes = _QUICK_SIZES if is_quick else _SIZES
    cases = cases_of(world_size, is_quick)
    tp_sizes = sorted({1, *(case.tp_size for case in cases)})
    found = measure(device, arguments(1), model_of(plain, is_quick), tp_sizes, *sizes, 1)
    if not any(case.has_lora for case in cases):
        return found
    more = measure(device, arguments(1), model_of(lora, is_quick), [1], *sizes, 1)
    return replace(found, blocks=(*found.blocks, *(one for one in more.blocks if one.key not in found.by_key)))


def _row(case: Case, world_size: int, rounds: Sequence[_Measured]) -> dict[str, Any]:
    """The median prediction of a case beside the measured time, as ``benchmarks.plan`` describes."""
    predicted = sorted((one.predicted for one in rounds), key=lambda one: one.seconds)[len(rounds) // 2]
    of_batches = zip(*(one.seconds for one in rounds), strict=True)
    measured = statistics.fmean(map(statistics.median, of_batches))
    low, high = predicted.interval
    is_inside = [one.predicted.interval[0] <= seconds <= one.predicted.interval[1]
                 for one in rounds for seconds in one.seconds]
    return {"case": case.name, "num_ranks": world_size, "predicted": predicted.seconds, "low": low, "high": high,
            "measured": measured, "error": predicted.seconds / measured - 1,
            "calibration_seconds": statistics.fmean(one.calibration_seconds for one in rounds),
            "share_in_interval": statistics.fmean(is_inside)}  # fmt: skip
