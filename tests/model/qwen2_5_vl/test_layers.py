"""What a layer keeps for its backward pass.  That it computes the right thing: tests/test_parity.py."""

import json
from pathlib import Path

import pytest

from tests.launch import run_ranks

NUM_LAYERS = 4 + 4
OTHER_NORMS = 2
"""The projector's and the one before the head, which are no layer's."""


@pytest.mark.parametrize("tp", [1, 2])
def test_selective_recompute_keeps_less_and_changes_no_bit(tp: int, tmp_path: Path) -> None:
    run_ranks(tp, "tests.parallel.selective_worker", str(tmp_path / "found.json"))
    for rank in json.loads((tmp_path / "found.json").read_text()):
        norms, swiglus = 2 * NUM_LAYERS + OTHER_NORMS, NUM_LAYERS
        assert rank["plain"]["kept"] == {"rms_norm": [norms, norms], "swiglu": [swiglus, swiglus]}
        assert rank["selective"]["kept"] == {"rms_norm": [OTHER_NORMS, norms], "swiglu": [0, swiglus]}
        assert rank["selective layernorm"]["kept"] == {"rms_norm": [OTHER_NORMS, norms], "swiglu": [swiglus, swiglus]}
        assert rank["selective mlp_act"]["kept"] == {"rms_norm": [norms, norms], "swiglu": [0, swiglus]}
        assert rank["selective mlp"]["kept"] == {"rms_norm": [norms - NUM_LAYERS, norms], "swiglu": [0, swiglus]}
        assert rank["plain"]["calls"] == {"rms_norm": norms, "swiglu": swiglus}
        assert rank["selective"]["calls"] == {"rms_norm": norms + 2 * NUM_LAYERS, "swiglu": 2 * swiglus}
        assert rank["selective mlp"]["calls"] == {"rms_norm": norms + NUM_LAYERS, "swiglu": 2 * swiglus}
        assert rank["different"] == [] and rank["num_tensors"] > 70
