"""The commands of ``mm-plan``, each a function of its flags and of the run; as a program, one rank of ``calibrate``."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mm.config.run import Run, load_run
from mm.cost.by_device import calibration_by_flops
from mm.cost.calibration import calibration_for, read_calibration
from mm.cost.costs import Cutting
from mm.cost.predict import Predictor
from mm.cost.workload import COUNTS, workload_of
from mm.device.device import Device
from mm.environment import launcher_problems
from mm.errors import UserError, printable, refuse
from mm.plan.flags import CalibrateFlags, CompareFlags, LayoutFlags, ListsFlags, PredictFlags
from mm.plan.layouts import layouts, lengths_of
from mm.plan.lists import rate_lists
from mm.plan.reports import compared, lists_report, prediction_report
from mm.process import end_with_launcher, is_first_rank, print_notes, run_command, status_of


def _calibrate(flags: CalibrateFlags, run: Run, training: Sequence[str]) -> None:
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
             "mm.plan.commands", str(flags.output.absolute()), *map(str, _largest_microbatch(run)), *training]
    done = subprocess.run(words, check=False, env={"OMP_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        raise UserError(f"the processes that measure ended with status {done.returncode}; see their messages above")
    found = read_calibration(flags.output)
    worst = max(found.blocks, key=lambda one: one.error)
    print(f"written: {printable(str(flags.output))}: {len(found.blocks)} kinds of blocks; usual error of a law "
          f"{found.error:.0%}, largest {worst.error:.0%} ({worst.key.kind})")


def _largest_microbatch(run: Run) -> tuple[int, int]:
    """The most tokens of a microbatch and patches of a pass of the ViT in some steps; without data, the flags' most."""
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


def _predict(flags: PredictFlags, run: Run, _: Sequence[str]) -> None:
    calibration = calibration_for(flags.calibration, run, flags.accept_calibration)
    workload = workload_of(run, lengths_of(run))
    print(printable(prediction_report(run, calibration, workload, Predictor(run, calibration).predict(workload))))


def _compare(flags: CompareFlags, run: Run, _: Sequence[str]) -> None:
    calibration = calibration_for(flags.calibration, run, flags.accept_calibration)
    print(printable(compared(Predictor(run, calibration), flags.folder, flags.timeline)))


def _lists(flags: ListsFlags, run: Run, _: Sequence[str]) -> None:
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


_COMMANDS: Mapping[type, Callable[[Any, Run, Sequence[str]], None]] = {
    CalibrateFlags: _calibrate, PredictFlags: _predict, CompareFlags: _compare, ListsFlags: _lists}  # fmt: skip


def run(flags: object, training: Sequence[str]) -> None:
    """Run the command that ``flags`` belong to; ``training`` are the flags of the run."""
    if isinstance(flags, LayoutFlags):
        for text in layouts(flags, training):
            print(text)
    else:
        _COMMANDS[type(flags)](flags, load_run([*training, "--dry-run"]), training)


def main(argv: Sequence[str] | None = None) -> int:
    """One rank of ``mm-plan calibrate``: FILE TOKENS PATCHES FLAGS; rank 0 writes FILE.  Returns the exit status."""
    end_with_launcher()
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: status_of(lambda: _measure(words)), lambda: "nothing was written", is_rank=True)


def _measure(words: Sequence[str]) -> int:
    refuse(launcher_problems(os.environ))
    output, (num_tokens, num_patches) = Path(words[0]), map(int, words[1:3])
    run = load_run([*words[3:], "--dry-run"], environment={})
    device = Device.pick(run.args.device, run.args.deterministic_mode)
    # megatron looks at the device while it is imported, so everything built on it comes after this
    from mm.parallel import mesh as parallel
    from mm.plan.measure import measure

    found = measure(device, run.args, run.model, sorted({1, run.tp_size}), num_tokens, num_patches)
    if is_first_rank():
        found.write(output)
    parallel.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
