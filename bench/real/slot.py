"""A slot of llama.cpp's server, as it lies in a file, made longer: the rows of its tokens repeated, positions counted on.
What decoding over it costs is what it would cost over rows that were computed; what it says is not."""
import struct

MAGIC = b"qsgg\x04\x00\x00\x00"


def fail(what):
    raise SystemExit(f"bench real: the peer's slot: {what}")


def lengthen(small, ids, path):
    """Writes to `path` the slot file `small`, with as many tokens as ids says."""
    with open(small, "rb") as file:
        data = file.read()
    if data[:8] != MAGIC:
        fail(f"begins with {data[:8]!r}, known is {MAGIC!r}")
    words, = struct.unpack_from("<I", data, 8)  # three of a header, the ids, and a zero
    header = struct.unpack_from("<3I", data, 12)
    at = 12 + 4 * words
    streams, cells = struct.unpack_from("<2I", data, at)
    if header[2] != words - 4 or streams != 1 or cells != words - 4:
        fail(f"{words} words of ids, {streams} streams of {cells} cells")
    at += 8 + 12 * cells  # of each: position, count of sequences, sequence
    shape = struct.unpack_from("<4I", data, at)  # values transposed, layers
    if shape[0] != 0:
        fail("its values are transposed")
    at += 16
    count = len(ids)
    with open(path, "wb") as out:
        out.write(MAGIC + struct.pack("<I3I", count + 4, header[0], header[1], count))
        out.write(struct.pack(f"<{count}I", *ids) + struct.pack("<3I", 0, 1, count))
        for position in range(count):
            out.write(struct.pack("<3I", position, 1, 0))
        out.write(struct.pack("<4I", *shape))
        for _ in range(2 * shape[1]):  # K of every layer, then V
            kind, row = struct.unpack_from("<iQ", data, at)
            rows = data[at + 12:at + 12 + row * cells]
            if len(rows) != row * cells:
                fail(f"ends within {cells} rows of {row} bytes")
            out.write(struct.pack("<iQ", kind, row))
            out.write((rows * (count // cells + 1))[:count * row])
            at += 12 + len(rows)
    if at != len(data):
        fail(f"{len(data) - at} bytes follow its rows")
