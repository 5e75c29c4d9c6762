"""Answers the same prompts on every layout, in one set of processes, and writes token ids and logits.

Launched by tests/generation/test_layouts.py: ``layouts_worker DIRECTORY``, which ``write_questions`` has filled and
where ``mm`` is a conversion and ``adapters`` were trained for ``hf``.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mm.device.device import Device

DEVICE = Device.pick("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from mm.config import args as flags  # noqa: E402
from mm.config.generate import load_asking  # noqa: E402
from mm.generation.answers import by_length  # noqa: E402
from mm.generation.decode import Answerer  # noqa: E402
from mm.generation.prompts import Prompt, read_prompts  # noqa: E402
from mm.generation.session import Session  # noqa: E402
from mm.generation.setup import find, session_of  # noqa: E402
from mm.parallel import mesh as parallel  # noqa: E402
from mm.run.checkpoint import restore  # noqa: E402
from mm.run.checkpoint.save import BegunSave  # noqa: E402
from mm.run.step import Setup  # noqa: E402
from tests.generation.questions import MAX_NEW_TOKENS, SAMPLING  # noqa: E402

FEW = slice(0, 10)
"""Prompts of every kind, for layouts that do not answer all, and for answers one at a time."""


@dataclass(frozen=True)
class Case:
    """A layout, and the directory it is loaded from."""

    name: str
    load: str
    vision: tuple[tuple[int, ...], ...] = ((8,),)
    language: tuple[tuple[int, ...], ...] = ((4,),)
    tp: int = 1
    has_all: bool = True
    """Whether it answers all prompts, eight at a time, or only a few."""

    @property
    def world_size(self) -> int:
        return self.tp * len(self.vision[0])


CASES = (
    Case("one", "hf"),
    Case("mm", "mm", has_all=False),
    Case("pp2", "hf", ((5, 3),), ((0, 4),)),
    Case("vpp2", "hf", ((3, 4), (1, 0)), ((0, 0), (2, 2)), has_all=False),
    Case("tp2", "saved", tp=2),
    Case("tp2pp2", "mm", ((6, 2),), ((0, 4),), 2),
)
"""``saved`` is a training checkpoint written by the case ``pp2``."""
WITH_ADAPTERS = Case("adapters", "adapters", ((6, 2),), ((0, 4),), 2, has_all=False)
"""``adapters`` is a PEFT directory for ``hf``."""


class Recording(Answerer):
    """Records the logits from which each token is chosen, on the ranks that choose."""

    def _chosen(self, logits, answers):
        if logits is not None:
            for row, answer in zip(logits, answers, strict=True):
                if answer.ended is None:
                    self.rows.setdefault(f"{answer.prompt}", []).append(row)
        return super()._chosen(logits, answers)


def open_session(root: Path, case: Case, *more: str) -> Session:
    argv = ["--load", str(root / case.load), "--model-name-or-path", str(root / "hf"), "--prompt", "-",
            "--device", "cpu", "--tensor-model-parallel-size", str(case.tp), "--max-new-tokens", str(MAX_NEW_TOKENS),
            "--image-max-pixels", "9408", "--video-max-pixels", "9408", *more]
    found = find(load_asking(argv))
    vision, language = found.model.vision, found.model.language
    model = replace(found.model, vision=replace(vision, pipeline_num_layers=case.vision),
                    language=replace(language, pipeline_num_layers=case.language))
    mesh = parallel.build_mesh(model, case.tp, parallel.timedelta(minutes=20))
    return session_of(load_asking(argv), replace(found, model=model), DEVICE, mesh)


def answers(session: Session, prompts: Sequence[Prompt], batch_size: int) -> dict[int, tuple[int, ...]]:
    """Token ids by number; on rank 0."""
    lengths = [session.length(one) for one in prompts] if session.mesh.owns_data else [0] * len(prompts)
    found = {}
    for batch in by_length(lengths, batch_size):
        responses, problems = session.respond([prompts[number] for number in batch])
        assert not problems
        found |= {one.prompt.number: one.token_ids for one in responses}
    return found


def run_case(root: Path, case: Case, prompts: list[Prompt]) -> dict:
    session = open_session(root, case)
    result = {"8": answers(session, prompts if case.has_all else prompts[FEW], 8),
              "1": answers(session, prompts[FEW], 1)}
    recording = Recording(session.stage, session.mesh, session.decoding)
    recording.rows = {}
    recording.answer(*session._shared(prompts[:5])[:2])
    if recording.rows and session.mesh.tp_rank == 0:
        save_file({name: torch.stack(rows) for name, rows in recording.rows.items()}, root / f"{case.name}.safetensors")
    if case.name == "pp2":
        args = flags.parse(["--lr", "0", "--train-iters", "1", "--micro-batch-size", "1", "--seq-length", "512",
                            "--mm-model", "m.json", "--mm-data", "d.json"])
        setup = Setup.build(session.stage, session.mesh, args)
        progress = restore.TrainingProgress(3, 12)
        BegunSave.begin(root / "saved", progress, setup, {}, save_optim=False, save_rng=False).finish(setup)
    parallel.stop_mesh()
    ways = (("drawn", SAMPLING, 8), ("drawn alone", SAMPLING, 3), ("drawn by 8", (*SAMPLING, "--seed", "8"), 8),
            ("penalty", ("--repetition-penalty", "1.3"), 8))
    for name, more, size in ways:
        if (name == "drawn" and case != WITH_ADAPTERS) or case.name == "one":
            session = open_session(root, case, *more)
            result[name] = answers(session, prompts[FEW], size)
            parallel.stop_mesh()
    return result


def main(root: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          timeout=parallel.timedelta(days=1))
    prompts, problems = read_prompts(str(root / "prompts.jsonl"), ())
    assert not problems
    results = {}
    for case in (*CASES, WITH_ADAPTERS):
        if rank < case.world_size:
            os.environ["WORLD_SIZE"] = str(case.world_size)
            dist.init_process_group("gloo", store=dist.PrefixStore(case.name, store), rank=rank,
                                    world_size=case.world_size, timeout=parallel.timedelta(minutes=20))
            results[case.name] = run_case(root, case, prompts)
            dist.destroy_process_group()
        store.set(f"{case.name} {rank}", "done")
        store.wait([f"{case.name} {other}" for other in range(4)])
    if rank == 0:
        (root / "results.json").write_text(json.dumps(results), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
