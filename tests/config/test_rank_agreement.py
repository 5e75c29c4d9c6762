"""Settings that all ranks must have in common: machines may differ in paths and workers only."""

import json
from pathlib import Path

from mm.config.args import Arguments
from mm.config.data import DataConfig
from mm.config.run import load_run, shared_settings
from mm.config.schema import LOCAL, fields_of
from tests.tiny_inputs import flags_of, write_inputs


def test_every_text_flag_is_a_path_that_machines_may_differ_in() -> None:
    for cls in (Arguments, DataConfig):
        for name, field in fields_of(cls).items():
            assert LOCAL in field.metadata or field.annotation not in (str, str | None), name


def test_machines_may_differ_in_paths_and_workers_only(tmp_path: Path) -> None:
    inputs, elsewhere = write_inputs(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()

    def settings(folder: Path, *flags: str) -> dict[str, str]:
        words = flags_of(inputs, "a", 1, *flags, "--mm-model", str(folder / "model_1.json"), "--mm-data",
                         str(folder / "data.json"), "--log-dir", str(folder))
        return shared_settings(load_run(words, 1, {}))

    for name in ("model_1.json", "data.json"):
        (elsewhere / name).write_bytes((inputs / name).read_bytes())
    ours = settings(inputs)
    assert settings(elsewhere, "--num-workers", "3") == ours and len(ours) > 150
    model = json.loads((inputs / "model_1.json").read_text())
    model["text_decoder"]["rope_theta"] = 5.0
    (elsewhere / "model_1.json").write_text(json.dumps(model))
    theirs = settings(elsewhere, "--lr", "2e-3", "--overlap-grad-reduce")
    assert {name: value for name, value in theirs.items() if ours[name] != value} == {
        "--lr": "0.002", "--overlap-grad-reduce": "true", "language.rope_theta of --mm-model": "5.0"}
