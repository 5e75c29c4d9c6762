"""Changes of a run that alter what is learnt, which only its user can decide: what each would do to a step.

They stand apart from layouts, all of which train the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mm.config.lora import LoraConfig
from mm.config.run import Run
from mm.data.lengths import HasLengths, Lengths

_LORA = LoraConfig(r=16, target_modules=("all-linear",))


@dataclass(frozen=True)
class OtherRun:
    """A run that learns something else."""

    what: str
    """The change, in the user's words."""
    run: Run
    lengths: HasLengths


@dataclass(frozen=True)
class FewerPixels:
    """``lengths`` with images of half as many pixels."""

    lengths: HasLengths
    merge_area: int
    """Patches that become one token."""

    def __len__(self) -> int:
        return len(self.lengths)

    def of(self, numbers: np.ndarray) -> Lengths:
        """See ``HasLengths``.  Full attention of the ViT compares a quarter of the pairs."""
        found = self.lengths.of(numbers)
        lost = found.num_patches // (2 * self.merge_area)
        return replace(
            found, num_tokens=found.num_tokens - lost, num_patches=found.num_patches - lost * self.merge_area,
            num_image_pairs=found.num_image_pairs // 4, num_window_pairs=found.num_window_pairs // 2)


def other_runs(run: Run, lengths: HasLengths) -> Iterator[OtherRun]:
    """The runs that users weigh against ``run``: other global batches, frozen parts, adapters, smaller images."""
    for size in (run.global_batch_size * 2, run.global_batch_size // 2):
        if size:
            yield OtherRun(f"--global-batch-size {size}", replace(run, args=replace(run.args, global_batch_size=size)),
                           lengths)
    model = run.model
    if not model.lora.is_on and not model.vision.freeze:
        frozen = replace(model, vision=replace(model.vision, freeze=True))
        yield OtherRun("ViT frozen", replace(run, model=frozen), lengths)
    if not model.lora.is_on:
        adapted = replace(model, lora=_LORA)
        yield OtherRun(f"LoRA, r = {_LORA.r}, all linear layers", replace(run, model=adapted), lengths)
    yield OtherRun("images of half as many pixels", run, FewerPixels(lengths, model.vision.spatial_merge_size**2))
