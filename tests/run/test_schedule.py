"""The learning rate equals Megatron's, also after a run continues with other settings."""

import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.device.device import Device

Device.pick("cpu")

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

from mm.checkpoint import training_files as writer  # noqa: E402
from mm.checkpoint import training_manifest  # noqa: E402
from mm.checkpoint.source import Kind, Source  # noqa: E402
from mm.checkpoint.training_manifest import TrainingDirectory  # noqa: E402
from mm.config.model import Rates  # noqa: E402
from mm.config.run import Run, load_run  # noqa: E402
from mm.errors import UserError  # noqa: E402
from mm.run.schedule import OVERRIDE, USE_CHECKPOINT, LearningRate, Schedule, scheduled  # noqa: E402
from tests.files import EXAMPLES  # noqa: E402


def megatrons(rate: LearningRate, num_samples: int, **flags: bool) -> OptimizerParamScheduler:
    megatron = OptimizerParamScheduler(
        types.SimpleNamespace(param_groups=[]),
        init_lr=rate.warmup_init, max_lr=rate.max_lr, min_lr=rate.min_lr, lr_warmup_steps=rate.warmup_samples,
        lr_decay_steps=rate.decay_samples, lr_decay_style=rate.decay_style, start_wd=0.0, end_wd=0.0, wd_incr_steps=1,
        wd_incr_style="constant", **{"use_checkpoint_opt_param_scheduler": False, **flags},
    )  # fmt: skip
    megatron.num_steps = num_samples
    return megatron


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@given(warmup=st.integers(0, 50), decay=st.integers(60, 200), step=st.integers(0, 250),
       min_lr=st.sampled_from([0, 1e-6]))
def test_schedule_equals_megatron(style: str, warmup: int, decay: int, step: int, min_lr: float) -> None:
    schedule = LearningRate(1e-4, min_lr, 1e-7, warmup, decay, style)
    assert schedule.at(step) == pytest.approx(megatrons(schedule, step).get_lr({}), rel=1e-12, abs=1e-18)


LoadRun = Callable[..., Run]
WITHOUT = {OVERRIDE: "override_opt_param_scheduler", USE_CHECKPOINT: "use_checkpoint_opt_param_scheduler"}


@pytest.fixture
def load(tmp_path: Path) -> LoadRun:
    """Settings of a run: 6 steps of 8 samples; a repeated flag overrides."""
    data = (EXAMPLES / "data_tiny.json").read_text(encoding="utf-8").replace("runs/demo/checkpoint", str(tmp_path))
    (tmp_path / "data.json").write_text(data, encoding="utf-8")

    def load(*flags: str) -> Run:
        words = ["--mm-model", str(EXAMPLES / "model_tiny.json"), "--mm-data", str(tmp_path / "data.json"),
                 "--micro-batch-size", "1", "--seq-length", "64", "--global-batch-size", "8", "--train-iters", "6",
                 "--lr", "2e-3", "--lr-decay-style", "cosine", "--min-lr", "1e-4", "--lr-warmup-iters", "1",
                 "--load", str(tmp_path), "--dry-run", "--world-size", "2", *flags]  # fmt: skip
        return load_run(words, environment={})

    return load


def checkpoint(folder: Path, run: Run, iteration: int = 3, schedule: Schedule | None = None) -> Source:
    """A checkpoint of ``run`` after so many iterations."""
    kept = (schedule or Schedule.of(run)).to_json()
    temporary = writer.begin(folder / "save", iteration, 0)
    consumed = iteration * run.global_batch_size
    path = writer.commit(temporary, training_manifest.CheckpointManifest(
        iteration, consumed, 2, 1, 2, run.model, None, {}, (), schedule=kept))
    return Source(path, Kind.TRAINING, run.model, 1, (), (), TrainingDirectory.open(path), iteration=iteration,
                  consumed_samples=consumed)


@pytest.mark.parametrize(("flags", "what"), [
    (("--global-batch-size", "4"), "(6 steps x --global-batch-size 8) and ends after 24 now (6 x 4)"),
    (("--train-iters", "9"), "--num-train-epochs) ended after 48 samples (6 steps x --global-batch-size 8) and ends "
                             "after 72 now (9 x 8)"),
    (("--lr", "1e-3"), "--lr was 0.002 and is 0.001 now"),
    (("--min-lr", "0"), "--min-lr was 0.0001 and is 0 now"),
    (("--lr-decay-style", "linear"), "--lr-decay-style was cosine and is linear now"),
    (("--lr-warmup-iters", "2"), "--lr-warmup-fraction) ended after 8 samples"),
    (("--lr-warmup-init", "1e-5"), "--lr-warmup-init was 0 and is 1e-05 now"),
    (("--weight-decay", "0.5"), "--weight-decay was 0.01 and is 0.5 now"),
    (("--vision-tower-lr", "1e-4"), "the learning rate of the ViT was that of the others and is 0.0001 now"),
    (("--lr-mult", "0.5", "--lr-scale-modules", "mlp"), "--lr-scale-modules was absent and is mlp now"),
], ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_each_changed_setting_is_rejected_or_selected(flags, what: str, load: LoadRun, tmp_path: Path) -> None:
    before = load()
    sources, then = checkpoint(tmp_path, before), Schedule.of(before)
    assert scheduled(before, sources) == (before, then, ())
    now = load(*flags)
    with pytest.raises(UserError) as refused:
        scheduled(now, sources)
    (problem,) = refused.value.problems
    assert what in problem and all(flag in problem for flag in (*WITHOUT, "--finetune"))
    for flag, is_now in zip(WITHOUT, (True, False), strict=True):
        run, schedule, notes = scheduled(load(*flags, flag), sources)
        assert schedule == (Schedule.of(now) if is_now else then)
        assert any(what in note and note.startswith(flag) for note in notes)
        found, expected = (
            [*(part.rates for part in (one.model.vision, one.model.projector, one.model.language)), one.args.lr,
             one.args.weight_decay, one.args.lr_mult, one.args.lr_scale_modules]
            for one in (run, now if is_now else before))
        assert found == expected


@pytest.mark.parametrize("flag", WITHOUT)
@pytest.mark.parametrize("flags", [(), ("--global-batch-size", "4"), ("--lr", "1e-3", "--train-iters", "9")])
def test_the_resulting_schedule_equals_megatrons(flags, flag: str, load: LoadRun, tmp_path: Path) -> None:
    before = load()
    sources = checkpoint(tmp_path, before)
    state = megatrons(Schedule.of(before).learning_rate, 24).state_dict()
    now = load(*flags, flag)
    megatron = megatrons(Schedule.of(now).learning_rate, 0, **{WITHOUT[flag]: True})
    megatron.load_state_dict(state)
    _, schedule, _ = scheduled(now, sources)
    for consumed in range(24, 80, now.global_batch_size):
        megatron.num_steps = consumed
        assert schedule.at(consumed) == pytest.approx(megatron.get_lr({}), rel=1e-12)
    with pytest.raises(AssertionError, match="do not match") if flags else nullcontext():
        megatrons(Schedule.of(now).learning_rate, 0).load_state_dict(state)


def test_settings_without_effect_may_differ(load: LoadRun, tmp_path: Path) -> None:
    constant = ("--lr-decay-style", "constant")
    sources = checkpoint(tmp_path, load(*constant))
    scheduled(load(*constant, "--train-iters", "9", "--min-lr", "0"), sources)
    sources = checkpoint(tmp_path, load(), iteration=6)
    scheduled(load("--train-iters", "3"), sources)  # to export: nothing is trained


def test_without_the_optimizer_the_schedule_restarts(load: LoadRun, tmp_path: Path) -> None:
    """And continues from there when that run is resumed."""
    sources = checkpoint(tmp_path, load())
    now = load("--lr", "1e-3", "--no-load-optim")
    run, schedule, (note,) = scheduled(now, sources)
    assert run is now and note.startswith("--no-load-optim: the learning-rate schedule restarts after iteration 3")
    assert [schedule.at(24 + consumed) for consumed in (0, 8, 16)] == [
        Schedule.of(now).at(consumed) for consumed in (0, 8, 16)]
    later = checkpoint(tmp_path, load("--lr", "1e-3"), iteration=5, schedule=schedule)
    assert scheduled(load("--lr", "1e-3"), later)[1] == schedule
    assert scheduled(load("--lr", "5e-3", OVERRIDE), later)[1].began_at == 24
    assert scheduled(load("--lr", "5e-3", "--finetune"), later)[1].began_at == 0


def test_a_schedule_is_saved_completely(load: LoadRun, tmp_path: Path) -> None:
    run = load("--vision-tower-lr", "1e-4", "--lr-scale-modules", "mlp", "norm", "--lr-mult", "0.5")
    schedule = Schedule.of(run, began_at=8)
    assert Schedule.from_json(schedule.to_json(), tmp_path) == schedule
    language = replace(run.model.language, rates=Rates(lr=1.0))
    other = replace(run, args=replace(run.args, lr=1.0), model=replace(run.model, language=language))
    assert Schedule.of(schedule.put_into(other), began_at=8) == schedule
