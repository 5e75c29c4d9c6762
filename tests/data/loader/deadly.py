"""Images that end their decoder; imported quickly by data workers."""

import os
import signal

from torch import Tensor

from mm.data.media.image_patches import ImagePlan, ImageProcessor
from mm.data.workers import decoding
from mm.errors import UserError


class Refusing(ImageProcessor):
    """Decodes images, except one."""

    def patches(self, plan: ImagePlan) -> Tensor:
        with decoding(plan.path):
            if str(plan.path).endswith("tall.jpg"):
                self.end(plan)
        return super().patches(plan)

    def end(self, plan: ImagePlan) -> None:
        raise UserError(f"{plan.path}: is bad.")


class Crashing(Refusing):
    """The same, whose decoder crashes there."""

    def end(self, plan: ImagePlan) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)
