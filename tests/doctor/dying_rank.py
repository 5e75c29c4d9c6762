"""A rank of ``mm-doctor``; that of device 1 dies in the training step:
``python -m tests.doctor.dying_rank FOLDER DEVICE``.
"""

import os
import sys

from mm.doctor import rank

if __name__ == "__main__":
    from mm.device.device import Device

    Device.pick("cpu")
    from mm.doctor import step

    if os.environ["LOCAL_RANK"] == "1":
        step.trained_step = lambda *_: os._exit(9)
    sys.exit(rank.main())
