#!/usr/bin/env python3
"""How prefill and decoding grow with threads, beside what the machine's cores give at most. JSON lines into a file, a
table at the end.

Needs the programs carrel and cores_bench, a model, a text, and this folder's parent.
With several programs (--carrel NAME=PATH) they take turns on the same model and text; with --peer llama.cpp does the
same beside them (bench/real/peer.py)."""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import provenance

SETTINGS = {
    "default": [],  # as planned for so many threads
    "store": ["--zone", "store"],
    "selected": ["--plan", "store"],
    "host": ["--zone", "host"],
    "dense": ["--zone", "host", "--top-k", "all"],
}
PROMPT = "What happens next?"
PEER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "real", "peer.py")


def fail(message):
    sys.exit("bench cores: " + message)


def tokens_of(word):
    return int(word[:-1]) * 1000 if word.endswith("k") else int(word)


def run(command, environment):
    """The last JSON object that a process prints."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=environment)
    output, errors = process.communicate(timeout=1200)
    if process.returncode != 0:
        fail(f"{' '.join(command[:3])} ... failed: {errors.decode()[-600:]}")
    return json.loads(output.splitlines()[-1])


class Bench:
    def __init__(self, flags, folder):
        self.flags = flags
        self.folder = folder
        self.environment = dict(os.environ, OPENBLAS_NUM_THREADS="1")
        self.rows = []
        self.where = provenance.of("cpu", flags.commit)
        with open(flags.text, "rb") as file:
            self.text = file.read()

    def write(self, row):
        row = {"bench": "cores", **self.where, "model": os.path.basename(self.flags.model), **row}
        self.rows.append(row)
        line = json.dumps(row)
        print(line, file=sys.stderr, flush=True)
        with open(self.flags.out, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def cut(self, tokens):
        """About so many tokens of the text, which is repeated where it is short."""
        wanted = int(tokens * self.flags.bytes_per_token)
        text = self.text
        while len(text) < wanted:
            text += b"\n\n" + self.text
        path = os.path.join(self.folder, f"text-{tokens}.txt")
        with open(path, "wb") as file:
            file.write(text[:text.rindex(b" ", 0, wanted)])
        return path

    def floors(self):
        command = [self.flags.floors, self.flags.model, *map(str, self.flags.threads)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=self.environment) as process:
            for line in process.stdout:
                self.write({"what": "floor", **json.loads(line)})
        if process.returncode != 0:
            fail("cores_bench failed")

    def prefill(self, name, program, tokens, threads, store):
        shutil.rmtree(store, ignore_errors=True)
        report = run([program, "prefill", "--model", self.flags.model, "--raw", "--input", self.cut(tokens), "--store", store,
                      "--name", "d", "--threads", str(threads), "--quiet", "--json", "--device",
                      self.flags.long_device if tokens > self.flags.prefill_most else "cpu"], self.environment)
        if tokens > self.flags.prefill_most and self.flags.long_device != "cpu":
            return
        row = {"what": "prefill", "program": name, "length": tokens, "threads": threads}
        for key in ("tokens", "seconds", "tokens_per_s", "compute_seconds", "index_wait_seconds", "recheck_seconds",
                    "publish_seconds", "indexing_thread_seconds", "statistics_thread_seconds", "writing_thread_seconds"):
            row[key] = report[key]
        self.write(row)

    def decode(self, name, program, tokens, threads, store, setting):
        report = run([program, "ask", "--raw", "--model", self.flags.model, "--store", store, "--context", "d", PROMPT, "--max-tokens",
                      str(self.flags.generate), "--lab", "ignore-eos", "--threads", str(threads), "--json",
                      *SETTINGS[setting]], self.environment)
        self.write({"what": "decode", "program": name, "length": tokens, "threads": threads, "setting": setting,
                    "tokens_per_s": report["tokens_per_s"], "prompt_seconds": report["prompt_seconds"],
                    "taken": (report.get("plan") or {}).get("taken", setting),
                    "ids": hash(tuple(report["ids"]))})

    def peer(self, part, tokens, threads):
        """llama.cpp reads the text and saves its rows; or goes on from them."""
        folder = os.path.join(self.folder, f"peer-{tokens}")
        os.makedirs(folder, exist_ok=True)
        out, empty = os.path.join(folder, "out.json"), os.path.join(folder, "empty.txt")
        with open(empty, "w", encoding="utf-8"):
            pass
        command = [self.flags.peer, PEER, part, "--gguf", self.flags.model, "--document", self.cut(tokens), "--continuation",
                   empty, "--prompt", PROMPT, "--folder", folder, "--out", out, "--threads", str(threads), "--count",
                   str(self.flags.generate), "--repeat", str(self.flags.repeats), "--vocabulary", "0", "--every", "1",
                   "--positions", str(int(tokens * 1.3) + 1024), "--prefix", "0", "--sample", str(self.flags.peer_sample)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              check=False, timeout=1200)
        if done.returncode != 0:
            fail(f"llama.cpp: {part} failed: {done.stderr.decode(errors='replace')[-600:]}")
        with open(out, encoding="utf-8") as file:
            found = json.load(file)
        row = {"what": part, "program": "llama.cpp", "length": tokens, "threads": threads}
        if part == "prefill":
            self.write({**row, "tokens": found["tokens"], "tokens_per_s": found["prefill_tokens_per_s"],
                        **({"sampled": found["sampled"]} if "sampled" in found else {})})
        else:
            self.write({**row, "setting": "dense", "tokens_per_s": 1000 / found["ms_per_token"], "ids": 0})

    def run_peer(self, length):
        for part in ("prefill", "decode"):
            for threads in self.flags.peer_threads:
                self.peer(part, length, threads)

    def run(self):
        flags = self.flags
        self.floors()
        for length in flags.lengths:
            stores = {}
            for name, program in flags.programs:
                stores[name] = os.path.join(self.folder, f"store-{name}-{length}")
            # The context of the last one stays for decoding: that of all cores.
            counts = flags.prefill_threads if length <= flags.prefill_most else flags.prefill_threads[-1:]
            for threads in counts:
                for name, program in flags.programs:
                    self.prefill(name, program, length, threads, stores[name])
            for setting in flags.settings:
                for threads in flags.threads:
                    for _ in range(flags.repeats):
                        for name, program in flags.programs:
                            self.decode(name, program, length, threads, stores[name], setting)
            if flags.peer:
                self.run_peer(length)
        self.check()

    def check(self):
        """Whoever asks the same the same way has the same answer, whatever the threads."""
        answers = {}
        for row in self.rows:
            if row["what"] == "decode":
                way = row.get("taken", row["setting"])
                answers.setdefault((row["program"], row["length"], way), set()).add(row["ids"])
        for where, ids in answers.items():
            if len(ids) > 1:
                fail(f"answers depend on the number of threads: {where}")


def best(rows, key):
    return max((row[key] for row in rows), default=None)


def table(flags, rows):
    threads = flags.threads
    lines = ["| | " + " | ".join(f"{t} threads" for t in threads) + f" | {threads[-1]} to {2 if 2 in threads else threads[0]} |",
             "|---" * (len(threads) + 2) + "|"]

    def line(name, values):
        by = dict(zip(threads, values))
        first, last = by.get(2, values[0]), values[-1]
        ratio = f"{last / first:.2f}" if first and last else ""
        lines.append(f"| {name} | " + " | ".join("" if v is None else f"{v:.1f}" for v in values) + f" | {ratio} |")

    def of(what, t, **wanted):
        return [r for r in rows if r["what"] == what and r["threads"] == t and all(r[k] == v for k, v in wanted.items())]

    line("floor: tokens/s if weights alone are read", [1000 / of("floor", t)[0]["read_ms"] for t in threads])
    line("a loop of 4 us of work, us", [of("floor", t)[0]["loop_us"] for t in threads])
    line("products alone, tokens/s", [of("floor", t)[0]["products_tokens_per_s"] for t in threads])
    for name in [name for name, _ in flags.programs] + ["llama.cpp"] * bool(flags.peer):
        for length in flags.lengths:
            line(f"{name}: prefill of {length}", [best(of("prefill", t, program=name, length=length), "tokens_per_s")
                                                  for t in threads])
            for setting in flags.settings if name != "llama.cpp" else ["dense"]:
                line(f"{name}: decode at {length}, {setting}",
                     [best(of("decode", t, program=name, length=length, setting=setting), "tokens_per_s") for t in threads])
    return "\n".join(lines)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--carrel", action="append", required=True, metavar="[NAME=]PATH")
    parser.add_argument("--floors", required=True, metavar="cores_bench")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--peer", help="python of an environment that has xllamacpp")
    parser.add_argument("--peer-sample", type=int, default=0, metavar="TOKENS",
                        help="it reads so many of a text's middle, behind rows that repeat; default: it reads all")
    parser.add_argument("--commit", help="of the program, where git does not tell")
    parser.add_argument("--folder", help="for stores; default: a temporary one, deleted at the end")
    parser.add_argument("--lengths", default="7k", help="tokens, about; default 7k")
    parser.add_argument("--threads", help="default 1,2,4,8,16 up to what there is")
    parser.add_argument("--prefill-threads", help="default those of --threads from 2 on")
    parser.add_argument("--prefill-most", default="7k", help="longer texts are prefilled with the most threads alone")
    parser.add_argument("--long-device", default="cpu", choices=["cpu", "cuda"], help="what prefills those")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2, help="of decoding; the best counts")
    parser.add_argument("--bytes-per-token", type=float, default=4.3)
    flags = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    flags.threads = [int(t) for t in flags.threads.split(",")] if flags.threads else \
        [t for t in (1, 2, 4, 8, 16) if t <= cores]
    flags.prefill_threads = [int(t) for t in flags.prefill_threads.split(",")] if flags.prefill_threads else \
        ([t for t in flags.threads if t >= 2] or flags.threads)
    flags.peer_threads = [t for t in flags.threads if t >= min(4, flags.threads[-1])]
    flags.lengths = [tokens_of(word) for word in flags.lengths.split(",")]
    flags.prefill_most = tokens_of(flags.prefill_most)
    flags.settings = flags.settings.split(",")
    flags.programs = [tuple(one.split("=", 1)) if "=" in one else ("carrel", one) for one in flags.carrel]
    for setting in flags.settings:
        if setting not in SETTINGS:
            fail(f"no setting {setting}: {', '.join(SETTINGS)}")
    return flags


def machine():
    """What the kernel says of the cores."""
    try:
        lines = subprocess.run(["lscpu"], stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return {}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    wanted = ("Model name", "CPU(s)", "Thread(s) per core", "Core(s) per socket", "Socket(s)", "NUMA node(s)", "L2 cache", "L3 cache")
    return {name: fields[name].strip() for name in wanted if name in fields}


def main():
    flags = parse()
    os.makedirs(os.path.dirname(os.path.abspath(flags.out)), exist_ok=True)
    folder = flags.folder or tempfile.mkdtemp(prefix="carrel-cores-")
    os.makedirs(folder, exist_ok=True)
    start = time.monotonic()
    bench = Bench(flags, folder)
    try:
        bench.write({"what": "machine", "load": os.getloadavg()[0], **machine()})
        bench.run()
    finally:
        if not flags.folder:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(flags, bench.rows))
    print(f"\n{time.monotonic() - start:.0f} s, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
