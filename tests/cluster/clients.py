"""Who asks a cluster while it is being broken: decoders over gRPC and clients of HTTP. Each holds what it gets against what one
machine said alone."""
import http.client
import json
import os
import random
import subprocess
import threading
import time

PATIENCE_S = 120  # an answer in which nothing comes for so long hangs
TRIES_S = 240     # of one question, with all that breaks
PROMPT = " The quiet"  # the demo model goes on with it until it is stopped
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CARREL_"))}, "OPENBLAS_NUM_THREADS": "1"}


class Tally:
    def __init__(self):
        self.lock = threading.Lock()
        self.counts, self.failures, self.pauses, self.cuts = {}, [], [], []

    def add(self, name):
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + 1

    def get(self, name):
        with self.lock:
            return self.counts.get(name, 0)

    def fail(self, text):
        with self.lock:
            self.failures.append(text)
            print(f"FAILURE {text}", flush=True)


class Client(threading.Thread):
    """Asks its questions in turn until `ending` is set."""

    def __init__(self, name, questions, tally, ending, seed):
        super().__init__(daemon=True)
        self.name, self.questions, self.tally, self.ending = name, questions, tally, ending
        self.random, self.answers = random.Random(seed), 0

    def run(self):
        order = list(self.questions)
        while not self.ending.is_set():
            self.random.shuffle(order)
            for question in order:
                if self.ending.is_set():
                    return
                try:
                    self.ask(question)
                except Exception as failure:  # a client that dies unseen would ask nothing more
                    self.tally.fail(f"{self.name}, {question}: {failure!r}")
                self.answers += 1


def ask_command(cluster, where, context, tokens):
    return [cluster.carrel, "ask", "--model", cluster.model, *where, "--context", context, "--plan", "store", "--max-tokens", str(tokens),
            "--lab", "ignore-eos", PROMPT]


def decode(cluster, where, context, tokens):
    """(text, standard error, exit code) of one `carrel ask`."""
    done = subprocess.run(ask_command(cluster, where, context, tokens), stdin=subprocess.DEVNULL, capture_output=True, env=ENVIRONMENT,
                          timeout=TRIES_S, check=False)
    return done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"), done.returncode


class Decoder(Client):
    """`carrel ask --server`: its session resumes by itself, so that whatever is killed it ends with the whole text."""

    def __init__(self, *args, cluster, address, tokens, expected):
        super().__init__(*args)
        self.cluster, self.address, self.tokens, self.expected = cluster, address, tokens, expected

    def ask(self, context):
        began, last, longest, text = time.monotonic(), None, 0.0, b""
        process = subprocess.Popen(ask_command(self.cluster, ["--server", self.address, "--retry-for", "120s"], context, self.tokens),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
        while True:
            some = os.read(process.stdout.fileno(), 4096)
            now = time.monotonic()
            if not some:
                break
            if last is not None and now - last > longest:
                longest = now - last
            last, text = now, text + some
        said = process.stderr.read().decode()
        code = process.wait()
        text = text.decode("utf-8", "replace")
        if code != 0:
            return self.tally.fail(f"{self.name}, {context}: exit code {code} after {now - began:.1f} s: {said}")
        if text != self.expected[context]:
            return self.tally.fail(f"{self.name}, {context}: {text!r} is not {self.expected[context]!r}; {said}")
        self.tally.add("decoder: right")
        if "is back after" in said:
            self.tally.add("decoder: resumed")
        with self.tally.lock:
            self.tally.pauses.append((longest, "is back after" in said))


class Cut(Exception):
    pass


def complete(address, context, tokens, form="context", began=None):
    """One streamed answer of the API: (status, text or error, replica). Raises Cut(what came) where it ends before its end.
    form: how the context is said: "context", "model" or "header". began: told which replica answers."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    text = ""
    try:
        body = {"model": f"demo@{context}"} if form == "model" else {"model": "demo", "context": context}
        body.update(prompt=PROMPT, max_tokens=tokens, temperature=0, stream=True)
        fields = {"Content-Type": "application/json", **({"carrel-context": context} if form == "header" else {})}
        connection.request("POST", "/v1/completions", json.dumps(body), fields)
        reply = connection.getresponse()
        if reply.status != 200:
            return reply.status, reply.read().decode("utf-8", "replace"), ""
        replica = reply.getheader("carrel-replica")
        if began is not None:
            began(replica)
        for line in reply:
            if line.startswith(b"data: [DONE]"):
                return 200, text, replica
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise Cut(text)
                text += "".join(choice.get("text") or "" for choice in event["choices"])
        raise Cut(text)
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException):
        raise Cut(text) from None
    finally:
        connection.close()


class Asker(Client):
    """Streams over HTTP: what is cut ends without its last event, and is asked again."""

    def __init__(self, *args, address, tokens, expected):
        super().__init__(*args)
        self.address, self.tokens, self.expected = address, tokens, expected
        self.replica = None  # who answers now

    def ask(self, context):
        until = time.monotonic() + TRIES_S
        while time.monotonic() < until:
            form = self.random.choice(("context", "model"))
            try:
                status, text, _ = complete(self.address, context, self.tokens, form, self.began)
            except Cut as cut:
                with self.tally.lock:
                    self.tally.cuts.append((time.monotonic(), self.replica, len(cut.args[0])))
                self.replica = None
                self.tally.add("api: cut")
                if not self.expected[context].startswith(cut.args[0]):
                    return self.tally.fail(f"{self.name}, {context}: {cut.args[0]!r} does not begin {self.expected[context]!r}")
                time.sleep(0.1)
                continue
            self.replica = None
            if status == 200:
                if text != self.expected[context]:
                    return self.tally.fail(f"{self.name}, {context}: {text!r} is not {self.expected[context]!r}")
                return self.tally.add("api: right")
            if status != 503:
                return self.tally.fail(f"{self.name}, {context}: {status} {text}")
            self.tally.add("api: 503")
            time.sleep(0.2)
        return self.tally.fail(f"{self.name}, {context}: not answered within {TRIES_S} s")

    def began(self, replica):
        self.replica = replica
