"""The command line: what it accepts, and how each error is reported."""

import re
import typing

import pytest

from mm.config.command_line import FIRST_TITLE, flag_name
from mm.config.flag_groups import FIRST, GROUPS
from mm.config.flag_rules import flag_problems
from mm.config.flags import TRAIN, Arguments, parse
from mm.config.foreign import FLAGS, Fixed, Inert, SameAs
from mm.config.schema import NUMBERS, choices, fields_of
from mm.errors import UserError
from tests.files import ROOT
from tests.workload import NO_COPIES, REMAINDERS

REQUIRED = ["--mm-model", "m.json", "--mm-data", "d.json", "--micro-batch-size", "2", "--seq-length", "64",
            "--train-iters", "5", "--lr", "1e-4"]


FIELDS = fields_of(Arguments)


def problems(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        TRAIN.read(TRAIN.split([*REQUIRED, *argv]))
    return list(caught.value.problems)


def notes(*argv: str) -> tuple[str, ...]:
    return tuple(TRAIN.notes(TRAIN.split([*REQUIRED, *argv])))


def test_defaults_are_megatrons():
    args = parse(REQUIRED)
    assert (args.mm_model, args.mm_data, args.micro_batch_size, args.seq_length) == ("m.json", "d.json", 2, 64)
    assert (args.lr, args.min_lr, args.lr_decay_style, args.lr_warmup_iters) == (1e-4, 0.0, "linear", 0)
    assert (args.weight_decay, args.adam_beta1, args.adam_beta2, args.adam_eps) == (0.01, 0.9, 0.999, 1e-8)
    assert (args.clip_grad, args.seed, args.num_workers, args.log_interval) == (1.0, 1234, 2, 100)
    assert (args.initial_loss_scale, args.min_loss_scale, args.loss_scale_window, args.hysteresis) == (
        2.0**32, 1.0, 1000, 2)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (1, None)
    assert (args.global_batch_size, args.save_interval, args.load, args.save) == (None, None, None, None)
    assert not any((args.bf16, args.fp16, args.use_distributed_optimizer, args.dry_run, args.finetune))
    assert (args.device, args.log_dir) == ("auto", "logs")


@pytest.mark.parametrize("name", FIELDS)
def test_every_flag_sets_its_own_field(name):
    field = FIELDS[name]
    kind = next((one for one in (int, float, bool, str) if one in (field.annotation, *typing.get_args(
        field.annotation)) or any(one is getattr(part, "__origin__", None) for part in typing.get_args(
            field.annotation))), str)
    value = {int: "3", float: "0.5", str: "x", bool: ""}[kind]
    value = "2.5" if name == "initial_loss_scale" else (choices(field) or (value,))[-1]
    value = "3" if field.title == NUMBERS else value
    kind = tuple if typing.get_origin(field.annotation) is tuple else kind
    found = getattr(parse([*REQUIRED, flag_name(name), *([value] if value else [])]), name)
    assert found is True if kind is bool else tuple(map(str, found)) == (value,) if kind is tuple else (
        str(found) == value and type(found) is kind)


def test_forms_of_values():
    assert parse([*REQUIRED, "--min-lr=1.0e-6"]).min_lr == 1e-6
    assert parse([*REQUIRED, "--seed", "7", "--seed", "7"]).seed == 7
    assert parse([*REQUIRED, "--lr-scale-modules", "a", "b.*"]).lr_scale_modules == ("a", "b.*")
    assert parse([*REQUIRED, "--profile-ranks", "0", "12"]).profile_ranks == (0, 12)
    assert parse([*REQUIRED, "--lr", "0.0001"]).lr == 1e-4  # the same number, written in another way


@pytest.mark.parametrize(("argv", "what"), [
    (["--seq-lenght", "5"], "--seq-lenght is not a known flag (did you mean '--seq-length'?); see --help"),
    (["--train-iter", "5"], "--train-iter is not a known flag (did you mean '--train-iters'?); see --help"),
    (["--min-lr", "1e-5,"], "--min-lr is '1e-5,'; expected a number of at least 0"),
    (["--min-lr", "nan"], "--min-lr is nan; expected a number of at least 0"),
    (["--min-lr", "-1"], "--min-lr is -1; expected a number of at least 0"),
    *((["--min-lr", word], f"--min-lr is {word}; expected a number of at least 0")
      for word in ("-1e-3", "-.5", "-inf", "-NaN", "-1E+400")),
    (["--min-lr", "-1,"], "--min-lr is '-1,'; expected a number of at least 0"),
    (["--seed", "-1e-3"], "--seed is '-1e-3'; expected an integer of at least 0 and below 2^63"),
    (["--save", "-1", "-2]"], "--save has 2 values (-1 -2]); expected one: directory of the training checkpoints"),
    (["--seq-lenght", "-1e3"], "--seq-lenght is not a known flag (did you mean '--seq-length'?); see --help"),
    (["-lr", "5"], "-lr is not a known flag (did you mean '--lr'?); see --help"),
    (["--seed", "9" * 5000], f"--seed is {'9' * 77}...; expected an integer of at least 0 and below 2^63"),
    (["--seed", "1.5"], "--seed is '1.5'; expected an integer of at least 0 and below 2^63"),
    (["--log-interval", "0"], "--log-interval is 0; expected an integer of at least 1"),
    (["--save"], "--save has no value; expected one: directory of the training checkpoints"),
    (["--save", "a", "b"], "--save has 2 values (a b); expected one: directory of the training checkpoints"),
    (["--lr-scale-modules"], "--lr-scale-modules has an empty word; expected one or more words"),
    (["--lr-scale-modules", "a", " "], "--lr-scale-modules has an empty word; expected one or more words"),
    (["--profile-ranks"], "--profile-ranks is ''; expected one or more integers of at least 0"),
    (["--profile-ranks", "1", "-1"], "--profile-ranks is '1 -1'; expected one or more integers of at least 0"),
    (["--vision-tower-lr", "0"], "--vision-tower-lr is 0; expected a number above 0"),
    (["--vision_tower_lr", "1"], "--vision_tower_lr is not a known flag (did you mean '--vision-tower-lr'?); see --help"
     ),
    (["--save", ""], "--save is empty; expected directory of the training checkpoints"),
    (["--seed", ""], "--seed is ''; expected an integer of at least 0 and below 2^63"),
    (["--bf16", ""], "--bf16 takes no value, but has ''; give it alone, or not at all"),
    (["--bf16", "yes"], "--bf16 takes no value, but has 'yes'; give it alone, or not at all"),
    (["--fp16=1"], "--fp16 takes no value, but has '1'; give it alone, or not at all"),
    (["--device", "gpu"], "--device is 'gpu'; expected one of auto, npu, cuda, cpu"),
    (["--lora-r", "0"], "--lora-r is 0; expected an integer of at least 1"),
    (["--lora-target-parameters", "x"], "--lora-target-parameters is not available here: only linear layers can have "
     "adapters: use --lora-target-modules"),
    (["--optimizer", "muon"], "--optimizer is 'muon'; expected adam"),
])
def test_each_mistake_is_one_sentence(argv, what):
    assert problems(*argv) == [what]


def test_the_last_of_repeated_flags_is_used_with_a_note():
    assert notes("--seed", "7", "--seed", "7") == ()
    assert notes("--lr", "1e-5") == ("--lr is given more than once (1e-4, 1e-5); the last one is used",)
    assert parse([*REQUIRED, "--lr", "1e-5"]).lr == 1e-5
    assert parse([*REQUIRED, "--lr", "x", "--lr", "1e-6"]).lr == 1e-6
    assert problems("--lr", "x") == ["--lr is 'x'; expected a number of at least 0"]


@pytest.mark.parametrize(("flag", "legal", "what"), [
    ("--optimizer", "adam", "--optimizer is 2; expected adam"),
    ("--ai-framework", "pytorch",
     "--ai-framework is 2; the model runs on PyTorch, not on MindSpore: remove the flag and start the "
     "script with torchrun instead of msrun; model JSON, data and Hugging Face weights stay as they are"),
])
def test_flags_with_one_legal_value(flag, legal, what):
    assert notes(flag, legal) == ()
    assert problems(flag, "2") == [what]
    assert problems(flag)[0].startswith(f"{flag} is ''; ")


def test_all_problems_are_reported_together():
    with pytest.raises(UserError) as caught:
        parse(["stray", "--lr", "x", "--bf16=1", "--sed", "3", "--dpo-beta", "1"])
    reported = "\n".join(caught.value.problems)
    for what in ("'stray'", "--lr is 'x'", "--bf16 takes no value", "--sed is not", "--dpo-beta",
                 "--mm-model is missing", "--mm-data is missing", "--micro-batch-size is missing",
                 "--seq-length is missing"):
        assert what in reported
    assert "--lr is missing" not in reported


def test_flags_without_effect_are_noted_once_per_reason():
    assert set(notes("--use-flash-attn", "--vocab-size", "1", "--vocab-size", "2", "--swiglu")) == {
        "--vocab-size, --swiglu: no effect: the model JSON decides",
        "--use-flash-attn: no effect: the device chooses its kernels",
    }


@pytest.mark.parametrize("flag", [flag for flag, row in FLAGS.items() if isinstance(row, Inert)])
def test_every_inert_flag_is_accepted_with_its_reason(flag):
    assert any(flag in note and FLAGS[flag].why in note for note in notes(flag, "1"))


@pytest.mark.parametrize("flag", [flag for flag, row in FLAGS.items() if isinstance(row, Fixed) and not row.supported])
def test_every_refused_flag_says_what_to_do_instead(flag):
    assert problems(flag, "1") == [f"{flag} is not available here: {FLAGS[flag].why}"]


@pytest.mark.parametrize("flag", ["--deterministic-mode", "--use-deter-comp", "--npu-deterministic"])
def test_every_word_for_deterministic_mode_turns_it_on(flag):
    assert not parse(REQUIRED).deterministic_mode and parse([*REQUIRED, flag]).deterministic_mode
    assert notes(flag) == ()
    assert problems(flag, "1") == [f"{flag} takes no value, but has '1'; give it alone, or not at all"]


def test_foreign_values_map_to_our_switches():
    for row in (row for row in FLAGS.values() if isinstance(row, SameAs)):
        field = fields_of(Arguments)[row.flag.removeprefix("--").replace("-", "_")]
        assert field.annotation is bool if row.value is None else row.value in choices(field)


@pytest.mark.parametrize("flag", ["--use-torch-fsdp2", "--use-megatron-fsdp"])
def test_words_for_sharded_weights(flag):
    assert parse([*REQUIRED, flag]).sharding == "optim_grads_params" and notes(flag) == ()
    (note,) = notes(flag, "--fsdp2-config-path", "absent.yaml")
    assert "--fsdp2-config-path: no effect: with --use-torch-fsdp2 all weights are sharded over all ranks" in note
    for given in ((flag, "--data-parallel-sharding-strategy", "optim_grads"),
                  ("--data-parallel-sharding-strategy", "optim_grads", flag)):
        assert parse([*REQUIRED, *given]).sharding == "optim_grads"
    assert problems(flag, "1") == [f"{flag} takes no value, but has '1'; give it alone, or not at all"]


def test_a_seed_that_torch_does_not_take_is_refused():
    assert parse([*REQUIRED, "--seed", str(2**63 - 1)]).seed == 2**63 - 1
    assert problems("--seed", str(2**63)) == [f"--seed is {2**63}; expected an integer of at least 0 and below 2^63"]


PEER_FLAGS = """
--lora-target-modules --lora-target-parameters --lora-apply-modules --lora-mixed-training --load-base-model
--lora-dropout --lora-r --lora-alpha --lora-register-forward-hook --use-deter-comp --jit-compile --allow-tf32
--downcast-to-bf16 --allow-internal-format --virtual-pipeline-model-parallel-size --encoder-dp-balance
--recompute-skip-core-attention --recompute-num-layers-skip-core-attention --hetero-parallel
--hetero-encoder-mbs-scale --calculate-per-sample-loss --calculate-square-loss --calculate-token-loss --optimizer
--moe-token-dispatcher-type --padded-vocab-size --enable-dummy-optimizer --log-tps --trust-remote-code
--profile-subgraph-seg --profile-stage --simulated-nnodes --simulated-nproc-per-node --dpo-beta --dpo-loss-type
--dpo-label-smoothing --ref-model --pref-ftx --stage --use-data-balance --data_balance_sorting_algo
--use-image-mbs-data-balance --mbs_data_balance_sorting_algo --use-txt-dynamic-batching --max-seq-len
--dynamic-batch-buffer-size --weight-decay-exclude-modules --lr-scale-modules --lr-mult --matched-adamw-rms
--muon-momentum --ns-steps --ai-framework --npu-deterministic --swap-attention
"""
"""Every flag of MindSpeed-MM's arguments.py, and those that its scripts took from MindSpeed."""


@pytest.mark.parametrize("flag", PEER_FLAGS.split())
def test_no_flag_of_the_peer_is_unknown(flag):
    assert flag in FLAGS or flag.removeprefix("--").replace("-", "_") in fields_of(Arguments)


def test_no_flag_is_both_supported_and_inert():
    assert not {flag_name(name) for name in FIELDS} & FLAGS.keys()


def test_help_lists_every_flag_and_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in FIELDS:
        assert flag_name(name) in text
    assert "(default 0.999)" in text
    assert "--lora-apply-modules" not in text


def test_help_begins_with_what_every_run_needs(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    begun, *parts = re.split(r"^(\S[^\n]*):\n", text.partition("options:")[2], flags=re.MULTILINE)
    assert parts[0::2] == [FIRST_TITLE, *GROUPS.values()] and begun.count(" --") == 3
    assert re.findall(r"^  (--[\w-]+)", parts[1], re.MULTILINE) == [
        flag_name(name) for name in FIELDS if name in FIRST]
    assert len(FIRST) == 10 and set(FIRST) | set(GROUPS) <= set(FIELDS)


def test_the_groups_of_the_help_are_those_of_the_source():
    source = (ROOT / "mm/config/flags.py").read_text()
    titles = re.findall(r"^    # (.+)\n    (\w+):", source, re.MULTILINE)
    assert {name: title for title, name in titles} == GROUPS


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_reduction_in_bf16_needs_bf16(precision: str) -> None:
    words = [*REQUIRED, "--grad-reduce-in-bf16", *([] if precision == "fp32" else [f"--{precision}"])]  # fmt: skip
    (problem,) = flag_problems(parse(words))
    assert problem.startswith(f"--grad-reduce-in-bf16 needs --bf16, but the run is in {precision}")
    assert not [*flag_problems(parse([word for word in words if word != "--fp16"] + ["--bf16"]))]


@pytest.mark.parametrize("flags", [NO_COPIES, REMAINDERS])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_without_fp32_copies_need_bf16(flags: tuple[str, ...], precision: str) -> None:
    words = [*REQUIRED, *flags]
    (problem,) = flag_problems(parse([*words, *([] if precision == "fp32" else [f"--{precision}"])]))
    assert problem.startswith(f"{' '.join(flags)} needs --bf16, but the run is in {precision}")
    assert not [*flag_problems(parse([*words, "--bf16"]))]


def test_a_weight_has_one_form_beside_the_bf16_one() -> None:
    (problem,) = flag_problems(parse([*REQUIRED, "--bf16", *NO_COPIES, *REMAINDERS]))
    assert problem.startswith("--main-params-dtype bf16 and --store-param-remainders are both given; keep the second")
    assert [parse([*REQUIRED, "--bf16", *flags]).kept_copy for flags in ((), NO_COPIES, REMAINDERS)] == [
        "fp32", "none", "remainder"]
