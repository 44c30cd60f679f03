"""One GGUF file, three programs: Carrel's and llama.cpp's logits beside those of the same weights in
double precision (numpy, weights by the package gguf). KL over the tokens of a text, as JSON lines.

The file is written again in each of the types asked for, so that what a type's products lose is seen.
Runs in an environment that has gguf, numpy and xllamacpp; with --blas also llama_cpp, built with BLAS: it
multiplies batches in fp32, where llama.cpp otherwise rounds activations to 8 bits.
"""
import argparse
import json
import os
import subprocess
import sys

import gguf
import numpy as np

import peer

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # many times faster where others use the cores too

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_1"]


def write_as(source, kind, path):
    """The model of the reader `source` with every matrix as `kind`; norms stay as they are."""
    writer = gguf.GGUFWriter(path, "llama")
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        main = field.types[0]
        value = field.contents()
        writer.add_key_value(field.name, value, main, field.types[-1] if main == gguf.GGUFValueType.ARRAY else None)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in source.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values.astype(np.float32), wanted),
                              raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Exact:
    """A Llama in double precision. A GGUF file's Q and K lie with the halves of a head alternating, so
    neighbours are a pair of RoPE."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64)
                        for t in reader.tensors}

        def key(name):
            return reader.fields["llama." + name].contents()
        self.layers, self.heads = key("block_count"), key("attention.head_count")
        self.kv_heads = key("attention.head_count_kv")
        self.eps, self.theta = key("attention.layer_norm_rms_epsilon"), key("rope.freq_base")

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.tensors[name + ".weight"]

    def product(self, x, name):
        return x @ self.tensors[name + ".weight"].T

    def rope(self, x):
        count, _, width = x.shape
        angle = np.arange(count)[:, None] * self.theta ** (-np.arange(0, width, 2) / width)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def attention(self, x, layer):
        def heads(name, count):
            return self.product(x, f"blk.{layer}.attn_{name}").reshape(len(x), count, -1)
        q, k = self.rope(heads("q", self.heads)), self.rope(heads("k", self.kv_heads))
        v = heads("v", self.kv_heads)
        group = self.heads // self.kv_heads
        future = np.triu(np.full((len(x), len(x)), -np.inf), 1)
        out = []
        for head in range(self.heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[-1]) + future
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(weights / weights.sum(-1, keepdims=True) @ v[:, head // group])
        return self.product(np.concatenate(out, -1), f"blk.{layer}.attn_output")

    def logits(self, ids):
        x = self.tensors["token_embd.weight"][ids]
        for layer in range(self.layers):
            x = x + self.attention(self.norm(x, f"blk.{layer}.attn_norm"), layer)
            h = self.norm(x, f"blk.{layer}.ffn_norm")
            gate = self.product(h, f"blk.{layer}.ffn_gate")
            x = x + self.product(gate / (1 + np.exp(-gate)) * self.product(h, f"blk.{layer}.ffn_up"),
                                 f"blk.{layer}.ffn_down")
        x = self.norm(x, "output_norm")
        return self.product(x, "output" if "output.weight" in self.tensors else "token_embd")


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def kl(p, q):
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def carrels(args, path, ids):
    tokens, out = os.path.join(args.folder, "ids.json"), os.path.join(args.folder, "logits.safetensors")
    with open(tokens, "w", encoding="utf-8") as file:
        json.dump(ids, file)
    subprocess.run([args.carrel, "ask", "--model", path, "--prompt-tokens", tokens, "--max-tokens", "1",
                    "--lab", "logits=" + out, "--json"], check=True, stdout=subprocess.DEVNULL)
    with open(out, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        rows, vocabulary = header["logits"]["shape"]
        values = np.frombuffer(file.read(), np.float32).reshape(rows, vocabulary)
    return values[:len(ids)].astype(np.float64)


def start_peer(args, path, positions):
    return peer.Peer(argparse.Namespace(gguf=path, folder=args.folder, threads=len(os.sched_getaffinity(0))), positions)


def llamas(args, path, ids, vocabulary):
    """At each `every` of the tokens."""
    server = start_peer(args, path, len(ids) + 64)
    return np.array([peer.log_probabilities(server, ids[:position + 1], vocabulary)
                     for position in range(0, len(ids), args.every)])


def llamas_by_blas(path, ids):
    import llama_cpp
    model = llama_cpp.Llama(model_path=path, n_ctx=len(ids) + 64, n_batch=len(ids), n_ubatch=len(ids), logits_all=True,
                            type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, flash_attn=False,
                            n_threads=len(os.sched_getaffinity(0)), n_threads_batch=len(os.sched_getaffinity(0)), verbose=False)
    model.eval(ids)
    return log_softmax(np.array(model.scores[:len(ids)], np.float64))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("carrel", "gguf", "document", "folder"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--every", type=int, default=8, help="llama.cpp's: at each such token")
    parser.add_argument("--blas", action="store_true")
    parser.add_argument("types", nargs="*", metavar="TYPE", help=" ".join(TYPES))
    args = parser.parse_args()
    os.makedirs(args.folder, exist_ok=True)
    with open(args.document, encoding="utf-8") as file:
        ids = start_peer(args, args.gguf, 64).tokens(file.read())[:args.tokens]
    source = gguf.GGUFReader(args.gguf)
    for kind in args.types or TYPES:
        path = os.path.join(args.folder, f"model-{kind}.gguf")
        write_as(source, kind, path)
        exact = log_softmax(Exact(path).logits(ids))
        carrel = log_softmax(carrels(args, path, ids))
        llama = llamas(args, path, ids, exact.shape[1])
        at = slice(0, len(ids), args.every)
        by_blas = {}
        if args.blas:
            blas = llamas_by_blas(path, ids)
            by_blas = {"kl_llama_blas_to_exact": kl(exact, blas), "kl_carrel_to_llama_blas": kl(blas, carrel)}
        print(json.dumps({
            "type": kind, "tokens": len(ids),
            "kl_carrel_to_exact": kl(exact, carrel), "kl_llama_to_exact": kl(exact[at], llama),
            "kl_carrel_to_llama": kl(llama, carrel[at]),
            "top1_carrel": float((exact.argmax(-1) == carrel.argmax(-1)).mean()),
            "top1_llama": float((exact[at].argmax(-1) == llama.argmax(-1)).mean()), **by_blas}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
