"""Which tokenizers are safe: the length of a text bounds the time and memory that they take for it.

A tokenizer is a program too: its regular expressions may backtrack for ever, and its replacements may double a text
again and again, in native code that nothing can interrupt.  So only parts that are known to end are accepted: byte-pair
merges, Unicode's normal forms, bytes as characters, and the expressions of published tokenizers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mm.config.schema import shown
from mm.families.family import Family

_STEPS = ("normalizer", "pre_tokenizer", "decoder")
"""Parts that consist of steps."""
_HARMLESS = ("NFC", "NFD", "NFKC", "NFKD", "ByteLevel")
_INNER = ("normalizers", "pretokenizers", "decoders")
"""Keys of the steps within a step of type "Sequence"."""


def backend_steps(backend: Any) -> dict[str, Any]:
    """The steps of a loaded tokenizer, as tokenizer.json has them."""
    found = {name: getattr(backend, name) for name in _STEPS}
    steps = {name: None if step is None else json.loads(step.__getstate__()) for name, step in found.items()}
    return {**steps, "model": {"type": type(backend.model).__name__}}


def endless_steps(steps: Mapping[str, Any], where: str, families: Sequence[Family]) -> Iterator[str]:
    """A problem for each part of the tokenizer in ``where`` that is not known to end."""
    patterns = {pattern for family in families for pattern in family.split_patterns}
    cure = f"copy tokenizer.json from a {' or '.join(family.title for family in families)} checkpoint."
    model = steps.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        yield f"{where}: its model is {shown(kind)}; expected \"BPE\": {cure}"
    for name in _STEPS:
        left = [steps.get(name)]
        while left:
            step = left.pop()
            if isinstance(step, dict) and step.get("type") == "Sequence":
                left += [one for key in _INNER for one in step.get(key) or ()]
            elif step is not None and not _is_harmless(step, patterns):
                yield (f"{where}: its {name} has {shown(step)}, which can take any time or memory; expected the steps "
                       f"of a published tokenizer: {cure}")


def _is_harmless(step: Any, patterns: set[str]) -> bool:
    if not isinstance(step, dict):
        return False
    pattern = step.get("pattern")
    is_known = step.get("type") == "Split" and isinstance(pattern, dict) and pattern.get("Regex") in patterns
    return is_known or step.get("type") in _HARMLESS
