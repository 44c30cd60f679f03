#!/usr/bin/env python3
"""Whether the way that a plan takes is the fastest: the default beside each way asked for, in turns; with clients, over
`carrel api`. JSON lines into a file, a table at the end.

Needs the program carrel, a model and a text, and this folder's parent."""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import provenance

PROMPT = "What happens next?"


def fail(message):
    sys.exit("bench plans: " + message)


def tokens_of(word):
    return int(float(word[:-1]) * 1000) if word.endswith("k") else int(word)


def last_json(command):
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=1200, check=False)
    if process.returncode != 0:
        return {"failed": process.stderr.decode()[-300:]}
    return json.loads(process.stdout.splitlines()[-1])


class Bench:
    def __init__(self, flags, folder):
        self.flags, self.folder = flags, folder
        self.rows = []
        self.where = {**provenance.of(flags.device, flags.commit), "cores": len(os.sched_getaffinity(0))}
        if flags.gpu_memory:
            self.where["machine"] += f", {flags.gpu_memory} of it"
        with open(flags.text, "rb") as file:
            self.text = file.read()

    def device(self):
        return ["--device", self.flags.device]

    def held(self):
        """The device of who asks."""
        return [*self.device(), *(["--gpu-memory", self.flags.gpu_memory] if self.flags.gpu_memory else [])]

    def write(self, row):
        row = {"bench": "plans", **self.where, "model": os.path.basename(self.flags.model), "device": self.flags.device, **row}
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        with open(self.flags.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def prefill(self, length):
        there = last_json([self.flags.carrel, "inspect", f"d{length}", "--store", self.store(), "--json"]).get("tokens")
        if there:
            self.write({"what": "prefill", "length": length, "tokens": there})
            return
        wanted = int(length * self.flags.bytes_per_token)
        text = self.text * (1 + wanted // len(self.text))
        path = os.path.join(self.folder, f"text-{length}.txt")
        with open(path, "wb") as file:
            file.write(text[:text.rindex(b" ", 0, wanted)])
        report = last_json([self.flags.carrel, "prefill", "--model", self.flags.model, "--input", path, "--store",
                            self.store(), "--name", f"d{length}", "--quiet", "--json", *self.device()])
        if "failed" in report:
            fail(report["failed"])
        self.write({"what": "prefill", "length": length, "tokens": report["tokens"], "tokens_per_s": report["tokens_per_s"]})

    def store(self):
        return os.path.join(self.folder, "store")

    def ask(self, length, way):
        report = last_json([self.flags.carrel, "ask", "--model", self.flags.model, "--store", self.store(), "--context",
                            f"d{length}", "--max-tokens", str(self.flags.generate), "--lab", "ignore-eos", "--json",
                            "--temperature", "0", "--plan", way, *self.held(), PROMPT])
        if "failed" in report:
            self.write({"what": "ask", "length": length, "way": way, "failed": report["failed"]})
            return
        self.write({"what": "ask", "length": length, "way": way, "taken": report["plan"]["taken"],
                    "tokens_per_s": report["tokens_per_s"],
                    "planned_ms": 1e3 * report["plan"]["ways"][report["plan"]["taken"]]["seconds"]})

    def serve(self, way):
        server = subprocess.Popen([self.flags.carrel, "api", "--model", self.flags.model, "--store", self.store(),
                                   "--read-only", "--listen", "127.0.0.1:0", "--model-name", "m", "--max-answers", "64",
                                   "--plan", way, *self.held()],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for line in server.stderr:
            if found := re.search(r"http://([0-9.:]+)/v1", line):
                return server, f"http://{found[1]}"
        fail(f"carrel api --plan {way} ended")
        return None

    def clients(self, way, counts):
        server, url = self.serve(way)

        def question(context, number):
            body = {"model": f"m@{context}", "temperature": 0, "max_tokens": self.flags.generate,
                    "messages": [{"role": "user", "content": f"{PROMPT} Tell it in {number + 20} words."}]}
            request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            answer = json.loads(urllib.request.urlopen(request, timeout=600).read())
            return answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"], answer["carrel"]["plan"]

        for length in self.flags.lengths:
            context, texts = f"d{length}", {}
            question(context, 0)
            for count in counts:
                with concurrent.futures.ThreadPoolExecutor(count) as pool:
                    list(pool.map(lambda n: question(context, n), range(count)))  # opens the decoders
                    start = time.monotonic()
                    answers = list(pool.map(lambda n: question(context, n), range(max(8, 2 * count))))
                    seconds = time.monotonic() - start
                for number, (_, text, _) in enumerate(answers):
                    texts.setdefault(number, set()).add(text)
                self.write({"what": "api", "length": length, "way": way, "clients": count, "taken": answers[0][2],
                            "tokens_per_s": sum(answer[0] for answer in answers) / seconds,
                            "tokens_per_answer": statistics.mean(answer[0] for answer in answers)})
            self.write({"what": "alike", "length": length, "way": way,
                        "questions": len(texts), "alike": sum(len(all_of) == 1 for all_of in texts.values())})
        server.send_signal(signal.SIGTERM)
        server.stderr.close()
        server.wait(60)

    def run(self):
        flags = self.flags
        for length in flags.lengths:
            self.prefill(length)
        for length in flags.lengths:
            for _ in range(flags.repeats):
                for way in ["auto", *flags.ways]:
                    self.ask(length, way)
        for _ in range(flags.api_repeats if flags.clients else 0):
            for way in ["auto", *flags.api_ways]:
                self.clients(way, flags.clients)

    def table(self):
        groups = {}
        for row in self.rows:
            if row["what"] in ("ask", "api") and "tokens_per_s" in row:
                key = (row["length"], row.get("clients", 0), row["way"])
                groups.setdefault(key, []).append((row["tokens_per_s"], row["taken"]))
        best = {}
        for (length, clients, way), values in groups.items():
            if way != "auto":
                median = statistics.median(value for value, _ in values)
                best[length, clients] = max(best.get((length, clients), (0, "")), (median, way))
        lines = ["| tokens | clients | way | tokens/s (median) | of the best |", "|---|---|---|---|---|"]
        for (length, clients, way), values in sorted(groups.items()):
            median = statistics.median(value for value, _ in values)
            top = best.get((length, clients), (median, way))[0]
            shown = f"auto: {values[0][1]}" if way == "auto" else way
            lines.append(f"| {length} | {clients or 'ask'} | {shown} | {median:.1f} | {median / top:.3f} |")
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--carrel", default="build/release/carrel")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of ask and api, as 3GB: with less than the rows take they stay in pinned memory")
    parser.add_argument("--text", required=True, help="which is repeated where it is short")
    parser.add_argument("--lengths", nargs="+", default=["200", "2k", "8k", "32k"], help="tokens, about")
    parser.add_argument("--bytes-per-token", type=float, default=4.4)
    parser.add_argument("--ways", nargs="*", default=None, help="beside the default; by default all of the device")
    parser.add_argument("--clients", nargs="*", type=int, default=[], help="of carrel api; none: it is not run")
    parser.add_argument("--api-ways", nargs="*", default=[], help="beside the default")
    parser.add_argument("--api-repeats", type=int, default=1, help="in turns")
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=11, help="in turns")
    parser.add_argument("--out", default="out/bench/plans.jsonl")
    parser.add_argument("--commit", help="of the program, where git does not tell")
    parser.add_argument("--folder", help="for a store that stays, and whose contexts are taken; default: a temporary one")
    flags = parser.parse_args()
    flags.lengths = [tokens_of(word) for word in flags.lengths]
    if flags.ways is None:
        flags.ways = ["store", "store-dense"] + (["host", "device", "device-dense"] if flags.device == "cuda" else [])
    os.makedirs(os.path.dirname(flags.out) or ".", exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="carrel-plans-") as folder:
        if flags.folder:
            os.makedirs(flags.folder, exist_ok=True)
        bench = Bench(flags, flags.folder or folder)
        bench.run()
    print(bench.table())


if __name__ == "__main__":
    main()
