"""Writes what the tests of GGUF files compare with:

kernels/dequantize/goldens.bin: random blocks of every GGUF type that Carrel reads, and what the
`gguf` package (written with 0.23.3) makes of them. Per type, little-endian: u32 type, u32 elements,
u32 bytes, the blocks, the elements as f32.

model/testdata/gguf_pre.json: a tokenizer.json whose merges cross words, numbers and marks, so that
every cut shows; texts, and their ids by the `tokenizers` package (0.22) under each pre-tokenizer that
a GGUF file may name.

    pip install gguf tokenizers && python3 tools/goldens/gguf_files.py
"""

import json
import pathlib
import struct

import gguf
import numpy as np
import tokenizers
from tokenizers import normalizers, pre_tokenizers

ROOT = pathlib.Path(__file__).parent.parent.parent

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


def write_blocks():
    rng = np.random.default_rng(16)
    path = ROOT / "kernels/dequantize/goldens.bin"
    with path.open("wb") as out:
        for name in PLAIN + list(HALVES) + ["MXFP4"]:
            kind, data = blocks_of(name, rng)
            wide = gguf.quants.dequantize(data, kind).astype("<f4").reshape(-1)
            assert wide.size == ELEMENTS and np.isfinite(wide).all()
            out.write(struct.pack("<III", int(kind), ELEMENTS, data.size))
            out.write(data.tobytes() + wide.tobytes())
    print(path, path.stat().st_size, "bytes")


# The pre-tokenizers as the models' own tokenizer.json files have them; "default" is llama.cpp's.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + r"+|[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER +
          r"*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [GPT2],
    "smollm": None,  # Digits, then ByteLevel's own pattern
    "llama-bpe": [WORDS + r"\p{N}{1,3}" + REST],
    "qwen2": [WORDS + r"\p{N}" + REST],
    "tekken": [TEKKEN],
}
TEXTS = [
    "Hello world", " It's 2026, isn't it? I'LL see.", "1 22 333 4444 55555 1,234,567.89", "a  b   c\td",
    "line\n\n  next\r\nlast \n", "    indented(code=True)  # ok", "Ünïcödé naïve café CAFÉ",
    "Cafe\u0301 a\u0308\u0323 \u1e9b\u0323 ﬁ ½", "日本語のテキスト。中文，混排 text", "Привет, мир! ¿Qué tal? — “quotes”…",
    "user@example.org/path//x/\n/y https://a.b/?q=1&r=2", "snake_case CamelCase HTTPServer iPhone15Pro",
    "<|end_of_text|>between<|end_of_text|>", "😀👩‍👩‍👧 ☃️ \u200d", "$1 + 2 = ~3 ^ <=> |x|", "\u00a0nbsp\u2003em\u3000wide ",
    "don'T 'Tis 're", "x\u0300\u0301 \u0300start", "٣٤٥ १२३ Ⅷ ²³", "",
]


def train():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<|end_of_text|>"], show_progress=False, min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return json.loads(tokenizer.to_str())


def write_pre():
    path = ROOT / "model/testdata/gguf_pre.json"
    trained = train()
    ids = {}
    for name, splits in SPLITS.items():
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(trained))
        if splits is None:
            steps = [pre_tokenizers.Digits(individual_digits=True),
                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        else:
            steps = [pre_tokenizers.Split(tokenizers.Regex(s), "isolated") for s in splits]
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if name == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        if name in ("llama-bpe", "tekken"):
            tokenizer.model.ignore_merges = True
        ids[name] = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
    kept = {"model": {k: trained["model"][k] for k in ("vocab", "merges")},
            "added_tokens": trained["added_tokens"]}
    parts = [("tokenizer", kept), ("texts", TEXTS), ("ids", ids)]
    path.write_text("{" + ",\n".join(f'"{n}": {json.dumps(v)}' for n, v in parts) + "}\n")
    print(path, path.stat().st_size, "bytes")


write_blocks()
write_pre()
