"""The commands of ``mm-plan``: flags become calls, and errors become messages with exit status 2."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mm.config.flags import TRAIN
from mm.config.misspelt import parse
from mm.config.run import Run, load_run
from mm.console import COMPLETION, Completed, add_common_flags, completed_parser, positive_count
from mm.environment import version_line
from mm.errors import UserError, printable
from mm.plan.by_device import calibration_by_flops
from mm.plan.calibration import read_calibration
from mm.plan.costs import Cutting
from mm.plan.lists import rate_lists
from mm.plan.predict import Predictor
from mm.plan.workload import COUNTS, workload_of
from mm.planner.layouts import add_flags, layouts, lengths_of
from mm.planner.machine import ACCEPT, ACCEPT_HELP, calibration_for
from mm.planner.reports import compared, lists_report, prediction_report
from mm.process import print_notes, refused


def run(words: Sequence[str]) -> int:
    """Run the command that ``words`` names; returns the exit status."""
    place = list(words).index("--") if "--" in words else len(words)
    own, training = list(words[:place]), list(words[place + 1 :])
    try:
        first = own[0].partition("=")[0] if own else ""
        if first.startswith("--") and first not in ("--help", "--version", COMPLETION):
            parser = argparse.ArgumentParser("mm-plan", allow_abbrev=False)
            add_flags(parser)
            flags, more = parser.parse_known_args(own)
            for text in layouts(flags, [*more, *training]):
                print(text)
        else:
            flags = parse(_parser(), own)
            flags.run(flags, load_run([*training, "--dry-run"]), training)
    except UserError as error:
        return refused(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "mm-plan", usage="mm-plan --device NAME FLAGS | mm-plan COMMAND ... -- FLAGS", description=(
            "Without a command: finds the fastest layout of a run on a device, or on what --calibration has measured, "
            "and with --write DIR writes it (docs/planning.md).  FLAGS are those of python -m mm.train."))
    add_common_flags(parser, version_line("mm-plan"), "mm-plan", _completed)
    commands: Any = parser.add_subparsers(required=True, metavar="COMMAND", prog="mm-plan")
    add_flags(parser.add_argument_group("Without a command"))

    def command(name: str, run: Callable[..., None], what: str, details: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=what, description=f"{details}  FLAGS are those of the run.")
        found.set_defaults(run=run)
        return found

    def add_calibration(to: argparse.ArgumentParser, is_required: bool, more: str = "") -> None:
        to.add_argument("--calibration", type=Path, required=is_required,
                        help=f"the file that mm-plan calibrate has written{more}")
        to.add_argument(ACCEPT, action="store_true", help=ACCEPT_HELP)

    calibrate = command("calibrate", _calibrate, "measure this device with the layers of a model", (
        "Measures each kind of layer at several sizes, the update, messages and sums, and writes what predictions "
        "use."))
    calibrate.add_argument("--output", type=Path, required=True, help="the file to write")
    calibrate.add_argument("--num-processes", type=positive_count, default=1, help=(
        "devices, or on a CPU processes that compute at the same time (default: %(default)s); a tensor-parallel size "
        "needs as many"))
    predict = command("predict", _predict, "predict the step time of a run", (
        "Prints how long a step takes, what the stages do meanwhile, and how sure that is; --world-size says how many "
        "ranks the run has.  Nothing is started."))
    add_calibration(predict, is_required=True)
    compare = command("compare", _compare, "compare measured steps of a run with their prediction", (
        "Compares the steps that --profile-pipeline has measured with their prediction."))
    compare.add_argument("folder", type=Path, metavar="RUN_DIR", help="the --log-dir of the run")
    add_calibration(compare, is_required=True)
    compare.add_argument("--timeline", type=Path, metavar="DIR", help=(
        "also write both timelines of each step to DIR, as an SVG file and a trace"))
    lists = command("lists", _lists, "find the pipeline lists with the shortest step", (
        "Rates the pipeline_num_layers of the run's model JSON on its own data, and searches for better lists with as "
        "many stages and chunks.  Losses and gradients do not depend on them."))
    add_calibration(lists, is_required=False, more=" (default: every FLOP takes the same time)")
    lists.add_argument("--memory-gib", type=positive_count, help=(
        "GiB of memory that a rank may need; lists that need more are not proposed (default: no limit)"))
    return parser


def _completed() -> Completed:
    """The flags of training stand among our own without a command, else after ``--``."""
    own = completed_parser(_parser())
    commands = {word: replace(one, commands={"--": TRAIN.completed}) for word, one in own.commands.items()}
    return Completed({**TRAIN.completed.flags, **own.flags}, commands)


def _calibrate(flags: argparse.Namespace, run: Run, training: Sequence[str]) -> None:
    """Start the ranks that measure; rank 0 writes the file."""
    if flags.output.is_dir() or not flags.output.absolute().parent.is_dir():
        raise UserError(f"--output is {flags.output}; expected a file in an existing directory")
    if flags.num_processes % run.tp_size:
        raise UserError(f"--num-processes is {flags.num_processes}; expected a multiple of "
                        f"--tensor-model-parallel-size, which is {run.tp_size}")
    if run.tp_size not in replace(run.model, encoder_placement="cut").tp_sizes:
        raise UserError(f"--tensor-model-parallel-size is {run.tp_size}, which does not divide the ViT's "
                        f"{run.model.vision.num_attention_heads} heads; calibrate always cuts the ViT, although this "
                        f"run keeps it whole, so give a size that divides them")
    words = [sys.executable, "-m", "mm.launch", "--standalone", "--nproc_per_node", str(flags.num_processes), "-m",
             "mm.planner.rank", str(flags.output.absolute()), *map(str, _largest_microbatch(run)), *training]
    done = subprocess.run(words, check=False, env={"OMP_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        raise UserError(f"the processes that measure ended with status {done.returncode}; see their messages above")
    found = read_calibration(flags.output)
    worst = max(found.blocks, key=lambda one: one.error)
    print(f"written: {printable(str(flags.output))}: {len(found.blocks)} kinds of blocks; usual error of a law "
          f"{found.error:.0%}, largest {worst.error:.0%} ({worst.key.kind})")


def _largest_microbatch(run: Run) -> tuple[int, int]:
    """The tokens of the largest microbatch in some steps, and the patches of the largest pass of the ViT; without data,
    the most that the flags allow."""
    num_tokens = run.args.seq_length * run.args.micro_batch_size
    num_patches = num_tokens * run.model.vision.spatial_merge_size**2 // 2
    try:
        steps = workload_of(run, lengths_of(run)).steps
    except UserError as error:
        print_notes([f"the data cannot be read, so microbatches of up to {num_tokens:,} tokens are measured: {error}"])
        return num_tokens, num_patches * run.model.encoder_batch_size
    most = np.concatenate([counts for step in steps for counts in step]).max(axis=0)
    tokens, patches = (int(most[COUNTS.index(name)]) for name in ("num_tokens", "num_patches"))
    return tokens, (patches or num_patches) * run.model.encoder_batch_size


def _predict(flags: argparse.Namespace, run: Run, _: Sequence[str]) -> None:
    calibration = calibration_for(flags.calibration, run, flags.accept_calibration)
    workload = workload_of(run, lengths_of(run))
    print(printable(prediction_report(run, calibration, workload, Predictor(run, calibration).predict(workload))))


def _compare(flags: argparse.Namespace, run: Run, _: Sequence[str]) -> None:
    calibration = calibration_for(flags.calibration, run, flags.accept_calibration)
    print(printable(compared(Predictor(run, calibration), flags.folder, flags.timeline)))


def _lists(flags: argparse.Namespace, run: Run, _: Sequence[str]) -> None:
    if run.num_stages == 1:
        raise UserError(f"{run.args.mm_model} has one pipeline stage, so there are no lists to choose; give "
                        f"pipeline_num_layers one number per stage")
    if flags.calibration is None:
        calibration = calibration_by_flops(run.model, Cutting(run.tp_size, run.args.sequence_parallel),
                                           run.args.precision)
    else:
        calibration = calibration_for(flags.calibration, run, flags.accept_calibration)
    max_bytes = None if flags.memory_gib is None else flags.memory_gib << 30
    rated = rate_lists(run, Predictor(run, calibration), workload_of(run, lengths_of(run)), max_bytes)
    print(printable(lists_report(run, *rated, has_times=flags.calibration is not None)))
