"""One run from flags and files: derived numbers, rules across files, and all problems together."""

import json
from pathlib import Path

import pytest

from mm.config.args import Arguments
from mm.config.data import DataConfig, read_data
from mm.config.layers import OffloadConfig, RecomputeConfig
from mm.config.model import read_model
from mm.config.parse import LOCAL, fields_of
from mm.config.rules import asks, is_due, validates
from mm.config.run import Run, load_run, resolved, shared_settings
from mm.errors import UserError
from tests.config.test_model import ABSENT, LANGUAGE, PROJECTOR, VISION, changed, model
from tests.files import EXAMPLES
from tests.tiny_inputs import flags_of, write_inputs


def written(tmp_path: Path, model: dict | None = None, data: dict | None = None) -> list[str]:
    """Flags of a run in fp32 with both JSON files of the 7B, changed."""
    for name, changes in (("model_7b.json", model), ("data_7b.json", data)):
        (tmp_path / name).write_text(json.dumps(changed(name, changes or {}), indent=1))
    return ["--mm-model", str(tmp_path / "model_7b.json"), "--mm-data", str(tmp_path / "data_7b.json"),
            "--micro-batch-size", "1", "--seq-length", "1024", "--train-iters", "100", "--lr", "1e-5"]


def load(tmp_path, *flags: str, world_size: int | None = 8, model: dict | None = None, data: dict | None = None,
         environment: dict[str, str] | None = None) -> Run:
    return load_run([*written(tmp_path, model, data), "--bf16", "--dry-run", *flags], world_size, environment or {})


def problems(tmp_path, *flags: str, **how) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(tmp_path, *flags, **how)
    return list(caught.value.problems)


def test_derived_numbers(tmp_path):
    run = load(tmp_path, "--global-batch-size", "192", "--lr-warmup-fraction", "0.125")
    assert (run.num_stages, run.dp_size, run.num_microbatches, run.global_batch_size) == (2, 4, 48, 192)
    assert (run.args.precision, run.lr_decay_iters, run.lr_warmup_iters) == ("bf16", 100, 12.5)
    assert run.args.loss_unit == "token"
    run = load(tmp_path, "--tensor-model-parallel-size", "2", "--calculate-per-sample-loss",
               "--lr-warmup-iters", "3", "--lr-decay-iters", "50")
    assert (run.dp_size, run.global_batch_size, run.num_microbatches) == (2, 2, 1)
    assert (run.args.loss_unit, run.lr_decay_iters, run.lr_warmup_iters) == ("sample", 50, 3)


def test_a_run_without_a_loss_flag_gets_a_note_about_the_peers_loss(tmp_path):
    def reported(*flags: str) -> list[str]:
        return [note for note in load(tmp_path, *flags).notes if "--calculate-per-microbatch-loss" in note]

    (note,) = reported()
    assert "every target token of the global batch has the same weight" in note and "--calculate-per-token-loss" in note
    for unit in ("token", "sample", "microbatch"):
        assert reported(f"--calculate-per-{unit}-loss") == []
        assert load(tmp_path, f"--calculate-per-{unit}-loss").args.loss_unit == unit


PACKING = {"dataset_param.basic_parameters.packing": True}
BALANCED = {"dataloader_param.sampler_type": "BalancedBatchSampler"}


@pytest.mark.parametrize(("data", "micro_batch_size", "why"), [
    (PACKING, "1", "packing"),
    (BALANCED | PACKING, "1", "packing"),
    (BALANCED, "2", "sampler_type 'BalancedBatchSampler'"),
    (BALANCED, "1", None),
    ({"dataloader_param.sampler_type": "BucketBatchSampler"}, "2", None),
])
def test_a_loss_per_microbatch_needs_microbatches_independent_of_the_layout(tmp_path, data, micro_batch_size, why):
    flags = ("--micro-batch-size", micro_batch_size, "--global-batch-size", "16", "--calculate-per-microbatch-loss")
    if why is None:
        assert load(tmp_path, *flags, data=data).args.loss_unit == "microbatch"
    else:
        (found,) = problems(tmp_path, *flags, data=data)
        assert f"--calculate-per-microbatch-loss is given, but {why} in" in found
        assert "use --calculate-per-sample-loss or --calculate-per-token-loss" in found
        notes = load(tmp_path, *flags[:-1], data=data).notes
        (note,) = [note for note in notes if "MindSpeed-MM averages" in note]
        assert "--calculate-per-microbatch-loss" not in note and f"with {why} that would depend" in note
    for unit in ("token", "sample"):
        assert load(tmp_path, *flags[:-1], f"--calculate-per-{unit}-loss", data=data).args.loss_unit == unit


def test_packs_are_counted_in_no_setting(tmp_path):
    run = load(tmp_path, "--micro-batch-size", "3", "--global-batch-size", "7", data=PACKING)
    assert run.num_microbatches is None and resolved(run)["num_microbatches"] is None
    assert run.held_microbatches == 4  # of 7 samples, 3 are for the other replicas
    assert any("= 3072 tokens; --global-batch-size counts samples, not packs" in note for note in run.notes)
    (found,) = problems(tmp_path, "--global-batch-size", "3", data=PACKING)
    assert "--global-batch-size is 3; expected at least 4 samples, so that each of 4 replicas has one" in found
    lists = {f"{VISION}.pipeline_num_layers": [[16, 16], [0, 0]], f"{LANGUAGE}.pipeline_num_layers": [[0, 0], [14, 14]]}
    (found,) = problems(tmp_path, "--global-batch-size", "60", data=PACKING, model=lists)
    assert "not a multiple of data-parallel size x pipeline stages = 4 x 2 = 8, as packs on virtual" in found
    assert "nearest: 56 or 64" in found
    assert load(tmp_path, "--global-batch-size", "64", data=PACKING, model=lists).held_microbatches == 4


def test_sources_of_the_world_size(tmp_path):
    assert load(tmp_path, world_size=None, environment={"WORLD_SIZE": "4"}).world_size == 4
    assert load(tmp_path, "--world-size", "6", world_size=None).world_size == 6
    assert load(tmp_path, world_size=None, model={f"{VISION}.pipeline_num_layers": [32],
                                                  f"{LANGUAGE}.pipeline_num_layers": [28]}).world_size == 1
    found = problems(tmp_path, "--world-size", "6", world_size=None, environment={"WORLD_SIZE": "4"})
    assert "--world-size is 6, but the launcher's WORLD_SIZE is 4;" in found[0]
    assert "WORLD_SIZE is 'x'" in problems(tmp_path, "--world-size", "2", world_size=None,
                                           environment={"WORLD_SIZE": "x"})[0]


@pytest.mark.parametrize(("flags", "how", "what"), [
    (["--tensor-model-parallel-size", "8"], {"world_size": 16},
     "does not divide text_decoder.num_attention_heads = 28"),
    (["--pipeline-model-parallel-size", "4"], {}, "--pipeline-model-parallel-size is 4, but the"),
    (["--virtual-pipeline-model-parallel-size", "2"], {}, "have another number of virtual chunks, 1; change one"),
    (["--context-parallel-size", "3"], {"world_size": 6},
     "with ulysses_cp_algo it must divide the 28 heads per tensor-parallel rank of"),
    (["--context-parallel-size", "3"], {"world_size": 6}, "1, 2, 4, 28; --context-parallel-algo megatron"),
    (["--context-parallel-size", "2"], {"world_size": 6},
     "not a multiple of tensor x context x pipeline parallel size = 1 x 2 x 2 = 4; nearest: 4 or 8 ranks"),
    (["--dry-run-patches", "5000"], {}, "of a microbatch (--seq-length x --micro-batch-size) allow at most 4096"),
    ([], {"world_size": 7}, "The world size is 7, not a multiple of tensor x pipeline parallel size = 1 x 2 = 2; "
                            "nearest: 6 or 8 ranks"),
    ([], {"world_size": 1}, "nearest: 2 ranks"),
    (["--global-batch-size", "6"], {}, "--global-batch-size is 6, not a multiple of --micro-batch-size x data-parallel "
                                       "size = 1 x 4 = 4; nearest: 4 or 8"),
    (["--fp16"], {}, "--bf16 and --fp16 are both given"),
    (["--calculate-per-token-loss", "--calculate-per-sample-loss"], {}, "are both given; keep one"),
    (["--min-lr", "1"], {}, "--min-lr is 1, above --lr = 1e-05"),
    (["--lr-warmup-fraction", "0.1", "--lr-warmup-iters", "3"], {}, "are both given; keep one"),
    (["--lr-warmup-iters", "100"], {}, "expected fewer than the 100 decay steps (--train-iters)"),
    (["--save-retain-interval", "5"], {}, "--save is missing"),
    (["--save", "x", "--save-interval", "4", "--save-retain-interval", "6"], {}, "a multiple of --save-interval = 4"),
    (["--profile-pipeline", "101"], {}, "--profile-pipeline is 101, but the last iteration is --train-iters = 100"),
    (["--profile", "--profile-step-start", "12"], {}, "--profile-step-start is 12; expected less than "
     "--profile-step-end = 12, before which the profiler stops"),
    (["--profile", "--profile-step-start", "101", "--profile-step-end", "103"], {}, "give one from 1 to 100"),
    (["--profile", "--profile-ranks", "7", "8", "9"], {}, "--profile-ranks has 8, 9, but the world size is 8; expected "
     "ranks from 0 to 7"),
    (["--recompute-granularity", "full"], {}, "which also needs --recompute-method"),
    (["--recompute-modules", "mlp"], {}, "--recompute-modules needs --recompute-granularity 'selective'"),
    (["--freeze-modules", "norm"], {"model": {"freeze_modules": ["bias"]}}, 'freeze_modules is ["bias"]; both set'),
    ([], {"model": {f"{LANGUAGE}.max_position_embeddings": 512}},
     "--seq-length is 1024; expected at most text_decoder.max_position_embeddings = 512"),
    ([], {"model": {f"{LANGUAGE}.pipeline_num_layers": [12, 15]}}, "which sums to 27; expected num_layers = 28"),
    ([], {"model": {f"{VISION}.pipeline_num_layers": [[16, 16], [0, 0]],
                    f"{LANGUAGE}.pipeline_num_layers": [[0, 4], [12, 12]]}},
     "--global-batch-size is 4; microbatches of a replica: 1, but virtual chunks need at least one for each of the 2 "
     "stages; nearest: 8"),
    ([], {"model": {f"{VISION}.pipeline_num_layers": [[32], [0]], f"{LANGUAGE}.pipeline_num_layers": [[4], [24]]}},
     "have 2 virtual chunks on one stage, which cannot have any: give flat lists"),
    ([], {"model": {f"{LANGUAGE}.bf16": False}}, "text_decoder.bf16 is false; change the flag or the file"),
    ([], {"model": {f"{VISION}.params_dtype": "fp32"}}, "--bf16 is given, which means bf16, but"),
    (["--vision-tower-lr", "1e-6"], {"model": {f"{VISION}.vision_lr": 2e-6}},
     "vision_lr is 2e-06; both are the learning rate of one part, so keep one"),
    (["--mm-projector-lr", "1e-6"], {"model": {f"{PROJECTOR}.projector_lr": 2e-6}}, "--mm-projector-lr is 1e-06, but"),
    (["--lr", "0"], {"model": {f"{LANGUAGE}.language_lr": 2e-6}}, "--lr is 0, but text_decoder.language_lr is not"),
    (["--lr", "0", "--mm-projector-lr", "1e-6"], {"model": {f"{PROJECTOR}.freeze": False}},
     "--lr is 0, but --mm-projector-lr is not; all"),
    ([], {"data": {"dataset_param.preprocess_parameters.image_min_pixels": 300000}}, "above image_max_pixels = 262144"),
])
def test_rules_across_files(tmp_path, flags, how, what):
    found = problems(tmp_path, *flags, **how)
    assert any(what in problem for problem in found), found


def test_problems_of_flags_and_both_files_come_together(tmp_path):
    found = problems(tmp_path, "--sed", "1", model={f"{LANGUAGE}.num_layer": 3},
                     data={"dataset_param.attr.role_tags": "x"})
    assert len(found) == 3
    for what in ("--seed", "num_layers", "role_tag"):
        assert any(f"did you mean '{what}'" in problem for problem in found)
    found = problems(tmp_path, "--min-lr", "1", model={f"{LANGUAGE}.num_layer": 3})
    assert len(found) == 2


def test_what_is_frozen_comes_from_the_file_or_the_flags(tmp_path):
    assert load(tmp_path, "--freeze-modules", "norm", "bias").model.freeze_modules == ("norm", "bias")
    run = load(tmp_path, "--freeze-modules", "norm", "--trainable-modules", "layers.27",
               model={"freeze_modules": ["norm"], f"{LANGUAGE}.freeze": True})
    assert (run.model.freeze_modules, run.model.trainable_modules) == (("norm",), ("layers.27",))
    reported = load(tmp_path, model={f"{VISION}.freeze_layers": "1"}).notes
    assert any("vision_encoder.freeze_layers of" in one
               and ": no effect: freeze is true for that part" in one for one in reported)


def test_settings_for_activations_of_a_frozen_vit_are_noted(tmp_path):
    """Also with adapters, which a frozen part never has; a flag concerns the LLM too."""
    note = "vision_encoder.recompute_granularity, image_encoder.vision_encoder.cpu_offloading_num_layers of"
    settings = {f"{VISION}.cpu_offloading_num_layers": 2, f"{VISION}.recompute_granularity": "selective"}
    for flags in ((), ("--lora-target-modules", "linear_qkv")):
        notes = load(tmp_path, *flags, model=settings).notes
        assert any(note in one and "freeze is true" in one for one in notes)
    trained = {**settings, f"{VISION}.freeze": False}
    for run in (load(tmp_path, model=trained), load(tmp_path, "--cpu-offload-activations")):
        assert not [one for one in run.notes if "vision_encoder.recompute" in one]


def test_rates_of_parts_come_from_the_file_or_the_flags(tmp_path):
    trained = {f"{VISION}.freeze": False, f"{PROJECTOR}.freeze": False}
    run = load(tmp_path, "--vision-tower-lr", "1e-6", "--mm-projector-lr", "1e-4",
               model={**trained, f"{VISION}.vision_lr": 1e-6, f"{PROJECTOR}.projector_weight_decay": 0.5})
    rates = [(part.rates.lr, part.rates.weight_decay) for part in (
        run.model.vision, run.model.projector, run.model.language)]
    assert rates == [(1e-6, None), (1e-4, 0.5), (None, None)]
    assert not [note for note in run.notes if "freeze is true" in note]


def test_rates_without_effect_are_noted(tmp_path):
    reported = "\n".join(load(tmp_path, "--vision-tower-lr", "1e-6", "--lr-mult", "2",
                          model={f"{PROJECTOR}.projector_weight_decay": 0.5}).notes)
    for what in ("--vision-tower-lr: no effect: freeze is true", "--lr-mult: no effect: only with",
                 "image_encoder.vision_projector.projector_weight_decay of"):
        assert what in reported
    assert "--lr-scale-modules: no effect: only with --lr-mult" in "\n".join(
        load(tmp_path, "--lr-scale-modules", "mlp").notes)


def test_missing_paths_are_problems_except_in_a_dry_run(tmp_path):
    run = load(tmp_path, "--load", "nowhere")
    reported = "\n".join(run.missing)
    for what in ("--load is 'nowhere', which is not a directory", "model_name_or_path", "dataset_dir is './data'",
                 "dataset is './data/mllm"):
        assert what in reported
    assert len(refused([*written(tmp_path), "--bf16", "--load", "nowhere"], {}, 8)) == 4


def test_notes(tmp_path):
    reported = "\n".join(load(tmp_path, "--sequence-parallel", "--loss-scale", "8", "--use-flash-attn",
                          "--profile-ranks", "9", "--mm-tool", "tools.json", "--profile-level", "level1",
                              model={f"{LANGUAGE}.seq_length": 1024},
                              data={"dataset_param.basic_parameters.preprocessing_batch_size": 1000}).notes)
    for what in ("--profile-ranks: no effect: only with --profile", "--mm-tool: no effect",
                 "--profile-level: no effect", "--sequence-parallel: no effect: there is one", "--load is absent",
                 "--save is absent",
                 "--loss-scale: no effect", "--use-flash-attn", "text_decoder.seq_length", "cache_dir"):
        assert what in reported


def test_resolved_run_is_json_and_complete(tmp_path):
    run = load(tmp_path, "--global-batch-size", "192")
    whole = resolved(run)
    assert json.loads(json.dumps(whole)) == whole
    assert whole["arguments"]["lr"] == 1e-5
    assert whole["model"]["language"]["pipeline_num_layers"] == [[14, 14]]
    assert whole["data"]["attr"]["role_tag"] == "role"
    derived = ("world_size", "pipeline_model_parallel_size", "data_parallel_size", "num_microbatches", "precision")
    assert [whole[key] for key in derived] == [8, 2, 4, 48, "bf16"]
    assert whole["notes"] == list(run.notes)


def test_precision_keys_may_be_absent(tmp_path):
    absent = {f"{tower}.{key}": ABSENT for tower, keys in (
        (VISION, ("fp16", "bf16", "params_dtype")), (PROJECTOR, ("bf16", "params_dtype")),
        (LANGUAGE, ("bf16", "params_dtype"))) for key in keys}
    argv = [*written(tmp_path, absent), "--dry-run"]
    assert load_run(argv, 2, {}).args.precision == "fp32"
    assert load_run([*argv, "--fp16"], 2, {}).args.precision == "fp16"


@pytest.mark.parametrize(("flags", "values"), [
    ([], {"fp16": False, "bf16": False, "params_dtype": "float32"}),
    (["--bf16"], {"fp16": False, "bf16": True, "params_dtype": "bfloat16"}),
    (["--fp16"], {"fp16": True, "bf16": False, "params_dtype": "float16"}),
])
def test_precision_keys_may_repeat_the_flags(tmp_path, flags, values):
    towers = (VISION, PROJECTOR, LANGUAGE)
    argv = [*written(tmp_path, {f"{tower}.{key}": value for tower in towers for key, value in values.items()}),
            "--dry-run"]
    assert load_run([*argv, *flags], 2, {}).args.precision == (flags or ["--fp32"])[0].removeprefix("--")
    for other in {"--bf16", "--fp16"}.difference(flags):
        (reported,) = (one for one in refused([*argv, other], {}) if one.endswith("; change the flag or the file"))
        assert all(f"{tower}.params_dtype is" in reported for tower in towers)


def refused(argv: list[str], environment: dict[str, str], world_size: int | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_run(argv, world_size, environment)
    return list(caught.value.problems)


def test_a_run_that_no_launcher_started_must_not_wait_for_its_other_ranks(tmp_path):
    argv = [*written(tmp_path), "--bf16"]
    for environment, flags, what in (
        ({"WORLD_SIZE": "2"}, (), "WORLD_SIZE is set, but RANK is not"),
        ({"RANK": "1"}, (), "RANK is set, but WORLD_SIZE is not"),
        ({}, ("--world-size", "2"), "--world-size is 2, but no launcher started these ranks"),
    ):
        assert any(what in problem for problem in refused([*argv, *flags], environment)), what
    for environment, flags in (
        ({"WORLD_SIZE": "2", "RANK": "1"}, ()),
        ({}, ("--world-size", "2", "--check")),
    ):
        reported = refused([*argv, *flags], environment)
        assert len(reported) == 3, reported  # the paths that are missing
        assert all("which is not a" in problem for problem in reported)


def test_missing_paths_are_reported_together_with_problems_of_a_file(tmp_path):
    argv = [*written(tmp_path), "--load", "nowhere", "--sed", "1"]
    (tmp_path / "model_7b.json").write_text("{")
    reported = refused(argv, {})
    assert len(reported) == 6
    for what in ("--sed is not", "model_7b.json:1", "--load is 'nowhere'", "model_name_or_path", "dataset_dir"):
        assert any(what in problem for problem in reported), what


def test_every_text_flag_is_a_path_that_machines_may_differ_in() -> None:
    for cls in (Arguments, DataConfig):
        for name, field in fields_of(cls).items():
            assert LOCAL in field.metadata or field.annotation not in (str, str | None), name


def test_machines_may_differ_in_paths_and_workers_only(tmp_path: Path) -> None:
    inputs, elsewhere = write_inputs(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()

    def settings(folder: Path, *flags: str) -> dict[str, str]:
        words = flags_of(inputs, "a", 1, *flags, "--mm-model", str(folder / "model_1.json"), "--mm-data",
                         str(folder / "data.json"), "--log-dir", str(folder))
        return shared_settings(load_run(words, 1, {}))

    for name in ("model_1.json", "data.json"):
        (elsewhere / name).write_bytes((inputs / name).read_bytes())
    ours = settings(inputs)
    assert settings(elsewhere, "--num-workers", "3") == ours and len(ours) > 150
    model = json.loads((inputs / "model_1.json").read_text())
    model["text_decoder"]["rope_theta"] = 5.0
    (elsewhere / "model_1.json").write_text(json.dumps(model))
    theirs = settings(elsewhere, "--lr", "2e-3", "--overlap-grad-reduce")
    assert {name: value for name, value in theirs.items() if ours[name] != value} == {
        "--lr": "0.002", "--overlap-grad-reduce": "true", "language.rope_theta of --mm-model": "5.0"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[md]*_*.json")), ids=lambda path: path.name)
def test_every_shipped_json_loads(path):
    assert (read_model if path.name.startswith("model_") else read_data)(path).value


# When validations and questions are due, and the problems of settings that need them where there are none.

VAL_RATE = {"dataset_param.basic_parameters.val_rate": 0.25}
DATA = "data_7b.json"


def test_validations_are_due_at_the_interval_and_after_the_last_step(tmp_path):
    args = load(tmp_path, "--eval-interval", "30", data=VAL_RATE).args
    assert [step for step in range(1, 101) if is_due(args, step)] == [30, 60, 90, 100]
    args = load(tmp_path).args
    assert [step for step in range(1, 101) if is_due(args, step)] == [100]  # every 1000, as in Megatron


def test_questions_are_asked_at_the_interval_and_after_the_last_step(tmp_path):
    asked = ("--eval-generate-questions", "q.json", "--eval-generate-rule", "exact", "--eval-generate-interval", "40")
    run = load(tmp_path, *asked)
    assert [step for step in range(1, 101) if asks(run.args, step)] == [40, 80, 100]
    args = load(tmp_path).args
    assert not any(asks(args, step) for step in range(1, 101))
    assert "--eval-generate-questions is 'q.json', which is not a file" in run.missing  # a problem without --dry-run


def test_validation_needs_samples_and_may_be_switched_off(tmp_path):
    for flags, data, expected in (((), VAL_RATE, True), ((), {}, False), (("--eval-iters", "0"), VAL_RATE, False),
                                  (("--eval-iters", "5"), VAL_RATE, True),
                                  ((), {"dataset_param.basic_parameters.val_rate": 0.0}, False)):
        run = load(tmp_path, *flags, data=data)
        assert validates(run.args, run.data) is expected


def test_the_peers_flags_without_samples_give_a_note(tmp_path):
    notes = load(tmp_path, "--eval-interval", "10000", "--eval-iters", "5000").notes
    (note,) = [note for note in notes if "validation" in note]
    assert note == (f"--eval-interval, --eval-iters: no effect: without val_dataset or val_rate in {tmp_path / DATA} "
                    f"there is no validation")
    assert not [note for note in load(tmp_path, "--eval-interval", "7", data=VAL_RATE).notes if "validation" in note]


@pytest.mark.parametrize(("flags", "data", "expected"), [
    (("--save", "s", "--save-best"), {}, "--save-best: there is no validation: {data} has neither val_dataset "
                                         "nor val_rate; add one of them to its basic_parameters"),
    (("--save", "s", "--save-best", "--early-stopping-patience", "2", "--eval-iters", "0"), VAL_RATE,
     "--save-best and --early-stopping-patience: there is no validation: --eval-iters is 0; raise or remove it"),
    (("--save-best",), VAL_RATE, "--save-best is given, but --save is missing: add --save, or remove --save-best"),
    (("--early-stopping-patience", "0"), VAL_RATE, "--early-stopping-patience is 0; expected an integer of at least 1"),
    (("--eval-interval", "0"), VAL_RATE, "--eval-interval is 0; expected an integer of at least 1"),
    (("--eval-generate-interval", "5"), {},
     "--eval-generate-interval is given, but --eval-generate-questions is missing: add "
     "--eval-generate-questions, or remove --eval-generate-interval"),
    (("--eval-generate-interval", "5", "--eval-generate-questions", "q.json"), {},
     "--eval-generate-questions needs --eval-generate-benchmark if it is a benchmark's file, or "
     "--eval-generate-rule to score your own questions"),
    (("--eval-generate-interval", "5", "--eval-generate-questions", "q.tsv", "--eval-generate-rule", "anls",
      "--eval-generate-benchmark", "docvqa"), {},
     "--eval-generate-rule and --eval-generate-benchmark are both given; keep one"),
    (("--eval-iters", "-1"), VAL_RATE, "--eval-iters is -1; expected an integer of at least 0"),
])
def test_impossible_settings_are_refused(tmp_path, flags, data, expected):
    assert problems(tmp_path, *flags, data=data) == [expected.format(data=tmp_path / DATA)]


# How towers keep activations: from the model JSON, and from flags where that says nothing.

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
