"""Scoring under MindSpeed-MM's name: says how to score an export, because this version does not."""

import os
import sys

EXPORT = """\
Export the weights to a Hugging Face directory, by --export-hf at the end of a training or by

    mm-convert Qwen2_5_VLConverter mm_to_hf --cfg.mm_dir SAVE_DIR --cfg.hf_config.hf_dir BASE --cfg.save_hf_dir EXPORT
"""
SCORE = f"""\
error: scoring is not part of this version.  {EXPORT}
Then score EXPORT with VLMEvalKit or lmms-eval, which have AI2D, ChartQA, DocVQA and MMMU.
"""


def refuse(message: str) -> int:
    """Print ``message`` on the first rank of each node, and return the exit status."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(message)
    return 2


if __name__ == "__main__":
    sys.exit(refuse(SCORE))
