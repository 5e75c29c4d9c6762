"""Patterns of names match in a time that their length bounds."""


from mm.weights.table import is_target


def test_spans_of_layers() -> None:
    assert is_target("layers.0-15.mlp", ["model.layers.7.mlp"]) and not is_target("layers.0-5.mlp", ["layers.7.mlp"])
    assert not is_target("layers.0-99999999999.mlp", ["model.layers.7.mlp"])  # is no span, and would fill the memory
