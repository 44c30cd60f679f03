#!/usr/bin/env python3
"""Every command of docs/cluster.md, in its order: tests/cluster/runbook_test.py build/release/carrel

A cluster of deploy/cluster's own files stands for the machines: addresses of the page are those of its replicas, `systemctl` starts and
stops its processes. `kubectl` and `podman-compose` are not here: what they are given must exist. A block that fails ends the test.

Skipped (exit code 77) where the parts of others are not there: ./run deps cluster."""
import http.server
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools/cluster"))

from cluster import Cluster, Failed, fetch, find_parts, wait_until  # noqa: E402

SKIPPED = 77
MODEL = ROOT / "models/demo"
PAGE = ROOT / "docs/cluster.md"
UNITS = {"carrel-serve": "serve1", "carrel-api": "api1", "carrel-worker": "worker1", "carrel-queue": "queue", "carrel-router": "router"}
# What stands for systemctl: each unit is asked of this test.
SYSTEMCTL = """#!/bin/sh
[ "$1" = daemon-reload ] && exit 0
for unit in "$@"; do :; done
exec curl -s -f -m 120 "$CARREL_TEST_UNITS/$1/$unit"
"""
# What is not here: it is given files that exist.
GIVEN = """#!/bin/sh
for one in "$@"; do
  case $one in --*=out/* | --*=deploy/*) one=${one#*=} ;; out/* | deploy/*) ;; *) continue ;; esac
  [ -e "$one" ] || { echo "$0: $one is not there" >&2; exit 1; }
done
"""


class Units(http.server.BaseHTTPRequestHandler):
    """GET /ACTION/UNIT: as systemctl does."""
    cluster, asked = None, []

    def do_GET(self):
        action, unit = self.path.strip("/").split("/")
        self.asked.append((action, unit))
        process = self.cluster.processes.get(UNITS.get(unit, ""))
        good = process is not None and action in ("enable", "restart", "stop", "start")
        if good and action in ("restart", "stop"):
            process.stop()
        if good and action in ("restart", "start"):
            process.start()
            self.wait(UNITS[unit])
        self.send_response(200 if good else 404)
        self.end_headers()

    def wait(self, name):
        kind, number = re.fullmatch(r"([a-z]+)(\d*)", name).groups()
        {"serve": lambda: self.cluster.wait_serve(int(number)), "api": lambda: self.cluster.wait_api(int(number)),
         "worker": lambda: self.cluster.wait_worker(name), "queue": self.cluster.wait_queue,
         "router": lambda: wait_until(self.cluster.router_sees_all, "replicas healthy")}[kind]()

    def log_message(self, *_):
        pass


def blocks():
    """(heading, commands) of each block that is marked as bash."""
    heading, found, lines = "", [], None
    for line in PAGE.read_text().splitlines():
        if lines is None and line.startswith("#"):
            heading = line.lstrip("# ")
        elif lines is None and line == "```bash":
            lines = []
        elif lines is not None and line == "```":
            found.append((heading, "\n".join(lines)))
            lines = None
        elif lines is not None:
            lines.append(line)
    return found


def places(cluster):
    """What the page's addresses and folders are here."""
    serve, api = ["%s:%d" % one for one in cluster.serve], ["%s:%d" % one for one in cluster.api]
    metrics = cluster.processes["serve1"].metrics.removeprefix("http://").removesuffix("/metrics")
    return {"10.0.0.1:50051": serve[0], "10.0.0.2:50051": serve[1], "10.0.0.1:8080": api[0], "10.0.0.2:8080": api[1], "10.0.0.1:9464": metrics,
            "router.internal:8080": cluster.api_address, "router.internal:50051": cluster.serve_address,
            "127.0.0.1:9901": f"127.0.0.1:{cluster.admin_port}", "bucket.internal:9333": cluster.master_address,
            "bucket.internal:8888": cluster.filer_address, "$ROOT/etc/envoy": str(cluster.envoy),
            "-name carrel'": "-name another'",  # the first one is there
            "$ROOT/var/lib/carrel/serve": str(cluster.folder / "serve1/cache"), "$ROOT": str(cluster.folder / "root")}


def home(cluster, address):
    """A folder as a clone of the repository is, and the environment of who operates."""
    here, programs = cluster.folder / "home", cluster.folder / "programs"
    here.mkdir()
    programs.mkdir()
    for name in ("deploy", "models", "tools"):
        (here / name).symlink_to(ROOT / name)
    (here / "out").mkdir()
    for name, text in (("systemctl", SYSTEMCTL), ("kubectl", GIVEN), ("podman-compose", GIVEN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "carrel").symlink_to(cluster.carrel)
    (programs / "weed").symlink_to(cluster.parts / "weed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CARREL_")) and not name.lower().endswith("_proxy")}
    environment.update(cluster.credentials("worker"), CARREL_TEST_UNITS=address, PATH=f"{programs}:{environment['PATH']}", OPENBLAS_NUM_THREADS="1")
    return here, environment


def prepare(cluster, heading):
    """What must be so before a section's commands."""
    if heading == "Before many come":
        wait_until(lambda: b'"ready"' in fetch(f"http://{cluster.api_address}/v1/contexts/registry-512")[1], "the document is ready")


def run_page(cluster, address):
    here, environment = home(cluster, address)
    known = blocks()
    if len(known) < 15:
        raise Failed(f"{PAGE} has only {len(known)} blocks")
    for heading, commands in known:
        prepare(cluster, heading)
        for place, real in places(cluster).items():
            commands = commands.replace(place, real)
        try:
            done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", commands], cwd=here, env=environment, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False)
        except subprocess.TimeoutExpired:
            raise Failed(f"{heading}: still runs after 240 s:\n{commands}") from None
        print(f"== {heading}\n{commands}\n{done.stdout[-2000:]}", flush=True)
        # Volume servers refuse loopback as the source of a copy: on this machine alone that command cannot do its work.
        if done.returncode != 0 or "error:" in done.stdout and "weed" in commands and "resolves to loopback" not in done.stdout:
            raise Failed(f"{heading}: exit code {done.returncode}:\n{commands}\n{done.stdout}")
    for unit in ("carrel-serve", "carrel-worker", "carrel-queue"):
        if ("restart", unit) not in Units.asked:
            raise Failed(f"nothing restarted {unit}")
    wait_until(cluster.router_sees_all, "all is well in the end")


def run(carrel, parts, folder):
    with Cluster(folder, carrel, parts, MODEL) as cluster:
        cluster.start_bucket()
        cluster.start_queue()
        cluster.start_worker()
        cluster.start_serve(2)
        cluster.start_api(2, more={"CARREL_API_MODEL_NAME": "demo"})
        cluster.start_router()
        Units.cluster = cluster
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Units)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run_page(cluster, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: tests/cluster/runbook_test.py build/release/carrel")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("runbook_test: stopped"))
    parts = find_parts()
    if parts is None or shutil.which("curl") is None:
        print("skipped: weed, envoy and nats-server are not here (./run deps cluster fetches them), or curl is not")
        sys.exit(SKIPPED)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="carrel-runbook-"))
    try:
        run(pathlib.Path(sys.argv[1]), parts, folder)
    except Failed as failure:
        sys.exit(f"runbook_test: {failure}\nlogs: {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    print("runbook_test: every command of docs/cluster.md works")


if __name__ == "__main__":
    main()
