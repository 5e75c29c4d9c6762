"""Where visual tokens go among the words."""

import torch
import torch.distributed as dist

from mm.device.device import Device
from tests.tiny import IMAGE, VIDEO, VOCAB, microbatch, random_sample

Device.pick("cpu")  # importing megatron needs it

from mm.model.layers.embedding import embedding_inputs  # noqa: E402
from mm.parallel.context import Context  # noqa: E402

ALONE = Context(
    dist.ProcessGroup(0, 1),  # pyright: ignore[reportCallIssue]  (rank and size; torch's types lack it)
    dist.ProcessGroup(0, 1),  # pyright: ignore[reportCallIssue]
)


def test_the_gradients_of_tokens_that_pictures_overwrite_do_not_meet_on_one_row() -> None:
    packed = microbatch([random_sample(torch.Generator(), ((1, 24, 24),), 12)])
    found = embedding_inputs(packed, (IMAGE, VIDEO), Device.pick("cpu"), ALONE, ALONE.group)
    is_visual = packed.token_ids == IMAGE
    assert found.visual is not None and len(found.visual.index) == 144
    assert torch.equal(found.visual.index, is_visual.nonzero().squeeze(1))
    assert found.token_ids[is_visual].bincount().max() == 1 and found.token_ids.max() < VOCAB
    assert torch.equal(found.token_ids[~is_visual], packed.token_ids[~is_visual])
