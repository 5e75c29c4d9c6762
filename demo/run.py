"""The demo from end to end: ``make demo`` or ``python -m demo.run``.

A tiny Qwen2.5-VL with random weights learns to read scanned digits, in images and in short videos, on two CPU
processes, in pipeline stages whose layers mm-plan has chosen.  The run is interrupted and resumes under another
parallel layout, the result is exported, and ``transformers`` alone answers questions on held-out images and videos
with it.  Then adapters for the export learn another question.  Every training step goes through the shell script that
a user would run.  The losses of the first steps must match the golden ones of the device.  With
``--quick`` only these steps and a few steps of the adapters are trained, and no accuracy is required: that tests the
path, not the learning.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from demo import digits, evaluate, even_odd, figures, golden, tiny_checkpoint
from demo.planned import Planner
from demo.stages import ROOT, Clock, DemoError, run_python, run_script
from mm.device.device import PLATFORMS
from mm.errors import UserError
from mm.files import METRICS_FILE

EXAMPLES = ROOT / "examples/qwen2.5vl"
SEED = 0
_MARK = "demo.txt"
MINIMUM_ACCURACY = 0.95
MINIMUM_VIDEO_ACCURACY = 0.8
MINIMUM_EVEN_ODD_ACCURACY = 0.9
PICTURED_ITERATION = 10
"""The iteration whose timeline is drawn: past the start, and included in the quick run."""
MAXIMUM_LOGITS_DIFFERENCE = 1e-3
"""Two fp32 implementations of one model, with logits around 10: rounding differences are a hundredth of this."""


@dataclass(frozen=True)
class Plan:
    """How long the demo trains and what it requires."""

    schedule_iters: int
    """Length of the learning-rate schedule.  A run that stops earlier follows the beginning of the full one."""
    train_iters: int
    exit_iteration: int
    """The run is interrupted after this iteration and resumes under the second layout."""
    num_held_out: int | None
    """Number of held-out samples to answer; None for all."""
    minimum_accuracy: float
    minimum_video_accuracy: float
    even_odd_iters: int
    """Training steps of the adapters."""
    minimum_even_odd_accuracy: float
    """With the adapters."""


# The last 100 steps of the schedule are not worth their half minute: the learning rate is below 5% of its peak there.
FULL = Plan(
    schedule_iters=800, train_iters=700, exit_iteration=400, num_held_out=None, minimum_accuracy=MINIMUM_ACCURACY,
    minimum_video_accuracy=MINIMUM_VIDEO_ACCURACY, even_odd_iters=100,
    minimum_even_odd_accuracy=MINIMUM_EVEN_ODD_ACCURACY,
)  # fmt: skip
QUICK = Plan(
    schedule_iters=FULL.schedule_iters, train_iters=golden.NUM_STEPS, exit_iteration=10, num_held_out=24,
    minimum_accuracy=0.0, minimum_video_accuracy=0.0, even_odd_iters=2, minimum_even_odd_accuracy=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A parallel layout of the two processes."""

    tensor: int
    pipeline: int
    vision: Sequence[Any]
    language: Sequence[Any]

    def __str__(self) -> str:
        return f"TP={self.tensor} PP={self.pipeline} ViT {list(self.vision)} LLM {list(self.language)}"


PIPELINE = Layout(tensor=1, pipeline=2, vision=(5, 3), language=(0, 4))
"""Its lists are where mm-plan begins."""
TENSOR = Layout(tensor=2, pipeline=1, vision=(8,), language=(4,))


@dataclass(frozen=True)
class Run:
    """The files of one demo."""

    directory: Path
    device: str

    def __truediv__(self, name: str) -> Path:
        return self.directory / name

    @property
    def data_json(self) -> Path:
        return self / "data.json"

    @property
    def save(self) -> Path:
        return self / "save"

    @property
    def logs(self) -> Path:
        return self / "logs"

    @property
    def timeline(self) -> Path:
        return self.logs / f"pipeline_step_{PICTURED_ITERATION}.svg"

    @property
    def export(self) -> Path:
        return self / "hf"

    def model_json(self, layout: Layout) -> Path:
        return self / f"model_tp{layout.tensor}_pp{layout.pipeline}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="train a few steps and require no accuracy")
    parser.add_argument("--device", choices=[one.name for one in reversed(PLATFORMS)], default="cpu",
                        help="two of these (default: cpu)")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs/demo", help="cleared first (default: runs/demo)")
    flags = parser.parse_args()
    transformers_logging.disable_progress_bar()
    try:
        demo(Run(flags.directory.resolve(), flags.device), QUICK if flags.quick else FULL)
    except (DemoError, UserError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        sys.exit(1)


def demo(run: Run, plan: Plan) -> None:
    """Run all stages in order; docs/start.md describes the files they leave."""
    clock = Clock()
    _clear(run.directory)
    clock.stage("writing 1,797 scanned digits and a tiny checkpoint")
    dataset = prepare(run, plan)

    clock.stage("measuring this machine and planning the layout of two pipeline stages with mm-plan")
    planner = Planner(run / "plan", variables(run, plan, PIPELINE, run / "checkpoint"))
    planner.plan()
    vision, language = planner.lists()
    planned = Layout(PIPELINE.tensor, PIPELINE.pipeline, vision, language)
    shutil.copy(planner.model_json, run.model_json(planned))

    clock.stage(f"training on 2 processes, {planned}, steps 1 to {plan.exit_iteration}")
    train(run, plan, planned, run / "checkpoint", 1,
          ("--exit-interval", str(plan.exit_iteration), "--profile-pipeline", str(PICTURED_ITERATION)))
    predicted, measured = planner.compare(run.logs, PICTURED_ITERATION)
    first_resumed = plan.exit_iteration + 1
    clock.stage(f"resuming as {TENSOR}, steps {first_resumed} to {plan.train_iters}, then exporting")
    train(run, plan, TENSOR, run.save, first_resumed, ("--export-hf", str(run.export)))
    records = read_metrics(run, plan)
    golden_difference = golden.compare([record["loss"] for record in records], run.device)

    difference = prove(run, dataset, clock)
    task = even_odd.prepare(dataset, run.data_json, run.model_json(PIPELINE), run.export, run / "even_odd",
                            run.device)
    learnt = even_odd.learn(task, plan.even_odd_iters, clock)

    clock.stage("drawing the loss curve and the answers")
    answers, video_answers = read_answers(run, dataset)
    figures.draw_loss(records, plan.exit_iteration, (str(planned), str(TENSOR)), run / "loss.png")
    figures.draw_answers(answers, "digits", run / "answers.png")
    figures.draw_answers(video_answers, "videos", run / "video_answers.png")
    summary = {
        "quick": plan == QUICK,
        "held_out_accuracy": _accuracy(answers),
        "num_held_out": len(answers),
        "held_out_video_accuracy": _accuracy(video_answers),
        "num_held_out_videos": len(video_answers),
        "hf_logits_max_abs_diff": difference,
        "even_odd_accuracy_before_lora": learnt.before,
        "even_odd_accuracy_after_lora": learnt.after,
        "num_even_odd_questions": learnt.num_questions,
        "golden_losses_max_rel_diff": golden_difference,
        "final_loss": records[-1]["loss"],
        "train_iters": plan.train_iters,
        "interrupted_after": plan.exit_iteration,
        "layouts": [str(planned), str(TENSOR)],
        "predicted_step_seconds": predicted,
        "measured_step_seconds": measured,
        "seconds": round(clock.seconds(), 1),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "transformers")},
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    conclude(run, plan, summary, learnt)


def prove(run: Run, dataset: digits.DigitsDataset, clock: Clock) -> float:
    """Answer with ``transformers`` alone; returns the largest difference between its logits and the trainer's."""
    clock.stage("answering held-out images and videos with transformers alone")
    run_python("demo.evaluate", [
        "--model", str(run.export), "--dataset", str(dataset.held_out),
        "--answers", str(run / "answers.json"), "--logits", str(run / "logits_transformers.safetensors"),
    ], run / "evaluate.log")  # fmt: skip
    clock.stage("comparing logits with the trainer's own")
    run_python("demo.trainer_logits", [
        "--model", str(run.export), "--mm-model", str(run.model_json(TENSOR)), "--mm-data", str(run.data_json),
        "--dataset", str(dataset.held_out), "--logits", str(run / "logits_trainer.safetensors"),
    ], run / "logits.log")  # fmt: skip
    return max_abs_diff(run / "logits_transformers.safetensors", run / "logits_trainer.safetensors")


def prepare(run: Run, plan: Plan) -> digits.DigitsDataset:
    """Write images, dataset, checkpoint and the JSON files of both layouts."""
    dataset = digits.write(run / "digits", SEED, num_held_out_samples=plan.num_held_out)
    tiny_checkpoint.build(run / "checkpoint", digits.texts(dataset.train), SEED)
    data = json.loads((EXAMPLES / "data_tiny.json").read_text(encoding="utf-8"))
    data["dataset_param"]["preprocess_parameters"]["model_name_or_path"] = str(run / "checkpoint")
    data["dataset_param"]["basic_parameters"] |= {
        "dataset_dir": str(dataset.directory), "dataset": str(dataset.train),
    }  # fmt: skip
    _write_json(run.data_json, data)
    for layout in (PIPELINE, TENSOR):
        model = json.loads((EXAMPLES / "model_tiny.json").read_text(encoding="utf-8"))
        model["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = list(layout.vision)
        model["text_decoder"]["pipeline_num_layers"] = list(layout.language)
        _write_json(run.model_json(layout), model)
    return dataset


def train(run: Run, plan: Plan, layout: Layout, load: Path, first: int, flags: tuple[str, ...]) -> None:
    """Run the tiny script under ``layout`` from the checkpoint ``load``, starting at iteration ``first``."""
    last = plan.exit_iteration if first == 1 else plan.train_iters
    flags = ("--lr-decay-iters", str(plan.schedule_iters), *flags)
    log = run / f"train_tp{layout.tensor}_pp{layout.pipeline}.log"
    run_script(variables(run, plan, layout, load), flags, log, first, last)


def variables(run: Run, plan: Plan, layout: Layout, load: Path) -> dict[str, str]:
    """The variables of the tiny script."""
    return {
        "DEVICE": run.device,
        "NPUS_PER_NODE": "2",
        "TP": str(layout.tensor),
        "PP": str(layout.pipeline),
        "MM_DATA": str(run.data_json),
        "MM_MODEL": str(run.model_json(layout)),
        "LOAD_PATH": str(load),
        "SAVE_PATH": str(run.save),
        "LOG_DIR": str(run.logs),
        "TRAIN_ITERS": str(plan.train_iters),
    }


def read_metrics(run: Run, plan: Plan) -> list[dict]:
    """The steps in metrics.jsonl.  Raises DemoError unless both runs together have every iteration exactly once."""
    rows = map(json.loads, (run.logs / METRICS_FILE).read_text().splitlines())
    records = [row for row in rows if row["kind"] == "step"]
    iterations = [record["iteration"] for record in records]
    if iterations != list(range(1, plan.train_iters + 1)):
        raise DemoError(f"metrics.jsonl has iterations {iterations}; expected 1 to {plan.train_iters}, once each")
    return records


def read_answers(run: Run, dataset: digits.DigitsDataset) -> tuple[list[figures.Answer], list[figures.Answer]]:
    """The answers on images and on videos."""
    samples = json.loads(dataset.held_out.read_text(encoding="utf-8"))
    given = json.loads((run / "answers.json").read_text(encoding="utf-8"))
    of_images, of_videos = [], []
    for sample, answer in zip(samples, given, strict=True):
        (name,) = (*sample["images"], *sample["videos"])
        path = dataset.directory / name
        frames = evaluate.read_video(path)[0] if sample["videos"] else [Image.open(path).convert("L")]
        (of_videos if sample["videos"] else of_images).append(
            figures.Answer(frames, evaluate.expected_answer(sample), answer)
        )
    return of_images, of_videos


def _accuracy(answers: list[figures.Answer]) -> float:
    return sum(answer.right for answer in answers) / len(answers)


def max_abs_diff(transformers_file: Path, trainer_file: Path) -> float:
    """The largest difference between two files of logits.  Raises DemoError unless both are for the same tokens."""
    expected, found = load_file(transformers_file), load_file(trainer_file)
    if expected.keys() != found.keys():
        raise DemoError(f"{transformers_file} has {sorted(expected)}, {trainer_file} has {sorted(found)}")
    differing = [name for name in expected if name.startswith("token_ids") and not expected[name].equal(found[name])]
    if differing:
        name = differing[0]
        raise DemoError(f"{name} is {expected[name].tolist()} in transformers and {found[name].tolist()} in the "
                        f"trainer")
    return max(float((expected[name] - found[name]).abs().max()) for name in expected if name.startswith("logits"))


def conclude(run: Run, plan: Plan, summary: dict, learnt: even_odd.Learnt) -> None:
    """Print the results.  Raises DemoError when they fall short of the requirements."""
    difference = summary["hf_logits_max_abs_diff"]
    if difference > MAXIMUM_LOGITS_DIFFERENCE:
        raise DemoError(f"the exported logits differ by {difference:.2e}; at most {MAXIMUM_LOGITS_DIFFERENCE} allowed")
    accuracy, video_accuracy = summary["held_out_accuracy"], summary["held_out_video_accuracy"]
    for what, found, due in (("images", accuracy, plan.minimum_accuracy),
                             ("videos", video_accuracy, plan.minimum_video_accuracy)):  # fmt: skip
        if found < due:
            raise DemoError(f"{found:.1%} of the answers on held-out {what} are right; {due:.0%} are required")
    learnt.check(plan.minimum_even_odd_accuracy)
    print(
        f"\nThe exported checkpoint reads {accuracy:.1%} of {summary['num_held_out']} held-out digits and "
        f"{video_accuracy:.1%} of {summary['num_held_out_videos']} held-out videos correctly. Its logits differ from "
        f"the trainer's by at most {difference:.1e}.\n"
        f"{learnt.summary()}\n"
        f"{summary['seconds']:.0f} seconds in total. See {run / 'loss.png'}, {run / 'answers.png'}, "
        f"{run / 'video_answers.png'}, {run.timeline}, {run / 'even_odd/after/report.html'} and {run / 'summary.json'}."
    )


def _clear(directory: Path) -> None:
    """Empty a directory that an earlier demo filled.  Raises DemoError if it has anything else."""
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARK).exists():
        raise DemoError(f"{directory} has files that the demo did not write; choose another --directory or remove it")
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / _MARK).write_text("Written by demo.run, which clears this directory when it starts.\n")


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
