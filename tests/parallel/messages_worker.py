"""Writes what every stage of each layout does in each kind of step, for tests/parallel/test_messages.py.

``messages_worker OUTPUT``, a pickle of {name: {mode: programs}} and of ``limited_groups``; nothing is judged here.
"""

import pickle
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mm.device.device import Device
from tests.parallel.messages import VISION, Layout, Mode, programs_of

MODES = tuple(Mode(starts_ahead, forward_only) for forward_only in (False, True) for starts_ahead in (True, False))
LAYOUTS = {
    "PP2": Layout(((2, 0),), ((0, 2),)),
    "PP2, ViT frozen": Layout(((2, 0),), ((1, 3),), VISION, 6),
    "PP4": Layout(((1, 1, 1, 0),), ((0, 0, 1, 2),), (), 8, text_only=(1, 4)),
    "PP4, ViT frozen": Layout(((1, 1, 0, 0),), ((0, 1, 1, 1),), VISION, 8, text_only=(0, 5)),
    "PP4, as many microbatches as stages": Layout(((1, 1, 1, 0),), ((0, 0, 1, 2),)),
    "PP4, fewer microbatches than stages": Layout(((1, 1, 1, 0),), ((0, 0, 1, 2),), (), 2),
    "PP4, text alone": Layout(((1, 1, 1, 0),), ((0, 0, 1, 2),), (), 6, text_only=(0, 1, 2, 3, 4, 5)),
    "PP8, ViT frozen": Layout(((2, *(0,) * 7),), ((0, *(1,) * 7),), VISION, 16, text_only=(3,)),
    "PP8, ViT on four": Layout(((1,) * 4 + (0,) * 4,), ((0,) * 4 + (1,) * 4,), (), 16, text_only=(0, 3, 9)),
    "PP2, 2 chunks": Layout(((1, 1), (0, 0)), ((0, 0), (1, 1))),
    "PP2, 4 chunks": Layout(((1, 1), (0, 0), (0, 0), (0, 0)), ((0, 0), (1, 1), (1, 1), (1, 1)), text_only=(1,)),
    "PP4, 2 chunks": Layout(((1,) * 4, (0,) * 4), ((0,) * 4, (1,) * 4), (), 8, text_only=(2,)),
    "PP4, 2 chunks, ViT frozen": Layout(((1, 1, 1, 0), (0,) * 4), ((0, 0, 0, 1), (1,) * 4), VISION, 8, text_only=(2,)),
    "PP4, 2 chunks, 9 microbatches": Layout(((1, 1, 1, 0), (0,) * 4), ((0, 0, 0, 1), (1,) * 4), (), 9),
}

MAX_CTAS = 4


def limited_groups() -> dict[str, int | None]:
    """By name of a group on the device's backend: the processors that NCCL may take for it, of a mesh with a limit.

    NCCL is not in the CPU's torch: its options are stood in for, and taken away again before a group is made.
    """
    Device.pick("cpu")
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mm.parallel import mesh as parallel

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.config = SimpleNamespace()

    found: dict[str, int | None] = {}
    create, new_subgroups = parallel_state.create_group, dist.new_subgroups_by_enumeration

    def note(name: str | None, options: Any) -> None:
        found[name or ""] = None if options is None else options.config.max_ctas

    def noted_create(*ranks: Any, pg_options: Any = None, group_desc: str | None = None, **others: Any) -> Any:
        note(group_desc, pg_options)
        return create(*ranks, group_desc=group_desc, **others)

    def noted_subgroups(ranks: Any, timeout: Any, backend: str | None, options: Any, name: str | None) -> Any:
        if backend is None:
            note(name, options)
        return new_subgroups(ranks, timeout, group_desc=name)

    dist.ProcessGroupNCCL = SimpleNamespace(Options=Options)
    parallel_state.create_group, dist.new_subgroups_by_enumeration = noted_create, noted_subgroups
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = Layout(((2, 0),), ((0, 2),)).model()
    parallel.build_mesh(model, 2, timedelta(minutes=1), max_message_ctas=MAX_CTAS)
    return found


if __name__ == "__main__":
    found = {name: programs_of(layout, MODES) for name, layout in LAYOUTS.items()}
    Path(sys.argv[1]).write_bytes(pickle.dumps((found, limited_groups())))
