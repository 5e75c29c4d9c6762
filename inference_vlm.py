"""Asking the model under the name that MindSpeed-MM's scripts call: ``torchrun ... inference_vlm.py``."""

import sys

from mm.process import not_installed

try:
    from mm.generate import main
except ModuleNotFoundError as error:
    sys.exit(not_installed(error))

if __name__ == "__main__":
    sys.exit(main())
