"""Directories of runs as the trainer leaves them, without training."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mm.run.watch.metrics import SpikeMetrics, ValidationMetrics
from tests.run.watch.test_metrics import STEP

FACTS: dict[str, Any] = {
    "arguments": {"mm_model": "model.json", "train_iters": 400, "lr": 1e-5, "tensor_model_parallel_size": 2,
                  "context_parallel_size": 1},
    "model": {"vision": {"num_layers": 8}, "language": {"num_layers": 4}}, "world_size": 4,
    "pipeline_model_parallel_size": 2, "data_parallel_size": 1, "precision": "bf16", "global_batch_size": 192,
    "ran_on": {"device": "cpu", "backend": "gloo", "versions": {"torch": "2.13.0"}},
    "optimizer_groups": [{"max_lr": 1e-5, "weights": ["a.weight"] * 1000}], "started_at": "2026-11-28 12:00:00",
    "predicted_peak_bytes": [{"text": 2**30, "visual": 2**31}, {"text": 3 * 2**30, "visual": 2**32}],
}  # fmt: skip


def step_row(iteration: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "step", **asdict(replace(STEP, iteration=iteration)), "num_skipped": 0, **changes}


def write_run(
    folder: Path, num_steps: int = 100, changed: Callable[[int], dict[str, Any]] = lambda _: {}, **facts: Any
) -> Path:
    """A run of so many steps with a validation and a spike; ``changed`` gives other values for a step's fields."""
    folder.mkdir(parents=True)
    rows = [step_row(iteration, **changed(iteration)) for iteration in range(1, num_steps + 1)]
    found = ValidationMetrics(num_steps, 1, 0.75, 10, 100, 2.0, 0.625, 50)
    rows += [{"kind": "validation", **asdict(found)},
             {"kind": "spike", **asdict(SpikeMetrics(num_steps, "the loss is 7", True, 7.0, 1.0, tuple(range(90))))}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps(FACTS | facts))
    return folder
