#!/usr/bin/env python3
"""What a bucket costs whoever prefills into it and whoever asks first, for one model and one document. Prints JSON lines:

  prefill   into a folder, and straight into the bucket (`prefill --store s3://...`), in turns: seconds, and their ratio; CPU seconds
            of the program alone, which count where the bucket computes on the same cores (--cores gives each its own). With
            --rclone two more take turns: it writes the same objects into the bucket, which is the least that a push can take there;
            and a prefill goes into a folder while it writes them as fast, from the bucket's cores: what the machine alone loses
  cold      `carrel pull` alone; then a replica of `carrel api` with an empty cache is asked: seconds until the first token, cold and
            once the context is there. "beyond_pull_s" is cold less the replica's own pull

  bench/cluster/cold.py --model MODEL.gguf --document TEXT --characters 20000

Each step runs --rounds times; the last line of a kind has the medians. It needs no network and no repository: bench/cluster/pack
takes it along. Python 3.9 or later, its standard library alone.
"""
import argparse
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / "tools/cluster"), str(ROOT / "bench/service")]

from cluster import URI, Cluster, Failed  # noqa: E402
from load import ask, completion_piece  # noqa: E402

PROMPT = " The quiet"


class Bench:
    def __init__(self, args, cluster):
        self.args, self.cluster = args, cluster
        self.file = cluster.folder / "document.txt"
        self.file.write_text(args.document.read_text()[:args.characters])

    def tell(self, what, **fields):
        line = {"bench": "cold", "what": what, "model": self.args.model.name, "device": self.args.device, "threads": self.args.threads,
                "cores": self.args.cores, **fields}
        print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in line.items()}), flush=True)

    def on_own_cores(self, work):
        """Seconds of `work` and what it returns, whose processes have the first cores alone, where these are set: a process takes those of its parent."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sorted(before)[:self.args.cores] if self.args.cores else before)
        start = time.monotonic()
        done = work()
        seconds = time.monotonic() - start
        os.sched_setaffinity(0, before)
        return seconds, done

    def timed(self, *args):
        return self.on_own_cores(lambda: self.cluster.run(*args, timeout=3000))

    def prefill(self, store, name):
        """Seconds, CPU seconds, and the share of the bytes that were sent while layers were computed."""
        staging = ["--staging", self.cluster.folder / "staging"] if store == URI else []
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds, done = self.timed("prefill", "--model", self.args.model, "--raw", "--input", self.file, "--store", store, "--name", name,
                                   "--threads", self.args.threads, "--device", self.args.device, "--quiet", "--json", *staging)
        said = json.loads(done.stdout.strip().splitlines()[-1])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, said.get("bytes_ahead", 0) / max(1, said.get("bytes", 1))

    def copy(self, i, *limit):
        """rclone's command that writes the first round's objects into another prefix of the bucket, and its environment."""
        objects = self.cluster.folder / "objects"
        environment = {**os.environ, **self.cluster.credentials("admin"), "RCLONE_CONFIG": "/dev/null", "RCLONE_CONFIG_S_TYPE": "s3",
                       "RCLONE_CONFIG_S_PROVIDER": "Other", "RCLONE_CONFIG_S_ENV_AUTH": "true", "RCLONE_CONFIG_S_FORCE_PATH_STYLE": "true",
                       "RCLONE_CONFIG_S_ENDPOINT": self.cluster.endpoint}
        environment.pop("AWS_CA_BUNDLE", None)  # rclone's library of AWS takes none beside its own; the bucket speaks HTTP
        copy = [self.args.rclone, "copy", "--transfers", "8", "--s3-no-check-bucket"]
        if not objects.exists():
            subprocess.run([*copy, URI.replace("s3://", "s:"), objects], env=environment, check=True)
        return [*copy, *limit, objects, URI.replace("s3://", "s:") + f"-{i}"], environment

    def written(self, i):
        command, environment = self.copy(f"written-{i}")
        return self.on_own_cores(lambda: subprocess.run(command, env=environment, check=True))[0]

    def beside(self, i, seconds):
        """Seconds of a prefill into a folder while the bucket takes as many bytes in `seconds` from others."""
        command, environment = self.copy(f"beside-{i}", "--bwlimit", f"{int(self.size()['bytes'] / seconds)}B")
        store = self.cluster.folder / "beside"
        others = self.cluster.cores.get("others", os.sched_getaffinity(0))
        with subprocess.Popen(command, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, others)) as copying:
            found = self.prefill(store, f"beside-{i}")[0]
            if copying.wait() != 0:
                raise Failed("rclone failed")
        shutil.rmtree(store)
        return found

    def prefills(self):
        folders, buckets, written, beside = [], [], [], []
        for i in range(self.args.rounds):
            store = self.cluster.folder / f"store{i}"
            ways = [lambda: folders.append(self.prefill(store, f"round-{i}")), lambda: buckets.append(self.prefill(URI, f"round-{i}"))]
            for way in ways if i % 2 == 0 else reversed(ways):
                way()
            shutil.rmtree(store)
            if self.args.rclone:
                written.append(self.written(i))
                beside.append(self.beside(i, folders[-1][0]))
            self.tell("prefill", folder_s=folders[-1][0], bucket_s=buckets[-1][0], sent_ahead=buckets[-1][2],
                      **({"written_s": written[-1], "beside_s": beside[-1]} if written else {}))
        (one, one_cpu, _), (other, other_cpu, ahead) = (map(statistics.median, zip(*way)) for way in (folders, buckets))
        self.tell("prefill", rounds=self.args.rounds, folder_s=one, bucket_s=other, bucket_of_folder=other / one, folder_cpu_s=one_cpu,
                  bucket_cpu_s=other_cpu, sent_ahead=ahead, tokens=self.size()["tokens"], bytes=self.size()["bytes"],
                  **({"written_s": statistics.median(written), "beside_s": statistics.median(beside)} if written else {}))

    def size(self):
        return next(one for one in json.loads(self.cluster.run("ls", "--store", URI, "--json").stdout)["contexts"]
                    if one["name"] == "round-0")

    def colds(self):
        rounds, size = [], self.size()
        for i in range(self.args.rounds):
            store = self.cluster.folder / "pulled"
            pull, _ = self.timed("pull", "round-0", URI, "--store", store, "--quiet")
            shutil.rmtree(store)
            rounds.append({"pull_s": pull, **self.first_answers(i + 1, size["bytes"])})
            self.tell("cold", **rounds[-1])
        self.tell("cold", rounds=self.args.rounds, tokens=size["tokens"], bytes=size["bytes"],
                  **{name: statistics.median(one[name] for one in rounds) for name in rounds[0]})

    def first_answers(self, i, bytes_of_context):
        """Of a replica that has nothing yet, which is stopped then."""
        c = self.cluster
        c.start_api(1, cache_bytes=str(4 * bytes_of_context), more={"CARREL_API_THREADS": str(self.args.threads), "CARREL_API_MODEL_NAME": "bench"})
        body = {"model": "bench", "context": "round-0", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answers = [ask("round-0", "http://%s:%d" % c.api[-1], "/v1/completions", body, completion_piece)._asdict() for _ in range(2)]
        for answer in answers:
            if answer["error"] or not answer["tokens"]:
                raise Failed(f"no answer: {answer['error']}")
        if answers[0]["text"] != answers[1]["text"]:
            raise Failed(f"{answers[0]['text']!r}, asked again {answers[1]['text']!r}")
        pulled = c.metrics(f"api{i}")["carrel_replica_pull_seconds_total"]
        c.processes.pop(f"api{i}").stop()
        shutil.rmtree(c.folder / f"api{i}", ignore_errors=True)
        cold, warm = (answer["first_s"] for answer in answers)
        return {"replica_pull_s": pulled, "cold_first_s": cold, "warm_first_s": warm, "beyond_pull_s": cold - pulled}


def main():
    parser = argparse.ArgumentParser(prog="bench/cluster/cold.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = pathlib.Path
    parser.add_argument("--carrel", type=path, default=ROOT / "build/release/carrel")
    parser.add_argument("--parts", type=path, default=ROOT / "build/cluster/bin", help="folder with weed")
    parser.add_argument("--model", type=path, default=ROOT / "models/demo", help="GGUF file or folder (default models/demo)")
    parser.add_argument("--document", type=path, default=ROOT / "models/demo/docs/registry-8k.txt")
    parser.add_argument("--characters", type=int, default=24000, help="of the document, from its start")
    parser.add_argument("--threads", type=int, default=2, help="of prefill and replica; what is left is the bucket's")
    parser.add_argument("--cores", type=int, default=0, help="that prefill and pull run on, the first ones; the bucket has the others (default: all share all)")
    parser.add_argument("--device", default="cpu", help="of prefill (default cpu)")
    parser.add_argument("--bucket-disk", type=path, help="folder under which the bucket keeps its volumes: a disk that prefill does not write to (default: beside the stores)")
    parser.add_argument("--rclone", type=path, help="beside prefill it writes the same objects into the bucket")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", nargs="+", choices=("prefill", "cold"), default=["prefill", "cold"])
    args = parser.parse_args()
    if min(args.characters, args.threads, args.rounds) < 1:
        parser.error("counts are 1 or more")
    if not 0 <= args.cores < len(os.sched_getaffinity(0)):
        parser.error(f"--cores {args.cores}: fewer than the {len(os.sched_getaffinity(0))} that there are")
    others = set(sorted(os.sched_getaffinity(0))[args.cores:])
    folder = pathlib.Path(tempfile.mkdtemp(prefix="carrel-cold-"))
    disk = pathlib.Path(tempfile.mkdtemp(prefix="carrel-cold-", dir=args.bucket_disk))
    for volume in (f"volume{i + 1}" for i in range(3)):
        (disk / volume).mkdir()
        (folder / volume).symlink_to(disk / volume)
    try:
        with Cluster(folder, args.carrel, args.parts, args.model, {"others": others} if args.cores else None) as cluster:
            bench = Bench(args, cluster)
            cluster.start_bucket()
            if "prefill" in args.what:
                bench.prefills()
            else:
                bench.prefill(URI, "round-0")
            if "cold" in args.what:
                bench.colds()
    except Failed as failure:
        sys.exit(f"cold: {failure}\nlogs: {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(disk, ignore_errors=True)


if __name__ == "__main__":
    main()
