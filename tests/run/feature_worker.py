"""Trains two epochs with and without a disk cache of a frozen ViT's features, and writes the differences as JSON.

Launched by tests/run/test_feature_cache.py: ``feature_worker DIR NAME...``, where DIR has what ``write_cases`` has
written.  Both runs of a case start from the same checkpoint and read the same samples in the same order.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import current_thread, main_thread

from mm.device.device import Device

DEVICE = Device.pick("cpu")  # before megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mm.config.run import load_run  # noqa: E402
from mm.data.loader.feature_writer import vision_fingerprint  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.parallel.health.rendezvous import Rendezvous  # noqa: E402
from mm.parallel.health.watchdog import Watchdog  # noqa: E402
from mm.run.loop import Trainer  # noqa: E402
from mm.run.preflight import check  # noqa: E402
from tests.files import json_lines  # noqa: E402
from tests.parallel.trace import Trace, layers_counted, reads_counted, watch  # noqa: E402
from tests.tiny import copied_weights  # noqa: E402

NUM_EPOCHS = 2


@dataclass(frozen=True)
class Epoch:
    """What one rank did in one epoch."""

    num_vision_layer_runs: int
    num_sends: int
    """Number of messages to other stages."""
    num_read_back: int
    """Number of host reads from the device."""


@dataclass
class Result:
    """The result of one run on one rank."""

    fingerprint: str | None
    fingerprint_of_others: list[str] = field(default_factory=list)
    """Fingerprints with other LLM or projector weights, and with another ViT."""
    epochs: list[Epoch] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: list[dict] = field(default_factory=list)
    """Metrics, on the rank that writes them."""


def train(directory: Path, name: str, *flags: str) -> Result:
    """Train a whole run without export, epoch by epoch."""
    argv = [*json.loads((directory / f"{name}.argv.json").read_text()), *flags]
    run = load_run(argv, dist.get_world_size(), {})
    mesh = parallel.start(DEVICE, run.model, run.tp_size, cp_size=run.cp_size, is_ring=run.is_ring,
                          keeps_features=run.args.vision_feature_cache is not None)
    with Watchdog(Rendezvous.of_launcher(10), None) as watchdog:
        watchdog.place(mesh)
        trainer = Trainer(run, check(run) if mesh.rank == 0 else None, DEVICE, mesh, watchdog)
        result = Result(trainer.fingerprint)
        for _ in range(NUM_EPOCHS):
            trace = Trace(operations=[])
            with (layers_counted(trace, trainer.setup.stage), watch(trace),
                  reads_counted(trace, lambda: current_thread() is main_thread())):
                trainer.run_steps()
            sends = [one for one in trace.operations if one["name"] == "send"]
            result.epochs.append(Epoch(trace.num_vision_layer_runs, len(sends), trace.num_read_back))
        trainer.reporter.close(trainer.progress.iteration, "the test ends")
        if mesh.rank == mesh.world_size - 1:
            result.metrics = json_lines(Path(run.args.log_dir) / "metrics.jsonl")
        result.weights = copied_weights(trainer.setup.stage)
        if trainer.fingerprint is not None:
            result.fingerprint_of_others += [
                changed(trainer, "text_decoder", "image_encoder.projector"), changed(trainer, "blocks.layers.7.mlp")]
    parallel.stop_mesh()
    return result


def changed(trainer: Trainer, *names: str) -> str:
    """The fingerprint after a small change to one element of every weight whose name contains one of ``names``."""
    with torch.no_grad():
        for name, parameter in trainer.setup.stage.named_parameters():
            if any(part in name for part in names):
                parameter.view(-1)[0] += 1e-3
    return vision_fingerprint(trainer.setup.stage, trainer.mesh)


def compare(directory: Path, name: str) -> dict:
    """The results of all ranks, and whether all weights are bit-equal."""
    off = train(directory, name, "--log-dir", str(directory / name / "off"))
    on = train(directory, name, "--log-dir", str(directory / name / "on"),
               "--vision-feature-cache", str(directory / name / "cache"))
    differing = [one for one, weight in off.weights.items() if not torch.equal(weight, on.weights[one])]
    mine = {"differing": differing, "off": [asdict(one) for one in off.epochs], "fingerprint": on.fingerprint,
            "fingerprint_of_others": on.fingerprint_of_others,
            "on": [asdict(one) for one in on.epochs], "metrics": {"off": off.metrics, "on": on.metrics}}
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {"metrics": gathered[-1]["metrics"], "ranks": gathered}


def main(directory: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    first = json.loads((directory / f"{names[0]}.argv.json").read_text())
    check(load_run(first, dist.get_world_size(), {}))  # makes the index of the samples, no part of what is counted
    results = {name: compare(directory, name) for name in names}
    if dist.get_rank() == 0:
        (directory / f"results_{dist.get_world_size()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
