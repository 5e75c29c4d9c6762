"""The questions of one evaluation, from either kind of file."""

from dataclasses import replace
from pathlib import Path

from mm.config.evaluate import Evaluating
from mm.errors import reading
from mm.scoring.benchmarks import BENCHMARKS, Items, read_benchmark
from mm.scoring.own import read_own


@reading()
def read_items(evaluating: Evaluating) -> Items:
    """Read the questions.  Raises UserError with everything in the file that cannot be asked or scored."""
    path, args = evaluating.questions, evaluating.asking.args
    if evaluating.benchmark is None:
        assert evaluating.rule is not None, "one of the two is given"
        items = read_own(path, evaluating.rule, args.media_roots)
    else:
        items = read_benchmark(path, BENCHMARKS[evaluating.benchmark], evaluating.custom_prompt, args.media_roots)
    return replace(items, items=items.items[: args.max_questions])


def title_of(evaluating: Evaluating) -> str:
    """Title of the questions."""
    name = evaluating.benchmark
    return Path(evaluating.questions).name if name is None else BENCHMARKS[name].title
