"""How long NCCL's kernels occupy a device while a stage computes, and what it gains to post messages early.

    python -m benchmarks.pipeline.messages [--output F]

Each stage posts and awaits the messages of a real run (``tests.parallel.messages``), which are replayed under NCCL's
rules (``tests.parallel.replay``).
"""

from benchmarks.measure import command, report
from tests.files import table
from tests.parallel.messages import VISION, Layout, Mode, Seconds, programs_of
from tests.parallel.replay import replay

MESSAGE_SECONDS = 0.01
"""How long one message takes; the forward pass of an even stage takes 1."""
CASES = {
    # name: the layout, and the seconds of each stage
    "PP 2, 7B's list, ViT frozen": (
        Layout(((2, 0),), ((1, 3),), VISION, 12), [Seconds(1.0, 1.2), Seconds(0.95, 1.9)]),
    "PP 4, everything trained": (Layout(((1, 1, 0, 0),), ((0, 0, 1, 1),), (), 16), [Seconds(1.0, 2.0)] * 4),
    "PP 8, ViT frozen on a stage of its own": (
        Layout(((2, *(0,) * 7),), ((0, *(1,) * 7),), VISION, 32), [Seconds(1.0, 2.0)] * 8),
}


HEAD = ("layout", "messages", "time of a step", "share of compute time with a message kernel running, by stage")


def main() -> None:
    flags = command(__doc__).parse_args()
    rows = []
    for name, (layout, seconds) in CASES.items():
        modes = Mode(starts_ahead=True), Mode(starts_ahead=False)
        programs = programs_of(layout, modes, seconds)
        results = [replay(programs[mode], MESSAGE_SECONDS) for mode in modes]
        assert not any(result.stuck for result in results)
        for result, posted in zip(results, ("ahead", "when wanted"), strict=True):
            shares = ", ".join(f"{share:.0%}" for share in result.occupied)
            rows.append((name, posted, f"{result.seconds / results[-1].seconds:.4f}", shares))
    print("\n".join(table(HEAD, rows)))
    report([dict(zip(HEAD, row, strict=True)) for row in rows], flags.output, prints=False)


if __name__ == "__main__":
    main()
