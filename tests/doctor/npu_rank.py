"""A rank of ``mm-doctor`` on the fake NPU, under torchrun: ``python -m tests.doctor.npu_rank FOLDER``."""

import os
import sys

from tests.stand_ins import fake_npu

if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"  # each process sees one NPU, as under ASCEND_RT_VISIBLE_DEVICES
    fake_npu.start()
    from mm.doctor import trial

    sys.exit(trial.main([sys.argv[1], "npu"]))
