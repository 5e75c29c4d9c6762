"""The FLOP formula counts exactly what torch counts on the Hugging Face model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mm.batch import BatchTotals
from tests.forward_flops import forward_flops
from tests.tiny import hf_logits, hf_model, microbatch, our_config, random_sample

GRIDS = ((1, 8, 12), (1, 4, 6))


@pytest.fixture(scope="module")
def counted() -> tuple[BatchTotals, dict[str, int]]:
    sample = random_sample(torch.Generator().manual_seed(0), GRIDS, 12)
    model = hf_model()
    model.set_attn_implementation("eager")  # SDPA's CPU kernel is not in torch's FLOP table
    with FlopCounterMode(display=False, depth=4) as counter, torch.no_grad():
        hf_logits(model, sample)
    counts = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    return BatchTotals.of([microbatch([sample])], our_config(((4,),), ((4,),)).vision), counts


def test_linear_flops_equal_torchs(counted) -> None:
    totals, counts = counted
    config = our_config(((4,),), ((4,),))
    (visual,) = [flops for name, flops in counts.items() if name.endswith(".visual")]
    (merger,) = [flops for name, flops in counts.items() if name.endswith("visual.merger")]
    assert forward_flops(config, totals).projector == merger
    assert forward_flops(config, totals).vision == visual - merger
