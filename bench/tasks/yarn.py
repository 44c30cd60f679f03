"""A copy of a GGUF file whose metadata say that its positions are stretched by YaRN: yarn.py FROM TO FACTOR.

The model goes FACTOR times as far as it was trained; its tensors are those of FROM, byte for byte."""
import struct
import sys

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
U32, F32, STRING, ARRAY = 4, 6, 8, 9


class Reader:
    def __init__(self, data, at):
        self.data, self.at = data, at

    def take(self, count):
        self.at += count
        return self.data[self.at - count:self.at]

    def number(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]

    def string(self):
        return self.take(self.number("Q")).decode()

    def skip(self, kind):
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in SIZES:
                self.take(SIZES[inner] * count)
            else:
                for _ in range(count):
                    self.skip(inner)
        else:
            self.take(SIZES[kind])


def entry(name, kind, payload):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + payload


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def stretched(data, factor):
    """The bytes of a GGUF file of version 3, stretched."""
    reader = Reader(data, 4)
    version, tensors, count = reader.number("I"), reader.number("Q"), reader.number("Q")
    if data[:4] != b"GGUF" or version != 3:
        raise ValueError("no GGUF file of version 3")
    entries, values = [], {}
    for _ in range(count):
        begin, name, kind = reader.at, reader.string(), reader.number("I")
        value = reader.at
        reader.skip(kind)
        entries.append((name, data[begin:reader.at]))
        values[name] = (kind, data[value:reader.at])
    begin = reader.at
    for _ in range(tensors):
        reader.string()
        reader.take(8 * reader.number("I") + 4 + 8)
    infos, alignment = data[begin:reader.at], 32
    if "general.alignment" in values:
        alignment = struct.unpack("<I", values["general.alignment"][1])[0]
    rows = -(-reader.at // alignment) * alignment
    architecture = values["general.architecture"][1][8:].decode()
    kind, length = values[f"{architecture}.context_length"]
    if kind != U32 or f"{architecture}.rope.scaling.type" in values:
        raise ValueError("its context_length is no 32 bits, or its positions are scaled already")
    trained = struct.unpack("<I", length)[0]
    new = {"context_length": (U32, struct.pack("<I", int(trained * factor))),
           "rope.scaling.type": (STRING, text("yarn")), "rope.scaling.factor": (F32, struct.pack("<f", factor)),
           "rope.scaling.original_context_length": (U32, struct.pack("<I", trained))}
    kept = [written for name, written in entries if name.removeprefix(architecture + ".") not in new]
    kept += [entry(f"{architecture}.{name}", *value) for name, value in new.items()]
    head = data[:4] + struct.pack("<IQQ", version, tensors, len(kept)) + b"".join(kept) + infos
    return head + bytes(-len(head) % alignment) + data[rows:]


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    with open(sys.argv[1], "rb") as file:
        data = file.read()
    with open(sys.argv[2], "wb") as file:
        file.write(stretched(data, float(sys.argv[3])))


if __name__ == "__main__":
    main()
