"""A rank of ``mm-doctor`` that raises or hangs: ``python -m tests.doctor.failing_rank FOLDER raises|hangs``."""

import os
import sys
import time
from pathlib import Path

from mm.doctor.trial import begun_file

if __name__ == "__main__":
    begun_file(Path(sys.argv[1]), int(os.environ["RANK"])).write_text("device\n")
    if sys.argv[2] == "raises":
        raise RuntimeError("no such kernel")
    time.sleep(600)
