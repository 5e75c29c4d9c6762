"""Chat templates: programs in a checkpoint that turn a conversation into text.

The published template of a family is rendered here.  Any other may loop, recurse or fill the memory, so a process with
limits renders it (``rendering.py``).  Both use the same function of transformers, in its sandbox.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mm.data.limited import LimitedProcess, ProcessEndedError
from mm.errors import UserError
from mm.families.family import Family

LIMIT_SECONDS = 5.0
"""Limit for one conversation, in seconds of CPU time: ten thousand times what an ordinary one takes."""


class Template:
    """The chat template of a tokenizer.  Pickles without its process."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, family: Family, limit_seconds: float = LIMIT_SECONDS
    ) -> None:
        """Rendering a conversation is aborted after ``limit_seconds`` of CPU time."""
        self._tokenizer, self._title, self._limit_seconds = tokenizer, family.title, limit_seconds
        digest = hashlib.sha256(str(tokenizer.chat_template).encode(errors="surrogatepass")).hexdigest()
        self._process = None if digest in family.template_sha256s else LimitedProcess("mm.data.encode.rendering")

    @property
    def is_known(self) -> bool:
        """Whether it is a published template, which needs no limits."""
        return self._process is None

    def render(self, messages: Sequence[Mapping[str, Any]], for_generation: bool) -> str:
        """The text of a conversation.  Raises UserError when there is none, or when it takes too much time or memory.

        ``for_generation``: append the header of an answer.
        """
        try:
            if self._process is None:
                conversation: Any = list(messages)  # typed as if a message held strings only
                return cast(str, self._tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=for_generation))
            return self._rendered(self._process, messages, for_generation)
        except ProcessEndedError as error:
            why = f"it needs {error.how}" if error.is_large else f"its process ended {error.how}"
            why = f"it takes more than {self._limit_seconds:g} s of CPU time" if error.is_late else why
            raise self._unusable(why) from None
        except (TemplateError, UserError) as error:
            raise self._unusable(str(error)) from error

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            with self._process as process:
                process.close()

    def _rendered(self, renderer: LimitedProcess, messages: Sequence[Mapping[str, Any]], for_generation: bool) -> str:
        request = {
            "messages": messages, "template": self._tokenizer.get_chat_template(), "for_generation": for_generation,
            "variables": self._tokenizer.special_tokens_map, "limit_seconds": self._limit_seconds,
        }  # fmt: skip
        with renderer as process:
            return process.read(process.ask(request)["num_bytes"]).decode(errors="surrogatepass")

    def _unusable(self, why: str) -> UserError:
        return UserError(f"the chat template cannot be used: {why}; use {self._title}'s template.")
