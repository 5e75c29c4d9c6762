"""Writes the outputs of a frozen ViT to the feature cache in a background thread, so a step never waits for the disk.

A fingerprint of the ViT is part of the key, so that features are used only with the ViT that made them.
``mm.data.loader.feature_cache`` defines the files.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from queue import Queue
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.data.loader.feature_cache import CRC32_BYTES, path_of, used_bytes, write_features
from mm.model.stage import MadeFeatures, Stage
from mm.parallel.agreement import all_of
from mm.parallel.mesh import Mesh
from mm.weights.fuse import unshard
from mm.weights.shard import MemoryLayout
from mm.weights.table import Weight
from mm.weights.trained import is_frozen

_WITHOUT_EFFECT = ("pipeline_num_layers", "freeze", "freeze_layers", "rates", "recompute", "offload",
                   "tokens_per_second")
"""Settings of the ViT that do not change its output."""


def vision_fingerprint(stage: Stage, mesh: Mesh) -> str:
    """Hash of the values, dtype and settings of patch embedding and ViT layers; the same for every layout.

    Collective over all ranks, once the weights are filled.
    """
    digests = sorted(all_of(tuple(_digests(stage, mesh)), mesh.control_group))
    settings = {name: value for name, value in asdict(stage.model.vision).items() if name not in _WITHOUT_EFFECT}
    facts = [settings, str(stage.config.params_dtype), digests]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _digests(stage: Stage, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Name and hash of each weight of the ViT that is here, on the first of the ranks that hold it."""
    for weight, parameter in stage.whole_weights(one for one in stage.weights if one.part == "vision"):
        assert is_frozen(weight, stage.model), f"{weight.name} is trained"
        if mesh.copy_rank == 0:
            whole = _whole(weight, parameter, mesh)
            if mesh.tp_rank == 0:
                content: Any = whole.cpu().contiguous().flatten().view(torch.uint8).numpy()
                yield weight.name, hashlib.sha256(content).hexdigest()


def _whole(weight: Weight, parameter: Tensor, mesh: Mesh) -> Tensor:
    """The whole weight, without padding, gathered from the tensor-parallel ranks."""
    own = MemoryLayout.of(weight, mesh.tp_size).unpad_whole(parameter).contiguous()
    num_shards, _ = weight.shards(mesh.tp_size)
    if num_shards == 1:
        return own
    shards = [torch.empty_like(own) for _ in range(num_shards)]
    dist.all_gather(shards, own, group=mesh.groups.tp)
    return unshard(weight, shards)


MAX_WAITING_BYTES = 1 << 30
"""Limit of data waiting to be written.  Above it, features are not kept but recomputed in the next epoch."""


class FeatureWriter:
    """One rank's writer of features.  Images and videos that are already cached are not written again.

    When the folder is full or has reached ``max_bytes``, one warning is printed and training continues.
    """

    def __init__(self, directory: str, rank: int, max_bytes: int | None, num_writers: int) -> None:
        """``max_bytes`` limits the whole folder; each of the ``num_writers`` writers may use an equal share."""
        self._directory, self._rank = directory, rank
        self._max_bytes, self._num_writers = max_bytes, num_writers
        self._room: float | None = None
        """Bytes that this rank may still write; None until the size of the folder is known."""
        self._waiting_bytes, self._lock = 0, Lock()
        self._has_ended = False
        self._warned: set[str] = set()
        self._failure: Exception | None = None
        self._made: Queue[MadeFeatures | None] = Queue()
        self._thread = Thread(target=self._run, name="features", daemon=True)
        self._thread.start()

    def enqueue(self, made: Sequence[MadeFeatures]) -> None:
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
                (self._max_bytes - used_bytes(self._directory)) / self._num_writers)
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
