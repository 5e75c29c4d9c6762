"""The towers of Qwen2.5-VL, for a stage."""

from mm.model.qwen2_5_vl.language import LanguageModel, language_inputs
from mm.model.qwen2_5_vl.vision import Projector, VisionEncoder, features_of, last_output, vision_inputs
from mm.model.towers import Towers

TOWERS = Towers(VisionEncoder, Projector, LanguageModel, vision_inputs, language_inputs, features_of, last_output)
