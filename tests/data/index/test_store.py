"""The folder of indexes: one of the processes and nodes that share it creates what all need."""

import multiprocessing
import os
import signal

from mm.data.index import sample_files
from mm.data.index.dataset import Dataset
from mm.data.index.gauge import Gauge
from tests.data.oracle import RECORDS


def _open(data, model, start, answers, dies):
    """Acts like an owner on another node; reports when it creates the index, and may die meanwhile."""
    make = sample_files.make_index

    def reported(*arguments):
        answers.put(os.getpid())
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(*arguments)

    sample_files.make_index = reported
    start.wait()
    dataset = Dataset(data, gauge=Gauge.from_config(data, model, 4096))
    answers.put([len(dataset), dataset.columns.files[0].path])


def test_one_of_several_processes_creates_it_and_another_takes_over_if_it_dies(write_dataset, model_config, tmp_path):
    data = write_dataset(RECORDS * 20, cache_dir=str(tmp_path / "cache"))
    context = multiprocessing.get_context("forkserver")
    start, answers = context.Event(), context.SimpleQueue()
    doomed = context.Process(target=_open, args=(data, model_config, start, answers, True))
    start.set()
    doomed.start()
    assert answers.get() == doomed.pid
    doomed.join()
    assert [*(tmp_path / "cache").glob("*.lock")]  # nobody has removed it
    start.clear()
    owners = [context.Process(target=_open, args=(data, model_config, start, answers, False)) for _ in range(2)]
    for one in owners:
        one.start()
    start.set()
    found = [answers.get() for _ in range(3)]
    (path,) = map(str, (tmp_path / "cache").glob("*.rows"))
    assert found[0] in [one.pid for one in owners] and found[1:] == [[len(RECORDS) * 20, path]] * 2
    for one in owners:
        one.join()
    names = sorted(path.suffix for path in (tmp_path / "cache").iterdir() if path.is_file())
    assert names == [".json", ".numbers", ".rows"]
