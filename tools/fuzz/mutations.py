"""Seeded mutations of a file, as buggy tools, bad disks or attackers make them.

Every mutation takes the bytes of a valid file and a random generator, and returns other bytes.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import math
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

HUGE = (2**31, 2**63, 2**64, 10**5, 10**9, 10**400)
JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    1.5,
    -0.5,
    1e-320,
    1e38,
    3e38,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    *HUGE,
    "",
    "x",
    "0",
    "-1",
    "nan",
    "\0",
    "\ud800",
    "\u202e",
    "\x1b[31mred",
    "a" * 5000,
    "../../etc/passwd",
    "/dev/zero",
    "<script>alert(1)</script>",
    "[bold]x[/]",
    "=1+1",
    "(",
    "(a+)+$",
    "float8_e4m3fn",
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"a": {"b": []}},
    [1, 2, 3],
    ["a", "a"],
    [0, 2**63],
    ["F32"],
    [1e308],
    {"value": 1},
    "{{ 1 }}",
)


# --- documents ------------------------------------------------------------------------------------


def places(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value inside a document."""
    items: Any = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in items:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))


def changed_document(document: Any, rng: random.Random) -> Any:
    """Replace, remove, rename or nest one to three values."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not isinstance(document, dict | list) or rng.random() < 0.02:
            return rng.choice(JUNK)
        paths = list(places(document))
        if not paths:
            return rng.choice(JUNK)
        # Draw the depth first: shallow values are few and matter most.
        depth = rng.choice(sorted({len(path) for path in paths}))
        *above, key = rng.choice([path for path in paths if len(path) == depth])
        owner: Any = document
        for step in above:
            owner = owner[step]
        if _change(owner, key, rng):
            break
    return document


def _change(owner: Any, key: Any, rng: random.Random) -> bool:
    """Change one value; return whether the document is now too deep for another change."""
    what = rng.randrange(9)
    if what <= 3:
        owner[key] = copy.deepcopy(rng.choice(JUNK))
    elif what == 4:
        owner[key] = _other_number(owner[key], rng)
    elif what == 5:
        del owner[key]
    elif what == 6 and isinstance(owner, dict):
        owner[str(rng.choice(JUNK))[:300]] = owner.pop(key)
    elif what == 7:
        owner[key] = rng.choice(([owner[key]], {"x": owner[key]}, str(owner[key])[:300]))
    elif what == 8 and rng.random() < 0.3:
        for _ in range(rng.choice((3, 500, 3000))):
            owner[key] = [owner[key]]
        return True
    else:
        owner[key] = copy.deepcopy(rng.choice(JUNK))
    return False


def _other_number(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return rng.choice(JUNK)
    return rng.choice(
        (-value, value + 1, value - 1, value * 2, value * 1000, value / 3, str(value))
    )


def as_json(document: Any) -> bytes:
    """Return the document as JSON, or deep brackets if it is nested too deeply for `json`."""
    try:
        return json.dumps(document).encode("utf-8", "surrogatepass")
    except RecursionError:
        depth = 100_000
        return b"[" * depth + b"]" * depth


def json_values(data: bytes, rng: random.Random) -> bytes:
    return as_json(changed_document(json.loads(data), rng))


def json_text(data: bytes, rng: random.Random) -> bytes:
    """Return JSON that is invalid, or barely valid."""
    text = data.strip()
    return rng.choice(
        (
            lambda: b"",
            lambda: b"\xef\xbb\xbf" + text,
            lambda: text.decode().encode("utf-16"),
            lambda: text[: rng.randrange(len(text))],
            lambda: text + text,
            lambda: b"[" * 200_000,
            lambda: b'{"a":' * 100_000,
            lambda: b"1" * 5000,
            lambda: text[:-1] + b', "model_type": "olmoe", "model_type": 3}',
            lambda: text.replace(b":", b": NaN, ", 1),
            lambda: text.replace(b'"', b"'", 4),
            lambda: b"null",
            lambda: b"\0" * 4096,
        )
    )()


def raw_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, remove, repeat or randomise bytes."""
    mutable = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if not mutable:
            break
        at, length = rng.randrange(len(mutable)), rng.choice((1, 1, 4, 64, 1024))
        what = rng.randrange(5)
        if what == 0:
            mutable[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del mutable[at : at + length]
        elif what == 2:
            mutable[at:at] = mutable[at : at + length]
        elif what == 3:
            mutable[at : at + length] = rng.randbytes(length)
        else:
            mutable[at : at + length] = bytes([rng.choice((0, 255, 32, 34, 10))]) * length
    return bytes(mutable)


def cut_short(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))] if data else data


# --- safetensors ----------------------------------------------------------------------------------


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_safetensors(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def header_values(data: bytes, rng: random.Random) -> bytes:
    header, body = split_safetensors(data)
    return join_safetensors(as_json(changed_document(header, rng)), body)


def header_text(data: bytes, rng: random.Random) -> bytes:
    header, body = split_safetensors(data)
    return join_safetensors(json_text(as_json(header), rng), body)


def header_length(data: bytes, rng: random.Random) -> bytes:
    length = rng.choice((0, 1, 7, len(data) - 8, len(data), 2**31, 2**63, 2**64 - 1, 99_999_999))
    return struct.pack("<Q", length) + data[8:]


def header_entries(data: bytes, rng: random.Random) -> bytes:
    """Give one tensor another dtype, shape, name or offset."""
    header, body = split_safetensors(data)
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    entry = header[name]
    begin, end = entry["data_offsets"]
    what = rng.randrange(7)
    if what == 0:
        label, size = rng.choice(
            (
                ("F16", 2),
                ("I32", 4),
                ("F64", 8),
                ("U8", 1),
                ("F8_E4M3", 1),
                ("BOOL", 1),
                ("F4", 0.5),
                ("F8_E8M0", 1),
                ("C64", 8),
            )
        )
        entry["dtype"], entry["shape"] = label, [int((end - begin) / size)]
    elif what == 1:
        count = math.prod(entry["shape"])
        entry["shape"] = rng.choice(([count], [1, count], [count, 1], [*entry["shape"], 1]))
    elif what == 2:
        header[
            rng.choice(
                (
                    "\ud800",
                    "x" * 70_000,
                    "",
                    "a/../b",
                    "model.layers.99999999.mlp.gate.weight",
                    "model.layers.-1.mlp.gate.weight",
                    f"{name}.weight",
                )
            )
        ] = header.pop(name)
    elif what == 3:
        entry["data_offsets"] = [begin, rng.choice((2**63, begin, end + 1, -1, 10**30))]
    elif what == 4:
        header["extra"] = {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [len(body)] * 2}
    elif what == 5:
        other = rng.choice(names)
        header[name], header[other] = header[other], header[name]
    else:
        del header[name]
    return join_safetensors(as_json(header), body)


def header_doubled(data: bytes, rng: random.Random) -> bytes:
    """Return a header with many names, one of them twice."""
    _, body = split_safetensors(data)
    count = rng.choice((2, 1000, 100_000))
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ",".join(f'"t{i % (count - 1)}":{entry}' for i in range(count))
    return join_safetensors(f"{{{header}}}".encode(), body)


def body_values(data: bytes, rng: random.Random) -> bytes:
    """Put NaN, infinities or extreme numbers into one tensor."""
    header, body = split_safetensors(data)
    name = rng.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    values = bytearray(body)
    number = struct.pack("<f", rng.choice((math.nan, math.inf, -math.inf, 3e38, 1e38, 1e-45, 1e30)))
    whole = rng.random() < 0.3
    first = begin if whole else begin + 4 * rng.randrange(max(1, (end - begin) // 4))
    stop = end if whole else min(end, first + 4)
    for at in range(first, stop - 3, 4):
        values[at : at + 4] = number
    return join_safetensors(as_json(header), bytes(values))


# --- other formats --------------------------------------------------------------------------------


YAML_BITS = (
    "!!bool x",
    "!!int x",
    "!!float x",
    "!!timestamp x",
    "!!binary '!'",
    "!!set {a, b}",
    "!!omap [a]",
    "0x_",
    "0b",
    "0o9",
    "1_000__",
    "9" * 5000,
    "190:20:30",
    "2001-99-99",
    "&a [*a]",
    "*missing",
    "<<: 3",
    "? [a]",
    "{a: b",
    "[a, b",
    "'",
    '"\\x',
    "!!python/object/apply:os.system [ls]",
    "- - - -",
    ".inf",
    ".nan",
    "~",
    "|",
    ">",
    "%YAML 9.9",
    "---\n---",
    "\t- a",
    "{" * 3000,
    "[" * 3000,
    "a: " * 300,
    "\x00",
    "\ufeff",
    "null",
    "&x {<<: *x}",
    "@",
    "`",
    "!<tag:x> y",
    "1e400",
    "-0",
    "=",
    "{1: 2, [a]: 3}",
)


def yaml_lines(data: bytes, rng: random.Random) -> bytes:
    """Replace a value, a key or a line by unusual YAML."""
    lines = data.decode().split("\n")
    at, bit = rng.randrange(len(lines)), rng.choice(YAML_BITS)
    key, colon, _ = lines[at].partition(": ")
    what = rng.randrange(5)
    if what <= 1 and colon:
        lines[at] = f"{key}: {bit}"
    elif what == 2:
        lines[at] = bit
    elif what == 3:
        lines.insert(at, lines[rng.randrange(len(lines))])
    else:
        lines[at] = lines[at].replace(key.strip(), bit, 1) if key.strip() else bit
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def row_values(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines()
    for at in rng.sample(range(len(lines)), rng.choice((1, 3, len(lines)))):
        lines[at] = json_values(lines[at], rng) if rng.random() < 0.8 else json_text(lines[at], rng)
    return b"\n".join(line for line in lines if b"\n" not in line)


def long_rows(data: bytes, rng: random.Random) -> bytes:
    word = rng.choice(("one two ", "x", " ", "\n", "é", "<|end|>", "\ud83d\ude00"))
    text = word * rng.choice((10, 10_000, 2_000_000))
    row = rng.choice(
        ({"text": text}, {"prompt": text}, {"messages": [{"role": "user", "content": text}]})
    )
    return data + as_json(row) + b"\n"


def gzipped(data: bytes, rng: random.Random) -> bytes:
    bomb = rng.random() < 0.3
    return (
        gzip.compress(b'{"text": "' + b"a " * 50_000_000 + b'"}', 1)
        if bomb
        else raw_bytes(data, rng)
    )


def zip_members(data: bytes, rng: random.Random) -> bytes:
    """Change, truncate or drop a member of a `.bin` file; the zip itself stays valid."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(written, "w") as new:
        names = old.namelist()
        chosen, what = rng.choice(names), rng.randrange(4)
        for name in names:
            content = old.read(name)
            if name == chosen:
                if what == 0:
                    continue
                content = rng.choice((raw_bytes, cut_short))(content, rng)
            new.writestr(name, content)
    return written.getvalue()


class _Strange:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


def other_pickles(data: bytes, rng: random.Random) -> bytes:
    value: Any = rng.choice((_Strange(), [1], {}, {"a": 1}, {1: "a"}, "x" * 100, {"a": None}, 3.5))
    return pickle.dumps(value, protocol=rng.choice((0, 2, 4)))


JSON: tuple[Mutation, ...] = (
    json_values,
    json_values,
    json_values,
    json_text,
    raw_bytes,
    cut_short,
)
SAFETENSORS: tuple[Mutation, ...] = (
    header_values,
    header_values,
    header_entries,
    header_entries,
    header_text,
    header_length,
    header_doubled,
    body_values,
    body_values,
    raw_bytes,
    cut_short,
)
YAML: tuple[Mutation, ...] = (yaml_lines, yaml_lines, yaml_lines, raw_bytes, cut_short)
ROWS: tuple[Mutation, ...] = (row_values, row_values, row_values, long_rows, raw_bytes)
ZIPPED: tuple[Mutation, ...] = (gzipped,)
PICKLED: tuple[Mutation, ...] = (zip_members, zip_members, raw_bytes, cut_short, other_pickles)
BYTES: tuple[Mutation, ...] = (raw_bytes, cut_short)
