"""What the process of a ``Decoder`` answers: sizes and pixels of images.  ``video_answers.py`` answers about videos.

Does not import torch, nor FFmpeg before the first video, so that the process starts quickly.
"""

import gc
from typing import Any

import numpy as np

from mm.data import limited
from mm.data.limited import Alarm, Replies
from mm.data.media.picture import image_remarks, image_size, into, load_image, load_pixels
from mm.data.sample import Inline
from mm.errors import UserError

ROOM_BYTES = 4 << 30
"""What the process may reserve besides its code: three times what the largest image takes."""


def serve(memory: int) -> None:
    """The main function of the process."""
    limited.serve(_answer, memory, ROOM_BYTES)


def _answer(request: dict[str, Any], content: bytes, replies: Replies) -> None:
    image = Inline(request["path"], content) if request.get("is_inline") else request["path"]
    alarm = Alarm(request["limit_seconds"], is_computing=True)
    match request["task"]:
        case "size":
            with alarm:
                size = image_size(image, request["is_upright"])
            replies.send({"size": size})
        case "remarks":
            with alarm:
                remarks = image_remarks(image)
            replies.send({"remarks": remarks})
        case "picture":
            with alarm:
                shape = _decoded(request, image, replies)
            replies.send({"shape": shape})
        case "resized":
            with alarm:
                shape = _resized(request, image, replies)
            replies.send({"shape": shape})
        case _:
            from mm.data.media.video_answers import answer_about_video

            gc.collect()  # a frame whose side data was read is in a reference cycle, and has megabytes
            answer_about_video(request, replies, ROOM_BYTES)


def _decoded(request: dict[str, Any], image: str | Inline, replies: Replies) -> tuple[int, ...]:
    """Decode an image into the shared memory; return its shape."""
    if request["is_fast"]:
        return load_pixels(image, request["is_upright"], replies.shared).shape
    return into(replies.shared, np.asarray(load_image(image, request["is_upright"]))).shape


def _resized(request: dict[str, Any], image: str | Inline, replies: Replies) -> tuple[int, ...]:
    """The same, resized before it is copied, because the result is usually smaller."""
    pixels = load_image(image, request["is_upright"], request["on_white"])
    if list(pixels.size) != request["size"]:
        raise UserError(
            f"{image}: its header and its pixels disagree on the size ({request['size'][0]} x {request['size'][1]} "
            f"and {pixels.width} x {pixels.height} pixels); replace or remove the file.")
    for size, how in request["steps"]:
        pixels = pixels.resize(size, how)
    return into(replies.shared, np.asarray(pixels)).shape
