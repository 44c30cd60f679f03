"""What Carrel promises of a real model, measured on real text, as JSON lines on stdout: KL to dense
attention and top-1 over 128 tokens of three texts, with and without the estimation term; and right
answers to 48 questions of documents of 8k to 64k tokens. No retrieval flag unless a setting says so."""
import argparse
import array
import json
import os
import struct
import subprocess
import sys

from bench import fidelity, log_softmax

TEXTS = ["persuasion-2k", "handbook-4k", "emma-7k"]
DOCUMENTS = ["real-8k", "novel-8k", "real-32k", "novel-32k", "real-64k", "novel-64k"]
ROWS = [64, 128, 512]
CPU = {"store": ["--zone", "store"], "host": ["--zone", "host"]}
CUDA = {"device": ["--device", "cuda", "--zone", "device"],
        "host": ["--device", "cuda", "--zone", "host"]}
KV_HEADS = 3  # of this model: what is counted per layer is a sum over them


def fail(message):
    sys.exit("bench fidelity: " + message)


def run(command):
    """The JSON object that a command prints last."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        fail(f"{' '.join(command[:4])} ... failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def read_tensors(path):
    """Tensors of a safetensors file as flat arrays of numbers, by name, with their shapes."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        piece = data[begin:end]
        if entry["dtype"] == "F16":
            values = struct.unpack(f"<{len(piece) // 2}e", piece)
        else:
            values = array.array({"F32": "f", "I32": "i"}[entry["dtype"]])
            values.frombytes(piece)
        tensors[name] = values, entry["shape"]
    return tensors


def log_probabilities(path):
    """Log probabilities by position."""
    values, (rows, vocabulary) = read_tensors(path)["logits"]
    return [log_softmax(values[row * vocabulary:(row + 1) * vocabulary]) for row in range(rows)]


class Bench:
    def __init__(self, args):
        self.args = args
        self.settings = CPU if args.device == "cpu" else CUDA
        os.makedirs(args.folder, exist_ok=True)

    def path(self, name):
        return os.path.join(self.args.folder, name)

    def carrel(self, command, *arguments, adapter=False):
        model = ["--model", self.args.gguf] + (["--adapter", self.args.adapter] if adapter else [])
        return run([self.args.carrel, command, *model, "--threads", str(self.args.threads),
                    *arguments, "--json"])

    def prefill(self, name, *arguments, adapter=False):
        inspect = [self.args.carrel, "inspect", name, "--store", self.path("store"), "--json"]
        there = subprocess.run(inspect, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               check=False)
        if there.returncode != 0:
            device = ["--device", "cuda"] if self.args.device == "cuda" else []
            self.carrel("prefill", *arguments, "--store", self.path("store"), "--name", name,
                        "--quiet", *device, adapter=adapter)

    def text(self, name):
        tensors = read_tensors(os.path.join(self.args.shared, "fidelity", name + ".safetensors"))
        for part in ("document", "continuation"):
            with open(self.path(f"{name}-{part}.json"), "w", encoding="utf-8") as file:
                json.dump(list(tensors[part + "_ids"][0]), file)
        self.prefill(name, "--tokens", self.path(name + "-document.json"))

        def ask(*flags):
            logits = self.path("logits.safetensors")
            done = self.carrel("ask", "--store", self.path("store"), "--context", name,
                               "--prompt-tokens", self.path(name + "-continuation.json"),
                               "--max-tokens", "1", "--lab", "logits=" + logits,
                               # Else a prompt on a GPU attends to all, and nothing is measured.
                               "--lab", "prompt-rows=chosen", *flags)
            found = log_probabilities(logits)[:128]
            os.remove(logits)
            rows = done.get("stats", {}).get("rows_per_layer_and_token")
            return found, None if rows is None else rows / KV_HEADS

        where = next(iter(self.settings.values()))
        dense, _ = ask(*where, "--top-k", "all")
        reference = log_probabilities(
            os.path.join(self.args.shared, "fidelity", name + ".safetensors"))
        yield {"setting": "dense against transformers in float32", **fidelity(reference, dense)}
        cases = {zone: flags for zone, flags in self.settings.items()}
        for level in ("fast", "faithful"):
            cases[level] = where + ["--fidelity", level]
        for rows in ROWS:
            for term in ("off", "on"):
                cases[f"{rows} rows, term {term}"] = where + [
                    "--top-k", str(rows), "--lab", "dense-layers=0", "--lab", "estimate=" + term]
        for setting, flags in cases.items():
            found, rows = ask(*flags)
            yield {"setting": setting, **fidelity(dense, found), "rows_per_kv_head": rows}

    def answers(self, name):
        folder = os.path.join(self.args.shared, "docs", name)
        self.prefill(name, "--raw", "--input", folder + ".txt", adapter=True)
        for setting, flags in [*self.settings.items(), *self.args.also]:
            found = self.carrel("eval", "--store", self.path("store"), "--context", name,
                                "--questions", folder + ".questions.jsonl", *flags, adapter=True)
            rows = found["stats"]["rows_per_layer_and_token"] / KV_HEADS
            yield {"setting": setting, "right": found["right"], "questions": found["questions"],
                   "rows_per_kv_head": rows, "tokens_per_s": found["tokens_per_s"]}


def setting(text):
    name, _, flags = text.partition("=")
    if not flags:
        raise argparse.ArgumentTypeError(f'"{text}" is not NAME=FLAGS')
    return name, flags.split()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("carrel", "gguf", "adapter", "shared", "folder"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--also", type=setting, action="append", default=[], metavar="NAME=FLAGS",
                        help="another setting of the answers")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"texts and documents: {' '.join(TEXTS + DOCUMENTS)}; without one "
                        "the texts and those of 8k")
    args = parser.parse_args()
    bench = Bench(args)
    for name in args.names or TEXTS + DOCUMENTS[:2]:
        if name not in TEXTS + DOCUMENTS:
            fail(f'no text or document "{name}"; there are {" ".join(TEXTS + DOCUMENTS)}')
        for result in bench.text(name) if name in TEXTS else bench.answers(name):
            print(json.dumps({"name": name, **result}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
