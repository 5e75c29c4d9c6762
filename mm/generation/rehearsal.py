"""``--check`` before generation: everything that can be checked without a device, other ranks or reading weights.

Neither megatron nor torch.distributed is needed.
"""

from collections.abc import Callable, Iterable

from mm.config.generate import Asking
from mm.config.outputs import folder_problems
from mm.data.encode.encoder import SampleEncoder
from mm.data.sample import Sample
from mm.errors import collected, refuse
from mm.generation.source import ModelFiles, find, named_tokens

ALL_IN_ORDER = "Everything that can be checked beforehand is in order."

ReadSamples = Callable[[], tuple[Iterable[Sample], list[str]]]
"""Reads the valid samples, and the problems of the rest."""


def rehearse(asking: Asking, read: ReadSamples, output: str | None, decodes: bool = False) -> ModelFiles:
    """Find weights and layout, read the prompts, and encode them; returns what was found.

    Pictures and videos are measured by their headers, as the training's check does; ``decodes`` reads their pixels too.
    ``output`` is the directory that ``--output`` needs.  Raises UserError with all problems.
    """
    problems: list[str] = []
    samples: Iterable[Sample] = ()
    found = None
    with collected(problems):
        found = find(asking)
    with collected(problems):
        samples, wrong = read()
        problems += wrong
    if found is not None:
        with collected(problems):
            language = found.model.language
            encoder = SampleEncoder.from_config(
                asking.media_config(found.directory), found.model, language.max_position_embeddings)
            with collected(problems):
                named_tokens(asking.args.stop_tokens, encoder.chat.tokenizer.get_vocab(), language.vocab_size)
            for sample in samples:
                with collected(problems):
                    encoder.encode_prompt(sample) if decodes else encoder.prompt_length(sample)
    refuse([*problems, *(folder_problems("--output", output) if output is not None else ())])
    assert found is not None, "else there is a problem"
    return found
