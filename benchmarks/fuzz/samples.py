"""Records, images, videos and the index of samples: checked, measured and encoded as before a training."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from benchmarks.fuzz.kind import Kind, Reading
from benchmarks.fuzz.mutate import json_form, json_lines, some, with_json_crc32
from benchmarks.fuzz.settings import inputs
from mm.config.data import DataConfig, read_data
from mm.config.model import read_model
from mm.data.feed.quarantine import Quarantine
from mm.data.index.dataset import Dataset
from mm.data.index.gauge import Gauge
from mm.data.media.picture import image_remarks, image_size, load_pixels
from mm.data.sample import Video
from mm.errors import UserError, refuse
from tests.data.clips import even, write_clip

LONGEST = 512


def _gauge(beside: Path) -> tuple[DataConfig, Gauge]:
    """The tiny inputs beside, with data settings for files in the target, and the gauge of its model."""
    inputs(beside)
    model = read_model(beside / "model_1.json").value
    data = read_data(beside / "data.json").value
    data = replace(data, model_name_or_path=str(beside / "hf"))
    gauge = Gauge.from_config(data, model, LONGEST)
    return replace(data, dataset_dir=".", preprocessing_num_workers=1), gauge


def _records(folder: Path) -> list[dict]:
    """Conversations with and without pictures, which are written beside them."""
    for name in ("a.png", "b.jpg"):
        Image.fromarray(np.full((56, 84, 3), 90, np.uint8)).save(folder / name)
    return [
        {"id": "one", "images": ["a.png"], "messages": [
            {"role": "user", "content": "<image>How many?"},
            {"role": "assistant", "content": "There are 2 <|box_start|>(1,2),(3,4)<|box_end|>."}]},
        {"images": ["a.png", "b.jpg"], "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image><image>And now?"},
            {"role": "assistant", "content": "None."}]},
        {"messages": [{"role": "user", "content": "Text only"}, {"role": "assistant", "content": "Yes."},
                      {"role": "user", "content": "More"}, {"role": "assistant", "content": "No."}]},
    ]  # fmt: skip


def _read_samples(config: DataConfig, gauge: Gauge) -> None:
    """Check and measure every record, and encode the usable ones."""
    dataset = Dataset(config, skips_bad=True, gauge=gauge)
    _ = dataset.notes, dataset.contents(), dataset.lengths
    problems: list[str] = []
    for index in range(len(dataset)):
        try:
            gauge.encoder.encode(dataset[index])
            dataset.name(index)
        except UserError as error:
            problems += error.problems
            dataset.bad_sample(index, error).message()
    refuse([*problems, *(one.message() for one in dataset.skipped)])


def write_records(original: Path, beside: Path) -> Reading:
    config, gauge = _gauge(beside)
    records = _records(original)
    (original / "list.json").write_text(json.dumps(records, indent=1))
    (original / "lines.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    shares = [{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}], "system": "x"},
              {"instruction": "Say", "input": "it", "output": "It", "history": [["a", "b"]]}]
    (original / "forms.json").write_text(json.dumps(shares))

    config = replace(config, attr=replace(config.attr, system="system", history="history"))

    def read() -> None:
        problems: list[str] = []
        for name in ("list.json", "lines.jsonl", "forms.json"):
            try:
                _read_samples(replace(config, dataset=(name,)), gauge)
            except UserError as error:
                problems += error.problems
        refuse(problems)

    return read


def write_parquet(original: Path, beside: Path) -> Reading:
    config, gauge = _gauge(beside)
    rows = [{key: json.dumps(value) if key == "id" else value for key, value in one.items()}
            for one in _records(beside)]
    content = BytesIO()
    Image.fromarray(np.full((56, 84, 3), 90, np.uint8)).save(content, "PNG")
    for row in rows:
        row["images"] = [{"bytes": content.getvalue(), "path": None} for _ in row.get("images", ())]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), original / "rows.parquet", row_group_size=2)
    return lambda: _read_samples(replace(config, dataset=("rows.parquet",)), gauge)


def write_index(original: Path, beside: Path) -> Reading:
    """The index that an earlier start has made, and the list of bad samples of a killed run."""
    config, gauge = _gauge(beside)
    records = _records(original)
    (original / "list.json").write_text(json.dumps([*records, {"messages": 3}]))
    config = replace(config, dataset=("list.json",), cache_dir=".mm-index", val_rate=0.4)
    with suppress(UserError):  # about the last record
        _read_samples(config, gauge)
    (original / "bad_samples.jsonl").write_text('{"dataset": "a", "index": 3}\n{"dataset": "b", "index": 4}\n')

    def read() -> None:
        Quarantine(10, 0.5, Path("bad_samples.jsonl"))
        try:
            _read_samples(config, gauge)
        except UserError as error:
            refuse(problem for problem in error.problems if "record 3" not in problem)

    return read


def write_pictures(original: Path, beside: Path) -> Reading:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 4), dtype=np.uint8)
    for name, mode in (("a.png", "RGBA"), ("b.jpg", "RGB"), ("c.gif", "P"), ("d.webp", "RGB"), ("e.tiff", "RGB"),
                       ("f.bmp", "RGB"), ("g.png", "P"), ("h.ppm", "RGB"), ("i.ico", "RGBA")):
        Image.fromarray(pixels).convert(mode).save(original / name)
    def read() -> None:
        problems: list[str] = []
        for path in sorted(Path().iterdir()):
            if path.stat(follow_symlinks=False).st_nlink == 1:  # the others are as they were
                with_problems(problems, lambda name=str(path): (
                    image_size(name), image_remarks(name), load_pixels(name)))
        refuse(problems)

    return read


def with_problems(problems: list[str], read: Callable[[], object]) -> None:
    try:
        read()
    except UserError as error:
        problems += error.problems


def write_videos(original: Path, beside: Path) -> Reading:
    videos = _gauge(beside)[1].encoder.videos
    for name, codec in (("a.mp4", "libx264"), ("b.mkv", "libx264"), ("c.avi", "mpeg4")):
        write_clip(original / name, even(8), (64, 48), codec)
    frames = [Image.fromarray(np.full((48, 64, 3), 30 * number, np.uint8)) for number in range(6)]
    frames[0].save(original / "d.gif", save_all=True, append_images=frames[1:], duration=100)
    def read() -> None:
        problems: list[str] = []
        for path in sorted(Path().iterdir()):
            if path.stat(follow_symlinks=False).st_nlink == 1:
                with_problems(problems, lambda name=str(path): videos.patches(videos.plan(Video(name))))
        refuse(problems)

    return read


SAMPLES_KINDS = (
    Kind("records", write_records, {"list.json": json_form, "lines.jsonl": json_lines, "forms.json": json_form},
         words=("dataset",)),
    Kind("Parquet records", write_parquet, {"rows.parquet": some}, 0.6, words=("dataset",)),
    Kind("sample index", write_index, {".mm-index/*.json": with_json_crc32("json_crc32"), ".mm-index/*.npy": some,
         ".mm-index/files/*": with_json_crc32("json_crc32"), "bad_samples.jsonl": json_lines},
         damages_folder=False, words=("list.json",)),
    Kind("images", write_pictures, {"*": some}, words=("image",)),
    Kind("videos", write_videos, {"*": some}, 0.5, words=("video",)),
)
