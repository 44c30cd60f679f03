"""Carrel beside llama.cpp on the same GGUF file, text and threads: prefill, a restored context to
its first token, ms per token, memory, and fidelity to dense decoding. JSON lines on stdout."""
import argparse
import array
import collections
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time

import peer
import slot

TRAINED = 8192            # positions of the model
BYTES_PER_TOKEN = 4.18    # of the novel
CONTINUATION_TOKENS = 64  # of the same text, about; for KL and top-1
PREFIX = 2048             # tokens that the peer reads for a slot of repeated rows
EVERY = 4                 # the peer's probabilities: at each fourth of them
GENERATED = 64
REPEAT = 3
PROMPT = "\n\nWhat happened next?"
SETTINGS = {
    "server": ["--zone", "store"],
    "store": ["--zone", "store"],
    "host": ["--zone", "host"],
    "dense": ["--top-k", "all"],
}


Finished = collections.namedtuple("Finished", "seconds cpu_seconds resident_bytes report")


def fail(message):
    sys.exit("bench real: " + message)


def cut(text, start, tokens):
    """About so many tokens of the UTF-8 text from byte `start`, to before a space, where a token
    begins."""
    end = start + int(tokens * BYTES_PER_TOKEN)
    if end > len(text):
        fail(f"the novel has {len(text)} bytes, {end} are wanted")
    return text[start:text.rindex(b" ", start, end)]


def run(command):
    """A process, and the JSON object that it prints last."""
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)  # wait() would not tell the memory
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - start
    if process.returncode != 0:
        fail(f"{' '.join(command[:4])} ... failed with exit code {process.returncode}")
    return Finished(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024,
                    json.loads(output.splitlines()[-1]))


def with_trained_length(gguf, path, positions):
    """A copy of the model file that says it was trained for so many positions: the peer gives a
    slot no more than that."""
    with open(gguf, "rb") as file:
        data = bytearray(file.read())
    key = b"llama.context_length" + (4).to_bytes(4, "little")  # a uint32 follows
    at = data.find(key)
    if at < 0:
        fail(f"{gguf} has no llama.context_length of 32 bits")
    at += len(key)
    data[at:at + 4] = positions.to_bytes(4, "little")
    with open(path, "wb") as file:
        file.write(data)
    return path


def median(values):
    return sorted(values)[len(values) // 2]


def machine(threads, prefill_threads):
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        info = dict(line.split(":", 1) for line in file if ":" in line)
    info = {key.strip(): value.strip() for key, value in info.items()}
    flags = info.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2") if name in flags), "no avx2")
    return {"cpu": info.get("model name", "unknown"), "vectors": widest, "cores": len(os.sched_getaffinity(0)),
            "threads": threads, "prefill_threads": prefill_threads, "load_average_1min": os.getloadavg()[0]}


def log_softmax(logits):
    top = max(logits)
    total = math.log(math.fsum(math.exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


def read_logits(path, positions):
    """Log probabilities at the first positions of a safetensors file with one f32 tensor."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        rows, vocabulary = header["logits"]["shape"]
        if rows < positions:
            fail(f"{path} has {rows} positions, {positions} are wanted")
        result = []
        for _ in range(positions):
            row = array.array("f")
            row.frombytes(file.read(4 * vocabulary))
            result.append(log_softmax(row))
    return result


def fidelity(dense, other):
    """Mean KL(dense || other) in nats, and the share of positions with the same best token."""
    divergence, same = 0.0, 0
    for p, q in zip(dense, other, strict=True):
        divergence += math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q))
        same += p.index(max(p)) == q.index(max(q))
    return {"kl": divergence / len(dense), "top1": same / len(dense)}


class Case:
    """One length: its texts, and both programs on them."""

    def __init__(self, args, thousands):
        self.args = args
        self.name = f"{thousands}k"
        self.beyond = 1000 * thousands + 2 * GENERATED + CONTINUATION_TOKENS > TRAINED
        self.folder = os.path.join(args.folder, self.name)
        os.makedirs(self.folder, exist_ok=True)
        with open(args.document, "rb") as file:
            text = file.read()
        document = cut(text, 0, 1000 * thousands)
        self.texts = {"document": document,
                      "continuation": cut(text, len(document), CONTINUATION_TOKENS)}
        for name, piece in self.texts.items():
            with open(self.path(name + ".txt"), "wb") as file:
                file.write(piece)

    def path(self, name):
        return os.path.join(self.folder, name)

    def carrel(self, *arguments):
        threads = self.args.prefill_threads if arguments[0] == "prefill" else self.args.threads
        return run([self.args.carrel, arguments[0], "--model", self.args.gguf, "--threads",
                    str(threads), *arguments[1:], "--json",
                    *(["--lab", "beyond-trained"] if self.beyond else [])])

    def ask(self, setting, prompt, *arguments):
        where = ["--store", self.path("store")]
        if setting == "server":
            where = ["--server", "unix:" + self.socket]
        return self.carrel("ask", *where, "--raw", "--context", "document", *SETTINGS[setting], *arguments,
                           prompt)

    @contextlib.contextmanager
    def served(self):
        """A kvstore process over the store, while it lasts."""
        with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
            self.socket = os.path.join(folder, "socket")
            with subprocess.Popen([self.args.carrel, "serve", "--store", self.path("store"),
                                   "--listen", "unix:" + self.socket, "--log-level", "warning"]) as server:
                while not os.path.exists(self.socket):
                    if server.poll() is not None:
                        fail("carrel serve ended")
                    time.sleep(0.02)
                try:
                    yield
                finally:
                    server.terminate()

    def prefill(self):
        shutil.rmtree(self.path("store"), ignore_errors=True)
        done = self.carrel("prefill", "--raw", "--input", self.path("document.txt"), "--store",
                           self.path("store"), "--name", "document", "--quiet")
        tokens = done.report["tokens"]
        return {"program": "carrel", "setting": "prefill", "tokens": tokens,
                "prefill_tokens_per_s": done.report["tokens_per_s"],
                "prefill_tokens_per_cpu_s": tokens / done.cpu_seconds,
                "resident_bytes": done.resident_bytes, "stored_bytes": done.report["stored_bytes"]}

    def decode(self):
        """One result per setting; the settings take turns, so that noise falls on all of them."""
        runs = {setting: [] for setting in SETTINGS}
        firsts = {setting: [] for setting in SETTINGS}
        for _ in range(REPEAT):
            for setting in SETTINGS:
                firsts[setting].append(self.ask(setting, PROMPT, "--max-tokens", "1"))
                runs[setting].append(
                    self.ask(setting, PROMPT, "--max-tokens", str(GENERATED), "--lab", "ignore-eos"))
        results, heads = {}, self.heads()
        for setting in SETTINGS:
            first, full = firsts[setting], runs[setting]
            stats = full[0].report["stats"]
            cpu = [b.cpu_seconds - a.cpu_seconds for a, b in zip(first, full)]
            results[setting] = {
                "program": "carrel", "setting": setting,
                "start_to_first_token_s": median([one.seconds for one in first]),
                "restore_to_first_token_s": median([one.report["open_seconds"] + one.report["prompt_seconds"]
                                                    for one in first]),
                "ms_per_token": median([1000 / one.report["tokens_per_s"] for one in full]),
                "cpu_ms_per_token": 1000 * median(cpu) / (GENERATED - 1),
                "resident_bytes": max(one.resident_bytes for one in full),
                "rows_per_kv_head": stats["rows_per_layer_and_token"] / heads,
                "promised_error": stats["promised_error"]}
        return results

    def heads(self):
        inspect = [self.args.carrel, "inspect", "document", "--store", self.path("store"), "--json"]
        return int(run(inspect).report["fingerprint"]["kv_heads"])

    def logits(self):
        """Log probabilities over the continuation, by setting."""
        continuation = self.texts["continuation"].decode()
        result = {}
        for setting in SETTINGS:
            file = self.path(setting + ".safetensors")
            done = self.ask(setting, continuation, "--max-tokens", "1", "--lab", f"logits={file}")
            result[setting] = read_logits(file, done.report["prompt_tokens"])
            os.remove(file)
        return result

    def peer(self, part, wait="passive", repeat=REPEAT, vocabulary=0, prefix=0):
        """One run of peer.py. Its threads wait for each other by spinning (active), best on idle
        cores, or by sleeping (passive), many times better where others use the cores too."""
        out = self.path(f"peer-{part}.json")
        here = os.path.dirname(os.path.abspath(__file__))
        positions = int(self.tokens + 2 * CONTINUATION_TOKENS + 2 * GENERATED)
        threads = self.args.prefill_threads if part == "prefill" else self.args.threads
        gguf = self.args.gguf
        if self.beyond:
            gguf = with_trained_length(gguf, self.path("longer.gguf"), positions)
        flags = {"gguf": gguf, "document": self.path("document.txt"),
                 "continuation": self.path("continuation.txt"), "prompt": PROMPT,
                 "folder": os.path.abspath(self.folder), "out": out, "threads": threads,
                 "count": GENERATED, "repeat": repeat, "vocabulary": vocabulary, "every": EVERY,
                 "positions": positions, "prefix": prefix}
        with open(self.path(f"peer-{part}.log"), "wb") as log:  # llama.cpp tells much
            command = [self.args.peer, os.path.join(here, "peer.py"), part]
            for name, value in flags.items():
                command += ["--" + name, str(value)]
            environment = {**os.environ, "OMP_WAIT_POLICY": wait}
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
            if done.returncode != 0:
                fail(f"the peer failed; {log.name} tells why")
        with open(out, encoding="utf-8") as file:
            return {"program": "llama.cpp", "setting": part, **json.load(file)}

    def measure(self, report):
        if self.beyond:
            print(f"bench real: {self.name} is beyond the {TRAINED:,} positions that the model was "
                  "trained for: times and bytes count, KL does not", file=sys.stderr)
        prefilled = self.prefill()
        self.tokens = prefilled["tokens"]
        report(prefilled)
        if self.args.peer and self.args.peer_slot == "repeated":
            report(self.peer_slot_of_repeated_rows())
        elif self.args.peer:
            peer_prefilled = self.peer("prefill")
            if peer_prefilled["tokens"] != self.tokens:
                fail(f"the peer reads {peer_prefilled['tokens']} tokens, Carrel {self.tokens}")
            report(peer_prefilled)
        with self.served():
            decoded = self.decode()
            logits = self.logits()
        for setting, result in decoded.items():
            report({**result, **fidelity(logits["dense"], logits[setting])})
        if self.args.peer:
            report(self.peer_decode(logits["dense"]))

    def peer_slot_of_repeated_rows(self):
        """The peer reads the beginning, and the rest of its slot repeats those rows."""
        read = self.peer("prefill", prefix=PREFIX)
        path, small = self.path(peer.SLOT), self.path("small.slot")
        os.replace(path, small)
        slot.lengthen(small, read["ids"], path)
        os.remove(small)
        if len(read["ids"]) != self.tokens:
            fail(f"the peer reads {len(read['ids'])} tokens, Carrel {self.tokens}")
        return {"program": "llama.cpp", "setting": "prefill", "tokens": self.tokens,
                "stored_bytes": os.path.getsize(path), "slot": "repeated rows"}

    def peer_decode(self, dense):
        """The better time of both ways to wait."""
        repeated = self.args.peer_slot == "repeated"
        active = self.peer("decode", wait="active", repeat=1)
        result = self.peer("decode", repeat=1 if repeated else REPEAT,
                           vocabulary=0 if repeated else len(dense[0]))
        theirs = result.pop("log_probabilities", None)
        result["ms_per_token_passive"] = result["ms_per_token"]
        result["ms_per_token_active"] = active["ms_per_token"]
        for time_of in ("ms_per_token", "start_to_first_token_s", "restore_to_first_token_s"):
            result[time_of] = min(result[time_of], active[time_of])
        return result if repeated else {**result, **fidelity(dense[::EVERY], theirs)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("carrel", "gguf", "document", "folder"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--peer", help="python of the environment that has xllamacpp")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prefill-threads", type=int, default=None,
                        help="of both programs; as --threads unless given")
    parser.add_argument("--peer-slot", choices=["read", "repeated"], default="read",
                        help="repeated: the peer reads the beginning of the document alone, and its slot repeats those rows: its "
                        "decoding takes the time that it would, its prefill and KL are not measured")
    parser.add_argument("lengths", nargs="+", metavar="LENGTH", help="as 4k: thousands of tokens")
    args = parser.parse_args()
    args.prefill_threads = args.prefill_threads or args.threads
    for length in args.lengths:
        if not (length.endswith("k") and length[:-1].isdigit() and 1 <= int(length[:-1]) <= 60):
            fail(f'a length is 1k to 60k, not "{length}"')
    print(json.dumps({**machine(args.threads, args.prefill_threads), "peer": bool(args.peer)}), flush=True)
    for length in args.lengths:
        case = Case(args, int(length[:-1]))
        case.measure(lambda result, name=length: print(json.dumps({"length": name, **result}),
                                                       flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
