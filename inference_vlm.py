"""Asking the model under the name that MindSpeed-MM's scripts call: ``torchrun ... inference_vlm.py``."""

import sys

from mm.generate import main

if __name__ == "__main__":
    sys.exit(main())
