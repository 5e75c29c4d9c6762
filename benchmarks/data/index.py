"""How long it takes to check and index a large data file: at the first start, and at the second.

    python -m benchmarks.data.index [--records 1000000] [--images 1000] [--processes N] [--output FILE.json]
    python -m benchmarks.data.index --rows 100000000

Generates LLaVA-like records (a JSON list) that share some images, checks and measures them as the first start of a
training does, then opens them again in a fresh process.  The tokenizer is a small one of the same kind as Qwen's, so
trust tokens per second more than samples per second.  Prints JSON.

``--rows`` reads no file: it saves an index of so many generated rows and plans steps of 4096 replicas from it, as a
node would.  The output has the memory of the planning process and the CPU time of a data owner's thread.
"""

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import psutil
from PIL import Image

from benchmarks.measure import command, num_cores, report, seconds_of, shipped_model, versions
from mm.config.data import Attributes, DataConfig, read_data
from mm.config.model import ModelConfig
from mm.data.index.dataset import Dataset
from mm.data.index.index import NUMBER, ROW, Columns, Measure, RecordIndex, Rows, Store
from mm.data.loader.loader import planned_steps
from mm.data.sampler.balance import Budget
from mm.data.sampler.cost import SampleSizes
from mm.data.sampler.sampler import SAMPLERS, BatchShares, SampleOrder

if TYPE_CHECKING:
    from demo.tiny_checkpoint import Sizes

SEQ_LENGTH = 4096
NUM_WORDS = (12, 60, 10, 40)
"""Number of words in question, answer, question, answer: LLaVA-Instruct's usual conversation."""
NUM_TEXTS = 20_000
"""Different turns of each kind, or as many as there are records; records take one at random."""
DP_SIZE, GLOBAL_BATCH_SIZE = 4096, 98_304
KEY = "generated"
BATCH_ROWS = 1 << 18
"""Rows that are generated at a time."""


def checkpoint_sizes() -> "Sizes":
    """The sizes of the checkpoint; only its tokenizer is used.

    Imported here: transformers' models take seconds to import, and the processes of ``--rows`` do not need them.
    """
    from demo.tiny_checkpoint import Sizes

    return Sizes(num_merges=1500, vocab_size=1800)


def write_inputs(folder: Path, num_records: int, num_images: int) -> None:
    """Pictures, tokenizer, records and data JSON."""
    from demo.tiny_checkpoint import build
    from tests.tiny_inputs import write_data

    rng, pixels = random.Random(0), np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    for number in range(num_images):
        coarse = pixels.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        size = rng.choice([(640, 480), (480, 640), (640, 427), (500, 375)])
        Image.fromarray(coarse).resize(size).save(folder / "images" / f"{number:012}.jpg")
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "ou", "an", "er", "in")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(3000)]
    texts = [[json.dumps(f"{' '.join(rng.choices(words, k=count)).capitalize()}.")
              for _ in range(min(NUM_TEXTS, num_records))] for count in NUM_WORDS]
    with (folder / "records.json").open("w", encoding="utf-8") as file:
        for number in range(num_records):
            first, answer, second, last = (rng.choice(kind) for kind in texts)
            file.write(f'{"," if number else "["}\n{{"id": "{number:012}", "image": "{number % num_images:012}.jpg", '
                       f'"conversations": [{{"from": "human", "value": "<image>\\n{first[1:]}}}, '
                       f'{{"from": "gpt", "value": {answer}}}, {{"from": "human", "value": {second}}}, '
                       f'{{"from": "gpt", "value": {last}}}]}}')
        file.write("\n]\n")
    build(folder / "hf", [json.loads(text) for kind in texts for text in kind[:500]], seed=0, sizes=checkpoint_sizes())
    write_data(folder, folder / "records.json", {"image_max_pixels": 262144},
               dataset_dir=str(folder / "images"), cache_dir=str(folder / "cache"))  # fmt: skip


def settings(folder: Path, num_processes: int) -> tuple[DataConfig, ModelConfig]:
    data, model, sizes = read_data(folder / "data.json").value, shipped_model("tiny"), checkpoint_sizes()
    model = replace(
        model, language=replace(model.language, vocab_size=sizes.vocab_size),
        image_token_id=sizes.token_id("<|image_pad|>"), video_token_id=sizes.token_id("<|video_pad|>"),
        vision_start_token_id=sizes.token_id("<|vision_start|>"))
    return replace(data, attr=Attributes(), preprocessing_num_workers=num_processes), model


def start(folder: Path, num_processes: int) -> dict[str, float]:
    """One start of a data owner in this process: seconds to open the dataset and to read a sample."""
    data, model = settings(folder, num_processes)
    measure = Measure.from_config(data, model, SEQ_LENGTH)
    began = time.perf_counter()
    dataset = Dataset(data, measure=measure)
    ready = time.perf_counter()
    lengths = dataset.lengths
    num_tokens, num_patches = int(lengths.num_tokens.sum(dtype=np.int64)), int(lengths.num_patches.sum(dtype=np.int64))
    sample_seconds = seconds_of(lambda: dataset[random.randrange(len(dataset))], 300)
    return {
        "num_samples": len(dataset), "tokens_per_sample": num_tokens / len(dataset),
        "patches_per_sample": num_patches / len(dataset), "dataset_seconds": ready - began,
        "read_sample_microseconds": 1e6 * sample_seconds,
    }  # fmt: skip


def saving(folder: Path, num_rows: int) -> dict[str, float]:
    """Generate the rows of LLaVA-like records, and save them as an index."""
    rng, began = np.random.default_rng(0), time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as source:
        end = 0
        for first in range(0, num_rows, BATCH_ROWS):
            end = _write_rows(source, rng, min(BATCH_ROWS, num_rows - first), end)
        source.flush()
        rows, generated = Rows(np.memmap(source, ROW, "r")), time.perf_counter()
        store = Store((folder,))
        store.save(KEY, RecordIndex(rows))
        store.numbers(KEY, lambda: np.arange(num_rows, dtype=NUMBER))
    return {"generating_seconds": generated - began, "saving_seconds": time.perf_counter() - generated,
            "bytes_per_row": ROW.itemsize}  # fmt: skip


def _write_rows(stream: IO[bytes], rng: np.random.Generator, count: int, end: int) -> int:
    """Write rows of records of about a kilobyte with one image each, the first of which follows a record that ends at
    ``end``; returns the end of the last."""
    rows, sizes = np.zeros(count, ROW), rng.integers(500, 3000, count)
    patches = 2 * rng.integers(4, 21, count) * 2 * rng.integers(4, 21, count)
    rows["end"] = end + np.cumsum(sizes + 2) - 2
    rows["start"] = rows["end"] - sizes
    rows["num_patches"], rows["num_media"] = patches, 1
    rows["num_tokens"] = patches // 4 + rng.integers(50, 1200, count)
    rows["num_target_tokens"] = rows["num_tokens"] // 2
    rows["num_image_pairs"], rows["num_window_pairs"] = patches**2, 64 * patches
    stream.write(rows.tobytes())
    return int(rows["end"][-1])


def large_order(folder: str) -> SampleOrder:
    """The order of the samples in ``folder``: packs of even cost for 4096 replicas."""
    store = Store((Path(folder),))
    kept = store.load(KEY, "")
    assert kept is not None, "it has just been saved"
    numbers = store.numbers(KEY, lambda: np.empty(0, NUMBER))
    sizes = SampleSizes(shipped_model("7b"), Columns((kept.rows,), numbers))
    stream, deal = SAMPLERS["BalancedBatchSampler with packing"].order(
        sizes, BatchShares(DP_SIZE, Budget(8192), num_stages=2), seed=1)
    return SampleOrder(stream, deal, GLOBAL_BATCH_SIZE, 0)


def planning(folder: Path) -> dict[str, float]:
    """CPU time of this process for a step that another process plans, and that process's memory."""
    began = time.perf_counter()
    steps = planned_steps(partial(large_order, str(folder)), 1)
    next(steps)
    first, times = time.perf_counter(), []
    (planner,) = multiprocessing.active_children()
    for _ in range(4):
        begin = time.thread_time()
        next(steps)
        times.append(time.thread_time() - begin)
    memory = psutil.Process(planner.pid).memory_full_info()
    return {"first_step_seconds": first - began, "owner_milliseconds_per_step": 1e3 * max(times),
            "resident_megabytes": memory.rss / 1e6, "of_these_shared_megabytes": memory.shared / 1e6}


def at_scale(num_rows: int) -> dict[str, Any]:
    """Memory and planning times of one node that trains on ``num_rows`` samples."""
    with tempfile.TemporaryDirectory() as folder:
        saved = in_fresh_process("saving", Path(folder), "--rows", str(num_rows))
        return {"rows": num_rows, "global_batch_size": GLOBAL_BATCH_SIZE, "dp_size": DP_SIZE, "versions": versions(),
                "index": saved, "planning": planning(Path(folder))}  # fmt: skip


ALONE: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "start": lambda flags: start(flags.folder, flags.processes),
    "saving": lambda flags: saving(flags.folder, flags.rows),
}
"""What ``--alone`` names."""


def in_fresh_process(name: str, folder: Path, *words: str) -> dict[str, float]:
    """What one of ``ALONE`` returns in a new process, with these flags."""
    output = folder / f"{name}.json"
    subprocess.run([sys.executable, "-m", "benchmarks.data.index", "--alone", name, "--folder", str(folder), *words,
                    "--output", str(output)], check=True)  # fmt: skip
    return json.loads(output.read_text())


def measure(num_records: int, num_images: int, num_processes: int, folder: Path) -> dict[str, Any]:
    """Both starts."""
    write_inputs(folder, num_records, num_images)
    first = start(folder, num_processes)
    second = in_fresh_process("start", folder, "--processes", str(num_processes))
    return {
        "records": num_records, "file_megabytes": (folder / "records.json").stat().st_size / 1e6,
        "index_megabytes": sum(path.stat().st_size for path in (folder / "cache").glob("*.rows")) / 1e6,
        "processes": num_processes, "versions": versions(),
        "first_start": first | {"samples_per_second": num_records / first["dataset_seconds"]},
        "second_start": second,
    }  # fmt: skip


def main(argv: list[str]) -> None:
    parser = command(__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=num_cores())
    parser.add_argument("--rows", type=int, help="number of generated rows of an index, in place of a data file")
    parser.add_argument("--alone", choices=ALONE, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.alone:
        report(ALONE[flags.alone](flags), flags.output, prints=False)
        return
    if flags.rows:
        result = at_scale(flags.rows)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(flags.records, flags.images, flags.processes, Path(folder))
    report(result, flags.output)


if __name__ == "__main__":
    main(sys.argv[1:])
