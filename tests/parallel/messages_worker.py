"""Writes what every stage of each layout does in each kind of step, for tests/parallel/pipeline/test_messages.py.

``messages_worker OUTPUT``, a pickle of {name: {mode: programs}}; nothing is judged here.
"""

import pickle
import sys
from pathlib import Path

from tests.parallel.messages import VISION, Layout, Mode, programs_of

MODES = tuple(Mode(starts_ahead, forward_only) for forward_only in (False, True) for starts_ahead in (True, False))
LAYOUTS = {
    "PP2": Layout(((2, 0),), ((0, 2),)),
    "PP2, ViT frozen": Layout(((2, 0),), ((1, 3),), VISION, 6),
    "PP4": Layout(((1, 1, 1, 0),), ((0, 0, 1, 2),), (), 8, text_only=(1, 4)),
    "PP4, ViT frozen": Layout(((1, 1, 0, 0),), ((0, 1, 1, 1),), VISION, 8, text_only=(0, 5)),
    "PP4, fewer microbatches than stages": Layout(((1, 1, 1, 0),), ((0, 0, 1, 2),), (), 2),
    "PP8, ViT frozen": Layout(((2, *(0,) * 7),), ((0, *(1,) * 7),), VISION, 16, text_only=(3,)),
    "PP8, ViT on four": Layout(((1,) * 4 + (0,) * 4,), ((0,) * 4 + (1,) * 4,), (), 16, text_only=(0, 3, 9)),
    "PP2, 2 chunks": Layout(((1, 1), (0, 0)), ((0, 0), (1, 1))),
    "PP4, 2 chunks": Layout(((1,) * 4, (0,) * 4), ((0,) * 4, (1,) * 4), (), 8, text_only=(2,)),
    "PP4, 2 chunks, 9 microbatches": Layout(((1, 1, 1, 0), (0,) * 4), ((0, 0, 0, 1), (1,) * 4), (), 9),
}


if __name__ == "__main__":
    found = {name: programs_of(layout, MODES) for name, layout in LAYOUTS.items()}
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))
