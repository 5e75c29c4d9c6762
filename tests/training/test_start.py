"""Ranks that would start from different weights do not start.

How a run finds what it starts from is tested in test_preflight.py, and on several disks in tests/parallel.
"""

from types import SimpleNamespace
from typing import Any

import pytest

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
