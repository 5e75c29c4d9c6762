"""LLaVA-Instruct records as the trainer reads them: ``conversations`` and ``image`` become ``messages`` and ``images``.

    python examples/qwen2vl/llava_instruct_2_mllm_demo_format.py \\
        [--llava_json_path FILE] [--coco_path FOLDER] [--output_json_path FILE]

Without flags it takes LLaVA-Instruct-150K and COCO 2017 where MindSpeed-MM's guide puts them.  Paths of pictures start
at the directory in which it is run, which is where the trainer is started too.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

LLAVA_JSON_PATH = "./data/llava_instruct_150k.json"
COCO_PATH = "./data/COCO2017"
OUTPUT_JSON_PATH = "./data/mllm_format_llava_instruct_data.json"
PICTURES = "train2017"
"""The folder of the pictures in that of COCO."""
ROLES = {"human": "user", "gpt": "assistant"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llava_json_path", default=LLAVA_JSON_PATH, help="LLaVA's records (default: %(default)s)")
    parser.add_argument("--coco_path", default=COCO_PATH, help=f"holds {PICTURES}/ (default: %(default)s)")
    parser.add_argument("--output_json_path", default=OUTPUT_JSON_PATH, help="must not exist (default: %(default)s)")
    flags = parser.parse_args()
    source, target, folder = Path(flags.llava_json_path), Path(flags.output_json_path), f"{flags.coco_path}/{PICTURES}"
    try:
        if target.exists():
            raise ValueError(f"{target} exists; rename or remove it, or give another --output_json_path.")
        records = json.loads(source.read_text(encoding="utf-8"))
        converted = (convert(record, folder) for record in tqdm(records, unit="record", disable=None))
        kept = [record for record in converted if all(Path(picture).is_file() for picture in record["images"])]
        if records and not kept:
            raise ValueError(f"none of the {len(records)} records has its picture in {folder}; give --coco_path.")
        with target.open("x", encoding="utf-8") as file:
            json.dump(kept, file, ensure_ascii=False)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    num_missing = len(records) - len(kept)
    print(f"{target}: {len(kept)} records" + f"; {num_missing} are left out, because {folder} lacks their picture"
          * (num_missing > 0))
    return 0


def convert(record: dict[str, Any], folder: str) -> dict[str, Any]:
    """One record; a record without a picture is text only."""
    unknown = {turn["from"] for turn in record["conversations"]} - ROLES.keys()
    if unknown:
        raise ValueError(f"record {record.get('id')} has turns from {sorted(unknown)}; expected {list(ROLES)}.")
    return {
        "images": [f"{folder}/{record['image']}"] if record.get("image") else [],
        "messages": [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in record["conversations"]],
    }


if __name__ == "__main__":
    sys.exit(main())
