#!/usr/bin/env python3
"""Writes a GGUF file with the shape of Llama-3.1-8B and random weights, in blocks as llama.cpp's Q4_K_M mixes
them: Q4_K, and Q6_K for the head and for half of the layers' v and down matrices. Its text is noise;
reading it takes the time of a real model's. A byte-level vocabulary of 128,256 tokens comes with it."""
import argparse
import os
import random
import struct

F32, Q4_K, Q6_K = 0, 12, 14
BLOCK = 256
BLOCK_BYTES = {Q4_K: 144, Q6_K: 210}
POOL_BLOCKS = 1 << 14  # random blocks drawn at a time
ALIGNMENT = 32
U32, I32, REAL, BOOL, TEXT, ARRAY = 4, 5, 6, 7, 8, 9
CONTROL, NORMAL = 3, 1


def half(value):
    return struct.pack("<e", value)


def random_blocks(kind, rng):
    """POOL_BLOCKS blocks whose numbers have a standard deviation of some 0.02 and a mean near zero."""
    size = BLOCK_BYTES[kind]
    data = bytearray(rng.randbytes(size * POOL_BLOCKS))

    def put(at, value):
        for i, byte in enumerate(half(value)):
            data[at + i::size] = bytes([byte]) * POOL_BLOCKS

    if kind == Q4_K:
        put(0, 1e-4)
        put(2, 7.5e-4)
    else:
        put(208, 1.5e-5)
    return bytes(data)


def more_bits(layer, layers):
    """llama.cpp's use_more_bits: which layers' v and down are Q6_K."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def tensors(args):
    """Name, rows and columns, type; of a vector columns alone."""
    hidden, inner, kv = 4096, 14336, 1024
    yield "token_embd.weight", (args.vocab, hidden), Q4_K
    for layer in range(args.layers):
        name = f"blk.{layer}."
        high = Q6_K if more_bits(layer, args.layers) else Q4_K
        yield name + "attn_norm.weight", (hidden,), F32
        yield name + "attn_q.weight", (hidden, hidden), Q4_K
        yield name + "attn_k.weight", (kv, hidden), Q4_K
        yield name + "attn_v.weight", (kv, hidden), high
        yield name + "attn_output.weight", (hidden, hidden), Q4_K
        yield name + "ffn_norm.weight", (hidden,), F32
        yield name + "ffn_gate.weight", (inner, hidden), Q4_K
        yield name + "ffn_up.weight", (inner, hidden), Q4_K
        yield name + "ffn_down.weight", (hidden, inner), high
    yield "output_norm.weight", (hidden,), F32
    yield "output.weight", (args.vocab, hidden), Q6_K


def size_of(shape, kind):
    count = 1
    for n in shape:
        count *= n
    return 4 * count if kind == F32 else count // BLOCK * BLOCK_BYTES[kind]


def byte_letters():
    """The 256 characters by which byte-level vocabularies write bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, next_one = [], 256
    for byte in range(256):
        letters.append(chr(byte) if byte in plain else chr(next_one))
        next_one += byte not in plain
    return letters


def vocabulary(size, rng):
    """Tokens, merges and types: words of random letters, each made of two others."""
    control = 256
    tokens = byte_letters()
    known, merges = set(tokens), []
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["\u0120"]
    while len(tokens) < size - control:
        left, right = rng.choice(tokens), rng.choice(letters if rng.random() < 0.7 else tokens)
        word = left + right
        if len(word) > 16 or word in known:
            continue
        known.add(word)
        tokens.append(word)
        # Every way to make it of two, as a real file lists them.
        merges += [f"{word[:i]} {word[i:]}" for i in range(1, len(word)) if word[:i] in known and word[i:] in known]
    types = [NORMAL] * len(tokens) + [CONTROL] * control
    return tokens + [f"<|special_{i}|>" for i in range(control)], merges, types


def text(value):
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def metadata(args, rng):
    tokens, merges, types = vocabulary(args.vocab, rng)
    yield "general.architecture", TEXT, text("llama")
    yield "general.alignment", U32, struct.pack("<I", ALIGNMENT)
    for key, value in {"block_count": args.layers, "context_length": args.context, "embedding_length": 4096,
                       "feed_forward_length": 14336, "attention.head_count": 32, "attention.head_count_kv": 8,
                       "rope.dimension_count": 128, "vocab_size": args.vocab}.items():
        yield "llama." + key, U32, struct.pack("<I", value)
    yield "llama.rope.freq_base", REAL, struct.pack("<f", 500000)
    yield "llama.attention.layer_norm_rms_epsilon", REAL, struct.pack("<f", 1e-5)
    yield "tokenizer.ggml.model", TEXT, text("gpt2")
    yield "tokenizer.ggml.pre", TEXT, text("llama-bpe")
    for key, values in (("tokens", tokens), ("merges", merges)):
        yield "tokenizer.ggml." + key, ARRAY, struct.pack("<IQ", TEXT, len(values)) + b"".join(map(text, values))
    yield "tokenizer.ggml.token_type", ARRAY, struct.pack(f"<IQ{len(types)}i", I32, len(types), *types)
    yield "tokenizer.ggml.bos_token_id", U32, struct.pack("<I", args.vocab - 256)
    yield "tokenizer.ggml.eos_token_id", U32, struct.pack("<I", args.vocab - 255)


def padded(size):
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=131072 + 4096, help="tokens that it takes")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    keys = list(metadata(args, rng))
    listed = list(tensors(args))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(keys))
    header += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in keys)
    offset = 0
    for name, shape, kind in listed:
        header += text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, offset)
        offset += padded(size_of(shape, kind))
    pools = {kind: random_blocks(kind, rng) for kind in BLOCK_BYTES}
    part = args.out + ".part"
    with open(part, "wb") as file:
        file.write(header.ljust(padded(len(header)), b"\0"))
        for _, shape, kind in listed:
            left = size_of(shape, kind)
            pad = padded(left) - left
            while left > 0:  # from a random block of the pool on
                if kind == F32:
                    piece = struct.pack("<f", 1.0) * (left // 4)
                else:
                    begin = rng.randrange(POOL_BLOCKS // 2) * BLOCK_BYTES[kind]
                    piece = pools[kind][begin:begin + left]
                file.write(piece)
                left -= len(piece)
            file.write(b"\0" * pad)
    os.replace(part, args.out)


if __name__ == "__main__":
    main()
