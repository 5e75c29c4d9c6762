"""Writes the outputs of a frozen ViT to the cache in a background thread, so a step never waits for the disk.

``mm.data.loader.feature_cache`` defines the files.
"""

import sys
from collections.abc import Sequence
from queue import Queue
from threading import Lock, Thread

from mm.data.loader.feature_cache import CRC32_BYTES, path_of, used_bytes, write_features
from mm.model.stage import MadeFeatures

MAX_WAITING_BYTES = 1 << 30
"""Limit of data waiting to be written.  Above it, features are not kept but recomputed in the next epoch."""


class FeatureKeeper:
    """One rank's writer of features.  Images and videos that are already cached are not written again.

    When the folder is full or has reached ``max_bytes``, one warning is printed and training continues.
    """

    def __init__(self, directory: str, rank: int, max_bytes: int | None, num_keepers: int) -> None:
        """``max_bytes`` limits the whole folder; each of the ``num_keepers`` writers may use an equal share."""
        self._directory, self._rank = directory, rank
        self._max_bytes, self._num_keepers = max_bytes, num_keepers
        self._room: float | None = None
        """Bytes that this rank may still write; None until the size of the folder is known."""
        self._waiting_bytes, self._lock = 0, Lock()
        self._has_ended = False
        self._warned: set[str] = set()
        self._failure: Exception | None = None
        self._made: Queue[MadeFeatures | None] = Queue()
        self._thread = Thread(target=self._run, name="features", daemon=True)
        self._thread.start()

    def keep(self, made: Sequence[MadeFeatures]) -> None:
        """Queue the features of a step.  Raises an earlier error of the writer thread, except disk errors."""
        if self._failure is not None:
            raise self._failure
        if made and self._waiting_bytes > MAX_WAITING_BYTES:
            self._warn_once(f"the disk of {self._directory} is slower than the ViT: some features are not kept but "
                            f"recomputed in the next epoch")
            return
        for one in made:
            with self._lock:
                self._waiting_bytes += one.num_bytes
            self._made.put(one)

    def close(self) -> None:
        """Wait until everything is written."""
        self._made.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (made := self._made.get()) is not None:
            try:
                if not self._has_ended:
                    self._write(made)
            except OSError as error:
                self._end(f"{error.filename or self._directory}: {error.strerror}")
            except Exception as error:  # raised again in the training thread
                self._failure, self._has_ended = error, True
            with self._lock:
                self._waiting_bytes -= made.num_bytes

    def _write(self, made: MadeFeatures) -> None:
        if self._room is None:
            self._room = float("inf") if self._max_bytes is None else (
                (self._max_bytes - used_bytes(self._directory)) / self._num_keepers)
        rows_of_images = made.read().split([num_patches for _, num_patches in made.images])
        for (key, _), rows in zip(made.images, rows_of_images, strict=True):
            if not key or path_of(self._directory, key).exists():
                continue
            if rows.nbytes + CRC32_BYTES > self._room:
                self._end(f"{self._directory} has reached the limit of --vision-feature-cache-gib")
                return
            write_features(self._directory, key, rows)
            self._room -= rows.nbytes + CRC32_BYTES

    def _end(self, reason: str) -> None:
        self._has_ended = True
        self._warn_once(f"ViT features are no longer kept; training continues without: {reason}")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            sys.stderr.write(f"warning: rank {self._rank}: {text}\n")
            sys.stderr.flush()
