"""llama.cpp (the package xllamacpp) on one document, in two processes, as one JSON object each:
prefill (read it, save the slot) and decode (restore the slot, answer, generate, probabilities).

Runs in the virtual environment that has xllamacpp; ids come and go as JSON files.
"""
import argparse
import json
import os
import resource
import sys
import time
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import slot

START = time.monotonic()
SLOT = "document.slot"
BEGINNING = "beginning.slot"


class Peer:
    """Its server in this process, on a free port of this host, with one slot."""

    def __init__(self, args, positions):
        import xllamacpp  # after START: loading it is part of what a restored context waits for
        params = xllamacpp.CommonParams()
        params.model.path = args.gguf
        params.n_ctx = positions
        params.n_parallel = 1
        params.cpuparams.n_threads = args.threads
        params.cpuparams_batch.n_threads = args.threads
        params.slot_save_path = args.folder + "/"
        params.endpoint_slots = True
        params.warmup = False
        params.cache_ram_mib = 0
        self.server = xllamacpp.Server(params)

    def post(self, path, body):
        request = urllib.request.Request(
            self.server.listening_address + path, data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def tokens(self, text):
        body = {"content": text, "add_special": False, "parse_special": True}
        return self.post("/tokenize", body)["tokens"]

    def complete(self, ids, count, probabilities=0):
        return self.post("/completion", {
            "prompt": ids, "n_predict": count, "id_slot": 0, "cache_prompt": True,
            "ignore_eos": True, "temperature": 0, "n_probs": probabilities,
            "return_tokens": True})


def read_text(path):
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def log_probabilities(peer, ids, vocabulary):
    """What the model gives each token after `ids`, as a list by id."""
    listed = peer.complete(ids, 1, vocabulary)["completion_probabilities"][0]["top_logprobs"]
    result = [None] * vocabulary
    for entry in listed:
        result[entry["id"]] = entry["logprob"]
    if None in result:
        raise SystemExit(f"peer: probabilities of {len(listed)} tokens of {vocabulary}")
    return result


def prefill(args, peer, document):
    read = document[:args.prefix] if args.prefix > 0 else document
    cpu = time.process_time()
    timings = peer.complete(read, 0)["timings"]
    cpu = time.process_time() - cpu
    if timings["prompt_n"] != len(read):
        raise SystemExit(f"peer: read {timings['prompt_n']} tokens of {len(read)}")
    peer.post("/slots/0?action=save", {"filename": SLOT})
    return {"prefill_tokens_per_s": timings["prompt_per_second"], "tokens": len(read),
            "prefill_tokens_per_cpu_s": len(read) / cpu,
            "stored_bytes": os.path.getsize(os.path.join(args.folder, SLOT)),
            **({"ids": document} if args.prefix > 0 else {})}


def prefill_sample(args, peer, document):
    """Reads the document's middle alone: a token's time grows evenly with what is before it. The rows before it, and those
    that decoding goes on from, are the beginning's (slot.py)."""
    beginning = os.path.join(args.folder, BEGINNING)
    if not os.path.exists(beginning):
        peer.complete(document[:args.sample], 0)
        peer.post("/slots/0?action=save", {"filename": BEGINNING})
    first = (len(document) - args.sample) // 2
    slot.lengthen(beginning, document[:first], os.path.join(args.folder, SLOT))
    peer.post("/slots/0?action=restore", {"filename": SLOT})
    timings = peer.complete(document[:first + args.sample], 0)["timings"]
    slot.lengthen(beginning, document, os.path.join(args.folder, SLOT))
    if abs(timings["prompt_n"] - args.sample) > 8:
        raise SystemExit(f"peer: read {timings['prompt_n']} tokens of {args.sample}")
    return {"prefill_tokens_per_s": timings["prompt_per_second"], "tokens": len(document), "sampled": timings["prompt_n"]}


def decode(args, peer, document):
    before = time.monotonic()
    restored = peer.post("/slots/0?action=restore", {"filename": SLOT})
    if restored["n_restored"] != len(document):
        raise SystemExit(f"peer: restored {restored['n_restored']} tokens of {len(document)}")
    question = document + peer.tokens(args.prompt)
    first = peer.complete(question, 1)
    now = time.monotonic()
    if first["timings"]["prompt_n"] > len(question) - len(document):
        raise SystemExit("peer: the restored slot was not used")
    result = {"start_to_first_token_s": now - START, "restore_to_first_token_s": now - before}
    cpu = time.process_time()
    speeds = [peer.complete(question, args.count)["timings"]["predicted_per_token_ms"]
              for _ in range(args.repeat)]
    cpu = time.process_time() - cpu
    result["cpu_ms_per_token"] = 1000 * cpu / args.repeat / args.count
    result["ms_per_token"] = sorted(speeds)[len(speeds) // 2]
    result["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if args.vocabulary == 0:
        return result
    continuation = peer.tokens(read_text(args.continuation))
    result["log_probabilities"] = [
        log_probabilities(peer, document + continuation[:position + 1], args.vocabulary)
        for position in range(0, len(continuation), args.every)]
    result["continuation_tokens"] = len(continuation)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["prefill", "decode"])
    # vocabulary: 0 for no probabilities; every: at each such token of the continuation; prefix: so
    # many tokens are read, 0 all; sample: prefill reads so many of the middle, 0 all
    for name in ("gguf", "document", "continuation", "prompt", "folder", "out"):
        parser.add_argument("--" + name, required=True)
    for name in ("threads", "count", "repeat", "vocabulary", "every", "positions", "prefix"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--sample", type=int, default=0)
    args = parser.parse_args()
    peer = Peer(args, args.positions)
    document = peer.tokens(read_text(args.document))
    part = decode if args.part == "decode" else prefill_sample if 0 < args.sample < len(document) / 2 else prefill
    result = part(args, peer, document)
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump(result, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
