"""Does the loader keep up with the device?  Its samples per second, and how long a step waits for it.

    python -m benchmarks.data.loader [--workers 8 16] [--records FILE] [--step-seconds 0.5]

Writes JPEG files of 640 x 480 with conversations, and reads them as a run does: decode, resize, patches, tokens, packed
microbatches.  It reads first as fast as the workers can, then with a pause as long as a training step before each step:
the time that ``next()`` then takes is what a step would wait.  The pause is ``--step-seconds``, or the median of our
step in ``--records``.  No device is used.
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.measure import num_cores, shipped_model
from benchmarks.records import OURS, Records, Results, add_record_flags
from demo.tiny_checkpoint import build
from mm.config.data import DataConfig, read_data
from mm.data.encode.encoder import SampleEncoder
from mm.data.feed.loader import StepLoader
from mm.data.index.dataset import Dataset
from mm.data.order.stream import SampleOrder, in_turn, shuffled
from mm.data_tool.mock import Mock
from tests.tiny_inputs import write_data

MAX_TOKENS = 4096
NUM_WORDS = 112
"""Number of words in an answer."""


def write_samples(directory: Path, count: int) -> DataConfig:
    """Write a tokenizer and ``count`` conversations, each about a JPEG file."""
    samples = Mock(count, text_length=NUM_WORDS, num_pictures=count).write(directory)
    build(directory / "hf", samples.read_text().splitlines(), seed=0)
    write_data(directory, samples)
    return read_data(directory / "data.json").value


def measure(data: DataConfig, flags: argparse.Namespace, num_workers: int, step_seconds: float | None) -> dict:
    """Rates and waits with ``num_workers`` worker processes."""
    dataset = Dataset(data)
    encoder = SampleEncoder.from_config(data, shipped_model("tiny"), MAX_TOKENS)
    batch = flags.samples_per_step
    order = SampleOrder(shuffled(len(dataset), 0), partial(in_turn, micro_batch_size=batch, dp_size=1), batch, 0)
    start = time.perf_counter()
    loader = StepLoader(dataset, encoder, order.steps(), num_workers, data.prefetch_factor)
    try:
        microbatches = next(loader).microbatches
        found = {"first_step_seconds": time.perf_counter() - start}
        start = time.perf_counter()
        for _ in range(flags.steps):
            microbatches += next(loader).microbatches
        found["samples_per_second"] = batch * flags.steps / (time.perf_counter() - start)
        waits = _waits(loader, flags.steps, step_seconds) if step_seconds else []
    finally:
        loader.close()
    found["tokens_per_sample"] = sum(m.num_tokens for m in microbatches) / batch / len(microbatches)
    found["patches_per_sample"] = sum(m.num_patches for m in microbatches) / batch / len(microbatches)
    if step_seconds and waits:
        found |= {"step_seconds": step_seconds, "wait_seconds": sum(waits) / len(waits), "wait_seconds_max": max(waits),
                  "wait_share": sum(waits) / (sum(waits) + step_seconds * len(waits))}  # fmt: skip
    return found


def _waits(loader: StepLoader, num_steps: int, step_seconds: float) -> list[float]:
    """Seconds that each step waits, if the steps take ``step_seconds`` apart from that."""
    waits = []
    for _ in range(num_steps):
        time.sleep(step_seconds)
        start = time.perf_counter()
        next(loader)
        waits.append(time.perf_counter() - start)
    return waits


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--samples", type=int, default=192, help="how many files to make")
    parser.add_argument("--samples-per-step", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, help="default: our step's median in --records")
    parser.add_argument("--size", default="3b", help="size of the model, for the records")
    add_record_flags(parser, "loader")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    flags = parse(argv)
    step_seconds = flags.step_seconds
    if step_seconds is None and flags.records is not None and flags.records.exists():
        step = Results.read(flags.records).step("step", OURS)
        step_seconds = step["step_seconds"]["median"] if step else None
    records = Records(flags.records, flags.label, "no device", flags.size)
    with tempfile.TemporaryDirectory() as name:
        data = write_samples(Path(name), flags.samples)
        for num_workers in flags.workers:
            found = measure(data, flags, num_workers, step_seconds)
            records.write("loader", num_workers=num_workers, num_cores=num_cores(),
                          samples_per_step=flags.samples_per_step, **found)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
