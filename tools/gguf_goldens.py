"""Writes kernels/dequantize/goldens.bin: random blocks of every GGUF type that Carrel reads, and
what the `gguf` package (PyPI; written with 0.23.3) makes of them.

    pip install gguf && python3 tools/gguf_goldens.py

Per type, little-endian: u32 type, u32 elements, u32 bytes, the blocks, the elements as f32.
"""

import pathlib
import struct

import gguf
import numpy as np

# Bytes of a block that hold a half: its scale, and its minimum where it has one.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}
PLAIN = ["F32", "F16", "BF16"]
ELEMENTS = 512


def blocks_of(name, rng):
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    if name in PLAIN:
        values = rng.normal(size=ELEMENTS).astype(np.float32)
        data = gguf.quants.quantize(values, kind).view(np.uint8)
        return kind, np.ascontiguousarray(data).reshape(-1)
    count = ELEMENTS // elements
    data = rng.integers(0, 256, size=(count, size), dtype=np.uint8)
    for at in HALVES.get(name, []):
        scale = (rng.normal(size=count) * 10.0 ** rng.integers(-6, 2, size=count)).astype(np.float16)
        data[:, at:at + 2] = scale.view(np.uint8).reshape(count, 2)
    if name == "MXFP4":  # exponents: the denormal ones, usual ones
        data[:, 0] = np.concatenate([[0, 1, 2], rng.integers(100, 150, size=count - 3)])
    return kind, data.reshape(-1)


def main():
    rng = np.random.default_rng(16)
    path = pathlib.Path(__file__).parent.parent / "kernels/dequantize/goldens.bin"
    with path.open("wb") as out:
        for name in PLAIN + list(HALVES) + ["MXFP4"]:
            kind, data = blocks_of(name, rng)
            wide = gguf.quants.dequantize(data, kind).astype("<f4").reshape(-1)
            assert wide.size == ELEMENTS and np.isfinite(wide).all()
            out.write(struct.pack("<III", int(kind), ELEMENTS, data.size))
            out.write(data.tobytes() + wide.tobytes())
    print(path, path.stat().st_size, "bytes")


main()
