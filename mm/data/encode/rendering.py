"""The process that renders chat templates of unknown origin: whatever one does, it cannot exceed its limits.

Does not import torch, so that the process starts quickly.
"""

from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from mm.data import limited
from mm.data.limited import Alarm, Replies
from mm.errors import UserError

ROOM_BYTES = 1 << 30
"""Memory that a template may reserve."""
_MOST_CHARACTERS = 1 << 26
_LONGEST_REASON = 200


def serve(memory: int) -> None:
    """The main function of the process."""
    limited.serve(_answer, memory, ROOM_BYTES)


def _answer(request: dict[str, Any], content: bytes, replies: Replies) -> None:
    with Alarm(request["limit_seconds"], is_computing=True):
        text = _rendered(request)
        encoded = np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8)
    replies.send({"num_bytes": len(encoded)}, (encoded,))


def _rendered(request: dict[str, Any]) -> str:
    """The text.  Raises UserError with the reason why there is none."""
    try:
        [text], _ = render_jinja_template(
            conversations=[request["messages"]], chat_template=request["template"],
            add_generation_prompt=request["for_generation"], **request["variables"])
    except MemoryError:
        raise
    except TemplateError as error:
        raise UserError(str(error)[:_LONGEST_REASON]) from error
    except Exception as error:  # a template can raise any error
        raise UserError(f"{type(error).__name__}: {error}"[:_LONGEST_REASON]) from error
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"it makes {len(text):,} characters, above the limit of {_MOST_CHARACTERS:,}")
    return text
