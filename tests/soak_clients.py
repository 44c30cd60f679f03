"""Clients of `carrel api` for tests/soak_api: they ask what was asked before, alone and undisturbed, and demand the same text.

An attempt ends right, wrong, left (the client went in the middle, as it meant to) or with the error that it met. Only what
says that it is complete is held to be; but what came before an error must be how the right answer begins.
"""
import collections
import dataclasses
import http.client
import json
import random
import socket
import struct
import threading
import time

PATIENCE_S = 300  # an attempt in which nothing comes for so long is an error: nothing_came
GIVE_UP_S = 600   # of all attempts at one question


@dataclasses.dataclass
class Question:
    api: str       # of which server: a key of addresses
    what: str      # for people
    path: str
    body: dict
    may_go: bool = False  # its context is deleted at times
    expected: frozenset = frozenset()


@dataclasses.dataclass
class Reply:
    text: str = ""
    finish: str = ""
    cached: int = -1
    error: str = ""  # empty: none


class Tally:
    """What became of all attempts, and what must not be."""

    def __init__(self):
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.failures = []
        self.longest_s = 0.0

    def add(self, name, *more):
        with self.lock:
            self.counts.update([name, *more])

    def fail(self, text):
        with self.lock:
            self.counts["FAILURES"] += 1
            self.failures.append(f"{time.strftime('%H:%M:%S')} {text}")
            print("FAILURE", self.failures[-1], flush=True)


def error_name(failure):
    """A short name for what a connection met."""
    if isinstance(failure, TimeoutError):
        return "nothing_came"
    if isinstance(failure, http.client.IncompleteRead):
        return "cut_off"
    if isinstance(failure, (http.client.HTTPException, ValueError)):
        return "cut_off" if isinstance(failure, http.client.RemoteDisconnected) else f"malformed:{failure!r}"
    return type(failure).__name__


class Leaves(Exception):
    """The client goes now."""


def connect(address):
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    connection.connect()
    return connection


def request(address, method, target, body=None, kind="application/json"):
    """Status and body of a call that is not an answer's; status 0: the body is the error's name."""
    connection = None
    try:
        connection = connect(address)
        connection.request(method, target, body, {"Content-Type": kind})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    except (OSError, http.client.HTTPException) as failure:
        return 0, error_name(failure)
    finally:
        if connection is not None:
            connection.close()


def refusal(status, body):
    """The name of an answer that is an error, and whether it says so as it should."""
    try:
        told = json.loads(body)["error"]
        return f"{status}_{told['code'] or told['type']}", told["message"]
    except (ValueError, KeyError, TypeError):
        return f"{status}_malformed", body[:500]


def read_whole(reply, out):
    answer = json.loads(reply.read())
    choice = answer["choices"][0]
    out.text = choice["message"]["content"] if "message" in choice else choice["text"]
    out.finish = choice["finish_reason"]
    out.cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def read_stream(reply, out, leave_after):
    events, done, finish = 0, False, ""
    for line in reply:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            out.error = "event_" + str(event["error"].get("code") or event["error"]["type"])
            return
        if event.get("usage"):
            out.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        for choice in event["choices"]:
            out.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            finish = choice.get("finish_reason") or finish
        events += 1
        if leave_after is not None and events > leave_after:
            raise Leaves
    # An end without its last event is an end in the middle.
    out.finish = finish if done else ""
    if not out.finish:
        out.error = "cut_off"


def ask(address, question, stream=False, leave_after=None, overrides=None):
    """One attempt. leave_after: how many events of a stream are taken before the client goes, with a reset."""
    out, connection = Reply(), None
    body = {**question.body, **(overrides or {})}
    if stream:
        body.update(stream=True, stream_options={"include_usage": True})
    try:
        connection = connect(address)
        connection.request("POST", question.path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            out.error, out.text = refusal(reply.status, reply.read().decode())
        elif stream:
            read_stream(reply, out, leave_after)
        else:
            read_whole(reply, out)
    except Leaves:
        out.error = "left"
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except (OSError, http.client.HTTPException, ValueError) as failure:
        out.error = error_name(failure)
    finally:
        if connection is not None:
            connection.close()
    return out


# What a server that is killed, or whose kvstore is, may say. Anything else is a failure.
EXPECTED_ERRORS = ("left", "cut_off", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError", "503_", "event_")


def judge(question, reply, tally):
    """Counts an attempt; true: the question is done with."""
    said = f"{question.api}, {question.what}: {json.dumps(question.body)}"
    beginning = reply.text and not reply.error[:1].isdigit()
    if not reply.error:
        right = reply.text in question.expected
        tally.add("right" if right else "WRONG")
        if not right:
            tally.fail(f"wrong answer, {said}: {reply} instead of {sorted(question.expected)}")
        return True
    if beginning and not any(text.startswith(reply.text) for text in question.expected):
        tally.fail(f"wrong beginning, {said}: {reply} instead of {sorted(question.expected)}")
    gone = question.may_go and reply.error.startswith("404_")
    tally.add("error: " + reply.error)
    if not gone and not reply.error.startswith(EXPECTED_ERRORS):
        tally.fail(f"an error that must not be, {said}: {reply}")
    return gone or reply.error == "left"


class Client(threading.Thread):
    """Asks as long as `going` is set, ends with `ending`. Tries again what an error met."""

    def __init__(self, addresses, questions, tally, going, ending, seed):
        super().__init__(daemon=True)
        self.addresses, self.questions, self.tally = addresses, questions, tally
        self.going, self.ending, self.random = going, ending, random.Random(seed)
        self.idle = False

    def run(self):
        while not self.ending.is_set():
            self.idle = not self.going.is_set()
            if self.idle:
                time.sleep(0.05)
            else:
                self.ask_until_answered()
        self.idle = True

    def ask_until_answered(self):
        question, draw = self.random.choice(self.questions), self.random.random()
        leave_after, overrides = None, None
        if draw < 0.1:  # a long answer that nobody waits for
            leave_after, overrides = self.random.randrange(8), {"temperature": 2, "max_tokens": 400}
        start, tries = time.monotonic(), 0
        while not self.ending.is_set():
            reply = ask(self.addresses[question.api], question, stream=draw < 0.55, leave_after=leave_after,
                        overrides=overrides)
            if leave_after is not None:
                reply.text = ""  # drawn at random
                if not reply.error:
                    reply.error = "left"
            if judge(question, reply, self.tally):
                break
            tries += 1
            if time.monotonic() - start > GIVE_UP_S:
                self.tally.fail(f"no answer in {GIVE_UP_S} s and {tries} attempts: {question.what}, {reply}")
                break
            time.sleep(self.random.uniform(0.1, 1))
        if tries > 0:
            self.tally.add("answered after other attempts")
        with self.tally.lock:
            self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - start)
