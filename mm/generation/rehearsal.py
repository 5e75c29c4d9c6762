"""``--check`` before generation: everything that can be checked without other ranks or reading weights, and without a
device unless one is named.

Neither megatron nor torch.distributed is needed.
"""

from collections.abc import Callable, Iterable

from mm.config.generate import Asking
from mm.config.outputs import folder_problems
from mm.data.sample import Sample
from mm.device.platforms import absent_device
from mm.errors import collected, refuse
from mm.generation.prompts import prompt_encoder
from mm.generation.source import ModelFiles, find, named_tokens
from mm.progress import Progress

ALL_IN_ORDER = "Everything that can be checked beforehand is in order."

ReadSamples = Callable[[], tuple[Iterable[Sample], list[str]]]
"""Reads the valid samples, and the problems of the rest."""


def rehearse(asking: Asking, read: ReadSamples, output: str | None, decodes: bool = False) -> ModelFiles:
    """Find weights and layout, and read and encode the prompts; returns the model's files.

    Images and videos are measured by their headers, as in the check before training; ``decodes`` reads pixels too.
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
            encoder = prompt_encoder(asking.media_config(found.directory), found.model)
            with collected(problems):
                vocabulary = encoder.chat.tokenizer.get_vocab()
                named_tokens(asking.args.stop_tokens, vocabulary, found.model.language.vocab_size)
            for sample in Progress("checking prompts", unit="prompts").each(samples):
                with collected(problems):
                    encoder.encode_prompt(sample) if decodes else encoder.prompt_length(sample)
    refuse([*problems, *(folder_problems("--output", output) if output is not None else ()),
            *absent_device(asking.args.device)])
    assert found is not None, "else there is a problem"
    return found
