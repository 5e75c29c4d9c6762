"""The command line of ``mm-train``: what it accepts, how each error is reported, and the rules between its flags."""

import re

import pytest

from mm.config.args import TRAIN, Arguments, parse
from mm.config.command_line import flag_name
from mm.config.evaluate import EVALUATE
from mm.config.generate import GENERATE
from mm.config.mindspeed import FLAGS, Fixed, Inert, SameAs
from mm.config.parse import Excludes, Group, Idle, Needs, choices, converted, fields_of, section_of
from mm.config.rules import flag_notes, flag_problems
from mm.console import NEEDED
from mm.errors import UserError
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


def rules(*argv: str) -> list[str]:
    return list(flag_problems(parse([*REQUIRED, *argv])))


@pytest.mark.parametrize("command", [TRAIN, GENERATE, EVALUATE], ids=lambda one: one.name)
def test_every_default_is_a_legal_value(command) -> None:
    """Settings are checked again whenever one of them is replaced."""
    for name, field in fields_of(command.cls).items():
        if section_of(field) is None and not field.is_required():
            assert converted(field.default, field, strict=True) == field.default, name


def test_defaults_are_megatrons():
    args = parse(REQUIRED)
    assert (args.mm_model, args.mm_data, args.micro_batch_size, args.seq_length) == ("m.json", "d.json", 2, 64)
    assert (args.lr, args.min_lr, args.lr_decay_style, args.lr_warmup_iters) == (1e-4, 0.0, "linear", 0)
    assert (args.weight_decay, args.adam_beta1, args.adam_beta2, args.adam_eps) == (0.01, 0.9, 0.999, 1e-8)
    assert (args.clip_grad, args.seed, args.num_workers, args.log_interval) == (1.0, 1234, 2, 100)
    assert (args.initial_loss_scale, args.min_loss_scale, args.loss_scale_window, args.hysteresis) == (
        2.0**32, 1.0, 1000, 2)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (1, None)
    assert not any((args.bf16, args.fp16, args.use_distributed_optimizer, args.dry_run, args.finetune))


def test_every_flag_sets_its_own_field():
    for name, flag in ((flag_name(name), TRAIN.flags[flag_name(name)]) for name in FIELDS):
        words = [[]] if flag.is_switch else [[one] for one in (*choices(flag.field)[-1:], "0.5", "3", "name=3")]
        given = next(one for one in words if flag.problem([one]) is None)
        found = getattr(parse([*REQUIRED, name, *given]), flag.path[0])
        found = found[0] if flag.takes_many else found
        expected = ("True",) if flag.is_switch else (given[0], f"{given[0]}.0")
        assert ("=".join(map(str, found)) if isinstance(found, tuple) else str(found)) in expected, name


def test_forms_of_values():
    assert parse([*REQUIRED, "--min-lr=1.0e-6"]).min_lr == 1e-6
    assert parse([*REQUIRED, "--lr-scale-modules", "a", "b.*"]).lr_scale_modules == ("a", "b.*")
    assert parse([*REQUIRED, "--profile-ranks", "0", "12"]).profile_ranks == (0, 12)
    assert parse([*REQUIRED, "--seed", str(2**63 - 1)]).seed == 2**63 - 1


@pytest.mark.parametrize(("argv", "what"), [
    (["--seq-lenght", "5"], "--seq-lenght is not a known flag (did you mean '--seq-length'?); see mm-train --help"),
    (["--train-iter", "5"], "--train-iter is not a known flag (did you mean '--train-iters'?); see mm-train --help"),
    (["-lr", "5"], "-lr is not a known flag (did you mean '--lr'?); see mm-train --help"),
    (["--min-lr", "1e-5,"], "--min-lr is '1e-5,'; expected a number of at least 0"),
    *((["--min-lr", word], f"--min-lr is {word}; expected a number of at least 0")
      for word in ("nan", "-1", "-1e-3", "-.5", "-inf", "-1E+400")),
    (["--seed", "9" * 5000], f"--seed is {'9' * 77}...; expected an integer of at least 0 and below 2^63"),
    (["--seed", str(2**63)], f"--seed is {2**63}; expected an integer of at least 0 and below 2^63"),
    (["--seed", "1.5"], "--seed is '1.5'; expected an integer of at least 0 and below 2^63"),
    (["--save"], "--save has no value; expected directory of the training checkpoints"),
    (["--save", ""], "--save has an empty value; expected directory of the training checkpoints"),
    (["--save", "a", "b"], "--save has 2 values (a b); expected one: directory of the training checkpoints"),
    (["--profile-ranks", "1", "-1"], "--profile-ranks is 1 -1; expected one or more integers of at least 0"),
    (["--bf16", "yes"], "--bf16 takes no value, but has 'yes'; give it alone, or not at all"),
    (["--fp16=1"], "--fp16 takes no value, but has '1'; give it alone, or not at all"),
    (["--device", "cudo"], "--device is 'cudo'; expected one of auto, npu, cuda, cpu (did you mean 'cuda'?)"),
    (["--recompute-modules", "mlp", "layernrom"], "--recompute-modules is 'layernrom'; expected one or more of "
     "layernorm, mlp_act, mlp, core_attn (did you mean 'layernorm'?)"),
    (["--recompute-modules", "mlp", "attn"], "--recompute-modules is 'attn'; expected one or more of layernorm, "
     "mlp_act, mlp, core_attn (did you mean 'core_attn'?)"),
    (["--lora-target-parameters", "x"], "--lora-target-parameters is not available here: only linear layers can have "
     "adapters: use --lora-target-modules"),
    (["--optimizer", "muon"], "--optimizer is 'muon'; expected adam"),
    (["--use-deter-comp", "1"], "--use-deter-comp takes no value, but has '1'; give it alone, or not at all"),
])
def test_each_mistake_is_one_sentence(argv, what):
    assert problems(*argv) == [what]


def test_all_problems_are_reported_together():
    with pytest.raises(UserError) as caught:
        parse(["stray", "--lr", "x", "--bf16=1", "--sed", "3", "--dpo-beta", "1"])
    reported = "\n".join(caught.value.problems)
    for what in ("'stray'", "--lr is 'x'", "--bf16 takes no value", "--sed is not", "--dpo-beta",
                 "--mm-model is missing", "--mm-data is missing", "--micro-batch-size is missing",
                 "--seq-length is missing"):
        assert what in reported
    assert "--lr is missing" not in reported


def test_the_last_of_repeated_flags_is_used_with_a_note():
    assert notes("--seed", "7", "--seed", "7") == ()
    assert notes("--lr", "1e-5") == ("--lr is given more than once (1e-4, 1e-5); the last one is used",)
    assert parse([*REQUIRED, "--lr", "x", "--lr", "1e-6"]).lr == 1e-6


def test_flags_without_effect_are_noted_once_per_reason():
    assert set(notes("--use-flash-attn", "--vocab-size", "1", "--vocab-size", "2", "--swiglu")) == {
        "--vocab-size, --swiglu: no effect: the model JSON decides",
        "--use-flash-attn: no effect: the device chooses its kernels"}
    assert notes("--optimizer", "adam") == ()


def test_flags_of_other_programs():
    for flag, row in FLAGS.items():
        assert flag not in TRAIN.flags
        match row:
            case Inert(why):
                assert any(flag in note and why in note for note in notes(flag, "1"))
            case Fixed((), why):
                assert problems(flag, "1") == [f"{flag} is not available here: {why}"]
            case SameAs(ours, value):
                field = FIELDS[ours.removeprefix("--").replace("-", "_")]
                assert field.annotation is bool if value is None else value in choices(field)


def test_words_for_sharded_weights_and_deterministic_mode():
    assert not parse(REQUIRED).deterministic_mode and parse([*REQUIRED, "--npu-deterministic"]).deterministic_mode
    for flag in ("--use-torch-fsdp2", "--use-megatron-fsdp"):
        assert parse([*REQUIRED, flag]).sharding == "optim_grads_params" and notes(flag) == ()
        for given in ((flag, "--data-parallel-sharding-strategy", "optim_grads"),
                      ("--data-parallel-sharding-strategy", "optim_grads", flag)):
            assert parse([*REQUIRED, *given]).sharding == "optim_grads"


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


def test_no_flag_of_the_peer_is_unknown():
    assert not set(PEER_FLAGS.split()) - FLAGS.keys() - TRAIN.flags.keys()


def test_help_lists_every_flag_once_in_its_group(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and "(default 0.999)" in text and "--lora-apply-modules" not in text
    parts = re.split(r"^(\S[^\n]*):\n", text, flags=re.MULTILINE)[1:]
    groups = [one.title for field in FIELDS.values() for one in field.metadata if isinstance(one, Group)]
    assert parts[0::2] == [NEEDED, *groups, "Help"]
    assert len(re.findall(r"^  --", parts[1], re.MULTILINE)) == 10
    assert sorted(re.findall(r"^  (--[\w-]+)", "".join(parts[1:-1:2]), re.MULTILINE)) == sorted(TRAIN.flags)


def test_rules_that_fields_carry_name_other_fields():
    for name, field in FIELDS.items():
        for one in field.metadata:
            if isinstance(one, Needs | Excludes | Idle):
                assert one.other in FIELDS and one.other != name


@pytest.mark.parametrize(("argv", "what"), [
    (["--grad-reduce-in-bf16"], "--grad-reduce-in-bf16 is given, but --bf16 is missing: add --bf16, or remove"),
    (["--fp16", *NO_COPIES], "--main-params-dtype is given, but --bf16 is missing"),
    (["--bf16", *NO_COPIES, *REMAINDERS], "--main-params-dtype and --store-param-remainders are both given; keep one"),
    (["--optimizer-offload-fraction", "0.5"], "--optimizer-offload-fraction is given, but --optimizer-cpu-offload is"),
    (["--num-train-epochs", "1"], "--train-iters and --num-train-epochs are both given; keep one"),
    (["--use-distributed-optimizer", "--data-parallel-sharding-strategy", "no_shard"], "--use-distributed-optimizer "
     "and --data-parallel-sharding-strategy no_shard contradict each other"),
    (["--overlap-param-gather", "--overlap-grad-reduce"], "--overlap-param-gather needs split optimizer state"),
    (["--eval-generate-rule", "exact"], "--eval-generate-rule is given, but --eval-generate-interval is missing"),
])
def test_rules_between_flags(argv, what):
    (problem,) = rules(*argv)
    assert problem.startswith(what)


def test_settings_of_the_optimizer():
    assert [parse([*REQUIRED, "--bf16", *flags]).kept_copy for flags in ((), NO_COPIES, REMAINDERS)] == [
        "fp32", "none", "remainder"]
    offload = ["--optimizer-cpu-offload"]
    assert [parse([*REQUIRED, *flags]).host_share for flags in ([], offload, [
        *offload, "--optimizer-offload-fraction", "0.5"])] == [0.0, 1.0, 0.5]
    strategy = "--data-parallel-sharding-strategy"
    for flags, sharding in (([], "no_shard"), (["--use-distributed-optimizer"], "optim"),
                            (["--use-distributed-optimizer", strategy, "optim_grads"], "optim_grads")):
        args = parse([*REQUIRED, *flags])
        assert args.sharding == sharding and not list(flag_problems(args))
        assert (args.splits_optimizer, args.shards_gradients) == (sharding != "no_shard", sharding == "optim_grads")


@pytest.mark.parametrize(("flags", "note"), [
    (("--hysteresis", "3", "--loss-scale", "8"), "--loss-scale, --hysteresis: no effect: only with --fp16"),
    (("--fp16", "--loss-scale", "8", "--hysteresis", "3"), "--hysteresis: no effect: --loss-scale gives a fixed scale"),
    (("--max-bad-fraction", "0.2"), "--max-bad-fraction: no effect: only with --bad-sample skip"),
    (("--recompute-granularity", "selective", "--recompute-modules", "core_attn"),
     "core_attn of --recompute-modules: no effect: attention scores are never kept"),
])
def test_flags_that_need_another_one_are_noted(flags, note):
    assert note in list(flag_notes(parse([*REQUIRED, *flags])))
