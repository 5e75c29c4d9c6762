"""What a stage needs from a family: the modules of its towers, and the functions that prepare their inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm.batch import Grid, Microbatch
from mm.config.model import LanguageConfig, ProjectorConfig, VisionConfig
from mm.device.device import Device
from mm.model.layers.attention import AttentionInputs
from mm.model.layers.layer_context import LayerContext
from mm.parallel.context import Share
from mm.placement import StageSpec


class VisionInputs(Protocol):
    """A microbatch's images, on the device; each family adds the other inputs of its ViT."""

    @property
    def pixel_values(self) -> Tensor | None:
        """In the model's dtype; None without the patch embedding."""
        ...

    @property
    def features(self) -> Tensor | None:
        """[num_patches, hidden], in the processor's order: stored output of the last ViT layer; None if not stored."""
        ...


@dataclass(frozen=True)
class Towers:
    """The modules and functions of one family.  Modules own what their ``StageSpec`` lists, under the table's names."""

    vision_encoder: Callable[[VisionConfig, StageSpec, LayerContext], nn.Module]
    """Patch embedding and ViT layers.  (rows, ``VisionInputs``) -> rows; pixels take the place of rows at the patch
    embedding."""
    projector: Callable[[ProjectorConfig, int, LayerContext], nn.Module]
    """Built with the number of patches that become one visual token.  (rows, ``VisionInputs``) -> visual tokens."""
    language_model: Callable[[LanguageConfig, StageSpec, LayerContext], Any]
    """Layers, with ``embedding`` and ``loss`` and ``logits`` where the stage has them.  (rows, ``AttentionInputs``) ->
    rows."""
    vision_inputs: Callable[
        [Sequence[Grid], Tensor | None, Tensor | None, VisionConfig, Device, dist.ProcessGroup | None, Tensor | None],
        VisionInputs]
    """From the grids of a microbatch's images, their pixels or features on the device, the group that shards rows, and
    dropout keys of the patches."""
    language_inputs: Callable[
        [Microbatch, LanguageConfig, torch.dtype, Device, dist.ProcessGroup | None, Share | None, Tensor | None],
        AttentionInputs]
    """With the group that shards rows, how context-parallel ranks divide the row, and the tokens' keys for dropout."""
    features_of: Callable[[Tensor, Any], Tensor]
    """The last ViT layer's output, gathered if it is sharded, in the form of ``VisionInputs.features``; detached."""
    last_output: Callable[[Tensor, Any], Tensor]
    """Its inverse: what the projector takes, or this rank's shard of it."""
