"""A rank of ``mm-doctor`` that dies in the training step: ``python -m tests.doctor.dying_rank FILE DEVICE``."""

import os
import sys

from mm.doctor import rank

if __name__ == "__main__":
    from mm.device.device import Device

    Device.pick("cpu")
    from mm.doctor import step

    step.trained_step = lambda *_: os._exit(9)
    sys.exit(rank.main())
