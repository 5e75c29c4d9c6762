"""The command line: what it takes, and how each mistake is told."""

import dataclasses

import pytest

from mm.config.flags import Arguments, flag_name, parse, parse_flags
from mm.config.foreign import INERT, UNSUPPORTED
from mm.errors import UserError

REQUIRED = ["--mm-model", "m.json", "--mm-data", "d.json", "--micro-batch-size", "2", "--seq-length", "64",
            "--train-iters", "5", "--lr", "1e-4"]


def problems(*argv: str) -> list[str]:
    return list(parse_flags([*REQUIRED, *argv]).problems)


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


@pytest.mark.parametrize("field", dataclasses.fields(Arguments), ids=lambda field: field.name)
def test_every_flag_sets_its_own_field(field):
    kind = str(getattr(field.type, "__name__", field.type)).split(" ")[0]
    value = {"int": "3", "float": "2.5", "str": "x", "bool": ""}[kind]
    value = (field.metadata["choices"] or (value,))[-1]
    flags = [flag_name(field.name)] if field.type is bool else [flag_name(field.name), value]
    parsed = parse_flags(flags)
    assert not any(problem.startswith(flags[0]) for problem in parsed.problems)
    found = getattr(parsed.arguments, field.name)
    if field.type is bool:
        assert found is True
    else:
        assert str(found) == value
        assert type(found) in (int, float, str)


def test_forms_of_values():
    assert parse([*REQUIRED, "--min-lr=1.0e-6"]).min_lr == 1e-6
    assert parse([*REQUIRED, "--seed", "7", "--seed", "7"]).seed == 7
    assert parse([*REQUIRED, "--lr", "0.0001"]).lr == 1e-4  # the same number, written in another way


@pytest.mark.parametrize(("argv", "what"), [
    (["--seq-lenght", "5"], "--seq-lenght is not a known flag (did you mean '--seq-length'?); see --help"),
    (["--train-iter", "5"], "--train-iter is not a known flag (did you mean '--train-iters'?); see --help"),
    (["--lr", "1e-5"], "--lr is given 2 times with different values: 1e-4, 1e-5; keep one"),
    (["--min-lr", "1e-5,"], "--min-lr is '1e-5,'; expected a number of at least 0"),
    (["--min-lr", "nan"], "--min-lr is nan; expected a number of at least 0"),
    (["--min-lr", "-1"], "--min-lr is -1; expected a number of at least 0"),
    (["--seed", "1.5"], "--seed is '1.5'; expected an integer of at least 0"),
    (["--log-interval", "0"], "--log-interval is 0; expected an integer of at least 1"),
    (["--save"], "--save has no value; expected one: directory of the training checkpoints"),
    (["--save", "a", "b"], "--save has 2 values (a b); expected one: directory of the training checkpoints"),
    (["--save", ""], "--save is empty; expected directory of the training checkpoints"),
    (["--bf16", "yes"], "--bf16 takes no value, but has 'yes'; it is on when given, else off"),
    (["--fp16=1"], "--fp16 takes no value, but has '1'; it is on when given, else off"),
    (["--device", "gpu"], "--device is 'gpu'; expected one of auto, npu, cuda, cpu"),
    (["--lora-r", "8"], "--lora-r is not available here: LoRA is not supported by this version"),
    (["--optimizer", "muon"], "--optimizer is 'muon'; expected one of adam"),
])
def test_each_mistake_is_one_sentence(argv, what):
    assert problems(*argv) == [what]


def test_all_mistakes_are_told_at_once():
    with pytest.raises(UserError) as caught:
        parse(["stray", "--lr", "x", "--bf16=1", "--sed", "3", "--dpo-beta", "1"])
    told = "\n".join(caught.value.problems)
    for what in ("'stray'", "--lr is 'x'", "--bf16 takes no value", "--sed is not", "--dpo-beta",
                 "--mm-model is missing", "--mm-data is missing", "--micro-batch-size is missing",
                 "--train-iters is missing"):
        assert what in told
    assert "--lr is missing" not in told


def test_flags_without_effect_are_noted_once_per_reason():
    parsed = parse_flags([*REQUIRED, "--use-flash-attn", "--vocab-size", "1", "--vocab-size", "2", "--swiglu"])
    assert parsed.problems == ()
    assert set(parsed.notes) == {
        "command line: the model JSON decides; no effect: --vocab-size, --swiglu",
        "command line: the device chooses its kernels; no effect: --use-flash-attn",
    }


@pytest.mark.parametrize("flag", INERT)
def test_every_inert_flag_is_accepted_with_its_reason(flag):
    parsed = parse_flags([*REQUIRED, flag, "1"])
    assert parsed.problems == ()
    assert any(flag in note and INERT[flag] in note for note in parsed.notes)


def test_tables_do_not_contradict_one_another():
    works = {flag_name(field.name) for field in dataclasses.fields(Arguments)}
    assert not works & INERT.keys()
    assert not works & UNSUPPORTED.keys()
    assert not INERT.keys() & UNSUPPORTED.keys()


def test_help_lists_every_flag_and_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(Arguments):
        assert flag_name(field.name) in text
    assert "(default 0.999)" in text
    assert "--lora" not in text
