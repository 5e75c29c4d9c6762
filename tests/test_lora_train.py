"""Adapters through the program itself: a run that stops and goes on, its exports, and what it says to mistakes."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from mm import train
from mm.checkpoint.adapters import mindspeed_to_peft, peft_to_mindspeed
from mm.checkpoint.convert import hf_to_mm
from mm.checkpoint.directories import LATEST_FILE
from mm.checkpoint.mindspeed_layout import Format, Layout, Storage
from mm.checkpoint.peft import AdapterDirectory
from mm.checkpoint.training_manifest import TrainingDirectory
from mm.config.args import Arguments
from mm.config.run import load_run
from mm.errors import UserError
from mm.run.sources import with_start
from tests.files import ROOT
from tests.generation.commands import run_commands
from tests.tiny_inputs import flags_of, metrics, run, write_inputs

LORA = ("--lora-target-modules", "q_proj", "v_proj", "linear_fc1", "mlp.0", "--lora-r", "4", "--lora-alpha", "8",
        "--lora-dropout", "0.1")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``hf`` is a model tuned from the ``ancestor``, which ``model_name_or_path`` names with a relative path."""
    directory = write_inputs(tmp_path_factory.mktemp("lora"))
    shutil.copytree(directory / "hf", directory / "ancestor")
    weights = load_file(directory / "hf" / "model.safetensors")
    save_file({name: one * 1.5 for name, one in weights.items()}, directory / "ancestor" / "model.safetensors",
              {"format": "pt"})
    data = json.loads((directory / "data.json").read_text())
    ancestor = os.path.relpath(directory / "ancestor", ROOT)
    data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = ancestor
    (directory / "data.json").write_text(json.dumps(data))
    return directory


@pytest.fixture(scope="module")
def trained(inputs: Path) -> Path:
    """Six steps from the checkpoint, with both exports."""
    out = inputs / "whole"
    run(inputs, "whole", 1, "--load", str(inputs / "hf"), *LORA, "--export-hf", str(out / "adapter"),
        "--export-merged-hf", str(out / "merged"))
    return out


def test_stop_and_continue_equals_the_uninterrupted_run(inputs: Path, trained: Path) -> None:
    first = run(inputs, "halves", 1, "--load", str(inputs / "hf"), *LORA, "--exit-interval", "3")
    assert "loaded a Hugging Face checkpoint" in first
    second = run(inputs, "halves", 1, "--load", str(inputs / "halves" / "save"), "--load-base-model",
                 str(inputs / "hf"), *LORA, "--export-hf", str(inputs / "halves" / "adapter"))
    assert f"loaded a training checkpoint from {inputs / 'halves' / 'save'} beside {inputs / 'hf'}" in second
    whole, halves = metrics(inputs, "whole"), metrics(inputs, "halves")
    for key in ("loss", "lr", "grad_norm", "consumed_samples"):
        assert [row[key] for row in whole] == [row[key] for row in halves], key
    exports = [(path / "adapter" / "adapter_model.safetensors").read_bytes() for path in (trained, inputs / "halves")]
    assert exports[0] == exports[1]


def test_the_finished_command_leaves_both_exports_alone(inputs: Path, trained: Path) -> None:
    files = [trained / "adapter" / "adapter_model.safetensors", trained / "merged" / "model.safetensors"]
    before = [(one.read_bytes(), one.stat().st_mtime_ns) for one in files]
    again = ("--load", str(inputs / "hf"), *LORA, "--export-hf", str(trained / "adapter"), "--export-merged-hf",
             str(trained / "merged"))
    said = run(inputs, "whole", 1, *again)
    assert said.count("is already identical; nothing was written.") == 2
    assert [(one.read_bytes(), one.stat().st_mtime_ns) for one in files] == before


def test_exports_are_what_peft_reads_and_merges(inputs: Path, trained: Path) -> None:
    """A few adapters beside the model: the checkpoint and the directory of PEFT are small."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(inputs / "hf", dtype=torch.float32)
    peft = PeftModel.from_pretrained(model, trained / "adapter")
    active = [one for name, one in peft.named_parameters() if ".lora_B." in name]
    assert active and all(one.abs().sum() > 0 for one in active)
    merged = peft.merge_and_unload().state_dict()
    ours = Qwen2_5_VLForConditionalGeneration.from_pretrained(trained / "merged", dtype=torch.float32).state_dict()
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(inputs / "hf", dtype=torch.float32).state_dict()
    assert any(not torch.equal(ours[name], base[name]) for name in ours)
    for name, tensor in merged.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)
    size = sum(one.numel() for one in load_file(trained / "adapter" / "adapter_model.safetensors").values())
    saved = [piece for piece in TrainingDirectory.open(trained / "save").manifest.pieces if piece.kind == "weight"]
    assert sum(piece.stored.num_bytes for piece in saved) == 4 * size < sum(one.numel() for one in base.values())


def test_the_lines_of_the_page_answer_with_an_export(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code in docs/train.md, which loads an export in transformers, gives the answer of ``mm.generate``."""
    Image.effect_noise((120, 90), 64).convert("RGB").save(tmp_path / "image.png")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "train.md").read_text(), re.DOTALL)
    exec(code.replace("EXPORT", str(trained / "merged")).replace("IMAGE.jpg", str(tmp_path / "image.png")), {})
    said = capsys.readouterr().out
    words = ["--device", "cpu", "--max-new-tokens", "64", "--prompt", "What is in the picture?", "--image",
             str(tmp_path / "image.png"), "--load", str(trained / "merged")]
    (answer,) = run_commands([{"argv": words}])
    assert said.strip() == answer["out"].strip()


def test_answers_are_those_of_the_merged_model(inputs: Path, trained: Path) -> None:
    """Asked of PEFT's directory, of the training checkpoint, and of the whole model; another base is refused.

    PEFT's directory names the model that was trained on, not its ancestor.
    """

    def asked(weights: Path, *flags: str) -> dict[str, list[str]]:
        return {"argv": ["--device", "cpu", "--max-new-tokens", "12", "--prompt", "What is to be seen?", "--load",
                         str(weights), *flags]}  # fmt: skip

    on_base, on_merged = (("--model-name-or-path", str(path)) for path in (inputs / "hf", trained / "merged"))
    merged, base, adapter, alone, checkpoint, other, without = run_commands([
        asked(trained / "merged"), asked(inputs / "hf"), asked(trained / "adapter", *on_base),
        asked(trained / "adapter"), asked(trained / "save", *on_base), asked(trained / "adapter", *on_merged),
        asked(trained / "save")])
    assert merged["status"] == 0 and merged["out"] != base["out"]
    for found in (adapter, alone, checkpoint):
        assert found["status"] == 0, found["err"]
        assert found["out"] == merged["out"]
    stated = f"adapter_config.json: base_model_name_or_path is {inputs / 'hf'}: the adapters are used with that model"
    assert stated in alone["err"] and stated not in adapter["err"]
    assert other["status"] == 2 and "adapters of another base model" in other["err"]
    assert without["status"] == 2 and "give --model-name-or-path" in without["err"]


def checked(inputs: Path, *flags: str) -> int:
    """The exit status of the check of a run."""
    return train.main(flags_of(inputs, "checked", 1, "--check", *flags))


def refused(inputs: Path, capsys: pytest.CaptureFixture, *flags: str) -> list[str]:
    """What the check of a run says of ``flags``, without a traceback and with exit status 2."""
    assert checked(inputs, *flags) == 2
    return capsys.readouterr().err.splitlines()


def test_mistakes_are_reported_at_once(inputs: Path, trained: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--lora-target-modules", "q_prj", "v_proj", "--lora-rank-pattern", "k_proj=2"]
    found = refused(inputs, capsys, "--load", str(inputs / "hf"), *flags)
    assert len(found) == 2 and "(did you mean 'q_proj'?)" in found[0] and "'k_proj'" in found[1]
    (found,) = refused(inputs, capsys, "--lora-target-modules", "q_proj", "--lora-r", "0")
    assert found == "error: --lora-r is 0; expected an integer of at least 1"
    found = refused(inputs, capsys, "--load-base-model", str(inputs / "hf"), "--export-merged-hf", "x")
    assert len(found) == 2 and all("there are no adapters" in one for one in found)
    base = ["--load-base-model", str(inputs / "hf")]
    (found,) = refused(inputs, capsys, "--load", str(trained / "adapter"), *base, *LORA[:-4], "--lora-r", "4")
    assert "give the same --lora-alpha" in found
    (found,) = refused(inputs, capsys, "--load", str(trained / "save"), *base, *LORA, "--lora-r", "8")
    assert "but this run trains ([8, " in found and "give the --lora-* flags" in found
    (found,) = refused(inputs, capsys, "--load", str(trained / "save"))
    assert "holds adapters (LoRA) of the model in" in found
    (found,) = refused(inputs, capsys, "--load", str(inputs / "hf"), *base, *LORA)
    assert "is a whole model, but --load-base-model names another" in found


def test_what_a_run_of_adapters_begins_with_and_what_stands_beside_them_later(inputs: Path, trained: Path) -> None:
    """``--pretrained-checkpoint`` may be a whole model or adapters; the whole model stays the base at a resume."""
    def started(save: Path, pretrained: Path) -> Arguments:
        flags = flags_of(inputs, "begun", 1, "--load", str(save), "--save", str(save), *LORA)
        return with_start(load_run([*flags, "--pretrained-checkpoint", str(pretrained)], 1, {})).args

    new, old, hf, adapter = inputs / "begun" / "save", trained / "save", inputs / "hf", trained / "adapter"
    for begun in (started(new, hf), started(new, adapter)):
        assert begun.load in (str(hf), str(adapter)) and begun.load_base_model is None
        assert begun.no_load_optim and begun.no_load_rng
    resumed = started(old, hf)
    assert (resumed.load, resumed.load_base_model, resumed.no_load_optim) == (str(old), str(hf), False)
    assert started(old, adapter).load_base_model is None


def test_a_converted_checkpoint_names_the_model_that_it_was_trained_on(
    inputs: Path, trained: Path, tmp_path: Path
) -> None:
    """By default what the checkpoint states; a directory is compared with it, a name on a hub cannot be."""
    for given, named in ((None, str(inputs / "hf")), ("Qwen/Tuned", "Qwen/Tuned")):
        mindspeed_to_peft(trained / "save", tmp_path / str(given), None, given, None).run(num_workers=1)
        assert AdapterDirectory.open(tmp_path / str(given)).base_name == named
    with pytest.raises(UserError, match=rf"another base model than .*\({inputs / 'hf'}\) as --cfg.hf_config.hf_dir"):
        mindspeed_to_peft(trained / "save", tmp_path / "other", None, str(inputs / "ancestor"), None)


def test_adapters_that_mindspeed_trained_go_on(inputs: Path, trained: Path, capsys: pytest.CaptureFixture) -> None:
    """At their iteration, with a new optimizer, which must be asked for; all six steps are done, so nothing changes.

    The base model comes from a converter of MindSpeed-MM in another order, which a note reports.
    """
    directory, base, layout = inputs / "mindspeed", inputs / "mindspeed_base", Layout(((8,),), ((4,),), 1)
    peft_to_mindspeed(trained / "adapter", directory, layout, Format.TORCH, str(inputs / "hf")).run(num_workers=1)
    hf_to_mm(inputs / "hf", base, layout, Storage(Format.TORCH, whole_vision_qkv=True)).run(num_workers=1)
    (base / "manifest.json").unlink()
    (directory / "manifest.json").unlink()
    (directory / "release").rename(directory / "iter_0000006")
    (directory / LATEST_FILE).write_text("6")
    start = ["--load", str(directory), "--load-base-model", str(base), *LORA]
    (found,) = refused(inputs, capsys, *start)
    assert "is a training checkpoint of MindSpeed-MM (iteration 6)" in found and "--no-load-optim" in found
    said = run(inputs, "went_on", 1, *start, "--no-load-optim", "--export-hf", str(inputs / "went_on" / "adapter"))
    assert f"loaded a converted checkpoint from {directory} beside {base}, iteration 6" in said
    assert f"note: {base} has the ViT's qkv as a whole" in said
    directories = trained / "adapter", inputs / "went_on" / "adapter"
    exports = [load_file(path / "adapter_model.safetensors") for path in directories]
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(one, exports[1][name]) for name, one in exports[0].items())
