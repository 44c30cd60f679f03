#!/usr/bin/env python3
"""Writes model/testdata/families: a tiny random checkpoint of each family, and the logits that
transformers computes from it in float32.

Needs torch and transformers. Usage: families.py OUT_FOLDER
"""
import os
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import (Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3MoeConfig, Qwen3MoeForCausalLM)

TOKENS = 40  # of families without windows
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
             pad_token_id=None, bos_token_id=1, eos_token_id=2)


def yarn():
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
    config = Qwen2Config(**SMALL, head_dim=16, rope_parameters=rope, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config)


def qwen3_moe(**options):
    config = Qwen3MoeConfig(**dict(SMALL, **options), head_dim=8, moe_intermediate_size=16,
                            rope_parameters=dict(rope_type="default", rope_theta=1e4))
    return Qwen3MoeForCausalLM(config)


def gemma3(**options):
    """Windows of 24 tokens, much shorter than the text; a scalar that is not head_dim."""
    rope = dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e5),
                sliding_attention=dict(rope_type="default", rope_theta=1e3))
    sizes = dict(SMALL, num_hidden_layers=4, num_key_value_heads=1, max_position_embeddings=512)
    config = Gemma3TextConfig(**dict(sizes, **options), head_dim=16, query_pre_attn_scalar=24,
                              sliding_window=24, rope_parameters=rope)
    return Gemma3ForCausalLM(config)


FAMILIES = {
    "yarn": yarn,
    "qwen3_moe": lambda: qwen3_moe(num_experts=8, num_experts_per_tok=3, norm_topk_prob=True),
    # The second layer is dense, and of the others' experts the weights do not add up to 1.
    "qwen3_moe_mixed": lambda: qwen3_moe(num_experts=5, num_experts_per_tok=2,
                                         norm_topk_prob=False, num_hidden_layers=3,
                                         mlp_only_layers=[1]),
    "gemma3": lambda: gemma3(layer_types=["sliding_attention", "full_attention",
                                          "sliding_attention", "full_attention"]),
}
LENGTHS = {"gemma3": 300}
KEEP = {"gemma3": 96}  # positions whose logits are kept, the last ones


def randomize(model):
    for name, parameter in model.named_parameters():
        # Gemma's norms multiply by 1 + weight.
        mean = 1.0 if "norm" in name and model.config.model_type != "gemma3_text" else 0.0
        parameter.data.normal_(mean, 0.25)
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)


def write(name, make, out):
    torch.manual_seed(32)
    model = make().eval()
    randomize(model)
    model.config._attn_implementation = "eager"
    tokens = torch.randint(3, 64, (1, LENGTHS.get(name, TOKENS)))
    with torch.no_grad():
        logits = model(tokens).logits[0][-KEEP.get(name, TOKENS):].contiguous()
    folder = os.path.join(out, name)
    model.to(torch.bfloat16).save_pretrained(folder)
    if os.path.exists(os.path.join(folder, "generation_config.json")):
        os.remove(os.path.join(folder, "generation_config.json"))
    save_file({"input_ids": tokens[0].to(torch.int32), "logits": logits},
              os.path.join(folder, "golden.safetensors"))
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    for name, make in FAMILIES.items():
        write(name, make, sys.argv[1])
