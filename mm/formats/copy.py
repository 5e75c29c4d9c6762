"""Executes a byte plan: reads, cuts and writes the bytes, and computes a checksum of each written tensor.

Memory is a few buffers per worker, whatever the size of the model.  Data passes through small buffers that stay in the
processor's cache between reading, checksum and writing.  That is as fast as ``copy_file_range`` followed by a checksum
pass, and the checksum covers exactly the written bytes.
"""

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from mm.errors import refuse
from mm.formats.atomic import Output
from mm.formats.files import BUFFER_BYTES, Files
from mm.formats.hf import output_layer_hint
from mm.weights.plan import CopyPlan, Job, ViewIndex
from mm.weights.views import Stored

Advance = Callable[[int], object]


def check_copies_and_padding(index: ViewIndex, root: Path) -> None:
    """Check that copies of a tensor are equal, and that padding, which is otherwise not read, is zero.

    Raises UserError naming each pair that differs, and each tensor with padding that is not zero.
    """
    problems = []
    with Files(root) as files:
        for one, other in ((one.stored, other.stored) for one, other in index.copies):
            if not files.are_equal(one, other):
                original = "the one" if one.name == other.name else one.name
                problems.append(
                    f"{root / other.file}: {other.name} differs from {original} in {root / one.file}, but should be a "
                    f"copy of it; one of the files is damaged or of another model{output_layer_hint(other.name)}."
                )
        for padding in index.padding:
            stored = padding.view.stored
            if not files.is_zero(padding):
                problems.append(
                    f"{root / stored.file}: the padding of {stored.name} is not zero; the file is damaged or was cut "
                    f"for another TP size."
                )
    refuse(problems)


def execute(plan: CopyPlan, source: Path, output: Output, num_workers: int, progress: Advance) -> None:
    """Write all files of ``plan`` that ``output`` has not finished.

    ``progress`` is called with numbers of bytes, from any thread.  Raises UserError if a source file is too short, and
    OSError if the disk is full or fails; finished files stay finished.
    """
    todo = _Todo(plan, output)

    def work(jobs: Iterator[Job]) -> None:
        with Files(source) as sources, Files(output.folder, os.O_WRONLY) as targets:
            worker = _Worker(sources, targets, progress)
            for job in jobs:
                todo.done(worker.run(job, todo.targets(job)))

    _run_workers(work, plan.jobs, num_workers)


def _run_workers(work: Callable[[Iterator[Job]], None], jobs: Sequence[Job], num_workers: int) -> None:
    """Run ``work`` in threads that share ``jobs``.  After a failure or an interrupt, no thread gets another job."""
    left, lock, stop = iter(jobs), threading.Lock(), threading.Event()

    def shared() -> Iterator[Job]:
        while not stop.is_set():
            with lock:
                job = next(left, None)
            if job is None:
                return
            yield job

    with ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(work, shared()) for _ in range(num_workers)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for future in futures:
        future.result()


class _Todo:
    """Tracks unfinished files, and finishes each after its last tensor."""

    def __init__(self, plan: CopyPlan, output: Output) -> None:
        self._output = output
        self._files = {file.name: file for file in plan.files if file.name not in output.finished}
        self._left = {name: len(file.tensors) for name, file in self._files.items()}
        self._crc32s: dict[str, dict[str, int]] = {name: {} for name in self._files}
        self._lock = threading.Lock()
        for file in self._files.values():
            output.create(file)
            if not file.tensors:
                output.finish(file, {})

    def targets(self, job: Job) -> list[Stored]:
        """The job's targets that are still to be written."""
        return [target for target in job.targets if target.file in self._files]

    def done(self, crc32s: dict[Stored, int]) -> None:
        complete = []
        with self._lock:
            for target, crc32 in crc32s.items():
                self._crc32s[target.file][target.name] = crc32
                self._left[target.file] -= 1
                if self._left[target.file] == 0:
                    complete.append(target.file)
        for file in complete:
            self._output.finish(self._files[file], self._crc32s[file])


class _Worker:
    """The files and buffers of one thread."""

    def __init__(self, sources: Files, targets: Files, progress: Advance) -> None:
        self._sources, self._targets = sources, targets
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._progress = progress

    def run(self, job: Job, targets: Sequence[Stored]) -> dict[Stored, int]:
        """Write ``targets``, a subset of the job's, and return their checksums."""
        if job.num_rows == len(job.targets) == 1:
            return {target: self._gather(job, target) for target in targets}
        return self._copy_columns(job, targets) if targets else {}

    def _gather(self, job: Job, target: Stored) -> int:
        """Write one tensor from first to last byte."""
        crc32 = written = filled = 0
        for source, start, num_bytes in _pieces(job):
            while num_bytes:
                step = min(num_bytes, BUFFER_BYTES - filled)
                piece = self._buffer[filled : filled + step]
                if source is None:
                    piece[:] = bytes(step)
                else:
                    self._sources.read(source, start, piece)
                start, num_bytes, filled = start + step, num_bytes - step, filled + step
                if filled == BUFFER_BYTES or written + filled == target.num_bytes:
                    crc32 = zlib.crc32(self._buffer[:filled], crc32)
                    self._targets.write(target, written, self._buffer[:filled])
                    self._progress(filled)
                    written, filled = written + filled, 0
        assert written == target.num_bytes, target
        return crc32

    def _copy_columns(self, job: Job, targets: Sequence[Stored]) -> dict[Stored, int]:
        """Write tensors that consist of columns of the same rows, a block of rows at a time."""
        moves = [move for move in job.moves if move.target in targets]
        widest = max(stored.num_bytes for stored in (*(move.source for move in moves), *targets)) // job.num_rows
        block = max(1, BUFFER_BYTES // widest)
        sources = {move.source: _rows(block, move.source, job) for move in moves}
        blocks = {target: _rows(block, target, job) for target in targets}  # padding stays zero
        copies = [
            (blocks[move.target][:, move.target_start : move.target_start + move.num_bytes],
             sources[move.source][:, move.source_start : move.source_start + move.num_bytes])
            for move in moves
        ]
        crc32s = dict.fromkeys(targets, 0)
        for row in range(0, job.num_rows, block):
            rows = min(block, job.num_rows - row)
            for source, content in sources.items():
                self._sources.read(source, row * content.shape[1], _bytes(content[:rows]))
            for into, content in copies:
                into[:rows] = content[:rows]
            for target, content in blocks.items():
                data = _bytes(content[:rows])
                crc32s[target] = zlib.crc32(data, crc32s[target])
                self._targets.write(target, row * content.shape[1], data)
                self._progress(len(data))
        return crc32s


def _pieces(job: Job) -> Iterator[tuple[Stored | None, int, int]]:
    """(source or None for zeros, first byte, number of bytes) of a job with one row, in target order."""
    reached = 0
    for move in job.moves:
        if move.target_start > reached:
            yield None, 0, move.target_start - reached
        yield move.source, move.source_start, move.num_bytes
        reached = move.target_start + move.num_bytes
    if reached < job.targets[0].num_bytes:
        yield None, 0, job.targets[0].num_bytes - reached


def _rows(num_rows: int, stored: Stored, job: Job) -> np.ndarray:
    return np.zeros((num_rows, stored.num_bytes // job.num_rows), np.uint8)


def _bytes(array: np.ndarray) -> memoryview:
    return array.data.cast("B")
