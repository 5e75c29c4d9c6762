"""A rank of ``mm-doctor`` that finds torch's norm 5% off on device 1, as with a broken kernel or driver.

    python -m tests.doctor.off_rank FOLDER DEVICE
"""

import os
import sys

from torch.nn import functional

from mm.doctor import rank

if __name__ == "__main__":
    if os.environ["LOCAL_RANK"] == "1":
        norm = functional.rms_norm
        functional.rms_norm = lambda *words, **more: norm(*words, **more) * 1.05
    sys.exit(rank.main())
