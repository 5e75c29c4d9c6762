"""Sends each step's data from the rank that reads it, the data owner, to all ranks of its replica, ahead of time.

The plan of a step without its media goes to the whole replica in one CPU broadcast.  Pixels go only to the ranks with
the patch embedding, as bytes, which the device normalises; cached outputs of a frozen ViT replace them, and go to the
ranks with the projector.  A thread does this for step n+1 while step n computes; only that thread uses the mesh's
replica, owners, pixel and feature groups.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice
from queue import Queue, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mm.batch import BatchTotals, Images, Microbatch, StepPlan, encoder_batches_of, image_passes, passes_of_any
from mm.config.model import ModelConfig
from mm.data.loader.loader import ReadStep
from mm.data.loader.quarantine import Quarantine
from mm.data.sample import BadSample
from mm.data.sampler.cost import in_pipeline_order
from mm.device.device import Device
from mm.errors import AgreedError
from mm.model.flops import image_flops
from mm.parallel.agreement import all_of, attempt
from mm.parallel.context import deal, images_of
from mm.parallel.mesh import Mesh

_Reading = tuple[float, float]
"""When this rank began and ended to read its samples of one step, by ``time.perf_counter``."""


@dataclass(frozen=True)
class _Found:
    """What a data owner tells the others about its next step."""

    problems: tuple[str, ...]
    """Why it could not be read."""
    bad: tuple[BadSample, ...]
    totals: BatchTotals
    passes: tuple[Images, ...]


class StepBroadcast(Iterator[StepPlan]):
    """Yields ``StepPlan``s for ``num_steps`` steps, on every rank.

    ``steps`` is the loader's iterator on data owners and None elsewhere; likewise both quarantines, for training and
    for validation samples.  ``holds_patch_embedding``: this rank needs pixels.  ``holds_projector``: it needs cached
    ViT outputs.  A sample that one data owner cannot use raises the same AgreedError on every rank, at that step.
    """

    def __init__(
        self,
        steps: Iterator[ReadStep] | None,
        mesh: Mesh,
        num_steps: int,
        holds_patch_embedding: bool,
        model: ModelConfig,
        device: Device,
        quarantine: Quarantine | None = None,
        holds_projector: bool = False,
        validation_quarantine: Quarantine | None = None,
        shares_image_passes: bool = False,
    ) -> None:
        """``shares_image_passes``: plans say what images of any replica do in each pass (``StepPlan.image_passes``)."""
        assert (steps is not None) == mesh.owns_data
        self.own_wait_seconds = 0.0
        """How long the latest ``next`` waited while this rank read its samples, not for other ranks."""
        self._steps, self._mesh, self._num_left = steps, mesh, num_steps
        self._quarantine, self._validation_quarantine = quarantine, validation_quarantine
        self._holds_patch_embedding, self._holds_projector = holds_patch_embedding, holds_projector
        self._model, self._shares_image_passes = model, shares_image_passes
        self._device = device
        self._shared: Queue[tuple[StepPlan, _Reading] | Exception] = Queue()
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        """True requests another step.  The first is requested at once, so that steps are prepared one ahead."""
        self._wanted.put(True)
        # A daemon thread, so that a failing rank can exit while the thread waits for other ranks.
        self._thread = Thread(target=self._share_steps, args=(num_steps,), name="data", daemon=True)
        self._thread.start()

    def __next__(self) -> StepPlan:
        if self._num_left == 0:
            raise StopIteration
        self._num_left -= 1
        began = time.perf_counter()
        shared = self._shared.get()
        ended = time.perf_counter()
        if isinstance(shared, Exception):
            raise shared
        plan, (read_began, read_ended) = shared
        self.own_wait_seconds = max(0.0, min(ended, read_ended) - max(began, read_began))
        self._wanted.put(True)
        return plan

    def close(self) -> None:
        """Wait for the thread to end.  Every rank must call this after the same step: the threads communicate."""
        self._num_left = 0
        self._wanted.put(False)
        self._thread.join()

    def _share_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if not self._wanted.get():
                return
            try:
                self._shared.put(self._share_step())
            except Exception as error:  # raised again in __next__
                self._shared.put(error)
                return

    def _share_step(self) -> tuple[StepPlan, _Reading]:
        """Data owners read and agree; each sends its replica the plan without media, then pixels or features."""
        mesh, owned, read = self._mesh, list[Microbatch](), (0.0, 0.0)
        shared: list[Any] = [None]
        if self._steps is not None:
            began = time.perf_counter()
            step, problems = attempt(mesh, self._steps.__next__)
            read = began, time.perf_counter()
            owned = in_pipeline_order(self._model, step.microbatches) if step else []
            shared = [self._agree(step, owned, problems)]
        if mesh.tp_size * mesh.cp_size * mesh.pp_size > 1:
            dist.broadcast_object_list(shared, src=mesh.replica_owner, group=mesh.replica_group)
        plan: StepPlan
        plan, problems = shared[0]
        if problems:
            raise AgreedError(problems)
        light = deal_images(plan.microbatches, self._model, mesh.context.num_encoders)
        whole = tuple(self._share_media(*pair) for pair in zip(light, owned or [None] * len(light), strict=True))
        return replace(plan, microbatches=whole), read

    def _agree(
        self, step: ReadStep | None, microbatches: list[Microbatch], problems: tuple[str, ...]
    ) -> tuple[StepPlan, tuple[str, ...]]:
        """On every data owner: the plan of its replica without media, and the problems of all.

        ``step``: None if it could not be read, for the reasons ``problems``.
        """
        mesh, model = self._mesh, self._model
        own = _Found(problems, step.bad if step else (), BatchTotals.of(microbatches, model.vision),
                     image_passes(microbatches, model.encoder_batch_size))
        found = [own] * mesh.dp_size
        if mesh.dp_size > 1:
            dist.all_gather_object(found, own, group=mesh.owners_group)
        problems = tuple(dict.fromkeys(problem for one in found for problem in one.problems))
        if bad := [sample for one in found for sample in one.bad]:
            problems += self._leave_out(bad, step is not None and step.is_validation)
        light = tuple(replace(one, pixel_values=None, features=None) for one in microbatches)
        totals = BatchTotals(*map(sum, zip(*(astuple(one.totals) for one in found), strict=True)))
        passes = passes_of_any([one.passes for one in found]) if self._shares_image_passes else None
        return StepPlan(light, totals, image_passes=passes), problems

    def _leave_out(self, bad: Sequence[BadSample], is_validation: bool) -> tuple[str, ...]:
        """On every data owner: add the bad samples of all to the quarantine.  Returns the problems with that."""
        quarantine = self._validation_quarantine if is_validation else self._quarantine
        assert quarantine is not None, "bad samples are left out only if there is a quarantine"
        _, problems = attempt(self._mesh, partial(quarantine.add, bad))
        return all_of(problems, self._mesh.owners_group) if self._mesh.dp_size > 1 else problems

    def _share_media(self, light: Microbatch, owned: Microbatch | None) -> Microbatch:
        """Add pixels, or cached features in their place, to ``light`` where this rank needs them, in pinned memory.

        ``owned``: on the data owner, the microbatch with the rows of all images.
        """
        mesh, vision = self._mesh, self._model.vision
        if light.skips_vision:
            features = self._share_rows(
                light, owned and owned.features, light.feature_bytes, mesh.feature_groups, mesh.feature_ranks)
            return replace(light, features=self._pinned(features) if self._holds_projector else None)
        pixels = self._share_rows(
            light, owned and owned.pixel_values, vision.patch_elements, mesh.pixel_groups, mesh.pixel_ranks)
        return replace(light, pixel_values=self._pinned(pixels) if self._holds_patch_embedding else None)

    def _pinned(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else self._device.runtime.pin(rows)

    def _share_rows(
        self, microbatch: Microbatch, owned: Tensor | None, width: int,
        groups: Sequence[dist.ProcessGroup | None], ranks: Sequence[int],
    ) -> Tensor | None:
        """The data owner, which has all rows, sends each rank of ``Context.encoders`` the rows of its images.

        ``groups``: for each of these ranks, the group of the data owner and the ranks that need the rows.  ``ranks``,
        if not empty, replaces it: for each of these ranks, the only global rank that needs the rows.
        """
        mesh, kept, sent = self._mesh, None, list[dist.Work | None]()
        own = mesh.context.encoders.rank()
        for rank in range(mesh.context.num_encoders):
            images = images_of(microbatch, rank if mesh.context.num_encoders > 1 else None)
            group = mesh.replica_group if ranks else groups[rank]
            if not images or (owned is None and (group is None or (ranks and ranks[rank] != mesh.rank))):
                continue
            if owned is None:
                num_patches = sum(math.prod(microbatch.image_grids[image]) for image in images)
                rows = torch.empty(num_patches, width, dtype=torch.uint8)
            else:
                of_images = owned.split([math.prod(grid) for grid in microbatch.image_grids])
                rows = owned if len(images) == len(of_images) else torch.cat([of_images[image] for image in images])
            if not ranks and group is not None:
                dist.broadcast(rows, src=mesh.replica_owner, group=group)
            elif ranks and owned is None:
                dist.recv(rows, mesh.replica_owner, group)
            elif ranks and ranks[rank] != mesh.rank:
                sent.append(dist.isend(rows, ranks[rank], group))
            kept = rows if rank == own else kept
        for work in sent:
            assert work is not None, "torch returns one on the ranks of the group"
            work.wait()
        return kept


def deal_images(microbatches: Sequence[Microbatch], model: ModelConfig, num_ranks: int) -> list[Microbatch]:
    """Assign each image to one of ``num_ranks`` ranks, evening out the ViT's work in each of its passes.

    Depends only on the grids, so every rank gets the same result.
    """
    dealt = list(microbatches)
    if num_ranks == 1:
        return dealt
    for batch in encoder_batches_of(microbatches, model.encoder_batch_size):
        costs = [image_flops(model, grid) for number in batch for grid in microbatches[number].image_grids]
        ranks = iter(deal(costs, num_ranks))
        for number in batch:
            one = microbatches[number]
            dealt[number] = replace(one, image_ranks=tuple(islice(ranks, len(one.image_grids))))
    return dealt
