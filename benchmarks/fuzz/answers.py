"""Questions of benchmarks, and what a killed evaluation or training has left: answers, settings, metrics, locks."""

import json
from pathlib import Path

from benchmarks.fuzz.kind import Kind, Reading
from benchmarks.fuzz.mutate import json_form, json_lines, text
from mm.errors import UserError, refuse
from mm.generation.answers import AnswerFile
from mm.generation.prompts import read_prompts
from mm.generation.source import settings_in
from mm.scoring.benchmarks import BENCHMARKS, Items, read_benchmark
from mm.scoring.own import read_own
from mm.scoring.results import ANSWERS, SETTINGS, check_settings, read_answers, write_results
from mm.training.metrics import _keep_before as keep_before
from tests.scoring.tables import encoded, write_table

_ROWS = [
    {"index": "dev_1", "question": "See <image 1>?", "A": "yes", "B": "no", "answer": "A", "split": "dev",
     "hint": "Look"},
    {"index": "val_1", "question": "How much?", "answer": "['1/2', '0.5']", "split": "validation", "category": "Art"},
    {"index": "val_2", "question": "Which?", "A": "up", "B": "down", "answer": "B", "split": "validation"},
]


def write_tsv(original: Path, beside: Path) -> Reading:
    picture = encoded(0)
    images = picture, f"['{picture}', '{encoded(1, 'JPEG')}']", "dev_1"
    rows = [{**row, "image": image} for row, image in zip(_ROWS, images, strict=True)]
    write_table(original / "mmmu.tsv", rows)
    write_table(original / "docvqa.tsv", [{"index": "0", "question": "Who?", "answer": "['a', 'b']", "image": picture}])

    def read() -> None:
        problems: list[str] = []
        for name in ("mmmu", "docvqa"):
            try:
                _write_as_prompts(read_benchmark(f"{name}.tsv", BENCHMARKS[name], False))
            except UserError as error:
                problems += error.problems
        refuse(problems)

    return read


def _write_as_prompts(items: Items) -> None:
    folder = Path("pictures")
    folder.mkdir(exist_ok=True)
    list(items.as_prompts(folder))


def _read_prompts() -> None:
    refuse(read_prompts("prompts.jsonl", ())[1])


def write_questions(original: Path, beside: Path) -> Reading:
    own = [{"question": "How many?", "answer": ["2", "two"], "category": "counting"},
           {"index": "b", "question": "What?", "answers": 3}]
    choice = [{"question": "Which?", "options": {"A": "cat", "B": "dog"}, "answer": "A"},
              {"question": "Which?", "options": ["cat", "dog"], "answer": "dog"}]
    prompts = [{"prompt": "Hello", "system": "x"}, {"messages": [{"role": "user", "content": "Hi"}], "id": 4}]
    (original / "own.json").write_text(json.dumps(own))
    (original / "choice.jsonl").write_text("\n".join(map(json.dumps, choice)))
    (original / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (original / "generation_config.json").write_text(
        '{"eos_token_id": [1, 2], "do_sample": true, "temperature": 0.5, "top_k": 5, "repetition_penalty": 1.05}')

    def read() -> None:
        problems: list[str] = []
        for action in (lambda: _write_as_prompts(read_own("own.json", "exact", ())),
                       lambda: _write_as_prompts(read_own("choice.jsonl", "choice", ())),
                       _read_prompts, lambda: settings_in(Path())):
            try:
                action()
            except UserError as error:
                problems += error.problems
        refuse(problems)

    return read


_SETTINGS = {"benchmark": None, "rule": "exact", "load": "x", "decoding": {"temperature": 0.0, "stop_token_ids": [1]},
             "media": {"image_max_pixels": 4}}
_ANSWERS = [{"number": number, "key": f"k{number}", "answer": "two", "ended": "stop"} for number in range(2)]


def write_left(original: Path, beside: Path) -> Reading:
    """The directories of an evaluation and of a training that were killed."""
    (original / "out").mkdir()
    (original / "logs").mkdir()
    (original / "out" / SETTINGS).write_text(json.dumps(_SETTINGS))
    lines = "".join(json.dumps(one) + "\n" for one in _ANSWERS)
    (original / "out" / ANSWERS).write_text(lines + '{"number": 2, "key"')
    (original / "out" / "own.json").write_text(json.dumps(
        [{"index": str(number), "question": "a?", "answer": "two"} for number in range(2)]))
    (original / "logs" / "metrics.jsonl").write_text("".join(
        json.dumps({"kind": "step", "iteration": number, "loss": 1.0}) + "\n" for number in range(1, 5)))

    def read() -> None:
        check_settings(Path("out"), _SETTINGS)
        answers = AnswerFile(Path("out") / ANSWERS, {number: f"k{number}" for number in range(2)})
        answers.close()
        if len(found := read_answers(Path("out") / ANSWERS)) == 2:
            write_results(Path("out"), read_own("out/own.json", "exact", ()), "own", found)
        keep_before(Path("logs/metrics.jsonl"), 3)

    return read


ANSWERS_KINDS = (
    Kind("TSV", write_tsv, {"*.tsv": text}, words=("tsv",)),
    Kind("questions", write_questions, {"*.json": json_form, "*.jsonl": json_lines}, words=("own",)),
    Kind("results of killed runs", write_left, {"out/settings.json": json_form, "out/answers.jsonl": json_lines,
         "logs/metrics.jsonl": json_lines}, damages_folder=False, words=("--log-dir",)),
)
