"""One training step: does it compute what transformers computes, and how fast is it?

    python -m benchmarks.step parity [--device cuda]
    python -m benchmarks.step train [--device cuda]
    python -m benchmarks.step speed --size 3b --mix --phases --rounds 2 [--freeze vision projector]
    python -m benchmarks.step cpu [--rounds 9] [--micro-batch-size 1] [--num-microbatches 8]
    python -m benchmarks.step encoder [--rounds 9] [--sequence-parallel]
    python -m benchmarks.step sharding [--rounds 9] [--num-microbatches 2]

``parity`` compares two small random models on a mixed batch, in fp32 and bf16, with transformers in fp32 on the CPU.
It also reports the errors of transformers' own bf16.

``train`` runs the program itself on the tiny model: in fp32 its losses are those of the CPU, and a run that stops and
resumes equals the uninterrupted one to the bit.

``speed`` times whole steps (schedule, gradient clipping, Adam) of the real sizes with random weights on one device,
ours and transformers' in turn for ``--rounds`` rounds, each side in a new process.  Samples are equal, of 689 tokens,
315 of them visual; with ``--mix`` their lengths and images differ, so that transformers pads, and our attention
handles segments of different lengths.

``parity``, ``train`` and ``speed`` print JSON and append each result to ``--records`` at once; the exit status is 1
when a tolerance is missed.

``cpu`` has two parts: one process with one thread for each side (TP1 PP1); then our two-stage pipeline on two processes
with one thread each, against transformers in one process with two threads.  transformers is always tuned: fused AdamW,
SDPA, and its own linear patch embedding instead of the 3-D convolution.

``encoder`` compares ViTs on two tensor-parallel processes, on batches of images with little text: cut like the LLM,
whole on both (``encoder_placement``), or whole with the images of all microbatches in one pass
(``encoder_batch_microbatches``).

``sharding`` compares the strategies of ``--data-parallel-sharding-strategy`` on two data-parallel processes.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import DEVICES, SIZES, report, run_ranks
from benchmarks.records import OURS, PEER, Records, add_record_flags, append
from benchmarks.step.speed import NUM_TIMED, NUM_WARMUP, speed, time_side
from mm.device.device import Device
from tests.workload import NO_COPIES, OFFLOADED, REMAINDERS, ROUNDED_MOMENTS

PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": (), "bf16": ("--bf16",), "bf16 moments": ("--bf16", *ROUNDED_MOMENTS),
    "bf16 remainders": ("--bf16", *REMAINDERS, *ROUNDED_MOMENTS),
    "bf16 weights": ("--bf16", *NO_COPIES, *ROUNDED_MOMENTS),
    "bf16 offloaded": ("--bf16", *OFFLOADED, "--cpu-offload-activations"),
}  # fmt: skip
"""What ``train`` compares, by flags of the program."""


def parity(flags: argparse.Namespace, _: list[str]) -> bool:
    device = Device.pick(flags.device)
    from benchmarks.step.parity import errors_of

    result, passed = errors_of(device, [flags.precision] if flags.precision else ["fp32", "bf16"])
    leave_process_group()
    keep(flags, "parity", device.name, "small", {"passed": passed, **result})
    report(result, flags.output)
    return passed


def train(flags: argparse.Namespace, _: list[str]) -> bool:
    device = Device.pick(flags.device)
    from benchmarks.step.train import runs_of

    names = [flags.precision] if flags.precision else PRECISIONS
    result, passed = runs_of(device, {name: PRECISIONS[name] for name in names})
    keep(flags, "train", device.name, "small", {"passed": passed, **result})
    report(result, flags.output)
    return passed


def timed(flags: argparse.Namespace, own_arguments: list[str]) -> bool:
    """Time one side in this process, or both sides in new processes."""
    if flags.side is not None:
        device = Device.pick(flags.device)
        result, passed, kind, name = time_side(flags, device), True, "side", device.name
        leave_process_group()
    else:
        if flags.records:
            append(flags.records, {"kind": "begin", "label": flags.label})
        (result, passed), kind = speed(flags, own_arguments), "comparison"
        name = result[OURS].get("device")
    keep(flags, kind, name, flags.size, {"side": flags.side, "passed": passed, **result})
    report(result, flags.output)
    return passed


def cpu(flags: argparse.Namespace, own_arguments: list[str]) -> bool:
    """Time one stage, then two, in new processes; or, with ``--is-rank``, work as one of these."""
    if flags.is_rank:
        device = Device.pick("cpu")
        from benchmarks.step.cpu import against_peer

        found = against_peer(device, flags.rounds, flags.micro_batch_size, flags.num_microbatches, flags.quick)
        return _reported(found, flags)
    results = []
    for num_stages in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "result.json"
            words = ["cpu", *own_arguments, "--is-rank", "--output", str(output)]
            run_ranks(num_stages, "benchmarks.step", words, num_threads=num_stages)
            results.append(json.loads(output.read_text()))
        report(results[-1], None)
    report(results, flags.output, prints=False)
    return True


def encoder(flags: argparse.Namespace, own_arguments: list[str]) -> bool:
    """Time all encoders in two new processes; with ``--is-rank``, be one of them."""
    if not flags.is_rank:
        return _on_two_ranks("encoder", flags, own_arguments)
    device = Device.pick("cpu")
    from benchmarks.step.cpu import encoders

    return _reported(encoders(device, flags.rounds, flags.quick, flags.sequence_parallel), flags)


def sharding(flags: argparse.Namespace, own_arguments: list[str]) -> bool:
    """Time all strategies in two new processes; with ``--is-rank``, be one of them."""
    if not flags.is_rank:
        return _on_two_ranks("sharding", flags, own_arguments)
    device = Device.pick("cpu")
    from benchmarks.step.cpu import strategies

    return _reported(strategies(device, flags.rounds, flags.num_microbatches, flags.quick), flags)


def _on_two_ranks(name: str, flags: argparse.Namespace, own_arguments: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        run_ranks(2, "benchmarks.step", [name, *own_arguments, "--is-rank", "--output", str(output)])
        report(json.loads(output.read_text()), flags.output)
    return True


def _reported(found: Any, flags: argparse.Namespace) -> bool:
    """Report what a rank has found, if anything."""
    leave_process_group()
    if found is not None:
        report(found, flags.output)
    return True


def keep(flags: argparse.Namespace, kind: str, device: str, size: str, result: dict[str, object]) -> None:
    """Record ``result`` if ``--records`` is given."""
    if flags.records:
        Records(flags.records, flags.label, device, size).write(kind, **result)


def leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True, metavar="parity, train, speed, cpu, encoder or sharding")
    works = {"parity": parity, "train": train, "speed": timed, "cpu": cpu, "encoder": encoder, "sharding": sharding}
    parsers = {name: modes.add_parser(name) for name in works}
    for name, work in works.items():
        parsers[name].set_defaults(work=work)
        parsers[name].add_argument("--output", type=Path, help="JSON file to write")
    for name in ("parity", "train", "speed"):
        one = parsers[name]
        one.add_argument("--device", default="auto", choices=DEVICES)
        add_record_flags(one, "step")
        one.add_argument("--precision", choices=PRECISIONS if name == "train" else ("fp32", "bf16"),
                         help="default: all for parity and train; for speed bf16, or fp32 on a CPU")  # fmt: skip
    _add_speed_flags(parsers["speed"])
    for one in (parsers["cpu"], parsers["encoder"], parsers["sharding"]):
        one.add_argument("--rounds", type=int, default=9)
        one.add_argument("--quick", action="store_true", help="a far smaller model: shows that it runs, not how fast")
        one.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    one = parsers["cpu"]
    one.add_argument("--micro-batch-size", type=int, default=1)
    one.add_argument("--num-microbatches", type=int, default=8, help="microbatches of one optimizer step")
    parsers["sharding"].add_argument("--num-microbatches", type=int, default=2, help="of each replica in a step")
    parsers["encoder"].add_argument("--sequence-parallel", action="store_true")
    return parser.parse_args(argv)


def _add_speed_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="3b", choices=SIZES)
    parser.add_argument("--tokens", type=int,
                        help="tokens of a microbatch, in whole samples without --mix; default 8192, 4096 for 7b")
    parser.add_argument("--num-microbatches", type=int, default=1)
    parser.add_argument("--mix", action="store_true", help="samples of different lengths and images")
    parser.add_argument("--freeze", nargs="*", default=[], choices=("vision", "projector", "language"))
    parser.add_argument("--recompute", action="store_true", help="keep only layer inputs, on both sides")
    parser.add_argument("--offload", action="store_true", help="keep activations in host memory, on our side")
    parser.add_argument("--no-peer", action="store_true", help="time our side only")
    parser.add_argument("--rounds", type=int, default=1, help="how many times each side runs, in turn")
    parser.add_argument("--warmup", type=int, default=NUM_WARMUP)
    parser.add_argument("--steps", type=int, default=NUM_TIMED)
    parser.add_argument("--phases", action="store_true", help="time the parts of a step")
    parser.add_argument("--profile", type=Path, help="write torch.profiler's table of one more step here")
    parser.add_argument("--ceilings", type=Path,
                        help="records of benchmarks.kernels, for the share of the measured ceiling")  # fmt: skip
    parser.add_argument("--side", choices=(OURS, PEER), help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)


def main(argv: list[str]) -> int:
    flags = parse(argv)
    return 0 if flags.work(flags, argv[1:]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
