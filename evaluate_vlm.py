"""Scoring under MindSpeed-MM's name, so that its scripts run as they are: ``torchrun ... evaluate_vlm.py``."""

import sys

from mm.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
