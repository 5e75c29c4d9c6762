"""Ranks that would start from different weights do not start.

How a run finds what it starts from is tested in test_preflight.py, and on several disks in tests/parallel.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mm.errors import AgreedError


@pytest.mark.parametrize(("load", "save", "expected"), [
    ("/disk/hf", None, "some ranks start from /disk/hf and others from random weights: give every machine the same "
                       "--load, --pretrained-checkpoint, --load-base-model and model_name_or_path"),
    (None, "out", "some ranks start from random weights and others from /node/hf: give every machine the same --load, "
                  "--pretrained-checkpoint, --load-base-model and model_name_or_path; if they are the same, some "
                  "machines did not see the checkpoint in --save out yet, so start again"),
])  # fmt: skip
def test_ranks_with_different_starts_are_refused(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch, load: str | None, save: str | None, expected: str
) -> None:
    from mm.training import start

    other = None if load else "/node/hf"
    monkeypatch.setattr(start, "all_of", lambda found, _: (*found, other) if found else ())
    run: Any = SimpleNamespace(args=SimpleNamespace(num_train_epochs=None, load=load, save=save))
    with pytest.raises(AgreedError) as refused:
        start.settle(run, one_rank, print)
    assert refused.value.problems == (expected,)


@pytest.mark.parametrize(("precision", "is_used"), [("fp32", True), ("bf16", False)])
def test_an_export_without_steps_takes_the_checkpoint_only_in_the_dtype_of_the_run(
    monkeypatch: pytest.MonkeyPatch, precision: str, is_used: bool
) -> None:  # fmt: skip
    from mm.formats.source import Kind
    from mm.training import start

    view = SimpleNamespace(stored=SimpleNamespace(dtype=torch.float32))
    resumed = SimpleNamespace(kind=Kind.TRAINING, path="save/iter_0000003", views=(view, view))
    args = SimpleNamespace(load="save", precision=precision, no_load_optim=False, no_load_rng=False, finetune=False)
    sources: Any = SimpleNamespace(trained=lambda _: resumed)
    monkeypatch.setattr(start.state, "load", lambda *_, **__: start.state.TrainingProgress(3, 12))
    started = start._progress(SimpleNamespace(args=args), None, sources)  # type: ignore[arg-type]
    assert started.checkpoint == (resumed.path if is_used else None) and started.progress.iteration == 3
