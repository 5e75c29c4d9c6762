"""Damage to files: to bytes, JSON, words, and what is packed in other formats.  The same seed does the same damage.

A ``Form`` knows one format and returns a damaged copy of a file's content.
"""

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Form = Callable[[bytes, Random], bytes]

OUTSIDE = "../outside"
"""A directory beside the one that is read; nothing may be written there."""
_DEPTH = 20_000
_PLACES = {
    "@deep@": "[" * _DEPTH + "]" * _DEPTH,
    "@deep object@": '{"a":' * _DEPTH + "1" + "}" * _DEPTH,
    "@digits@": "9" * 5000,
    "@large@": "1e400",
    "@twice@": '1, "@twice@": 2',
}
"""JSON that Python's writer does not write: put in place of these strings, with their quotes."""
_ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**32 + 1, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**18, 10**30,
    10**400, 0.5, -0.0, 1e-320, 1e16, 1e308, float("nan"), float("inf"), float("-inf"), "", " ", "x", "0", "-1",
    "1e9", "nan", "\x00", "\ud800", "a\udfffb", "\u202e", "\n", "\U0001f600", "a" * 100_000, "(a+)+$", "*" * 50,
    "[", "\\", "{}", "%s%n", "..", "/", f"{OUTSIDE}/made", "../../etc/passwd", "/etc/passwd", "/dev/zero", "~", "C:\\x",
    [], {}, [[]], [None], [0], ["x"], {"": None}, {"x": {"y": []}}, [1, [2, [3]]], [0] * 3000, *_PLACES,
)  # fmt: skip


def some(content: bytes, rng: Random) -> bytes:
    """Damage bytes, as disks, networks and interrupted writes do."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 4, 16, 200)))
        match rng.randrange(9):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.randrange(256)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(end - at)
            case 4:
                del data[at:end]
            case 5:
                data[at:at] = data[at:end] * rng.choice((1, 2, 100))
            case 6:
                start = rng.randrange(len(data) + 1)
                data[at:end] = data[start : start + end - at]
            case 7:
                data[at:end] = bytes([rng.choice((0, 255))]) * (end - at)
            case _:
                data[at:end] = rng.choice((b"-1", b"0", b"99999999999999999999", b"\xed\xa0\x80", b"\xff\xfe", b'"'))
    return bytes(data)


def text(content: bytes, rng: Random) -> bytes:
    """Damage words and lines of text."""
    if rng.random() < 0.3:
        return some(content, rng)
    lines = content.split(b"\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines[at:at] = [lines[other]] * rng.choice((1, 2, 50))
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = some(lines[at], rng)
        case 4:
            words = lines[at].split(b" ")
            words[rng.randrange(len(words))] = str(rng.choice(_ODD)).encode(errors="surrogatepass")
            lines[at] = b" ".join(words)
        case _:
            lines[at] = lines[at] * rng.choice((2, 50, 5000))
    return b"\n".join(lines)


def json_form(content: bytes, rng: Random) -> bytes:
    """Damage a JSON file: mostly its values, sometimes its bytes."""
    try:
        return some(content, rng) if rng.random() < 0.25 else dumped(changed(json.loads(content), rng))
    except ValueError:  # half a line, which a killed process has left
        return some(content, rng)


def json_lines(content: bytes, rng: Random) -> bytes:
    """Damage one line of JSON lines, or the lines as text."""
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    if rng.random() < 0.3 or not lines[at]:
        return text(content, rng)
    lines[at] = json_form(lines[at], rng)
    return b"\n".join(lines)


def dumped(value: Any) -> bytes:
    """JSON text, with what Python's writer does not write."""
    raw = json.dumps(value)
    for place, instead in _PLACES.items():
        raw = raw.replace(json.dumps(place), instead)
    return raw.encode()


def changed(value: Any, rng: Random) -> Any:
    """JSON with one to three changes of values, keys or items; ``value`` is taken apart."""
    holder = [value]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        nodes = [(parent, key) for parent, key in _nodes(holder)]
        parent, key = rng.choice(nodes)
        _change(parent, key, rng)
        if not holder:
            return None
    return holder[0]


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in JSON, as the container and the key."""
    found, left = [], [value]
    while left:
        one = left.pop()
        for key, inner in list(one.items() if isinstance(one, dict) else enumerate(one)):
            found.append((one, key))
            if isinstance(inner, dict | list):
                left.append(inner)
    return found


def _change(parent: Any, key: Any, rng: Random) -> None:
    found = parent[key]
    match rng.randrange(9):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            others = [one for one in parent if one != key]
            parent[rng.choice((*others, f"{key}x", "", "\ud800", "@twice@", "__class__"))] = parent.pop(key)
        case 1:
            parent[key:key] = [found] * rng.choice((1, 2, 1000))
        case 2 if isinstance(parent, dict):
            parent[rng.choice(("new", "", f"{key}_", "crc32", "file"))] = rng.choice(_ODD)
        case 2:
            rng.shuffle(parent)
        case 3 if isinstance(found, int | float) and not isinstance(found, bool):
            parent[key] = rng.choice((found + 1, found - 1, -found, found * 2, found * 10**6, found // 3, str(found)))
        case 3 if isinstance(found, str) and found:
            at = rng.randrange(len(found))
            parent[key] = rng.choice((found[:at], found[at:], found * 2, found.upper(), f"{found} ", f"../{found}",
                                      f"{OUTSIDE}/{found}", found[:at] + chr(rng.choice((0, 10, 47, 0xD800, 0x202E))),
                                      f"{found[:at]}*{found[at:]}", f"/{found}", [found]))
        case 4:
            parent[key] = [found]
        case 5:
            places = list(parent) if isinstance(parent, dict) else range(len(parent))
            parent[key] = parent[rng.choice(places)]
        case _:
            parent[key] = rng.choice(_ODD)


def words(found: Sequence[str], rng: Random) -> list[str]:
    """Damage a command line."""
    changed_words = list(found)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, other = rng.randrange(len(changed_words)), rng.randrange(len(changed_words))
        odd = rng.choice([one for one in _ODD if one is not None])
        written = odd if isinstance(odd, str) else str(odd) if not isinstance(odd, list | dict) else json.dumps(odd)
        match rng.randrange(7):
            case 0 if len(changed_words) > 1:
                del changed_words[at]
            case 1:
                changed_words.insert(other, changed_words[at])
            case 2:
                changed_words[at], changed_words[other] = changed_words[other], changed_words[at]
            case 3:
                changed_words[at] = some(changed_words[at].encode(errors="surrogateescape"), rng).decode(
                    errors="surrogateescape")
            case 4:
                changed_words.insert(at, written)
            case _:
                changed_words[at] = written
    return [word.replace("\x00", "") for word in changed_words]  # the system itself passes none


# Packed formats


def with_json_crc32(key: str) -> Form:
    """JSON objects that hold the checksum of their other content under ``key``: mostly the checksum is right."""

    def form(content: bytes, rng: Random) -> bytes:
        if rng.random() < 0.25:
            return json_form(content, rng)
        value = changed(json.loads(content), rng)
        if isinstance(value, dict):
            value.pop(key, None)
            value = {**value, key: _crc32(value)}
        return dumped(value)

    return form


def manifest(key: str) -> Form:
    """Manifests, whose last ``key`` is a list with one line for each item; mostly the checksum is right."""

    def form(content: bytes, rng: Random) -> bytes:
        if rng.random() < 0.25:
            return json_form(content, rng)
        value = changed(json.loads(content), rng)
        items = value.pop(key, None) if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(items, list):
            return dumped(value)
        value.pop("crc32", None)
        head = dumped({"crc32": _crc32({**value, key: items}), **value}).decode()
        lines = ",\n  ".join(dumped(one).decode() for one in items)
        # a line of its own, where the reader of the head alone stops
        return f'{head.removesuffix("}")},\n "{key}": [\n  {lines}\n ]\n}}\n'.encode()

    return form


def _crc32(value: Any) -> int:
    """The checksum of the content as it is parsed again: the reader sees what was put in place of the placeholders."""
    try:
        return zlib.crc32(json.dumps(json.loads(dumped(value)), sort_keys=True).encode())
    except (RecursionError, ValueError):
        return 0


def safetensors(content: bytes, rng: Random) -> bytes:
    """The JSON header with its length, or bytes."""
    if rng.random() < 0.3:
        return some(content[: rng.choice((16, 400, len(content)))], rng) + content[400:]
    (length,) = struct.unpack_from("<Q", content)
    if not length:  # a file that was not finished
        return some(content, rng)
    header = json_form(content[8 : 8 + length], rng)
    stated = len(header) if rng.random() < 0.9 else rng.choice((0, 1, len(header) + 1, 2**31, 2**63))
    return struct.pack("<Q", stated) + header + content[8 + length :]
