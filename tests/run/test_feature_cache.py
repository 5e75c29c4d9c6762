"""With a frozen ViT's features cached on disk, the second epoch runs no ViT layer and all results are bit-equal."""

import json
from pathlib import Path

import pytest

from tests.data.clips import even, write_clip
from tests.data.oracle import photo
from tests.launch import run_ranks
from tests.tiny_inputs import short_flags, write_inputs

STEPS_OF_EPOCH = 2
NUM_IMAGES = 8
CASES: dict[str, tuple[int, list[int], list[int], bool, tuple[str, ...]]] = {
    # ranks, layers of ViT and LLM on each stage, whether the projector is frozen, and flags
    "one rank": (1, [8], [4], False, ()),
    "ViT on its own stage": (2, [8, 0], [0, 4], False, ()),
    "ViT on two stages": (2, [5, 3], [0, 4], False, ()),
    "ViT on two stages, frozen projector": (2, [5, 3], [0, 4], True, ()),
    "TP 2, whole encoder, sequence": (2, [8], [4], True, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "TP 2, sequence, microbatches encoded together": (
        2, [8], [4], False, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "CP 2, weights in shards": (2, [8], [4], True, (
        "--context-parallel-size", "2", "--data-parallel-sharding-strategy", "optim_grads_params")),
    "DP 2": (2, [8], [4], False, ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")),
}


def write_cases(directory: Path) -> None:
    """Samples with pictures, videos, both and neither; the JSON files and command line of every case."""
    write_inputs(directory)
    write_clip(directory / "plain.mp4", even(75))
    write_clip(directory / "turned.mp4", even(60), rotation=90)
    for number, (width, height) in enumerate(((200, 90), (130, 170), (61, 143), (300, 120), (90, 90))):
        photo(width, height, seed=number).save(directory / f"{number}.{'jpg' if number % 2 else 'png'}")
    questions = (
        ("<video>What moves?", [], ["plain.mp4"]), ("Hello.", [], []), ("<image>What is it?", ["1.jpg"], []),
        ("<image> <video> <image>", ["0.png", "2.png"], ["turned.mp4"]), ("Are you there?", [], []),
        ("How are you?", [], []), ("<image><image>", ["3.jpg", "3.jpg"], []), ("<image>And this?", ["4.png"], []),
    )
    records = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"A bar, {number}."}],
                "images": images, "videos": videos} for number, (text, images, videos) in enumerate(questions)]
    assert len(records) == 4 * STEPS_OF_EPOCH
    (directory / "samples.json").write_text(json.dumps(records))
    data = json.loads((directory / "data.json").read_text())
    data["dataset_param"]["attr"]["videos"] = "videos"
    data["dataset_param"]["preprocess_parameters"] |= {"video_max_pixels": 96 * 96, "image_resize": "transformers"}
    data["dataloader_param"]["shuffle"] = False
    (directory / "data.json").write_text(json.dumps(data))
    for name, (_, vision, language, freezes_projector, flags) in CASES.items():
        model = json.loads((directory / "model_1.json").read_text())
        encoder = model["image_encoder"]
        encoder["vision_encoder"] |= {"pipeline_num_layers": vision, "freeze": True}
        encoder["vision_projector"]["freeze"] = freezes_projector
        model["text_decoder"]["pipeline_num_layers"] = language
        model["encoder_placement"] = "tensor_ranks" if "whole" in name else None
        model["encoder_batch_microbatches"] = 2 if "together" in name else None
        (directory / f"{name}.json").write_text(json.dumps(model))
        (directory / f"{name}.argv.json").write_text(json.dumps(short_flags(
            directory, name, name, "data", 2 * STEPS_OF_EPOCH, "--exit-interval", str(STEPS_OF_EPOCH),
            "--global-batch-size", "4", "--micro-batch-size", "2" if name != "DP 2" else "1", "--lr", "1e-3", *flags)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("features")
    write_cases(directory)
    return directory


@pytest.fixture(scope="module")
def results(directory: Path) -> dict:
    found = {}
    for num_ranks in (1, 2):
        names = [name for name, case in CASES.items() if case[0] == num_ranks]
        run_ranks(num_ranks, "tests.run.feature_worker", str(directory), *names, timeout_seconds=900)
        found |= json.loads((directory / f"results_{num_ranks}.json").read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_results_are_bit_equal_without_the_cache(results: dict, name: str) -> None:
    off, on = (results[name]["metrics"][kind] for kind in ("off", "on"))
    assert len(off) == len(on) == 2 * STEPS_OF_EPOCH
    for key in ("loss", "grad_norm", "num_tokens", "num_patches", "num_images", "consumed_samples"):
        assert [row[key] for row in on] == [row[key] for row in off], key
    assert len({row["loss"] for row in off}) == 2 * STEPS_OF_EPOCH  # otherwise the comparison would prove nothing
    for rank in results[name]["ranks"]:
        assert rank["differing"] == []


@pytest.mark.parametrize("name", CASES)
def test_the_second_epoch_runs_no_layer_of_the_vit(results: dict, name: str) -> None:
    off, on, ranks = *(results[name]["metrics"][kind] for kind in ("off", "on")), results[name]["ranks"]
    assert all(row["num_cached_images"] is None for row in off)
    assert [row["num_cached_images"] for row in on[:STEPS_OF_EPOCH]] == [0] * STEPS_OF_EPOCH
    assert [row["num_cached_images"] for row in on[STEPS_OF_EPOCH:]] == [
        row["num_images"] for row in on[STEPS_OF_EPOCH:]]
    assert sum(row["num_images"] for row in on[STEPS_OF_EPOCH:]) == NUM_IMAGES
    runs = [[[rank[kind][epoch]["num_vision_layer_runs"] for rank in ranks] for epoch in range(2)]
            for kind in ("off", "on")]
    assert runs[0][0] == runs[0][1] == runs[1][0] and sum(runs[0][0]) > 0, runs
    assert runs[1][1] == [0] * len(ranks)
    flops = [row["model_flops_per_second_per_device"] * row["step_seconds"] for row in on]
    assert sum(flops[STEPS_OF_EPOCH:]) < 0.999 * sum(flops[:STEPS_OF_EPOCH])


@pytest.mark.parametrize("name", CASES)
def test_the_cache_causes_no_extra_host_reads(results: dict, name: str) -> None:
    for rank in results[name]["ranks"]:
        off, on = ([epoch["num_read_back"] for epoch in rank[kind]] for kind in ("off", "on"))
        assert on[0] == off[0] > 0 and on[1] <= off[1], (off, on)


def test_the_second_epoch_sends_no_patches(results: dict) -> None:
    """The first of the ViT's two stages sends nothing; if it has the projector, it still sends visual tokens."""
    sends = {name: [results[name]["ranks"][0][kind][epoch]["num_sends"] for kind in ("off", "on") for epoch in range(2)]
             for name, case in CASES.items() if len(case[1]) == 2}
    for name in ("ViT on two stages", "ViT on two stages, frozen projector"):
        assert sends[name][0] == sends[name][1] == sends[name][2] > 0 == sends[name][3], sends
    assert len(set(sends["ViT on its own stage"])) == 1 and sends["ViT on its own stage"][0] > 0, sends


def test_the_fingerprint_is_the_same_in_every_layout(results: dict) -> None:
    """So other layouts can use the same cache."""
    found = {rank["fingerprint"] for result in results.values() for rank in result["ranks"]}
    assert len(found) == 1 and None not in found


@pytest.mark.parametrize("name", CASES)
def test_the_fingerprint_depends_on_the_vit_and_not_on_the_llm(results: dict, name: str) -> None:
    """One element of a layer differs on every tensor-parallel rank."""
    for rank in results[name]["ranks"]:
        with_another_llm, another = rank["fingerprint_of_others"]
        assert with_another_llm == rank["fingerprint"] != another
