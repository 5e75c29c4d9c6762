"""Training on real videos with the program itself: JSON, data worker, decoder, two pipeline stages."""

import json

from tests.data.clips import VFR, even, write_clip
from tests.data.oracle import photo
from tests.tiny_inputs import metrics, run, write_inputs


def test_two_stages_learn_from_videos(tmp_path):
    inputs = write_inputs(tmp_path)
    write_clip(inputs / "plain.mp4", even(75))
    write_clip(inputs / "turned.mp4", even(60), rotation=90)
    write_clip(inputs / "changing.mp4", VFR)
    photo(200, 90, seed=1).save(inputs / "wide.png")
    questions = (("<video>What moves?", [], ["plain.mp4"]), ("Hello.", [], []), ("<video>", [], ["turned.mp4"]),
                 ("<image> <video> <image>", ["wide.png", "wide.png"], ["changing.mp4"]))
    records = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "A bar."}],
                "images": images, "videos": videos} for text, images, videos in questions]
    (inputs / "samples.json").write_text(json.dumps(records))
    data = json.loads((inputs / "data.json").read_text())
    data["dataset_param"]["attr"]["videos"] = "videos"
    data["dataset_param"]["preprocess_parameters"] |= {"video_max_pixels": 96 * 96, "image_resize": "transformers"}
    (inputs / "data.json").write_text(json.dumps(data))
    run(inputs, "videos", 2, "--lr-warmup-fraction", "0", num_workers=1)
    rows = metrics(inputs, "videos")
    # 2.5 s and 2 s at 2 frames per second, rounded to an even number: two pairs of frames; 3.5 s at a variable rate:
    # three; pictures of 196 x 84 pixels
    grids = [(2, 4, 6), (2, 6, 4), (1, 6, 14), (3, 4, 6), (1, 6, 14)]
    assert all(row["num_images"] == len(grids) for row in rows), rows
    assert {row["num_patches"] for row in rows} == {sum(pairs * height * width for pairs, height, width in grids)}
    assert rows[-1]["loss"] < rows[0]["loss"]
