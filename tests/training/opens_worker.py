"""Runs the program on one rank and writes how often each file was opened before its first step: ``opens_worker DIR
FLAGS...``.

``DIR/opens_RANK.json`` has the files below DIR that the rank itself has opened, in "run"; and in "encoder" those that
one ``SampleEncoder`` opens, because transformers opens some files several times.  Launched by
tests/training/test_opened.py.
"""

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path

from mm import train
from mm.config.run import load_run
from mm.device.device import Device

Device.pick("cpu")

from mm.data.encode.encoder import SampleEncoder  # noqa: E402
from mm.parallel.activity import Activity, Work  # noqa: E402
from mm.training import loop  # noqa: E402


class Opens:
    """Counts the main thread's calls of ``open`` by file.

    Calls of ``os.open``, which reads weights tensor by tensor, are not counted.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.counted: Counter[str] | None = None
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple) -> None:
        if event != "open" or self.counted is None or arguments[1] is None:
            return
        if threading.current_thread() is not threading.main_thread():
            return  # the data thread prefetches a varying number of samples
        path = os.path.abspath(os.fsdecode(arguments[0])) if not isinstance(arguments[0], int) else ""
        if path.startswith(f"{self._directory}/"):
            self.counted[os.path.relpath(path, self._directory)] += 1


class CountedTrainer(loop.Trainer):
    """Stops counting when the first step begins."""

    opens: Opens

    def run_steps(self) -> None:
        self.setup.stage.journal.listeners.append(self)
        super().run_steps()

    def begin(self, activity: Activity) -> None:
        if activity.work is Work.FORWARD:
            self.opens.counted = None

    def end(self, activity: Activity) -> None:
        pass


def main(directory: Path, flags: list[str]) -> int:
    CountedTrainer.opens = opens = Opens(directory)
    loop.Trainer = CountedTrainer
    opens.counted = of_run = Counter()
    status = train.main(flags)
    settings = load_run(flags)
    opens.counted = of_encoder = Counter()
    SampleEncoder.from_config(settings.data, settings.model, settings.args.seq_length)
    opens.counted = None
    found = directory / f"opens_{os.environ['RANK']}.json"
    found.write_text(json.dumps({"run": of_run, "encoder": of_encoder}))
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
