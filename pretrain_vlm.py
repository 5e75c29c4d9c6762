"""The trainer under MindSpeed-MM's name, so that its scripts run as they stand: ``torchrun ... pretrain_vlm.py``."""

import sys

from mm.train import main

if __name__ == "__main__":
    sys.exit(main())
