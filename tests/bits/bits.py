#!/usr/bin/env python3
"""Whether answers have the bits they had: bits.py PROGRAM [--model M] [--device cuda] [--record]

Three prompts behind a document are answered alone and beside others, in each zone. Every time they must have the same
token ids and the same logits, bit for bit (SHA-256 over those of every position); and the ones that known.jsonl keeps for
this instruction set or GPU and this model, where it has any. --record keeps today's there.

A second PROGRAM, of another commit, is held to the same: --other PATH. No plan is asked for: the zone is named.
"""
import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KNOWN = pathlib.Path(__file__).resolve().parent / "known.jsonl"
DOCUMENT = ROOT / "models" / "demo" / "docs" / "registry-2k.txt"
QUESTIONS = DOCUMENT.with_suffix("").with_suffix(".questions.jsonl")
PROMPTS, TOKENS = 3, 12
COUNTS = {"cpu": (1, 4, 16), "cuda": (1, 4, 32)}
ZONES = {"cpu": ("store", "host"), "cuda": ("store", "host", "device")}


def machine(device):
    """What decides the bits: the widest instructions that kernels are written for, or the GPU."""
    if device == "cuda":
        return subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], stdout=subprocess.PIPE, text=True,
                              check=True).stdout.splitlines()[0]
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = next(line for line in file if line.startswith("flags")).split()
    return "+".join(name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if name in flags)


def digest(path):
    """Of a file, or of a folder's weights and what says how they are computed with."""
    sha = hashlib.sha256()
    for file in sorted([*path.glob("*.safetensors"), path / "config.json"]) if path.is_dir() else [path]:
        sha.update(file.read_bytes())
    return sha.hexdigest()[:12]


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode != 0:
        raise SystemExit(f"bits: {' '.join(map(str, command[:2]))} ... failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(program, args, folder):
    """Of each zone and prompt its ids and logits. Whatever differs between alone and beside others is said."""
    store, questions = folder / "store", folder / "questions.jsonl"
    device = ["--device", args.device]
    run([program, "prefill", "--model", args.model, "--raw", "--input", DOCUMENT, "--store", store, "--name", "bits",
         "--index", "flat", "--quiet", "--json"])
    prompts = [json.loads(line)["prompt"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()[:PROMPTS]]
    found, wrong = {}, []
    for zone in ZONES[args.device]:
        for count in COUNTS[args.device]:
            asked = max(count, PROMPTS)
            questions.write_text("".join(json.dumps({"prompt": prompts[i % PROMPTS], "answer": "-"}) + "\n" for i in range(asked)),
                                 encoding="utf-8")
            answers = run([program, "eval", "--model", args.model, "--store", store, "--context", "bits", "--questions",
                           questions, "--zone", zone, "--fidelity", "balanced", "--max-tokens", str(TOKENS), "--together",
                           str(count), "--answers", "all", "--lab", "logits-digest", "--json", *device])["answers"]
            for i, answer in enumerate(answers):
                bits = {"ids": answer["ids"], "logits": answer["logits_sha256"]}
                first = found.setdefault((zone, i % PROMPTS), bits)
                if bits != first:
                    wrong.append(f"{zone}, prompt {i % PROMPTS + 1}, place {i + 1} of {count} at a time: not as alone")
    return found, wrong


def compare(found, others, whose):
    return [f"{zone}, prompt {prompt + 1}: not the {what} of {whose}" for (zone, prompt), bits in found.items()
            if (zone, prompt) in others for what in ("ids", "logits") if bits[what] != others[zone, prompt][what]]


def known(here):
    lines = [json.loads(line) for line in KNOWN.read_text(encoding="utf-8").splitlines()]
    return lines, {(line["zone"], line["prompt"]): line for line in lines if all(line[k] == v for k, v in here.items())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--other", help="a program of another commit, which must have the same bits")
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="default: the demo model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--record", action="store_true", help="keep today's bits in known.jsonl")
    args = parser.parse_args()
    model = pathlib.Path(args.model)
    here = {"machine": machine(args.device), "model": model.name, "digest": digest(model)}
    with tempfile.TemporaryDirectory(prefix="carrel-bits-") as folder:
        found, wrong = measure(args.program, args, pathlib.Path(folder))
    lines, kept = known(here)
    if args.record:
        lines = [line for line in lines if any(line[k] != v for k, v in here.items())]
        lines += [{**here, "zone": zone, "prompt": prompt, **bits} for (zone, prompt), bits in found.items()]
        KNOWN.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    else:
        wrong += compare(found, kept, "known.jsonl")
    if args.other:
        with tempfile.TemporaryDirectory(prefix="carrel-bits-") as folder:
            others, of_other = measure(args.other, args, pathlib.Path(folder))
        wrong += compare(found, others, args.other) + [f"{args.other}: {line}" for line in of_other]
    for (zone, prompt), bits in found.items():
        print(f"{zone:6} {prompt + 1}  {bits['logits'][:16]}  {bits['ids']}")
    print(f"{here['model']} on {here['machine']}: {len(found)} answers, alone and beside others up to {COUNTS[args.device][-1]}; "
          f"{len(kept)} known{', recorded anew' if args.record else ''}", file=sys.stderr)
    sys.exit("\n".join(["bits: wrong:", *wrong]) if wrong else 0)


if __name__ == "__main__":
    main()
