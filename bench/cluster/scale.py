#!/usr/bin/env python3
"""What further replicas give: `carrel api` over a bucket, behind Envoy, each replica on cores of its own; bucket, Envoy and clients on
those that are left. Cores of one machine share caches, clocks and more, which replicas elsewhere do not: with --share each replica has so
much of a core instead, by a control group (which only root makes), and together they leave some free. Prints JSON lines:

  latency      one client: straight to a replica, and through Envoy, in turns: first token, time between tokens, whole answers
  throughput   1, 2, 3 replicas under the same clients, every context on its replica before: tokens and answers a second; "scaling"
               is that over one replica's
  zipf         the same clients, contexts drawn by Zipf's law, each replica's cache too small for all: hits, pulls, bytes, waits

  bench/cluster/scale.py --carrel build/release/carrel --parts build/cluster/bin --model models/demo --replicas 1 2 3 --cores-each 4

All texts of a context must be the same, whoever answered, or it fails. It needs no network and no repository: bench/cluster/pack
makes a folder of it for another machine. Python 3.9 or later, its standard library alone.
"""
import argparse
import collections
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import pathlib
import queue
import random
import shutil
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / "tools/cluster"), str(ROOT / "bench/service")]

from cluster import URI, Cluster, Failed, fetch  # noqa: E402
from load import ask, completion_piece, percentile  # noqa: E402

PROMPT = " The quiet"


def request(address, context, tokens):
    body = {"model": "bench", "context": context, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    return ask(context, f"http://{address}", "/v1/completions", body, completion_piece)


CONTROL_GROUPS = pathlib.Path("/sys/fs/cgroup/cpu" if os.path.exists("/sys/fs/cgroup/cpu") else "/sys/fs/cgroup")


def share_group(replica, share):
    """The control group whose processes get so much of a core together."""
    period = 20000
    group = CONTROL_GROUPS / f"carrel-scale-{os.getpid()}-{replica}"
    group.mkdir(exist_ok=True)
    first = CONTROL_GROUPS.name == "cpu"  # version 1
    limits = {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": int(share * period)} if first else {"cpu.max": f"{int(share * period)} {period}"}
    for name, value in limits.items():
        (group / name).write_text(str(value))
    return group


def client_process(cores, address, contexts, tokens, out):
    """A thread for each list of contexts, which asks them one after the other."""
    os.sched_setaffinity(0, cores)

    def work(names):
        for name in names:
            out.put(request(address, name, tokens)._asdict())

    threads = [threading.Thread(target=work, args=(names,)) for names in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def load(cores, address, names, tokens, clients):
    """All names asked, by so many clients at once in four processes: answers as dicts, seconds."""
    out, processes = multiprocessing.Queue(), []
    shares = [names[i::clients] for i in range(clients)]
    start = time.monotonic()
    for i in range(min(4, clients)):
        processes.append(multiprocessing.Process(target=client_process, args=(cores, address, shares[i::4], tokens, out)))
        processes[-1].start()
    answers = []
    while len(answers) < len(names):
        try:
            answers.append(out.get(timeout=5))
        except queue.Empty:
            if not any(process.is_alive() for process in processes) and out.empty():
                raise Failed(f"clients ended with {len(answers)} of {len(names)} answers") from None
    seconds = time.monotonic() - start
    for process in processes:
        process.join()
    return answers, seconds


def figures(answers, seconds):
    good = [answer for answer in answers if not answer["error"] and answer["tokens"]]
    gaps = [1000 * gap for answer in good for gap in answer["gaps_s"]]
    of = lambda values, digits: {name: round(percentile(values, share), digits) for name, share in (("p50", 0.5), ("p99", 0.99))} if values else None
    wrong = [answer["error"] or "no tokens" for answer in answers if answer["error"] or not answer["tokens"]]
    return {"answers": len(good), "errors": len(wrong), **({"error": wrong[0]} if wrong else {}), "seconds": round(seconds, 2),
            "answers_per_s": round(len(good) / seconds, 3), "tokens_per_s": round(sum(answer["tokens"] for answer in good) / seconds, 1),
            "first_token_s": of([answer["first_s"] for answer in good], 4), "answer_s": of([answer["seconds"] for answer in good], 4),
            "between_tokens_ms": of(gaps, 3)}


def cpu_seconds(pid):
    """Of a process, its threads' together."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_seconds(cores):
    """That these cores worked since the machine started."""
    lines = (line.split() for line in pathlib.Path("/proc/stat").read_text().splitlines())
    took = {fields[0]: [int(field) for field in fields[1:9]] for fields in lines if fields}
    return sum(sum(took[f"cpu{core}"]) - took[f"cpu{core}"][3] - took[f"cpu{core}"][4] for core in cores) / os.sysconf("SC_CLK_TCK")


def hash_on(core):
    os.sched_setaffinity(0, {core})
    rows = bytes(range(256)) * (1 << 17)
    while True:
        hashlib.sha256(rows).digest()


class Bench:
    def __init__(self, args, cluster, others):
        self.args, self.cluster, self.others, self.texts = args, cluster, others, {}
        self.names = [f"context-{i}" for i in range(args.contexts)]

    def tell(self, what, **fields):
        print(json.dumps({"bench": "cluster", "what": what, "model": self.args.model.name, "context_tokens": self.tokens, "cores_each":
                          self.args.share or self.args.cores_each, "contexts": self.args.contexts, "max_tokens": self.args.max_tokens, **fields}), flush=True)

    def same_texts(self, answers):
        for answer in answers:
            if not answer["error"] and self.texts.setdefault(answer["name"], answer["text"]) != answer["text"]:
                raise Failed(f"{answer['name']}: {answer['text']!r} is not {self.texts[answer['name']]!r}")

    def make_context(self, name, text):
        """Prefilled in a folder of its own and sent to the bucket."""
        folder = self.cluster.folder / "making" / name
        folder.mkdir(parents=True)
        (folder / "slice.txt").write_text(text)
        self.cluster.run("prefill", "--model", self.args.model, "--raw", "--input", folder / "slice.txt", "--store", folder / "store", "--name", name,
                         "--threads", 2, "--quiet")
        self.cluster.run("push", name, URI, "--store", folder / "store", "--quiet")
        shutil.rmtree(folder)

    def make_contexts(self):
        """Slices of the document. Bytes of all, and tokens of the first, are known then."""
        text = self.args.document.read_text()
        step = max(1, (len(text) - self.args.characters) // max(1, self.args.contexts - 1))
        self.bytes, self.tokens = 0, 0
        with concurrent.futures.ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
            list(pool.map(lambda i: self.make_context(self.names[i], text[i * step:i * step + self.args.characters]), range(self.args.contexts)))
        for one in json.loads(self.cluster.run("ls", "--store", URI, "--json").stdout)["contexts"]:
            self.bytes, self.tokens = self.bytes + one["bytes"], one["tokens"]

    def start(self, replicas, cache_bytes):
        c, each = self.cluster, self.args.cores_each
        for i in range(replicas):
            own = set(sorted(os.sched_getaffinity(0))[i * each:(i + 1) * each])
            c.cores[f"api{i + 1}"] = self.others if self.args.share or not own else own
        c.start_api(replicas, cache_bytes=str(cache_bytes), more={
            "CARREL_API_THREADS": str(each), "CARREL_API_MODEL_NAME": "bench", "CARREL_API_PLAN": self.args.plan,
            "CARREL_API_MAX_SEQUENCES": "0", "CARREL_API_MAX_OPEN_CONTEXTS": str(self.args.contexts)})
        for i in range(replicas if self.args.share else 0):
            group = share_group(i + 1, self.args.share)
            (group / "cgroup.procs").write_text(str(c.processes[f"api{i + 1}"].process.pid))
        c.start_router()

    def used(self):
        """CPU seconds of all replicas, and of the cores of everything else."""
        return sum(cpu_seconds(self.cluster.processes[f"api{i + 1}"].process.pid) for i in range(len(self.cluster.api))), busy_seconds(self.others)

    def start_neighbours(self, kind, replicas):
        """If they are busy: who hashes on each core of replicas that do not run."""
        each = self.args.cores_each
        idle = sorted(os.sched_getaffinity(0))[replicas * each:max(self.args.replicas) * each] if kind == "busy" else []
        hashing = [multiprocessing.Process(target=hash_on, args=(core,), daemon=True) for core in idle]
        for process in hashing:
            process.start()
        return hashing

    def stop(self):
        """Replicas and router: the bucket goes on."""
        c = self.cluster
        for name in ["router", *(f"api{i + 1}" for i in range(len(c.api)))]:
            c.processes.pop(name).stop()
            shutil.rmtree(c.folder / name, ignore_errors=True)
        c.api.clear()

    def counts(self):
        totals = collections.Counter()
        for i in range(len(self.cluster.api)):
            for name, value in self.cluster.metrics(f"api{i + 1}").items():
                if name.startswith("carrel_replica_") and name.endswith("_total"):
                    totals[name.removeprefix("carrel_replica_").removesuffix("_total")] += value
        return totals

    def latency(self):
        self.start(1, 2 * self.bytes)
        direct = "%s:%d" % self.cluster.api[0]
        rounds = {"direct": [], "envoy": []}
        for name in [self.names[0]] * 2 + self.names[:self.args.latency_questions] * 2:
            for way, address in (("direct", direct), ("envoy", self.cluster.api_address)):
                rounds[way].append(request(address, name, self.args.max_tokens)._asdict())
        for way, answers in rounds.items():
            self.same_texts(answers)
            later = answers[2 + self.args.latency_questions:]  # each context was asked once before
            self.tell("latency", way=way, replicas=1, clients=1, **figures(later, sum(answer["seconds"] for answer in later)))
        self.stop()

    def throughput(self, neighbours, replicas, one):
        self.start(replicas, 2 * self.bytes)
        answers, _ = load(self.others, self.cluster.api_address, self.names * 2, 2, self.args.clients)  # they come, to everybody's replica
        hashing, before = self.start_neighbours(neighbours, replicas), self.used()
        answers, seconds = load(self.others, self.cluster.api_address, self.draw(0), self.args.max_tokens, self.args.clients)
        of_replicas, of_others = (after - then for after, then in zip(self.used(), before))
        for process in hashing:
            process.terminate()
        self.same_texts(answers)
        found = figures(answers, seconds)
        tokens = sum(answer["tokens"] for answer in answers)
        self.tell("throughput", replicas=replicas, clients=self.args.clients, neighbours=neighbours, scaling=round(found["tokens_per_s"] / one, 3) if one else 1.0,
                  replicas_cpu_ms_per_token=round(1000 * of_replicas / max(1, tokens), 4), other_cores_busy=round(of_others / seconds / len(self.others), 3), **found)
        self.stop()
        return found["tokens_per_s"]

    def zipf(self, replicas):
        slots = self.args.slots
        cache = int(self.bytes / self.args.contexts * (slots + 0.5))
        self.start(replicas, cache)
        names = self.draw(self.args.zipf)
        load(self.others, self.cluster.api_address, names[:len(names) // 3], self.args.max_tokens, self.args.clients)
        before = self.counts()
        answers, seconds = load(self.others, self.cluster.api_address, names[len(names) // 3:], self.args.max_tokens, self.args.clients)
        after = self.counts()
        self.same_texts(answers)
        less = {name: after[name] - before[name] for name in ("hits", "pulls", "pulled_bytes", "pull_seconds", "evictions")}
        asked = less["hits"] + less["pulls"]
        self.tell("zipf", replicas=replicas, clients=self.args.clients, zipf=self.args.zipf, slots=slots,
                  hit_rate=round(less["hits"] / asked, 4) if asked else None, found_here=round(1 - less["pulls"] / max(1, len(answers)), 4),
                  pulled_mb_per_s=round(less["pulled_bytes"] / max(1e-9, less["pull_seconds"]) / 1e6, 1), **less, **figures(answers, seconds))
        self.stop()

    def draw(self, zipf):
        weights = [1 / (i + 1) ** zipf for i in range(len(self.names))]
        return random.Random(self.args.seed).choices(self.names, weights, k=self.args.questions)


def parse():
    parser = argparse.ArgumentParser(prog="bench/cluster/scale.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = pathlib.Path
    parser.add_argument("--carrel", type=path, default=ROOT / "build/release/carrel")
    parser.add_argument("--parts", type=path, default=ROOT / "build/cluster/bin", help="folder with weed and envoy")
    parser.add_argument("--model", type=path, default=ROOT / "models/demo", help="GGUF file or folder (default models/demo)")
    parser.add_argument("--document", type=path, default=ROOT / "models/demo/docs/registry-8k.txt", help="text whose slices become contexts")
    parser.add_argument("--characters", type=int, default=8000, help="of a slice")
    parser.add_argument("--contexts", type=int, default=24)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cores-each", type=int, default=4)
    parser.add_argument("--share", type=float, default=0, help="of a core, that each replica has in place of cores of its own; 0: cores")
    parser.add_argument("--neighbours", nargs="+", choices=("idle", "busy"), default=["idle"],
                        help="what the cores of replicas that do not run do under throughput; busy: hash, as if their replicas ran (default idle)")
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--questions", type=int, default=480, help="of each measurement")
    parser.add_argument("--latency-questions", type=int, default=24, help="contexts that one client asks, straight and through Envoy")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--plan", default="store", help="of carrel api: one way for all, so that texts can be compared (default store)")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--slots", type=int, default=6, help="contexts that a cache holds under Zipf's law")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--what", nargs="+", choices=("latency", "throughput", "zipf"), default=["latency", "throughput", "zipf"])
    args = parser.parse_args()
    if min(args.contexts, args.cores_each, args.clients, args.latency_questions, args.max_tokens, args.slots, *args.replicas) < 1:
        parser.error("counts are 1 or more")
    args.latency_questions = min(args.latency_questions, args.contexts)
    return args


def main():
    args = parse()
    cores = sorted(os.sched_getaffinity(0))
    taken = 0 if args.share else max(args.replicas) * args.cores_each
    if taken >= len(cores):
        print(f"scale: {max(args.replicas)} replicas of {args.cores_each} cores leave none of {len(cores)} for Envoy, bucket and clients: they share",
              file=sys.stderr)
    others = set(cores[taken:]) or set(cores)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="carrel-scale-"))
    try:
        with Cluster(folder, args.carrel, args.parts, args.model, {"others": others}) as cluster:
            bench = Bench(args, cluster, others)
            cluster.start_bucket()
            bench.make_contexts()
            if "latency" in args.what:
                bench.latency()
            for neighbours in args.neighbours if "throughput" in args.what else []:
                one = None
                for replicas in args.replicas:
                    found = bench.throughput(neighbours, replicas, one)
                    one = found if replicas == 1 else one
            for replicas in args.replicas if "zipf" in args.what else []:
                bench.zipf(replicas)
    except Failed as failure:
        sys.exit(f"scale: {failure}\nlogs: {folder}")
    finally:
        for group in CONTROL_GROUPS.glob(f"carrel-scale-{os.getpid()}-*"):
            group.rmdir()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
