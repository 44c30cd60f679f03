#!/usr/bin/env python3
"""A cluster that is broken while it is asked: tests/cluster/cluster_test.py build/release/carrel

Bucket (SeaweedFS: master, three volume servers, replication 001), queue (NATS), replicas of `carrel serve` and `carrel api`, workers
and Envoy, all on loopback and of deploy/cluster's own files; 16 clients on 8 contexts, through Envoy. Each replica, each worker, the
queue and a volume server are killed with -9 in turn. Then the bucket goes away altogether.

Every text must be what one machine said alone. Decoders over `serve` get the whole of it whatever is killed; an answer of `api` that
is cut ends without its last event, and is given whole when it is asked for again. No job is lost, none has two results.

Skipped (exit code 77) where the parts of others are not there: ./run deps cluster. CARREL_CLUSTER_SECONDS: how long each kill is
watched (default 4; by hand 30 and more); CARREL_SEED: what is drawn. Ends with counts, and with the longest pause of a decoder.
"""
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / "tools/cluster"), str(pathlib.Path(__file__).parent)]

from cluster import URI, Cluster, Failed, fetch, find_parts, wait_until  # noqa: E402
from clients import Asker, Cut, Decoder, Tally, complete, decode  # noqa: E402

MODEL = ROOT / "models/demo"
CONTEXTS = [f"context-{i}" for i in range(8)]
UNSEEN = "context-unseen"  # nobody opens it before the bucket is gone
WATCH_S = float(os.environ.get("CARREL_CLUSTER_SECONDS") or 4)
TOKENS = 96 if WATCH_S < 10 else 240  # of an answer: kills are to meet some in their middle
SKIPPED = 77
LONGEST_S = 60  # of anything that is to be soon, on a machine that does much else: bounds of the issue are printed, and held by hand


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def make_contexts(cluster, store):
    """Nine documents, a few hundred tokens each, in a local store and in the bucket."""
    text = (MODEL / "docs/registry-8k.txt").read_text()
    size = len(text) // (len(CONTEXTS) + 1)
    for i, name in enumerate([*CONTEXTS, UNSEEN]):
        document = cluster.folder / f"{name}.txt"
        document.write_text(text[i * size:(i + 1) * size])
        cluster.run("prefill", "--model", MODEL, "--input", document, "--store", store, "--name", name, "--quiet")
        cluster.run("push", name, URI, "--store", store, "--quiet")


def one_machine(cluster, store):
    """What each context's questions are answered with, by a store of this machine: of `ask`, and of `api`."""
    asked = {name: decode(cluster, ["--store", store], name, TOKENS)[0] for name in [*CONTEXTS, UNSEEN]}
    port = cluster.ports()
    alone = cluster.add("alone", [cluster.carrel, "api", "--model", MODEL, "--store", store, "--read-only", "--plan", "store",
                                  "--listen", f"127.0.0.1:{port}", "--model-name", "demo"])
    alone.until(lambda: fetch(f"http://127.0.0.1:{port}/health")[0] == 200, "does not answer")
    answered = {name: complete(f"127.0.0.1:{port}", name, TOKENS)[1] for name in [*CONTEXTS, UNSEEN]}
    alone.stop()
    return asked, answered


class Jobs:
    """Documents that are left for workers while everything is killed: each becomes one context, and its text is one machine's."""

    def __init__(self, cluster):
        self.cluster, self.given, self.text = cluster, {}, (MODEL / "docs/registry-8k.txt").read_text()

    def submit(self):
        i = len(self.given)
        name, document = f"job-{i}", self.cluster.folder / f"job-{i}.txt"
        document.write_text(self.text[1000 + 900 * i:5500 + 900 * i])
        self.given[name] = document
        self.cluster.run("job", "submit", "--remote", URI, "--model", MODEL.name, "--input", document, "--name", name, "--quiet",
                         "--nats", self.cluster.doorbell()["CARREL_WORKER_NATS"])

    def list(self):
        return json.loads(self.cluster.run("job", "list", "--remote", URI, "--all", "--json").stdout)["jobs"]

    def at(self, name):
        """Whether the worker of this name works on one now."""
        number = f"-{self.cluster.processes[name].process.pid}-"
        return any(job["state"] == "running" and number in job["worker"] for job in self.list())

    def end(self):
        """All have ended, each once. Returns what is wrong, as lines."""
        wait_until(lambda: all(job["state"] in ("done", "dead", "cancelled") for job in self.list()), "jobs end", 240, every=1)
        jobs, wrong = self.list(), []
        if sorted(job["name"] for job in jobs) != sorted(self.given):
            wrong.append(f"jobs {[job['name'] for job in jobs]}, submitted {list(self.given)}")
        wrong += [f"{job['name']} ended as {job['state']}: {job['reason']}" for job in jobs if job["state"] != "done"]
        results = [key for key in self.cluster.bucket.keys("contexts/jobs/results/")]
        if len(results) != len(self.given):
            wrong.append(f"{len(self.given)} jobs have {len(results)} results")
        there = json.loads(self.cluster.run("ls", "--store", URI, "--json").stdout)["contexts"]
        content = {context["name"]: context["content_id"] for context in there}
        wrong += [f"{job['name']}: its result names {job.get('content_id')}, the bucket has {content.get(job['name'])}" for job in jobs
                  if job.get("content_id") != content.get(job["name"])]
        tries = sum(job["tries"] for job in jobs)
        say(f"{len(jobs)} documents became contexts, in {tries} tries")
        return wrong

    def check_text(self, name):
        """The context that a worker made answers as one that this machine makes."""
        c, store = self.cluster, self.cluster.folder / "made-here"
        c.run("prefill", "--model", MODEL, "--input", self.given[name], "--store", store, "--name", name, "--quiet")
        here, there = (decode(c, where, name, TOKENS) for where in (["--store", store], ["--server", c.serve_address]))
        return [] if here[0] == there[0] and here[0] else [f"{name}: {there} of a worker, {here} of this machine"]


class Test:
    def __init__(self, cluster, seed):
        self.cluster, self.seed, self.tally, self.jobs = cluster, seed, Tally(), Jobs(cluster)
        self.ending = threading.Event()

    def check(self, true, text):
        if not true:
            self.tally.fail(text)

    # Each context's questions go to one replica, in whatever way the context is said.
    def routing(self):
        for name in CONTEXTS:
            seen = set()
            for form in ("context", "model", "header", "context"):
                status, text, replica = complete(self.cluster.api_address, name, 4, form)
                self.check(status == 200, f"{name} as {form}: {status} {text}")
                seen.add(replica)
            seen.add(self.replica_of(f"/v1/contexts/{name}"))
            self.check(len(seen) == 1, f"{name} went to {seen}")
        for name in CONTEXTS[:4]:
            before = self.opened()
            for _ in range(3):
                decode(self.cluster, ["--server", self.cluster.serve_address], name, 2)
            changed = [i for i, (old, new) in enumerate(zip(before, self.opened())) if new != old]
            self.check(len(changed) == 1, f"three sessions of {name} went to replicas {changed}")

    def replica_of(self, path):
        with urllib.request.urlopen(f"http://{self.cluster.api_address}{path}", timeout=30) as reply:
            return reply.headers["carrel-replica"]

    def opened(self):
        """Sessions of each replica that found their context here, or brought it."""
        return [sum(self.cluster.metrics(f"serve{i + 1}")[f"carrel_replica_{what}_total"] for what in ("hits", "pulls"))
                for i in range(len(self.cluster.serve))]

    def metrics_exist(self):
        """Every name that an alert, the dashboard, an autoscaler or the adapter uses is told by one of the parts."""
        c = self.cluster
        told = set()
        for url in (*(c.processes[name].metrics for name in ("serve1", "api1", "worker1")), f"http://127.0.0.1:{c.probe_port}/stats/prometheus"):
            status, body = fetch(url)
            self.check(status == 200, f"{url}: {status}")
            told |= set(re.findall(r"^([a-z_]+)(?:\{| )", body.decode(), re.M))
        files = [ROOT / "deploy/prometheus/cluster_alerts.yaml", ROOT / "deploy/grafana/cluster.json", *(ROOT / "deploy/cluster/kubernetes").glob("*.yaml")]
        for path in files:
            text = path.read_text()
            names = set(re.findall(r"\b((?:carrel|envoy)_[a-z0-9_]+)\b", text))
            for group in re.findall(r'=~"carrel_\(([a-z_|]+)\)"', text):  # the adapter's
                names |= {f"carrel_{name}" for name in group.split("|")}
            for name in names - {"envoy_cluster_name"}:
                self.check(name in told, f"{path.name} uses {name}, which nothing tells")
        for name in re.findall(r"\bcarrel_(?:replica|worker)_[a-z_]+\b", (ROOT / "docs/metrics.md").read_text()):
            self.check(name in told, f"docs/metrics.md has {name}, which nothing tells")

    def start_clients(self, asked, answered):
        c = self.cluster
        self.clients = [Decoder(f"decoder {i}", CONTEXTS, self.tally, self.ending, self.seed * 100 + i, cluster=c,
                                address=c.serve_address, tokens=TOKENS, expected=asked) for i in range(8)]
        self.clients += [Asker(f"client {i}", CONTEXTS, self.tally, self.ending, self.seed * 100 + 50 + i, address=c.api_address,
                               tokens=TOKENS, expected=answered) for i in range(8)]
        for client in self.clients:
            client.start()

    def all_answered(self):
        """Waits until each client has got one answer more."""
        before = [client.answers for client in self.clients]
        wait_until(lambda: self.tally.failures or all(client.answers > old for client, old in zip(self.clients, before)),
                   "an answer for each client", 240)

    def broken(self, name, again):
        """kill -9 of one process under way; it comes back, and everybody is answered. A document is brought at the same time."""
        for _ in self.cluster.workers if name in self.cluster.workers else (name,):
            self.jobs.submit()
        busy = name not in self.cluster.workers or self.works(name)
        with self.tally.lock:
            running = [client for client in self.clients if isinstance(client, Asker) and client.replica in self.addresses(name)]
            cuts = len(self.tally.cuts)
        killed = time.monotonic()
        self.cluster.processes[name].kill()
        time.sleep(WATCH_S)
        with self.tally.lock:
            ends = [f"{at - killed:.2f} s" for at, _, _ in self.tally.cuts[cuts:]]
        self.cluster.processes[name].start()
        again()
        self.all_answered()
        what = f"{len(running)} answers of it were on their way; those that were cut ended after {ends}" if name.startswith("api") else ""
        say(f"killed {name}{'' if busy else ', which was idle'}: {what or 'everybody was answered'}")
        if self.tally.failures:
            raise Failed("see above")

    def works(self, name):
        """Waits for the worker to have a job; false: others took them all."""
        try:
            return wait_until(lambda: self.jobs.at(name), f"{name} works", 20, every=0.1)
        except Failed:
            return False

    def addresses(self, name):
        if name.startswith("api"):
            host, port = self.cluster.api[int(name[3:]) - 1]
            return (f"{host}:{port}",)
        return ()

    def grow(self):
        """One more replica, by another clusters.yaml: no session and no answer ends."""
        before = self.tally.get("decoder: resumed"), self.tally.get("api: cut")
        self.cluster.start_serve(1)
        self.cluster.write_clusters()
        wait_until(self.cluster.router_sees_all, "the new replica is healthy")
        self.all_answered()
        after = self.tally.get("decoder: resumed"), self.tally.get("api: cut")
        self.check(before == after, f"a third replica: sessions that resumed and answers that were cut {before}, then {after}")
        say("a third replica of serve joined")

    def kills(self):
        c = self.cluster
        for i in range(len(c.serve)):
            self.broken(f"serve{i + 1}", lambda i=i: c.wait_serve(i + 1))
        for i in range(len(c.api)):
            self.broken(f"api{i + 1}", lambda i=i: c.wait_api(i + 1))
        for name in c.workers:
            self.broken(name, lambda name=name: c.wait_worker(name))
        self.broken("volume2", lambda: None)
        self.broken("queue", c.wait_queue)

    def end_clients(self):
        self.ending.set()
        for client in self.clients:
            client.join(300)
            self.check(not client.is_alive(), f"{client.name} does not end")

    def without_bucket(self, asked, answered):
        """Contexts that are here answer; others are refused, soon and by name."""
        c = self.cluster
        lie = {name: i for i in range(len(c.serve)) for name in CONTEXTS if decode(c, ["--server", "%s:%d" % c.serve[i]], name, 2)}
        for name in c.bucket_names:
            c.processes[name].kill()
        for i in range(len(c.serve)):
            text, said, _ = decode(c, ["--server", "%s:%d" % c.serve[i]], CONTEXTS[i], TOKENS)
            self.check(text == asked[CONTEXTS[i]], f"without the bucket, serve{i + 1}: {text!r} {said}")
        del lie
        for name in CONTEXTS:
            status, text, _ = complete(c.api_address, name, TOKENS)
            if status == 200:
                self.check(text == answered[name], f"without the bucket, {name}: {text!r}")
            else:
                self.check(status == 503, f"without the bucket, {name}: {status} {text}")
        began = time.monotonic()
        text, said, code = decode(c, ["--server", c.serve_address, "--retry-for", "0"], UNSEEN, 4)
        took = time.monotonic() - began
        self.check(code != 0 and "UNAVAILABLE" in said and UNSEEN in said, f"{UNSEEN} without the bucket: exit code {code} {text!r} {said}")
        self.check(took < LONGEST_S, f"{UNSEEN} without the bucket was refused after {took:.1f} s")
        say(f"the bucket is gone: a decoder of {UNSEEN} hears after {took:.2f} s (5 at most): {said.strip().splitlines()[-1]}")
        began = time.monotonic()
        status, text, _ = complete(c.api_address, UNSEEN, 4)
        took = time.monotonic() - began
        self.check(status == 503, f"{UNSEEN} without the bucket: {status} {text}")
        say(f"the bucket is gone: a client of {UNSEEN} hears after {took:.2f} s (5 at most): {status} {text}")
        for name in reversed(c.bucket_names):
            c.processes[name].start()
        wait_until(c.bucket.works, "the bucket is back")
        text, said, _ = decode(c, ["--server", c.serve_address], UNSEEN, TOKENS)
        self.check(text == asked[UNSEEN], f"the bucket is back, {UNSEEN}: {text!r} {said}")
        say("the bucket is back, and so is what it holds")

    def report(self):
        resumed = [pause for pause, was in self.tally.pauses if was]
        quiet = sorted(pause for pause, was in self.tally.pauses if not was)
        say(f"counts: {dict(sorted(self.tally.counts.items()))}")
        say(f"longest pause in an answer whose replica was killed: {max(resumed, default=0):.2f} s, of {len(resumed)} (3 at most on idle "
            f"cores); in others: median {quiet[len(quiet) // 2] if quiet else 0:.2f} s, longest {max(quiet, default=0):.2f} s")
        self.check(resumed, "no session was cut: nothing was tested")
        self.check(max(resumed, default=0) < LONGEST_S, "a session that resumed took too long")
        self.check(self.tally.get("api: cut") > 0, "no answer was cut: nothing was tested")
        if WATCH_S >= 30:
            self.check(max(resumed, default=0) < 3, "the longest pause is 3 s or more")


def run(carrel, parts, folder):
    seed = int(os.environ.get("CARREL_SEED") or random.SystemRandom().randrange(1 << 31))
    say(f"CARREL_SEED={seed}")
    with Cluster(folder, carrel, parts, MODEL) as cluster:
        test = Test(cluster, seed)
        cluster.start_bucket()
        store = folder / "store"
        make_contexts(cluster, store)
        asked, answered = one_machine(cluster, store)
        cluster.start_queue()
        plan = {"CARREL_API_PLAN": "store", "CARREL_API_MODEL_NAME": "demo"}
        cluster.start_worker(2, more={"CARREL_WORKER_LEASE": "5s", "CARREL_WORKER_POLL": "1s"})
        cluster.start_serve(2)
        cluster.start_api(2, more=plan)
        cluster.start_router()
        say("bucket, queue, two workers, two replicas of serve, two of api and the router answer")
        test.routing()
        test.metrics_exist()
        test.start_clients(asked, answered)
        test.all_answered()
        test.grow()
        test.kills()
        test.end_clients()
        test.tally.failures += test.jobs.end() + test.jobs.check_text("job-0")
        test.without_bucket(asked, answered)
        test.report()
        return test.tally.failures


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: tests/cluster/cluster_test.py build/release/carrel")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("cluster_test: stopped"))
    parts = find_parts()
    if parts is None:
        print("skipped: weed, envoy and nats-server are not here: ./run deps cluster fetches them")
        sys.exit(SKIPPED)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="carrel-cluster-"))
    try:
        failures = run(pathlib.Path(sys.argv[1]), parts, folder)
    except Failed as failure:
        failures = [str(failure)]
    if failures:
        print(f"cluster_test: {len(failures)} failures; first: {failures[0]}\nlogs: {folder}")
        sys.exit(1)
    shutil.rmtree(folder, ignore_errors=True)
    print("cluster_test: all is well")


if __name__ == "__main__":
    main()
