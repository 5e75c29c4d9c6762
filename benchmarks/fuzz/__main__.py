"""Damages files of every kind, reads them as the commands do, and reports what must not happen.

    python -m benchmarks.fuzz [--mutations 20000] [--seed 0] [--only KIND ...] [--number N] [--output FILE.json]

Each mutation damages one file: bits, bytes and lengths, values of JSON with right checksums, records of archives, words
of command lines, or files replaced by links, directories and pipes.  What a command calls to read the file then reads
it, in a child of this process.  It must accept the file, or refuse it with a message that names the file.  Reported,
and the exit status is 1, for: another exception, more than 10 s of a processor, a crash, more than 1 GiB of memory, and
any file that is created, changed or deleted outside of the directory that is read.

The same seed makes the same mutations.  ``--only KIND --number N`` repeats one and prints its traceback.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before imports

from benchmarks.fuzz.driver import Found, run
from benchmarks.fuzz.kinds import KINDS
from benchmarks.measure import command, report
from tests.files import table


def main() -> int:
    parser = command(__doc__)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--mutations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="KIND", help=", ".join(names))
    parser.add_argument("--number", type=int, help="repeat one mutation of the only kind")
    args = parser.parse_args()
    output = args.output and args.output.resolve()  # each kind changes the current directory
    kinds = [kind for kind in KINDS if kind.name in args.only]
    whole, began, found = sum(kind.share for kind in kinds), time.monotonic(), dict[str, Found]()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for kind in kinds:
            count = round(args.mutations * kind.share / whole)
            numbers = range(count) if args.number is None else range(args.number, args.number + 1)
            start = time.monotonic()
            one = found[kind.name] = run(kind, Path(folder) / kind.name.replace(" ", "_"), numbers, args.seed)
            os.chdir(folder)
            print(f"{kind.name}: {one.count} in {time.monotonic() - start:.0f} s, {len(one.findings)} findings",
                  file=sys.stderr, flush=True)
            _print_findings(kind.name, one, whole=args.number is not None)
            report({"seed": args.seed, "seconds": round(time.monotonic() - began), "kinds": {
                name: vars(one) for name, one in found.items()}}, output, prints=False)
    rows = [(name, one.count, one.accepted, one.refused, len(one.findings), f"{one.most_seconds:.2f}",
             one.most_bytes >> 20) for name, one in found.items()]
    head = ("kind", "mutations", "accepted", "refused", "findings", "longest, s", "most memory, MiB")
    print("\n".join(table(head, rows)))
    return 1 if any(one.findings for one in found.values()) else 0


def _print_findings(name: str, found: Found, whole: bool) -> None:
    """One of each cause, with the numbers of the others."""
    causes: dict[str, list[dict]] = {}
    for one in found.findings:
        lines = one["detail"].splitlines() or [""]
        place = next((line for line in reversed(lines) if line.startswith("  File ") and "/mm/" in line), "")
        causes.setdefault(f"{one['outcome']}\n{place}\n{lines[-1][:60]}", []).append(one)
    for cause, ones in causes.items():
        numbers = " ".join(str(one["number"]) for one in ones[:8])
        print(f"--only {name!r} --number {numbers}: {len(ones)} x {ones[0]['damage']}\n"
              f"{ones[0]['detail'] if whole else cause}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
