"""A rank of ``mm-doctor``, by its files; that of device 1 never ends: ``-m tests.doctor.stuck_rank FOLDER DEVICE``."""

import os
import sys
import time
from pathlib import Path

from mm.doctor.begun import FOUND, begun_file
from mm.doctor.diagnosis import ok

if __name__ == "__main__":
    folder, index = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    begun_file(folder, 0).write_text("device\nmatrix products\n")
    (folder / FOUND).write_text(ok("device", "cpu").line())
    time.sleep(600 * index)
