"""The short form of ``mm-train``: what it is translated into, what it trains, and what it says to other words."""

import gzip
import json
import re
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mm.checkpoint.hf_config import model_from_hf
from mm.config.args import TRAIN
from mm.config.model import read_model
from mm.config.other_trainers import ELSEWHERE, here
from mm.config.run import load_run, resolved
from mm.errors import UserError
from mm.families import FAMILIES
from mm.recipe import read_recipe, run_recipe, translated
from mm.train import main
from tests.files import ROOT, json_lines
from tests.launch import run_ranks
from tests.tiny_inputs import write_inputs

NEEDED = ["--model", "m", "--data", "d.json", "--output", "o"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("recipe"))


def words_of(inputs: Path, name: str, *more: str) -> list[str]:
    """A recipe of the tiny model on the CPU."""
    return ["--model", str(inputs / "hf"), "--data", str(inputs / "samples.json"), "--output", str(inputs / name),
            "--device", "cpu", "--precision", "fp32", "--global-batch-size", "4", "--micro-batch-tokens", "512",
            "--num-workers", "0", *more]  # fmt: skip


@pytest.mark.parametrize("size", FAMILIES[0].config_json.published)
def test_a_published_config_becomes_the_model_json_that_means_the_same(size: str, tmp_path: Path) -> None:
    model = model_from_hf(FAMILIES[0].config_json.published[size])
    recipe, _ = read_recipe([*NEEDED, "--freeze", "vision"])
    (tmp_path / "model.json").write_text(json.dumps(translated(recipe, "m", model, []).model))
    vision, projector, language = (replace(tower, freeze=tower is model.vision)
                                   for tower in (model.vision, model.projector, model.language))
    wanted = replace(model, vision=vision, projector=projector, language=language)
    assert read_model(tmp_path / "model.json").value == wanted


def test_the_default_freezes_vision_and_projector_and_adapters_freeze_nothing_more() -> None:
    model = model_from_hf(FAMILIES[0].config_json.published["3B"])
    recipe, _ = read_recipe(NEEDED)
    towers = {"image_encoder": ("vision_encoder", "vision_projector")}
    found = translated(recipe, "m", model, [])
    assert all(found.model["image_encoder"][one]["freeze"] for one in towers["image_encoder"])
    assert not found.model["text_decoder"]["freeze"] and "--lora-r" not in found.flags
    found = translated(replace(recipe, lora=16), "m", model, ["--lora-alpha", "64"])
    assert not any(found.model["image_encoder"][one]["freeze"] for one in towers["image_encoder"])
    place = list(found.flags).index
    assert found.flags[place("--lora-r") + 1] == "16" and found.flags[place("--lr") + 1] == "0.0001"
    assert found.flags[place("--lora-alpha") + 1] == "64" and found.flags.count("--lora-alpha") == 1


def test_keys_of_a_yaml_file_are_flags_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: hub/name\ndata: [a.json, b.json]\noutput: out\nlr: 1e-4\nlora: 8\nfreeze: null\n"
        "use_precision_aware_optimizer: true\nasync_save: false\ndownload: true\nsave_best: true\n")
    recipe, long_flags = read_recipe([str(tmp_path / "run.yaml"), "--lr", "3e-5", "--log-timers"])
    assert (recipe.model, recipe.data, recipe.lr, recipe.lora) == ("hub/name", ("a.json", "b.json"), 3e-5, 8)
    assert recipe.download and recipe.freeze == ()
    assert long_flags == ["--use-precision-aware-optimizer", "--save-best", "--log-timers"]


@pytest.mark.parametrize(("content", "problem"), [
    ("model: [", "run.yaml cannot be read: while parsing"),
    ("- a\n- b\n", "run.yaml is no recipe; expected lines like 'model: DIR'"),
    ("model: m\ndata: d.json\n", "--output is missing"),
    ("model: m\ndata: d.json\noutput: o\nfreeze: [visoin]\n", "did you mean 'vision'"),
    ("model: m\ndata: d.json\noutput: o\nnproc: many\n", "--nproc is 'many'; expected auto or a number"),
    ("model: m\ndata: d.json\noutput: o\nepochs: 1\nsteps: 5\n", "--epochs and --steps are both given; keep one"),
])  # fmt: skip
def test_mistakes_in_a_recipe_are_reported(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(UserError, match=problem.replace("[", r"\[")):
        read_recipe([str(tmp_path / "run.yaml")])


def test_both_forms_have_the_same_settings_and_losses_to_the_bit(inputs: Path, capsys) -> None:
    """Two stages.  The written script's flags are run by hand, as the long form."""
    lists = ("--nproc", "2", "--vision-layers", "5", "3", "--language-layers", "0", "4", "--steps", "3")
    assert main([*words_of(inputs, "new", *lists, "--write-mindspeed", str(inputs / "old"))]) == 0
    script = (inputs / "old" / "train.sh").read_text()
    flags = script.partition("-m mm.train")[2].replace("\\\n", " ").replace('"$@"', "").split()
    capsys.readouterr()
    assert main([*words_of(inputs, "new", *lists, "--print-config")]) == 0
    printed = json.loads(capsys.readouterr().out)
    settings = json.loads(json.dumps(resolved(load_run([*flags, "--dry-run"], 2))))
    for found in (printed, settings):
        for key in ("mm_model", "mm_data", "dry_run"):
            del found["arguments"][key]
    assert printed == settings

    run_ranks(2, "mm.train", *flags, "--log-dir", str(inputs / "by_hand"), "--save", str(inputs / "by_hand" / "save"),
              "--load", str(inputs / "by_hand" / "save"), "--export-hf", str(inputs / "by_hand" / "model"))
    run_ranks(2, "mm.train", *words_of(inputs, "by_torchrun", *lists))  # ranks of a launcher start no other
    printed = run_ranks(0, "mm.train", *words_of(inputs, "new", *lists)).splitlines()
    first = next(number for number, line in enumerate(printed) if line.startswith("step 1/3 | loss 6.2"))
    assert first <= 12 and max(map(len, printed[first : first + 3])) <= 120
    starts = ["model", "data", "layout", "batch", "memory", "output"]
    assert [line.split()[0] for line in printed if line[:8].rstrip() in starts] == starts
    assert "ViT 5 3, of the LLM 0 4" in "".join(printed)
    assert (inputs / "new" / "logs" / "train.log").read_text().count("| loss: 6.2") == 3
    new, old = json_lines(inputs / "new" / "logs" / "metrics.jsonl"), json_lines(inputs / "by_hand" / "metrics.jsonl")
    launched = json_lines(inputs / "by_torchrun" / "logs" / "metrics.jsonl")
    assert [row["loss"] for row in new] == [row["loss"] for row in old] == [row["loss"] for row in launched]
    assert len(new) == 3
    model, other = (load_file(inputs / name / "model" / "model.safetensors") for name in ("new", "by_hand"))
    assert model.keys() == other.keys() and all(torch.equal(model[name], other[name]) for name in model)


def test_an_adapter_recipe_ends_with_adapters_and_a_whole_model(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("\n".join([
        f"model: {inputs / 'hf'}", f"data: {inputs / 'samples.json'}", f"output: {tmp_path / 'out'}", "device: cpu",
        "precision: fp32", "global_batch_size: 4", "micro_batch_tokens: 512", "lora: 4", "epochs: 0.5",
        "num_workers: 0", "nproc: 1"]))  # fmt: skip
    run_ranks(0, "mm.train", str(tmp_path / "run.yaml"))
    assert (tmp_path / "out/adapters/adapter_config.json").is_file()
    assert (tmp_path / "out/model/model.safetensors").is_file() and (tmp_path / "out/logs/run.html").is_file()


def test_problems_are_reported_before_a_rank_starts(inputs: Path, capsys) -> None:
    assert main(words_of(inputs, "wrong", "--nproc", "3", "--tensor-parallel", "7", "--learning-rate", "1")) == 2
    assert "--learning-rate is here: --lr" in capsys.readouterr().err
    assert main(words_of(inputs, "wrong", "--nproc", "3", "--tensor-parallel", "7")) == 2
    assert "this model allows 1, 2" in capsys.readouterr().err


def test_a_model_that_is_not_here_is_named_with_the_commands_that_fetch_it(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of the hub is a folder with the layout of huggingface_hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    words = words_of(inputs, "hub", "--dry-run")
    words[1] = "Qwen/Qwen2.5-VL-3B-Instruct"
    with pytest.raises(UserError, match=r"hf download Qwen/Qwen2\.5-VL-3B-Instruct .*modelscope download --model"):
        run_recipe(words)
    words[1] = str(tmp_path)
    with pytest.raises(UserError, match=r"which has no config\.json"):
        run_recipe(words)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("coming-from-*.md")), ids=lambda page: page.stem)
def test_every_flag_of_a_coming_from_page_is_answered(page: Path) -> None:
    """In the left columns of the tables."""
    left = re.findall(r"^\| (.+?) \| .+ \|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    flags = {word for one in left for word in re.findall(r"`(--[a-z][\w-]*)", one)}
    known = {flag for flag in flags if (dashed := flag.replace("_", "-")) in TRAIN.flags or dashed in TRAIN.foreign}
    assert page.stem == "coming-from-mindspeed-mm" or all(map(here, flags - known)), flags - known


def test_an_answer_names_flags_that_exist_and_no_flag_of_ours_is_answered() -> None:
    assert not ELSEWHERE.keys() & (TRAIN.flags.keys() | TRAIN.foreign.keys())
    assert {word for one in ELSEWHERE.values() for word in re.findall(r"--[a-z][\w-]*", one)} <= TRAIN.flags.keys()
    with pytest.raises(UserError, match="--per_device_train_batch_size is here: --micro-batch-size"):
        TRAIN.read(TRAIN.split(["--per_device_train_batch_size", "4"]))


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "a.txt")


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(__file__, "a.txt")


WRONG_DATA: dict[str, tuple[Callable[[Path], object], str]] = {
    "samples.tar": (_tar, "is a tar archive: unpack it"),
    "samples.tar.gz": (lambda path: gzip.open(path, "wb").close(), "is a gzip file: unpack it"),
    "samples.zip": (_zip, "is a zip archive"),
    "table.xlsx": (_zip, r"a zip archive \(or an xlsx table\)"),
    "picture.png": (lambda path: Image.new("RGB", (8, 8)).save(path), "is an image: name the file of records"),
    "picture.jpg": (lambda path: Image.new("RGB", (8, 8)).save(path), "is an image: name the file of records"),
    "paper.pdf": (lambda path: path.write_bytes(b"%PDF-1.7\n"), "is a PDF: render its pages"),
    "data.arrow": (lambda path: path.write_bytes(b"ARROW1\0\0"), "is an Arrow file: save it with"),
    "samples.zst": (lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd"), "is a zstd file: unpack it"),
    "folder": (lambda path: path.mkdir(), "which is a directory; name the JSON"),
    "user/set": (lambda path: None, "hf download --repo-type dataset user/set"),
    "https://host/a.json": (lambda path: None, "download it, and give the path of the file"),
}


def test_ten_wrong_kinds_of_data_say_what_they_are(inputs: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (make, said) in WRONG_DATA.items():
        if "/" not in name:
            make(tmp_path / name)
        words = words_of(inputs, "data", "--steps", "2", "--nproc", "1", "--check")
        words[3] = name
        assert main(words) == 2, name
        assert re.search(said, capsys.readouterr().err), name
