"""LLaVA-Instruct records as the trainer reads them: ``conversations`` and ``image`` become ``messages`` and ``images``.

    python examples/qwen2vl/llava_instruct_2_mllm_demo_format.py \\
        [--llava_json_path FILE] [--coco_path FOLDER] [--output_json_path FILE]

The same as ``mm-data convert llava``, under MindSpeed-MM's name and with its flags.  Without flags it takes
LLaVA-Instruct-150K and COCO 2017 where MindSpeed-MM's guide puts them.  Paths of pictures start at the directory in
which it is run, which is where the trainer is started too.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, it does not see mm

from mm.data_tool.llava import convert_llava, summary
from mm.errors import UserError

LLAVA_JSON_PATH = "./data/llava_instruct_150k.json"
COCO_PATH = "./data/COCO2017"
OUTPUT_JSON_PATH = "./data/mllm_format_llava_instruct_data.json"
PICTURES = "train2017"
"""The folder of the pictures in that of COCO."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llava_json_path", default=LLAVA_JSON_PATH, help="LLaVA's records (default: %(default)s)")
    parser.add_argument("--coco_path", default=COCO_PATH, help=f"holds {PICTURES}/ (default: %(default)s)")
    parser.add_argument("--output_json_path", default=OUTPUT_JSON_PATH, help="must not exist (default: %(default)s)")
    flags = parser.parse_args()
    source, target, folder = Path(flags.llava_json_path), Path(flags.output_json_path), f"{flags.coco_path}/{PICTURES}"
    try:
        print(summary(convert_llava(source, target, folder), target, folder))
    except (OSError, UserError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
