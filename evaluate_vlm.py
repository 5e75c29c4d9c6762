"""Scoring under MindSpeed-MM's name, so that its scripts run unchanged: ``torchrun ... evaluate_vlm.py``."""

import sys

from mm.process import not_installed

try:
    from mm.evaluate import main
except ModuleNotFoundError as error:
    sys.exit(not_installed(error))

if __name__ == "__main__":
    sys.exit(main())
