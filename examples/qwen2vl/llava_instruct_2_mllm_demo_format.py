"""LLaVA-Instruct records as MindSpeed-MM's: ``conversations`` and ``image`` become ``messages`` and ``images``.

    python examples/qwen2vl/llava_instruct_2_mllm_demo_format.py \\
        [--llava_json_path FILE] [--coco_path FOLDER] [--output_json_path FILE]

Optional: the trainer reads LLaVA's files too.  This script has MindSpeed-MM's name and flags.  Without flags it takes
LLaVA-Instruct-150K and COCO 2017 where MindSpeed-MM's guide puts them.  Paths of images start at the directory in which
it is run, which is where the trainer is started too.  Records whose image is missing are left out.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROLES = {"human": "user", "gpt": "assistant"}


def converted(record: dict[str, Any], folder: str) -> dict[str, Any]:
    """One record of LLaVA in the other form; a record without an image is text only."""
    images = record.get("image") or []
    others = {key: value for key, value in record.items() if key not in ("image", "conversations")}
    turns = [{"role": ROLES[turn.pop("from")], "content": turn.pop("value"), **turn}
             for turn in record["conversations"]]
    return {**others, "images": [f"{folder}/{path}" for path in ([images] if isinstance(images, str) else images)],
            "messages": turns}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llava_json_path", default="./data/llava_instruct_150k.json",
                        help="LLaVA's records (default: %(default)s)")
    parser.add_argument("--coco_path", default="./data/COCO2017", help="holds train2017/ (default: %(default)s)")
    parser.add_argument("--output_json_path", default="./data/mllm_format_llava_instruct_data.json",
                        help="must not exist (default: %(default)s)")
    flags = parser.parse_args()
    folder, target = f"{flags.coco_path}/train2017", Path(flags.output_json_path)
    if target.exists():
        sys.stderr.write(f"error: {target} already exists; rename or remove it\n")
        return 2
    try:
        records = json.loads(Path(flags.llava_json_path).read_text(encoding="utf-8"))
        found = [converted(record, folder) for record in records]
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"error: {flags.llava_json_path} cannot be read as LLaVA's records: {error}\n")
        return 2
    kept = [record for record in found if all(Path(path).is_file() for path in record["images"])]
    if not kept:
        sys.stderr.write(f"error: none of the {len(found)} records has its image in {folder}\n")
        return 2
    target.write_text(json.dumps(kept), encoding="utf-8")
    print(f"{target}: {len(kept)} records; {len(found) - len(kept)} left out, because their image is not in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
