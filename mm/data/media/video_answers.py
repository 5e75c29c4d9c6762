"""What the process of a ``Decoder`` answers about videos: headers and frames."""

from fractions import Fraction
from typing import Any

from mm.data.limited import Alarm, Replies, limit_memory
from mm.data.media.animation import animation_frames, animation_header, is_animation
from mm.data.media.video_file import FRACTIONS, Wanted, read_header
from mm.data.media.video_frames import BACKENDS, missing_backend

_ARRAYS = ("times", "key_times", "key_seeks")
"""Header fields sent after the JSON, with 8 bytes per number."""


def answer_about_video(request: dict[str, Any], replies: Replies, room_bytes: int) -> None:
    """Answer one request.  ``room_bytes``: what decoding may reserve besides the code of the backend."""
    match request["task"]:
        case "check":
            with Alarm(request["limit_seconds"]):
                missing = missing_backend(request["backend"])
            replies.send({"missing": missing})
        case "header":
            _send_header(request, replies)
        case "frames":
            if request["backend"] != "pyav":
                missing_backend(request["backend"])  # imports it, and torch with it
                limit_memory(room_bytes)
            _send_frames(request, replies)


def _send_header(request: dict[str, Any], replies: Replies) -> None:
    with Alarm(request["limit_seconds"]):
        path = request["path"]
        header = vars(animation_header(path) if is_animation(path) else read_header(path, request["is_upright"]))
    arrays = {name: header.pop(name) for name in _ARRAYS}
    fractions = {name: header[name].as_integer_ratio() for name in FRACTIONS}
    lengths = {name: len(array) for name, array in arrays.items()}
    replies.send({**header, **fractions, "lengths": lengths}, tuple(arrays.values()))


def _send_frames(request: dict[str, Any], replies: Replies) -> None:
    """Send exactly the wanted frames: anything after the last would be taken as the next reply."""
    wanted = request["wanted"]
    wanted = Wanted(**{**wanted, "time_base": Fraction(*wanted["time_base"])})
    path = request["path"]
    frames = animation_frames(path, wanted) if is_animation(path) else BACKENDS[request["backend"]](path, wanted)
    replies.send({})
    alarm = Alarm(request["limit_seconds"])
    for _ in wanted.times:
        with alarm:  # excludes the time in which this process waits for the reader
            frame = next(frames)
        replies.send({"shape": frame.shape}, (frame,))
