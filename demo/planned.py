"""Plans the demo's pipeline with mm-plan, and compares the planned step with the measured one.

This machine is calibrated with the layers of the demo's model.  Tensor-parallel size, number of stages and batch stay
as they are; mm-plan chooses the layers of each stage, chunks and recomputation.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.stages import DemoError, plan_script

KEPT = "TP=1,CP=1,PP=2,MBS=1,ENCODER=cut"


@dataclass(frozen=True)
class Planner:
    """mm-plan for the run with the script's ``variables``; its files are in ``folder``."""

    folder: Path
    variables: dict[str, str]

    @property
    def calibration(self) -> Path:
        return self.folder / "calibration.json"

    @property
    def model_json(self) -> Path:
        """The model JSON with the planned lists."""
        return self.folder / "model.json"

    def plan(self) -> None:
        """Calibrate, search, and write the planned layout."""
        self.folder.mkdir()
        self._run("calibrate", "calibrate", "--output", self.calibration, "--num-processes", "2")
        self._run("layouts", "--calibration", self.calibration, "--fix", KEPT, "--write", self.folder)

    def lists(self) -> tuple[Any, Any]:
        """Layers of the ViT and of the LLM on each stage, or in each chunk of each stage."""
        model = json.loads(self.model_json.read_text(encoding="utf-8"))
        return (model["image_encoder"]["vision_encoder"]["pipeline_num_layers"],
                model["text_decoder"]["pipeline_num_layers"])

    def compare(self, logs: Path, iteration: int) -> tuple[float, float]:
        """Draw the planned step above the measured one; returns the seconds of both."""
        text = self._run("compare", "compare", logs, "--calibration", self.calibration, "--timeline", self.folder)
        found = re.search(r"^Step +measured ([\d.]+) s, predicted ([\d.]+) s", text, re.MULTILINE)
        if found is None or not (self.folder / f"compared_step_{iteration}.svg").is_file():
            raise DemoError(f"mm-plan compare printed no step; see {self.folder / 'compare.log'}")
        return float(found[2]), float(found[1])

    def _run(self, name: str, *words: str | Path) -> str:
        return plan_script(self.variables, words, self.folder / f"{name}.log")
