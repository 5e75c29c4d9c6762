"""Patterns of names match in a time that their length bounds."""

import time

from mm.weights.names import is_target, matches


def test_spans_of_layers() -> None:
    assert is_target("layers.0-15.mlp", ["model.layers.7.mlp"]) and not is_target("layers.0-5.mlp", ["layers.7.mlp"])
    assert not is_target("layers.0-99999999999.mlp", ["model.layers.7.mlp"])  # is no span, and would fill the memory


def test_patterns_do_not_try_for_ever() -> None:
    """As Python's own translation of such patterns does not; without that, these would take years."""
    name, began = "model.layers.10.self_attn.q_proj." * 3, time.process_time()
    for pattern in ("*a" * 200 + "x", "*.*" * 100 + "!", "*[a-z]" * 80 + "!", "*?" * 200 + "!", "[!x]*" * 90 + "!"):
        assert not matches(pattern, name) and not is_target(pattern, [name])
    assert time.process_time() - began < 60  # of a processor; it takes far below one
