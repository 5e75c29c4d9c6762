"""Does the data keep up with the device: samples a second of the loader, and how long a step waits for it.

    python -m benchmarks.device_loader [--workers 8 16] [--records FILE] [--step-seconds 0.5]

Writes JPEG files of 640 x 480 and their conversations, and reads them as a run does: decode, resize, patches, tokens,
packed microbatches.  First as fast as the workers can, then with a pause as long as a training step between two steps,
in which the time of ``next()`` is what a step would wait.  A step's time is ``--step-seconds``, or our step's median in
``--records``.  No device is used.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.measure import Records
from benchmarks.results import Results
from demo.tiny_checkpoint import build
from mm.config.data import DataConfig, read_data
from mm.config.model import read_model
from mm.data.encode.encoder import SampleEncoder
from mm.data.feed.loader import StepLoader
from mm.data.index.dataset import Dataset
from mm.data.order.stream import Order

EXAMPLES = Path(__file__).parents[1] / "examples" / "qwen2.5vl"
MAX_TOKENS = 4096
WORDS = ("window", "figure", "table", "street", "letter", "number", "colour", "shape", "left", "right")
NUM_WORDS = 112


def write_samples(directory: Path, count: int) -> DataConfig:
    """``count`` conversations about a JPEG each, and a tokenizer."""
    rng = np.random.default_rng(0)
    records = []
    for index in range(count):
        coarse = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((640, 480)).save(directory / f"{index}.jpg", quality=90)
        messages = [{"role": "user", "content": "<image>" + " ".join(rng.choice(WORDS, 12))},
                    {"role": "assistant", "content": " ".join(rng.choice(WORDS, NUM_WORDS))}]  # fmt: skip
        records.append({"messages": messages, "images": [f"{index}.jpg"]})
    (directory / "data.json").write_text(json.dumps(records))
    texts = [message["content"] for record in records for message in record["messages"]]
    build(directory / "hf", texts, seed=0)
    data = json.loads((EXAMPLES / "data_tiny.json").read_text())
    data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(directory / "hf")
    where = {"dataset": str(directory / "data.json"), "dataset_dir": str(directory)}
    data["dataset_param"]["basic_parameters"] |= where
    (directory / "data_config.json").write_text(json.dumps(data))
    return read_data(directory / "data_config.json").value


def measure(data: DataConfig, flags: argparse.Namespace, num_workers: int, step_seconds: float | None) -> dict:
    """Rates and waits with ``num_workers`` worker processes."""
    dataset = Dataset(data)
    encoder = SampleEncoder.from_config(data, read_model(EXAMPLES / "model_tiny.json").value, MAX_TOKENS)
    batch = flags.samples_per_step
    order = Order.plain(len(dataset), 0, True, global_batch_size=batch, micro_batch_size=batch, dp_rank=0, dp_size=1)
    start = time.perf_counter()
    loader = StepLoader(dataset, encoder, order.steps(), num_workers, data.prefetch_factor)
    try:
        microbatches = next(loader).microbatches
        found = {"first_step_seconds": time.perf_counter() - start}
        start = time.perf_counter()
        for _ in range(flags.steps):
            microbatches += next(loader).microbatches
        found["samples_per_second"] = batch * flags.steps / (time.perf_counter() - start)
        waits = []
        for _ in range(flags.steps if step_seconds else 0):
            time.sleep(step_seconds)
            start = time.perf_counter()
            next(loader)
            waits.append(time.perf_counter() - start)
    finally:
        loader.close()
    found["tokens_per_sample"] = sum(m.num_tokens for m in microbatches) / batch / len(microbatches)
    found["patches_per_sample"] = sum(m.num_patches for m in microbatches) / batch / len(microbatches)
    if waits:
        found |= {"step_seconds": step_seconds, "wait_seconds": sum(waits) / len(waits), "wait_seconds_max": max(waits),
                  "wait_share": sum(waits) / (sum(waits) + step_seconds * len(waits))}  # fmt: skip
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--samples", type=int, default=192, help="how many files to make")
    parser.add_argument("--samples-per-step", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, help="default: our step's median in --records")
    parser.add_argument("--size", default="3b", help="of the model whose step time is taken")
    parser.add_argument("--records", type=Path, help="file of JSON lines to append to")
    parser.add_argument("--label", default="loader", help="names this command in the records")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    flags = parse(argv)
    step_seconds = flags.step_seconds
    if step_seconds is None and flags.records is not None and flags.records.exists():
        step = Results.read(flags.records).step("step", "ours")
        step_seconds = step and step["step_seconds"]["median"]
    records = Records(flags.records, flags.label, "no device", flags.size)
    with tempfile.TemporaryDirectory() as name:
        data = write_samples(Path(name), flags.samples)
        for num_workers in flags.workers:
            found = measure(data, flags, num_workers, step_seconds)
            records.write("loader", num_workers=num_workers, num_cores=len(os.sched_getaffinity(0)),
                          samples_per_step=flags.samples_per_step, **found)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
