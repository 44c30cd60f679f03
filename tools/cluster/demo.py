#!/usr/bin/env python3
"""`./run demo cluster`: many machines on this one's loopback. A bucket, a queue, two replicas, a worker and the router are started from
deploy/cluster's own files; a document comes in, is asked, the replica that answers is killed, and it is asked again."""
import argparse
import json
import pathlib
import shutil
import signal
import sys
import time

sys.dont_write_bytecode = True

from cluster import ROOT, Cluster, Failed, fetch

MODEL = ROOT / "models/demo"
NAME = "registry-8k"


def say(text):
    print(text, flush=True)


def call(cluster, method, path, body=None, kind="application/json"):
    """Status, JSON and the replica that answered, through the router."""
    import urllib.error
    import urllib.request
    request = urllib.request.Request(f"http://{cluster.api_address}{path}", data=body, method=method, headers={"Content-Type": kind})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as reply:
            return reply.status, json.loads(reply.read()), reply.headers["carrel-replica"]
    except urllib.error.HTTPError as error:
        raise Failed(f"{method} {path}: {error.code} {error.read().decode('utf-8', 'replace')}") from None


def bring(cluster):
    """A document to any replica: a job in the bucket, which a worker takes; the context is everybody's."""
    document = MODEL / f"docs/{NAME}.txt"
    say(f"== bring: {document.relative_to(ROOT)} (7,703 tokens) to the router, for whichever worker is free")
    began, shown = time.monotonic(), ""
    call(cluster, "POST", f"/v1/contexts?name={NAME}", document.read_bytes(), "text/plain")
    while True:
        found = call(cluster, "GET", f"/v1/contexts/{NAME}")[1]
        state = found["state"]
        if state == "ready":
            break
        if state == "failed" or time.monotonic() - began > 300:
            raise Failed(f"the document did not become a context: {found}")
        if state != shown:
            say(f"   {state}")
            shown = state
        time.sleep(0.3)
    say(f"   a context of the bucket after {time.monotonic() - began:.1f} s; nobody has it yet")


def ask(cluster, question):
    body = {"model": "demo", "context": NAME, "prompt": f"\n\nQuestion: {question}\nAnswer:", "max_tokens": 48, "temperature": 0}
    began = time.monotonic()
    _, reply, replica = call(cluster, "POST", "/v1/completions", json.dumps(body).encode())
    return reply["choices"][0]["text"].strip(), replica, time.monotonic() - began


def ask_all(cluster):
    """(right answers, how many, who gave the last)"""
    right, asked, replica = 0, 0, None
    for line in (MODEL / "docs/demo-questions.tsv").read_text().splitlines():
        question, answer = line.split("\t")
        said, replica, seconds = ask(cluster, question)
        asked, right = asked + 1, right + (said == answer)
        verdict = "right" if said == answer else f"wrong, it is {answer}"
        say(f"   {question}\n      {said}   ({verdict}; {name_of(cluster, replica)}, {seconds:.2f} s)")
    return right, asked, replica


def name_of(cluster, address):
    for i, (host, port) in enumerate(cluster.api):
        if address == f"{host}:{port}":
            return f"replica {i + 1}"
    return str(address)


def demo(cluster):
    say("== start: a bucket (SeaweedFS: master, three volume servers, filer, S3), a queue (NATS)")
    cluster.start_bucket()
    cluster.start_queue()
    say("== start: two replicas of carrel api without contexts of their own, a worker, the router (Envoy)")
    cluster.start_worker()
    cluster.start_api(2, more={"CARREL_API_MODEL_NAME": "demo"})
    cluster.start_router()
    bring(cluster)
    say("== ask: the router sends every question about a context to one replica; the first one waits for the context to come")
    right, asked, replica = ask_all(cluster)
    lost = int(name_of(cluster, replica).removeprefix("replica "))
    say(f"== kill -9: replica {lost}, which answers")
    cluster.processes[f"api{lost}"].kill()
    say("== ask again: the other one brings the context, and goes on")
    again, _, replica = ask_all(cluster)
    if name_of(cluster, replica) == f"replica {lost}":
        raise Failed("a replica that was killed answers")
    say(f"== {right} of {asked} answers right, and {again} of {asked} after the loss; all is stopped")
    return right >= 3 and right == again


def main():
    parser = argparse.ArgumentParser(prog="tools/cluster/demo.py", description=__doc__)
    parser.add_argument("--carrel", type=pathlib.Path, required=True)
    parser.add_argument("--parts", type=pathlib.Path, required=True, help="folder with weed, envoy and nats-server")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="what all of them keep, and their logs; emptied first")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: stopped"))
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    try:
        with Cluster(args.folder, args.carrel, args.parts, MODEL) as cluster:
            good = demo(cluster)
    except Failed as failure:
        sys.exit(f"demo: {failure}\nlogs: {args.folder}")
    except KeyboardInterrupt:
        sys.exit("demo: stopped")
    sys.exit(0 if good else "demo: answers are not what they were to be")


if __name__ == "__main__":
    main()
