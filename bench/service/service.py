"""`carrel api` under clients that ask four documents at once, and llama.cpp's server on the same file, text and questions: JSON
lines on stdout. Any number of clients asks the same questions of the same documents, one after the other or at once, and the
numbers of clients take turns: a machine's speed changes from minute to minute. llama.cpp, which takes minutes for each, has
one turn. It reads each document once; its slots then hold one document each, as many times as there are clients."""
import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "real"))
import load  # noqa: E402
import peer  # noqa: E402

DOCUMENTS = 4
BYTES = 29_000  # of a document: some 7,000 tokens
QUESTIONS = ["Who speaks first, and to whom?", "What is said about the weather?", "Where does this take place?",
             "What happens at the end?", "Who is unhappy, and why?", "What is the family's house like?",
             "Which letters are mentioned?", "What do the sisters do?"]


def cut(text, number):
    start = text.index(b" ", number * BYTES) if number else 0
    return text[start:text.rindex(b" ", start, start + BYTES)].decode()


def prompt_of(question):
    return f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n"


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"bench service: {' '.join(command[:3])} ... failed with exit code {done.returncode}")
    return done.stdout


class Carrel:
    def __init__(self, args, zone):
        self.args = args
        self.zone = zone
        self.store = os.path.join(args.folder, "store")
        for i, text in enumerate(args.texts):
            path = os.path.join(args.folder, f"d{i}.txt")
            with open(path, "w", encoding="utf-8") as file:
                file.write("<|im_start|>user\n" + text)
            there = subprocess.run([args.carrel, "inspect", f"d{i}", "--store", self.store], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, check=False)
            if there.returncode != 0:
                run([args.carrel, "prefill", "--model", args.gguf, "--raw", "--input", path, "--store", self.store, "--name", f"d{i}",
                     "--quiet"])

    def __enter__(self):
        self.server = subprocess.Popen(
            [self.args.carrel, "api", "--model", self.args.gguf, "--store", self.store, "--listen", "127.0.0.1:0", "--read-only",
             "--model-name", "m", "--zone", self.zone, *self.args.carrel_flags.split()], stderr=subprocess.PIPE, text=True)
        for line in self.server.stderr:
            found = re.search(r"on (http://[0-9.:]+)/v1", line)
            if found:
                self.address = found.group(1)
                return self
        sys.exit("bench service: carrel api did not start")

    def __exit__(self, *_):
        self.server.terminate()
        self.server.wait()

    def request(self, client, document, question):
        return (f"d{document}: {question}", self.address, "/v1/completions",
                {"model": f"m@d{document}", "prompt": prompt_of(question), "max_tokens": self.args.max_tokens,
                 "temperature": 0}, load.completion_piece)


class Llama:
    """xllamacpp's server in this process, with a slot per client, and at least one per document."""

    def __init__(self, args, clients):
        import xllamacpp
        self.args = args
        self.slots = max(clients, DOCUMENTS)
        params = xllamacpp.CommonParams()
        params.model.path = args.gguf
        params.n_ctx = self.slots * 8192
        params.n_parallel = self.slots
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        params.slot_save_path = args.folder + "/"
        params.endpoint_slots = True
        params.warmup = False
        params.cache_ram_mib = 0
        self.server = xllamacpp.Server(params)
        self.address = self.server.listening_address
        self.post = lambda path, body: peer.Peer.post(self, path, body)
        self.ids = []
        for i, text in enumerate(args.texts):
            ids = peer.Peer.tokens(self, "<|im_start|>user\n" + text)
            self.ids.append(ids)
            self.post("/completion", {"prompt": ids, "n_predict": 0, "id_slot": i, "cache_prompt": True})
            self.post(f"/slots/{i}?action=save", {"filename": f"d{i}.slot"})
        for slot in range(DOCUMENTS, self.slots):
            self.post(f"/slots/{slot}?action=restore", {"filename": f"d{slot % DOCUMENTS}.slot"})

    def request(self, client, document, question):
        ids = self.ids[document] + peer.Peer.tokens(self, prompt_of(question))
        return (f"d{document}: {question}", self.address, "/completion",
                {"prompt": ids, "n_predict": self.args.max_tokens,
                 "id_slot": client if client % DOCUMENTS == document else document, "cache_prompt": True,
                 "temperature": 0}, lambda chunk: chunk.get("content", ""))


def requests_of(who, clients):
    """The same for any number of clients: each question of each document, twice."""
    return [who.request(i % clients, i % DOCUMENTS, QUESTIONS[i // DOCUMENTS % len(QUESTIONS)])
            for i in range(2 * DOCUMENTS * len(QUESTIONS))]


def warm(who, clients):
    """What is read and opened for the first time."""
    load.closed_loop(clients, requests_of(who, clients)[:max(clients, DOCUMENTS)])


def turn(program, who, clients):
    """Answers and seconds."""
    answers, seconds = load.closed_loop(clients, requests_of(who, clients))
    for answer in answers:
        if answer.error:
            print(f"bench service: {program}: {answer.error}", file=sys.stderr)
    return answers, seconds


def turn_of_llama(args, clients):
    """By a server of its own, which ends with it."""
    llama = Llama(args, clients)
    warm(llama, clients)
    return turn("llama.cpp", llama, clients)


def report(program, clients, turns):
    answers = [answer for of_turn, _ in turns for answer in of_turn]
    summary = load.summary(answers, sum(seconds for _, seconds in turns))
    each = [round(load.summary(*one)["tokens_per_s"], 1) for one in turns]
    print(json.dumps({"program": program, "clients": clients, **summary, "tokens_per_s_of_turns": each}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("carrel", "gguf", "document", "folder"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--carrel-flags", default="")
    parser.add_argument("--zone", action="append", help="of carrel api, auto by default; several take turns, each a server of its own")
    parser.add_argument("--turns", type=int, default=3, help="of each number of clients, in turn")
    parser.add_argument("--max-tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("clients", nargs="*", type=int, default=[1, 4, 16])
    args = parser.parse_args()
    for clients in args.clients:
        if clients < 1 or clients % DOCUMENTS and DOCUMENTS % clients:
            parser.error(f"{clients} clients: must be a divisor or a multiple of {DOCUMENTS}, the number of documents")
    if args.turns < 1:
        parser.error(f"--turns {args.turns}: must be at least 1")
    os.makedirs(args.folder, exist_ok=True)
    args.folder = os.path.abspath(args.folder)
    with open(args.document, "rb") as file:
        text = file.read()
    args.texts = [cut(text, i) for i in range(DOCUMENTS)]
    said = {}
    zones = args.zone or ["auto"]
    name = {zone: f"carrel api --zone {zone}" if args.zone else "carrel api" for zone in zones}
    turns = {(zone, clients): [] for zone in zones for clients in args.clients}
    with contextlib.ExitStack() as servers:
        carrels = {zone: servers.enter_context(Carrel(args, zone)) for zone in zones}
        for zone, clients in turns:
            warm(carrels[zone], clients)
        for _ in range(args.turns):
            for clients in args.clients:
                for zone in zones:
                    turns[zone, clients].append(turn(name[zone], carrels[zone], clients))
                    differing = [answer.name for answer in turns[zone, clients][-1][0]
                                 if not answer.error and said.setdefault((zone, answer.name), answer.text) != answer.text]
                    if differing:
                        sys.exit(f"bench service: with {clients} clients other answers than before: {differing[:3]}")
    for (zone, clients), of_zone in turns.items():
        report(name[zone], clients, of_zone)
    if not args.no_peer:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        for clients in args.clients:
            report("llama.cpp", clients, [turn_of_llama(args, clients)])
    return 0


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"bench service: {time.monotonic() - started:.0f} s", file=sys.stderr)
    os._exit(code)  # the peer's threads do not end by themselves
