#!/usr/bin/env python3
"""Writes model/testdata/rope.json: inverse frequencies and attention factors of rope kinds as
transformers computes them.

Needs torch and transformers. Usage: rope.py OUT.json
"""
import json
import sys

from transformers import Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CASES = [
    # Qwen2.5's own for long texts.
    (128, 1e6, 32768, {"factor": 4.0, "original_max_position_embeddings": 32768}),
    (64, 1e4, 8192, {"factor": 16.0, "original_max_position_embeddings": 4096}),
    (64, 5e5, 65536, {"factor": 8.0}),
    (32, 1e4, 8192, {"factor": 3.5, "original_max_position_embeddings": 2048, "truncate": False}),
    (96, 1e5, 8192, {"factor": 2.0, "original_max_position_embeddings": 4096,
                     "attention_factor": 1.25}),
    (128, 1e4, 8192, {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
                      "mscale_all_dim": 0.7, "beta_fast": 24, "beta_slow": 2}),
    (64, 1e4, 8192, {"factor": 1.0, "original_max_position_embeddings": 8192}),
    (16, 1e4, 8192, {"factor": 2.0, "original_max_position_embeddings": 8}),
]


def main():
    goldens = []
    for head_dim, theta, length, scaling in CASES:
        rope = dict(scaling, rope_type="yarn", rope_theta=theta)
        config = Qwen2Config(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim,
                             max_position_embeddings=length, rope_parameters=rope)
        inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
        goldens.append({"head_dim": head_dim, "rope_theta": theta, "max_position_embeddings": length,
                        "rope_scaling": dict(scaling, type="yarn"),
                        "attention_factor": factor, "inv_freq": inv_freq.tolist()})
    with open(sys.argv[1], "w") as out:
        out.write("[\n" + ",\n".join(json.dumps(g) for g in goldens) + "\n]\n")


if __name__ == "__main__":
    main()
