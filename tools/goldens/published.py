#!/usr/bin/env python3
"""Writes model/testdata/published: for the config.json files in tests/published a tiny random checkpoint
with the same fields, as a folder and as a GGUF file, and the logits that transformers computes from it in
float32. Sizes are small; what the published file says otherwise stays.

Needs torch, transformers and gguf. Usage: published.py
"""
import json
import pathlib
import shutil

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = pathlib.Path(__file__).parent.parent.parent
OUT = ROOT / "model/testdata/published"
VOCAB, KEEP = 64, 48
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2)
MODELS = {
    "llama-3.1-8b": (dict(), "llama", 300),
    # A window shorter than the text; one layer in six sees all of it.
    "gemma-3-1b": (dict(num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=1,
                        intermediate_size=32, sliding_window=24, query_pre_attn_scalar=16), "gemma3", 300),
    "qwen3-coder-30b-a3b": (dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16),
                            "qwen3moe", 100),
    # Turns of an original length that the text exceeds, so that the bounds of yarn matter.
    "deepseek-r1-0528-qwen3-8b": (dict(rope=dict(original_max_position_embeddings=64),
                                       max_position_embeddings=512, rope_theta=10000), "qwen3", 300),
    "mistral-7b-v0.1": (dict(sliding_window=96, max_position_embeddings=512), "llama", 96),
}


def config_of(name, sizes):
    config = json.loads((ROOT / f"tests/published/{name}.json").read_text())
    sizes = dict(sizes)
    if "rope" in sizes:
        config["rope_scaling"].update(sizes.pop("rope"))
    return dict(config, **SIZES) | sizes | dict(pad_token_id=None)


def randomize(model):
    generator = torch.Generator().manual_seed(41)
    for name, parameter in model.named_parameters():
        mean, scale = 0.0, 0.25
        if "norm" in name:  # Gemma's multiply by 1 + weight
            mean = 0.0 if model.config.model_type == "gemma3_text" else 1.0
        values = mean + scale * torch.randn(parameter.shape, generator=generator)
        parameter.data = values.to(torch.bfloat16).to(torch.float32)


def put_metadata(writer, config, arch):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_uint32("tokenizer.ggml.bos_token_id", config["bos_token_id"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", config["eos_token_id"])
    if config.get("sliding_window") and not config.get("use_sliding_window") is False:
        writer.add_sliding_window(config["sliding_window"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn":  # as a converter passes it on
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_attn_factor(scaling["attn_factor"])
        writer.add_rope_scaling_yarn_ext_factor(1.0)
        writer.add_rope_scaling_yarn_beta_fast(32.0)
        writer.add_rope_scaling_yarn_beta_slow(1.0)


def llama3_factors(model, config):
    dim = config["head_dim"]
    plain = 1.0 / (config["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    return (plain / model.model.rotary_emb.inv_freq).numpy()


# The halves of a head alternate in files of the architecture llama.
def alternate(values, heads):
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def stacked(name, values, config):
    """transformers' experts: gate and up in one tensor."""
    if name.endswith("gate_up_proj"):
        inner = config["moe_intermediate_size"]
        return {name.replace("gate_up_proj", "gate_proj.weight"): values[:, :inner],
                name.replace("gate_up_proj", "up_proj.weight"): values[:, inner:]}
    return {name + ".weight" if name.endswith("down_proj") else name: values}


def write_gguf(path, model, config, arch):
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(str(path), arch)
    put_metadata(writer, config, arch)
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(model, config).astype(np.float32))
    for full, parameter in model.state_dict().items():
        if full == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for name, values in stacked(full, parameter.detach().float().numpy(), config).items():
            if arch == "gemma3" and "norm" in name:
                values = values + np.float32(1)
            if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
                heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
                values = alternate(values, config[heads])
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            values = np.ascontiguousarray(values)
            if values.ndim == 1 or "ffn_gate_inp" in target:
                writer.add_tensor(target, values)
                continue
            bf16 = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(target, gguf.quants.quantize(values, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(name, sizes, arch, length):
    config = config_of(name, sizes)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**json.loads(json.dumps(config))), attn_implementation="eager",
        dtype=torch.float32).eval()
    randomize(model)
    tokens = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = model(tokens).logits[0][-KEEP:].contiguous()
    folder = OUT / name
    folder.mkdir(parents=True)
    write_gguf(folder / "model.gguf", model, config, arch)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({"input_ids": tokens[0].to(torch.int32), "logits": logits}, str(folder / "golden.safetensors"))
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    for model_name, (changes, architecture, tokens) in MODELS.items():
        write(model_name, changes, architecture, tokens)
