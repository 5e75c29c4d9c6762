"""Asking the model under MindSpeed-MM's name, so that its scripts run as they are: ``torchrun ... inference_vlm.py``."""

import sys

from mm.generate import main

if __name__ == "__main__":
    sys.exit(main())
