"""How towers keep activations: from the model JSON, and from flags where that says nothing."""

from mm.config.layers import OffloadConfig, RecomputeConfig
from tests.config.test_model import LANGUAGE, VISION, model
from tests.config.test_run import load


def test_block_recomputes_the_first_layers_of_each_chunk_and_uniform_all():
    block, chunks = RecomputeConfig("full", "block", 2), (range(0, 1), range(1, 5), range(5, 5), range(5, 8))
    assert [list(block.whole_layers(layers)) for layers in chunks] == [[0], [1, 2], [], [5, 6]]
    assert [RecomputeConfig("full", "uniform", 2).whole_layers(layers) for layers in chunks] == list(chunks)
    assert not any(RecomputeConfig("selective").whole_layers(layers) for layers in chunks)


def test_offload_is_of_all_layers_of_each_chunk_or_the_first():
    chunks = (range(0, 1), range(1, 5), range(5, 5), range(5, 8))
    for config, expected in (
        (OffloadConfig(), [[], [], [], []]), (OffloadConfig(False), [[], [], [], []]),
        (OffloadConfig(True), [[0], [1, 2, 3, 4], [], [5, 6, 7]]), (OffloadConfig(True, 2), [[0], [1, 2], [], [5, 6]]),
        (OffloadConfig(None, 0), [[], [], [], []]), (OffloadConfig(True, 0), [[], [], [], []]),
        (OffloadConfig(None, 2), [[0], [1, 2], [], [5, 6]]),
    ):
        assert [list(config.layers(layers, is_before_head=False)) for layers in chunks] == expected
        before = [list(config.layers(layers, is_before_head=True)) for layers in chunks]
        assert before == [[layer for layer in some if layer != layers.stop - 1]
                          for some, layers in zip(expected, chunks, strict=True)]


def test_megatrons_names_of_offload(tmp_path):
    config = model(tmp_path, **{f"{VISION}.cpu_offloading_activations": True,
                                f"{LANGUAGE}.cpu_offloading_num_layers": 4})
    assert (config.vision.offload, config.language.offload) == (OffloadConfig(True), OffloadConfig(None, 4))


def test_recompute_flags_apply_where_the_json_has_none(tmp_path):
    run = load(tmp_path, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers",
               "1", model={f"{LANGUAGE}.recompute_granularity": "selective"})
    assert run.model.vision.recompute.method == "uniform"
    assert run.model.language.recompute.granularity == "selective"


def test_offload_flags_apply_where_the_json_has_none(tmp_path):
    for flags, expected in ((["--cpu-offload-activations"], 28), (["--cpu-offloading-num-layers", "5"], 5),
                            (["--cpu-offload-activations", "--cpu-offloading-num-layers", "6"], 6), ([], 0)):
        run = load(tmp_path, *flags, model={f"{VISION}.cpu_offloading_activations": False})
        assert len(run.model.language.offload.layers(range(28), is_before_head=False)) == expected
        assert not run.model.vision.offload.layers(range(32), is_before_head=False)


def test_offload_flags_without_effect_are_noted(tmp_path):
    both = {f"{VISION}.cpu_offloading_activations": False, f"{LANGUAGE}.cpu_offloading_num_layers": 3}
    for keys, expected in ((both, 1), ({f"{VISION}.cpu_offloading_activations": False}, 0), ({}, 0)):
        notes = load(tmp_path, "--cpu-offloading-num-layers", "5", model=keys).notes
        unused = [note for note in notes if str(note).startswith("--cpu-offloading-num-layers: no effect")]
        assert len(unused) == expected
    kept = {f"{tower}.recompute_granularity": "selective" for tower in (VISION, LANGUAGE)}
    notes = load(tmp_path, "--recompute-granularity", "selective", model=kept).notes
    assert "--recompute-granularity: no effect: the model JSON has such settings for both towers" in map(str, notes)
