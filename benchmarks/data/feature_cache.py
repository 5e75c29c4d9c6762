"""How much of a step's time the cache of a frozen ViT's features saves: the first epoch of a run against the others.

    python -m benchmarks.data.feature_cache [--side PIXELS] [--epochs NUMBER]

Prints the median seconds of a step in the first epoch, which computes the features, and in later ones, which read them,
the ratio of both, and the ratio of their FLOPs.  The model is the demo's small one; for a real model, take the FLOPs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.measure import command, report
from demo.tiny_checkpoint import build
from mm.data_tool.commands import write_mock
from mm.data_tool.flags import MockFlags
from tests.files import EXAMPLES, ROOT
from tests.tiny_inputs import write_data

NUM_SAMPLES, BATCH = 32, 4


def write_inputs(directory: Path, side: int) -> None:
    """Samples with one square image each, and the demo's model with a frozen ViT on one stage."""
    samples = write_mock(MockFlags(num_samples=NUM_SAMPLES, width=side, height=side, text_length=8,
                                   num_pictures=NUM_SAMPLES, output=directory))
    build(directory / "hf", samples.read_text().splitlines(), seed=0)
    write_data(directory, samples, {"image_max_pixels": side * side, "image_resize": "transformers"})
    model = json.loads((EXAMPLES / "model_tiny.json").read_text())
    model["image_encoder"]["vision_encoder"] |= {"pipeline_num_layers": [8], "freeze": True}
    model["text_decoder"]["pipeline_num_layers"] = [4]
    (directory / "model.json").write_text(json.dumps(model))


def measure(directory: Path, side: int, num_epochs: int) -> list[dict]:
    """The metrics of each step."""
    write_inputs(directory, side)
    steps = num_epochs * NUM_SAMPLES // BATCH
    paths = {"--mm-model": "model.json", "--mm-data": "data.json", "--load": "hf", "--log-dir": "logs",
             "--vision-feature-cache": "kept"}
    words = [
        sys.executable, "-W", "ignore", "-m", "mm.train", "--device", "cpu", "--micro-batch-size", str(BATCH),
        "--seq-length", "2048", "--train-iters", str(steps), "--lr", "1e-4", "--num-workers", "0",
        *(word for flag, name in paths.items() for word in (flag, str(directory / name))),
    ]  # fmt: skip
    subprocess.run(words, cwd=ROOT, check=True)
    rows = map(json.loads, (directory / "logs" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "step"]


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--side", type=int, default=448, help="of each image, in pixels")
    parser.add_argument("--epochs", type=int, default=4)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), flags.side, flags.epochs)
    computed = [row for row in rows[1:] if row["num_cached_images"] == 0]  # the first step warms up
    kept = [row for row in rows if row["num_cached_images"] == row["num_images"]]
    seconds = [median(row["step_seconds"] for row in some) for some in (computed, kept)]
    flops = [median(row["model_flops_per_second_per_device"] * row["step_seconds"] for row in some)
             for some in (computed, kept)]
    report({"steps_computed": len(computed), "steps_read": len(kept), "median_seconds": seconds,
          "ratio": seconds[1] / seconds[0], "ratio_of_flops": flops[1] / flops[0]}, flags.output)


if __name__ == "__main__":
    main()
