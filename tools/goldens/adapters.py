#!/usr/bin/env python3
"""Writes model/testdata/adapters: a tiny random Llama checkpoint, LoRA adapters to it as PEFT saves
them, and the logits that PEFT computes.

Needs torch, transformers and peft. Usage: adapters.py OUT_FOLDER
"""
import copy
import os
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "all": dict(r=4, lora_alpha=8, target_modules=ALL),
    "some": dict(r=3, lora_alpha=5, use_rslora=True, target_modules=["self_attn.q_proj", "v_proj"],
                 layers_to_transform=[1]),
}


def randomize(model, deviation):
    for parameter in model.parameters():
        parameter.data.normal_(0, deviation)
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)


def main(out):
    torch.manual_seed(31)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                         max_position_embeddings=128, tie_word_embeddings=True)
    base = LlamaForCausalLM(config).eval()
    randomize(base, 0.25)
    copy.deepcopy(base).to(torch.bfloat16).save_pretrained(os.path.join(out, "base"))
    os.remove(os.path.join(out, "base", "generation_config.json"))
    tokens = torch.randint(0, 64, (1, 24))
    golden = {"input_ids": tokens[0].to(torch.int32)}
    with torch.no_grad():
        golden["logits.base"] = base(tokens).logits[0].contiguous()
        for name, options in CASES.items():
            model = LlamaForCausalLM.from_pretrained(os.path.join(out, "base"),
                                                     dtype=torch.float32)
            adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
            for key, parameter in adapted.named_parameters():
                if "lora_" in key:
                    parameter.data.normal_(0, 0.3)
            golden["logits." + name] = adapted(tokens).logits[0].contiguous()
            adapted.peft_config["default"].base_model_name_or_path = "base"
            folder = os.path.join(out, name)
            adapted.save_pretrained(folder)
            for file in os.listdir(folder):
                if file not in ("adapter_config.json", "adapter_model.safetensors"):
                    os.remove(os.path.join(folder, file))
    save_file(golden, os.path.join(out, "golden.safetensors"))


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    main(sys.argv[1])
    for folder, _, files in os.walk(sys.argv[1]):
        for file in files:
            os.chmod(os.path.join(folder, file), 0o644)
