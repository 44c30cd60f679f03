"""A cluster on this machine's loopback, of the files of deploy/cluster: a bucket (SeaweedFS), a queue (NATS), replicas, workers,
the router (Envoy). For tests/cluster, `./run demo cluster` and bench/cluster. Python 3.9 or later, its standard library alone.

    with Cluster(folder, carrel, parts, model) as cluster:
        cluster.start_bucket()
        cluster.start_serve(2)
        cluster.start_router()

Ports are free ones. All processes end with the `with`, and with this process whatever ends it. Nothing but loopback is used.
"""
import concurrent.futures
import ctypes
import datetime
import hashlib
import hmac
import json
import os
import pathlib
import random
import re
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree

from clusters import clusters

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy/cluster"
PARTS = ("weed", "envoy", "nats-server")
PATIENCE_S = 120  # until a part answers, on a busy machine
BUCKET = "carrel"
URI = f"s3://{BUCKET}/contexts"


class Failed(Exception):
    """What a cluster could not do, for people."""


def find_parts(folder=None):
    """Folder with the programs of others: given, $CARREL_CLUSTER_PARTS, or where `./run deps cluster` leaves them. None: they are
    not all there."""
    for place in (folder, os.environ.get("CARREL_CLUSTER_PARTS"), ROOT / "build/cluster/bin"):
        if place and all(os.access(pathlib.Path(place) / part, os.X_OK) for part in PARTS):
            return pathlib.Path(place).resolve()
    return None


def is_free(port):
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count):
    """`count` in a row that nobody has, nor those 10,000 above, which SeaweedFS takes for gRPC."""
    for _ in range(1000):
        first = random.SystemRandom().randrange(18000, 21500)
        if all(is_free(port) and is_free(port + 10000) for port in range(first, first + count)):
            return first
    raise Failed("no free ports on 127.0.0.1")


def wait_until(true, what, seconds=PATIENCE_S, every=0.05):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = true()
        if value:
            return value
        time.sleep(every)
    raise Failed(f"{what}: not within {seconds} s")


def fetch(url, method="GET", body=None, headers=None, timeout=10):
    """(status, body) of one request; status 0: no answer, the body says why."""
    request = urllib.request.Request(url, data=body, method=method, headers=headers or {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except (OSError, ValueError) as error:
        return 0, str(error).encode()


class Bucket:
    """As little of S3 as tests need: the bucket made, its keys, one object. AWS Signature Version 4."""

    def __init__(self, endpoint, key, secret):
        self.endpoint, self.key, self.secret = endpoint, key, secret

    def call(self, method, path, query=None, body=b"", headers=None, timeout=10):
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        query = urllib.parse.urlencode(sorted((query or {}).items()), quote_via=urllib.parse.quote)
        sha = hashlib.sha256(body).hexdigest()
        signed = {"host": urllib.parse.urlsplit(self.endpoint).netloc, "x-amz-content-sha256": sha, "x-amz-date": now}
        names = ";".join(sorted(signed))
        request = "\n".join([method, urllib.parse.quote(path), query, *(f"{name}:{signed[name]}" for name in sorted(signed)), "", names, sha])
        scope = f"{now[:8]}/us-east-1/s3/aws4_request"
        text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode()).hexdigest()])
        key = ("AWS4" + self.secret).encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        authorization = f"AWS4-HMAC-SHA256 Credential={self.key}/{scope}, SignedHeaders={names}, Signature={signature}"
        url = f"{self.endpoint}{urllib.parse.quote(path)}" + (f"?{query}" if query else "")
        return fetch(url, method, body or (b"" if method == "PUT" else None), {**signed, **(headers or {}), "Authorization": authorization}, timeout)

    def make(self):
        return self.call("PUT", f"/{BUCKET}")[0] in (200, 409)

    def works(self):
        """One object put and read, whichever volume it falls on."""
        return self.call("PUT", f"/{BUCKET}/probe", body=b"probe", timeout=5)[0] == 200 and \
            self.call("GET", f"/{BUCKET}/probe", timeout=5) == (200, b"probe")

    def keys(self, prefix=""):
        """All keys below a prefix. Raises Failed."""
        found, token = [], None
        while True:
            query = {"list-type": "2", "prefix": prefix, **({"continuation-token": token} if token else {})}
            status, body = self.call("GET", f"/{BUCKET}", query, timeout=30)
            if status != 200:
                raise Failed(f"list of {prefix}: {status} {body[:300]!r}")
            tree = xml.etree.ElementTree.fromstring(body)
            space = tree.tag[:tree.tag.index("}") + 1] if tree.tag.startswith("{") else ""
            found += [one.findtext(f"{space}Key") for one in tree.iter(f"{space}Contents")]
            token = tree.findtext(f"{space}NextContinuationToken")
            if not token:
                return found

    def get(self, key):
        status, body = self.call("GET", f"/{BUCKET}/{key}", timeout=30)
        if status != 200:
            raise Failed(f"{key}: {status} {body[:300]!r}")
        return body


class Process:
    """One program, with a log; may be killed and started again as it was."""

    # Who asks the kernel to be killed with its parent means the thread that started it: this one lasts.
    starter = concurrent.futures.ThreadPoolExecutor(1)
    libc = ctypes.CDLL(None)

    def __init__(self, name, args, log, environment=None, folder=None, cores=None):
        self.name, self.args, self.log, self.folder, self.cores = name, [str(arg) for arg in args], pathlib.Path(log), folder, cores
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.lower().endswith("_proxy") and not re.match(r"AWS_|CARREL_(SERVE|API|WORKER|KEY|TLS)_", name)}
        self.environment.update({"OPENBLAS_NUM_THREADS": "1", **(environment or {})})
        self.process = None

    def start(self):
        def before():
            self.libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if self.cores is not None:
                os.sched_setaffinity(0, self.cores)

        def spawn():
            with open(self.log, "ab") as log:
                return subprocess.Popen(self.args, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment,
                                        cwd=self.folder, preexec_fn=before)

        self.process = self.starter.submit(spawn).result()
        return self

    def running(self):
        return self.process is not None and self.process.poll() is None

    def kill(self):
        """kill -9."""
        if self.running():
            self.process.kill()
        self.process.wait()

    def stop(self, patience=45):
        """SIGTERM, and its exit code; what does not end is killed."""
        if self.process is None:
            return 0
        if self.running():
            self.process.terminate()
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def tail(self, lines=15):
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def until(self, true, what, seconds=PATIENCE_S):
        def checked():
            if not self.running():
                raise Failed(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")
            return true()
        try:
            return wait_until(checked, f"{self.name}: {what}", seconds)
        except Failed as failure:
            raise Failed(f"{failure}\n{self.tail()}") from None


class Cluster:
    def __init__(self, folder, carrel, parts, model, cores=None):
        """cores: of whom: {"serve1": {0, 1}, "others": {2}}; none: all of the machine's."""
        self.folder, self.carrel, self.parts, self.model = (pathlib.Path(one).resolve() for one in (folder, carrel, parts, model))
        self.cores, self.processes, self.port = cores or {}, {}, free_ports(60)
        self.secrets = {f"CHANGE-{who}-SECRET": secrets.token_hex(20) for who in ("ADMIN", "WORKER", "REPLICA")}
        self.password = "p" + secrets.token_hex(20)  # NATS reads it as a value of its configuration
        self.serve, self.api, self.workers = [], [], []  # addresses HOST:PORT of replicas; names of workers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Who asks first, who is asked last."""
        for name in reversed(list(self.processes)):
            self.processes[name].stop(20)

    def add(self, name, args, environment=None):
        where = self.folder / name
        where.mkdir(parents=True, exist_ok=True)
        cores = self.cores.get(name, self.cores.get("others"))
        process = Process(name, args, self.folder / f"{name}.log", environment, where, cores)
        self.processes[name] = process
        return process.start()

    def ports(self, count=1):
        self.port += count
        return self.port - count

    # The bucket.

    def start_bucket(self, volumes=3):
        """master, `volumes` volume servers, filer, s3; the bucket made."""
        weed, options = self.parts / "weed", DEPLOY / "bucket"
        home = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        master, filer, s3 = self.ports(), self.ports(), self.ports()
        config = self.folder / "s3.json"
        text = (options / "s3.json").read_text()
        for placeholder, secret in self.secrets.items():
            text = text.replace(placeholder, secret)
        config.write_text(text)
        config.chmod(0o600)
        for name in ("master", "filer", *(f"volume{i + 1}" for i in range(volumes))):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.add("master", [weed, "master", f"-options={options}/master.options", f"-port={master}", f"-mdir={self.folder}/master", *home])
        for i in range(volumes):
            self.add(f"volume{i + 1}", [weed, "volume", f"-options={options}/volume.options", f"-port={self.ports()}", "-max=40", "-minFreeSpace=1",
                                        f"-dir={self.folder}/volume{i + 1}", f"-master=127.0.0.1:{master}", *home])
        self.add("filer", [weed, "filer", f"-options={options}/filer.options", f"-port={filer}", f"-master=127.0.0.1:{master}",
                           f"-defaultStoreDir={self.folder}/filer", f"-localSocket={self.folder}/filer.sock", *home])
        self.add("s3", [weed, "s3", f"-options={options}/s3.options", f"-port={s3}", f"-config={config}", f"-filer=127.0.0.1:{filer}",
                        f"-localSocket={self.folder}/s3.sock", "-ip.bind=127.0.0.1"])
        self.endpoint, self.master_address, self.filer_address = f"http://127.0.0.1:{s3}", f"127.0.0.1:{master}", f"127.0.0.1:{filer}"
        self.bucket = Bucket(self.endpoint, "carrel-admin", self.secrets["CHANGE-ADMIN-SECRET"])
        self.bucket_names = ["s3", "filer", *(f"volume{i + 1}" for i in range(volumes)), "master"]
        self.processes["s3"].until(self.bucket.make, "no bucket")
        self.processes["s3"].until(self.bucket.works, "no object can be put")

    def credentials(self, who="worker"):
        """Environment of who may read and list (replica), write too (worker), or all (admin)."""
        return {"AWS_ENDPOINT_URL_S3": self.endpoint, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": f"carrel-{who}",
                "AWS_SECRET_ACCESS_KEY": self.secrets[f"CHANGE-{who.upper()}-SECRET"]}

    def run(self, *args, who="worker", check=True, timeout=600):
        """carrel ARGS with a bucket's credentials: a finished process, its output as text."""
        environment = Process("", [], "").environment
        done = subprocess.run([self.carrel, *map(str, args)], env={**environment, **self.credentials(who)}, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=timeout, check=False)
        if check and done.returncode != 0:
            raise Failed(f"carrel {' '.join(map(str, args))}: exit code {done.returncode}\n{done.stderr}")
        return done

    # The queue.

    def start_queue(self):
        self.queue_port, monitor = self.ports(), self.ports()
        self.queue_health = f"http://127.0.0.1:{monitor}/healthz"
        text = (DEPLOY / "nats.conf").read_text()
        for old, new in (("0.0.0.0:4222", f"127.0.0.1:{self.queue_port}"), ("127.0.0.1:8222", f"127.0.0.1:{monitor}")):
            assert old in text, old
            text = text.replace(old, new)
        config = self.folder / "nats.conf"
        config.write_text(text)
        self.add("queue", [self.parts / "nats-server", "-c", config], {"CARREL_NATS_PASSWORD": self.password})
        self.wait_queue()

    def wait_queue(self):
        self.processes["queue"].until(lambda: fetch(self.queue_health)[0] == 200, "does not answer")

    # Replicas.

    def start_serve(self, count, cache_bytes="2GB", more=()):
        for _ in range(count):
            i, port, metrics = len(self.serve) + 1, self.ports(), self.ports()
            environment = {**self.credentials("replica"), "CARREL_SERVE_CACHE": str(self.folder / f"serve{i}/cache"),
                           "CARREL_SERVE_CACHE_BYTES": cache_bytes, "CARREL_SERVE_LISTEN": f"127.0.0.1:{port}",
                           "CARREL_SERVE_INSECURE": "false", "CARREL_SERVE_METRICS": f"127.0.0.1:{metrics}", **dict(more)}
            process = self.add(f"serve{i}", [self.carrel, "serve", "--config", DEPLOY / "serve.toml"], environment)
            process.metrics = f"http://127.0.0.1:{metrics}/metrics"
            self.serve.append(("127.0.0.1", port))
        for i in range(len(self.serve) - count, len(self.serve)):
            self.wait_serve(i + 1)

    def wait_serve(self, i):
        process = self.processes[f"serve{i}"]
        process.until(lambda: fetch(process.metrics)[0] == 200, "does not answer")

    def start_api(self, count, cache_bytes="2GB", more=(), over=None):
        """over: address of who has the contexts (deploy/cluster/api-over-serve.toml); none: each has a cache of its own (api.toml)."""
        for _ in range(count):
            i, port = len(self.api) + 1, self.ports()
            environment = {**self.credentials("worker"), **self.doorbell("API"), "CARREL_API_MODEL": str(self.model),
                           "CARREL_API_LISTEN": f"127.0.0.1:{port}", "CARREL_API_INSECURE": "false",
                           # Documents, without the token of the page.
                           "CARREL_API_ANYONE_MAY_ADD_AND_DELETE": "true"}
            if over is None:
                environment.update({"CARREL_API_CACHE": str(self.folder / f"api{i}/cache"), "CARREL_API_CACHE_BYTES": cache_bytes})
            else:
                environment["CARREL_API_SERVER"] = over
            config = DEPLOY / ("api.toml" if over is None else "api-over-serve.toml")
            process = self.add(f"api{i}", [self.carrel, "--config", config, "api"], {**environment, **dict(more)})
            process.metrics = f"http://127.0.0.1:{port}/metrics"
            self.api.append(("127.0.0.1", port))
        for i in range(len(self.api) - count, len(self.api)):
            self.wait_api(i + 1)

    def wait_api(self, i):
        host, port = self.api[i - 1]
        self.processes[f"api{i}"].until(lambda: fetch(f"http://{host}:{port}/health")[0] == 200, "does not answer")

    # Workers.

    def start_worker(self, count=1, more=()):
        for _ in range(count):
            i, metrics = len(self.workers) + 1, self.ports()
            environment = {**self.credentials("worker"), "CARREL_WORKER_MODEL": str(self.model), "CARREL_WORKER_WORK": str(self.folder / f"worker{i}/work"),
                           "CARREL_WORKER_METRICS": f"127.0.0.1:{metrics}", **self.doorbell(), **dict(more)}
            process = self.add(f"worker{i}", [self.carrel, "worker", "--config", DEPLOY / "worker.toml"], environment)
            process.metrics = f"http://127.0.0.1:{metrics}/metrics"
            self.workers.append(f"worker{i}")
        for name in self.workers[-count:]:
            self.wait_worker(name)

    def doorbell(self, of="WORKER"):
        return {f"CARREL_{of}_NATS": f"nats://carrel:{self.password}@127.0.0.1:{self.queue_port}"} if "queue" in self.processes else {}

    def wait_worker(self, name):
        process = self.processes[name]
        process.until(lambda: fetch(process.metrics)[0] == 200, "does not answer")

    # The router.

    def start_router(self):
        """Envoy before the replicas that were started."""
        self.serve_port, self.api_port, self.admin_port, self.probe_port = (self.ports() for _ in range(4))
        self.envoy = self.folder / "envoy"
        self.envoy.mkdir(parents=True, exist_ok=True)
        self.write_clusters()
        text = (DEPLOY / "envoy.yaml").read_text()
        for old, new in (("/etc/envoy", str(self.envoy)), ("port_value: 50051", f"port_value: {self.serve_port}"),
                         ("port_value: 8080", f"port_value: {self.api_port}"), ("port_value: 9901", f"port_value: {self.admin_port}"),
                         ("port_value: 9902", f"port_value: {self.probe_port}"), ("address: 0.0.0.0", "address: 127.0.0.1")):
            assert old in text, old
            text = text.replace(old, new)
        (self.envoy / "envoy.yaml").write_text(text)
        self.add("router", [self.parts / "envoy", "-c", self.envoy / "envoy.yaml", "--use-dynamic-base-id", "--concurrency", "2", "-l", "warning"])
        self.processes["router"].until(self.router_sees_all, "does not see all replicas healthy")
        self.serve_address, self.api_address = f"127.0.0.1:{self.serve_port}", f"127.0.0.1:{self.api_port}"

    def write_clusters(self):
        """Moves a new list of the replicas under Envoy's eyes."""
        new = self.folder / "clusters.new"
        new.write_text(clusters(self.serve, self.api))
        os.replace(new, self.envoy / "clusters.yaml")

    def health(self):
        """{HOST:PORT: healthy} of all replicas, as Envoy sees them."""
        status, body = fetch(f"http://127.0.0.1:{self.admin_port}/clusters?format=json")
        if status != 200:
            return {}
        found = {}
        for one in json.loads(body).get("cluster_statuses", []):
            for host in one.get("host_statuses", []) if one["name"] != "admin" else []:
                at = host["address"]["socket_address"]
                flags = {key: value for key, value in host["health_status"].items() if value is True}
                found[f"{at['address']}:{at['port_value']}"] = not flags
        return found

    def router_sees_all(self):
        health = self.health()
        return all(health.get(f"{host}:{port}") for host, port in self.serve + self.api)

    def metrics(self, name):
        """{metric with its labels: value} of a replica or worker."""
        status, body = fetch(self.processes[name].metrics)
        if status != 200:
            raise Failed(f"{name}: no metrics: {status}")
        return {key: float(value) for key, value in re.findall(r"^(\w+(?:\{.*\})?) ([-+.\w]+)$", body.decode(), re.M)}
