"""Settings of config.json that would make transformers compute a different model than this code does.

Every key that transformers reads is used (``KEYS`` of ``config_json.py``), does not affect training, or must have the
value that is implemented here; a test goes through all of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mm.families.family import ROPE_KEYS, Section

FIXED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "text": {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "attention_dropout": (0,),
        "chunk_size_feed_forward": (0,),
        "is_encoder_decoder": (False,),
    },
    "vision": {"hidden_act": ("silu",), "chunk_size_feed_forward": (0,), "is_encoder_decoder": (False,)},
}
"""Section -> key -> the values that it may have, if it is present and not null."""
_ROPE_TYPES = {"text": ("default", "mrope"), "vision": ("default", "axial")}
_ROPE_FIXED = {"text": {"partial_rotary_factor": (1,), "mrope_interleaved": (False,)},
               "vision": {"partial_rotary_factor": (1,), "rope_theta": (10000,)}}  # fmt: skip
"""The same for keys inside the rotary embedding.  The ViT's is Qwen2-VL's: base 10000 over rows and columns."""


def fixed_problems(config: Section, file: object = "config.json") -> Iterator[str]:
    """Settings in a parsed ``config.json``, read from ``file``, that ask for a model not computed here."""
    text, vision = (config.get(f"{tower}_config") for tower in FIXED)
    for tower, sections in (("text", (config, text)), ("vision", (vision,))):
        for section in (one for one in sections if isinstance(one, dict)):
            where = "" if section is config else f"{tower}_config."
            yield from _wrong(section, FIXED[tower], f"{file}: {where}")
            layers = section.get("layer_types")
            if isinstance(layers, list) and (kinds := {str(one) for one in layers}) != {"full_attention"}:
                yield f"{file}: {where}layer_types has {sorted(kinds)}; expected 'full_attention' only."
            for key in ROPE_KEYS:
                rope = section.get(key)
                if isinstance(rope, dict):
                    yield from _wrong(rope, _ROPE_FIXED[tower], f"{file}: {where}{key}.")
                    found = {str(rope[one]) for one in ("type", "rope_type") if rope.get(one) is not None}
                    if not found <= {*_ROPE_TYPES[tower]}:
                        yield (f"{file} asks for the rotary embedding {sorted(found)} ({where}{key}); expected "
                               f"{' or '.join(map(repr, _ROPE_TYPES[tower]))}: scaled ones (yarn, linear, ...) are not "
                               f"computed here. Give the config.json of the published model.")


def _wrong(section: Section, fixed: Mapping[str, tuple[Any, ...]], where: str) -> Iterator[str]:
    for key, values in fixed.items():
        if section.get(key) not in (None, *values):
            yield (f"{where}{key} is {section[key]!r}; expected {values[0]!r}, the only way in which the "
                   f"model is computed here.")
