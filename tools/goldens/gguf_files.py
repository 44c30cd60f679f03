"""Writes what the tests of GGUF files compare with:

kernels/layer/dequantize/goldens.bin: random blocks of every GGUF type that Carrel reads, and what the
`gguf` package (written with 0.23.3) makes of them. Per type, little-endian: u32 type, u32 elements,
u32 bytes, the blocks, the elements as f32.

model/testdata/gguf_pre.json: a tokenizer.json whose merges cross words, numbers and marks, so that
every cut shows; texts, and their ids by the `tokenizers` package (0.22) under each pre-tokenizer that
a GGUF file may name.

model/testdata/qwen3moe: a tiny random Qwen3-MoE in quantised blocks, experts stacked as a converter
stacks them; what the package makes of one stack, and the logits that transformers (5.23, float32)
computes from the dequantised weights.

    pip install gguf tokenizers torch transformers && python3 tools/goldens/gguf_files.py
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
    path = ROOT / "kernels/layer/dequantize/goldens.bin"
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
    "command-r": None,
    "dbrx": [WORDS + r"\p{N}{1,3}" + REST],
    "megrez": [WORDS + r"\p{N}" + REST],
    # As transformers 5 has it (models/qwen3_5).
    "qwen35": [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "gpt-4o": [r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + r"+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
               + UPPER + "+" + LOWER + r"*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "seed-coder": [WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"],
    "deepseek-v3": [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
}
NFC = ("qwen2", "qwen35", "command-r")
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
    # What is there stays: another version of the package may train another vocabulary.
    trained = json.loads(path.read_text())["tokenizer"] if path.exists() else train()
    trained["model"]["type"] = "BPE"
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
        if name in NFC:
            tokenizer.normalizer = normalizers.NFC()
        if name in ("llama-bpe", "tekken"):
            tokenizer.model.ignore_merges = True
        ids[name] = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
    kept = {"model": {k: trained["model"][k] for k in ("vocab", "merges")},
            "added_tokens": trained["added_tokens"]}
    parts = [("tokenizer", kept), ("texts", TEXTS), ("ids", ids)]
    path.write_text("{" + ",\n".join(f'"{n}": {json.dumps(v)}' for n, v in parts) + "}\n")
    print(path, path.stat().st_size, "bytes")


def moe_name(name):
    for theirs, ours in {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
                         "lm_head": "output", "model.layers.": "blk.",
                         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
                         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
                         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
                         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
                         "mlp.gate.": "ffn_gate_inp."}.items():
        name = name.replace(theirs, ours)
    return name


def write_moe():
    import torch
    from safetensors.numpy import save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(16)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=256,
        pad_token_id=None, bos_token_id=1, eos_token_id=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e4))
    model = Qwen3MoeForCausalLM(config).eval()
    folder = ROOT / "model/testdata/qwen3moe"
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "qwen3moe")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_expert_feed_forward_length(32)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-6)
    kept = {}

    def put(name, values, kind):
        data = gguf.quants.quantize(values.detach().numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        return torch.tensor(gguf.quants.dequantize(data, kind))

    q8, q4, q5 = (gguf.GGMLQuantizationType[n] for n in ("Q8_0", "Q4_0", "Q5_1"))
    plain = gguf.GGMLQuantizationType.F32
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.25)
        matrix = parameter.dim() == 2 and "mlp.gate." not in name
        if parameter.dim() < 3:
            parameter.data = put(moe_name(name), parameter, q8 if matrix else plain)
            continue
        layer = "blk." + name.split(".")[2]
        if "gate_up" in name:  # [experts, 2 inner, hidden]: gate, then up
            gate, up = parameter.data[:, :32], parameter.data[:, 32:]
            parameter.data = torch.cat([put(layer + ".ffn_gate_exps.weight", gate.contiguous(), q4),
                                        put(layer + ".ffn_up_exps.weight", up.contiguous(), q5)], 1)
        else:
            parameter.data = put(layer + ".ffn_down_exps.weight", parameter.data, q8)
            kept[layer] = parameter.data.numpy().copy()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = torch.randint(3, 64, (1, 40))
    with torch.no_grad():
        logits = model(tokens).logits[0].contiguous().numpy()
    save_file({"input_ids": tokens[0].to(torch.int32).numpy(), "logits": logits,
               "blk.1.ffn_down_exps": np.ascontiguousarray(kept["blk.1"])},
              str(folder / "golden.safetensors"))


write_blocks()
write_pre()
write_moe()
