"""Damage to torch.save's zip archives: records, names, sizes, and pickles that would run code or exhaust a reader."""

import io
import pickle
import zipfile
from random import Random

from benchmarks.fuzz.mutate import OUTSIDE, some

_DEEP = 100_000
_PICKLES = (
    b"cposix\nsystem\n(S'touch " + f"{OUTSIDE}/made".encode() + b"'\ntR.",
    b"\x80\x04cbuiltins\neval\n(S'1'\ntR.",
    b"\x80\x02cos.path\njoin\n)R.",
    b"(" * _DEEP + b".",
    b"]" + b"a" * 10 + b".",
    b"\x80\x02)" + b"\x85" * _DEEP + b".",  # tuples within tuples
    b"\x80\x02}(" + b")" + b"\x85" * _DEEP + b"K\x01u.",  # the same as a key, which is hashed
    b"\x80\x02}(X\x05\x00\x00\x00model" + b"]" + b"]" * _DEEP + b"a" * _DEEP + b"u.",  # lists within lists
    b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",  # bytes of a terabyte
    b"\x80\x02r\xff\xff\xff\x7f.",  # a large number in the memo
    b"\x80\x02\x8b\xff\xff\xff\x7f.",  # an integer of 2 GiB
    b"\x80\x02}q\x00h\x00h\x00s.",  # a dictionary as its own key
    b"\x80\x02]q\x00h\x00a.",  # a list within itself
    b"I" + b"9" * 5000 + b"\n.",
    b"\x80\x02ccollections\nOrderedDict\n)R(K\x01K\x02u.",
    pickle.dumps({"model": {"x": "y"}, "args": 1}, 2),
    pickle.dumps({"model": []}, 2), pickle.dumps([1], 2), pickle.dumps({1: 2}, 2), b"", b".", b"N.", b"\x80\xff.",
)  # fmt: skip


def torch_zip(content: bytes, rng: Random) -> bytes:
    """Damage the bytes, the central directory, the pickle or the records of an archive."""
    choice = rng.random()
    if choice < 0.15:
        return some(content, rng)
    if choice < 0.3:  # the end, where the sizes, offsets and names are
        at = content.rindex(b"PK\x01\x02") if choice < 0.22 else content.index(b"PK\x01\x02")
        return content[:at] + some(content[at:], rng)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = rng.randrange(len(records))
    name, found = records[at]
    pickled = next(number for number, (name, _) in enumerate(records) if name.endswith("/data.pkl"))
    compression = zipfile.ZIP_STORED
    match rng.randrange(9):
        case 0:
            del records[at]
        case 1:
            records.append((name, some(found, rng)))
        case 2:
            records[at] = (rng.choice((f"../{name}", f"/{name}", "", "data.pkl", f"{name}/x", "x/data.pkl", "\ud800x",
                                       name * 500)).encode(errors="replace").decode(), found)
        case 3:
            records[at] = (name, found[: len(found) // 2])
        case 4:
            compression = zipfile.ZIP_DEFLATED
        case 5 | 6:
            records[pickled] = (records[pickled][0], rng.choice(_PICKLES))
        case _:
            records[pickled] = (records[pickled][0], some(records[pickled][1], rng))
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, found in records:
            archive.writestr(zipfile.ZipInfo(name or "x"), found, compression)
    return target.getvalue()
