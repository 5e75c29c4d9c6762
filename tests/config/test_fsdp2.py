"""MindSpeed-MM's YAML for FSDP2: what must agree with the flags, what has no effect, and what is refused."""

from pathlib import Path

import pytest

from mm.config.flags import Arguments, parse
from mm.config.fsdp2 import fsdp2_notes
from mm.errors import UserError
from tests.config.test_flags import REQUIRED

BROUGHT = """\
# as in MindSpeed-MM's example
sharding_size: 8
sub_modules_to_wrap:
  - mindspeed_mm.models.common.transformer.TransformerLayer
param_dtype: "bf16"
reduce_dtype: fp32
cast_forward_inputs: True
ignored_modules: [image_encoder]
num_to_forward_prefetch: 2
offload_to_cpu: false
"""
BF16: Arguments = parse([*REQUIRED, "--bf16", "--use-torch-fsdp2"])


def problems(tmp_path: Path, text: str, args: Arguments = BF16, num_copies: int = 8) -> list[str]:
    (tmp_path / "fsdp2.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        fsdp2_notes(str(tmp_path / "fsdp2.yaml"), args, num_copies)
    return [one.removeprefix(f"{tmp_path}/") for one in caught.value.problems]


def test_a_file_that_agrees_has_notes_only(tmp_path: Path) -> None:
    (tmp_path / "fsdp2.yaml").write_text(BROUGHT)
    notes = [str(one) for one in fsdp2_notes(str(tmp_path / "fsdp2.yaml"), BF16, 8)]
    assert any("ignored_modules" in one and "those of the ViT too" in one for one in notes) and len(notes) == 4
    (tmp_path / "fsdp2.yaml").write_text("sharding_size: auto\n")
    assert fsdp2_notes(str(tmp_path / "fsdp2.yaml"), BF16, 3) == ()


def test_what_contradicts_the_flags_is_refused_together(tmp_path: Path) -> None:
    found = problems(tmp_path, BROUGHT, parse(REQUIRED), num_copies=4)
    assert found == [
        "fsdp2.yaml: sharding_size is 8, but weights are sharded over all 4 ranks that hold the same ones (data x "
        "context parallel); write auto",
        "fsdp2.yaml: param_dtype is bf16, but the run is in fp32; change it, or give --bf16 or --fp16"]
    reduced = parse([*REQUIRED, "--bf16", "--grad-reduce-in-bf16"])
    assert problems(tmp_path, "reduce_dtype: fp32", reduced) == [
        "fsdp2.yaml: reduce_dtype is fp32, but gradients are reduced in bf16; change it, or remove "
        "--grad-reduce-in-bf16"]


@pytest.mark.parametrize(("text", "expected"), [
    ("offload_to_cpu: true", "fsdp2.yaml:1: offload_to_cpu is true; supported: false or null"),
    ("sharding_size: eight", "fsdp2.yaml:1: sharding_size is"),
    ("\nwrap_modules: [a]", "fsdp2.yaml:2: wrap_modules is not a known key"),
    ("a: 1\n  b: [", "fsdp2.yaml:2: "),
    ("param_dtype: bf16\nparam_dtype: fp32", "fsdp2.yaml:2: "),
    ("a: !!python/object/apply:os.system [ls]", "fsdp2.yaml:1: "),
    ("- a", "fsdp2.yaml: the file"),
    ("1: 2", "fsdp2.yaml: the key 1 is not text"),
    ("? [a]\n: 1", "fsdp2.yaml: the key ('a',) is not text"),
    ("sharding_size: {? [a] : 1}", "fsdp2.yaml:1: sharding_size is {('a',): 1}; supported"),
    ("sharding_size: &a [*a]", "fsdp2.yaml:1: sharding_size is [[...]]; supported"),
    ("sharding_size: 2020-99-99", "fsdp2.yaml: is not valid YAML: month must be in 1..12"),
    ("param_dtype: '\a'", "fsdp2.yaml: is not valid YAML: unacceptable character #x0007"),
    (f"param_dtype: {'[' * 1000}{']' * 1000}", "fsdp2.yaml: too many levels of nesting"),
])  # fmt: skip
def test_damaged_files_are_refused_with_their_line(tmp_path: Path, text: str, expected: str) -> None:
    assert problems(tmp_path, text)[0].startswith(expected)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UserError, match=r"missing.yaml: cannot be read .* expected a YAML file"):
        fsdp2_notes("missing.yaml", BF16, 8)
