"""Scoring under MindSpeed-MM's name: says how to score an export, because this version does not."""

import sys

from inference_vlm import EXPORT, refuse

SCORE = f"""\
error: scoring is not part of this version.  {EXPORT}
Then score EXPORT with VLMEvalKit or lmms-eval, which have AI2D, ChartQA, DocVQA and MMMU.
"""

if __name__ == "__main__":
    sys.exit(refuse(SCORE))
