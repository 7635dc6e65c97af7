"""Cuts the first tokens of every rank out of a routing trace.

    python3 make_excerpt.py SOURCE.safetensors [OUTPUT.safetensors] [TOKENS]

Reads and writes .safetensors with nothing but the standard library. Only topk_idx and topk_weight are kept.
"""

import json
import os
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def read(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), file.read()


def cut(data, entry, tokens):
    ranks, all_tokens, k = entry["shape"]
    tokens = min(tokens, all_tokens)
    begin, _ = entry["data_offsets"]
    size = k * 4
    parts = []
    for rank in range(ranks):
        start = begin + rank * all_tokens * size
        parts.append(data[start : start + tokens * size])
    return [ranks, tokens, k], b"".join(parts)


def main():
    source = sys.argv[1]
    output = sys.argv[2] if len(sys.argv) > 2 else os.path.join(HERE, "text-256x8-excerpt.safetensors")
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 128
    header, data = read(source)
    note = f"first {tokens} tokens of each rank of {os.path.basename(source)}"
    out, body = {"__metadata__": {"excerpt": note, "experts": "256"}}, b""
    for name in ("topk_idx", "topk_weight"):
        shape, part = cut(data, header[name], tokens)
        out[name] = {"dtype": header[name]["dtype"], "shape": shape, "data_offsets": [len(body), len(body) + len(part)]}
        body += part
    text = json.dumps(out, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(output, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)


if __name__ == "__main__":
    main()
