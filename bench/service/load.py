"""Clients of an HTTP API that stream answers: how many tokens come in all, how long the first one takes, and the time between
tokens. Used by service.py, and alone against a server that runs: one JSON object on stdout.

A closed loop: so many clients, each of which asks again when it was answered; what is slow is then asked less. An open loop:
requests arrive at random, so many a second on average (Poisson), whatever became of those before; a request's times are from
when it was to arrive, not from when this program came to it."""
import argparse
import collections
import http.client
import itertools
import json
import random
import threading
import time
import urllib.parse

Answer = collections.namedtuple("Answer", "name text tokens first_s gaps_s seconds error")


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def stream(address, path, body, piece_of, timeout=600):
    """The pieces of a streamed answer, each with the time that it came."""
    where = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps({**body, "stream": True}),
                           {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise OSError(f"{path}: {reply.status} {reply.read(300)!r}")
        rest = b""
        while data := reply.read1():  # line by line is two fifths more work
            when = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    piece = piece_of(json.loads(line[6:]))
                    if piece:
                        yield when, piece
    finally:
        connection.close()


def ask(name, address, path, body, piece_of, arrived=None):
    """arrived: when it was to begin; now, if not given."""
    start = time.monotonic() if arrived is None else arrived
    text, times, error = "", [], None
    try:
        for when, piece in stream(address, path, body, piece_of):
            text += piece
            times.append(when)
    except (OSError, ValueError, http.client.HTTPException) as failure:
        error = str(failure)
    gaps = [b - a for a, b in zip(times, times[1:])]
    return Answer(name, text, len(times), times[0] - start if times else None, gaps,
                  time.monotonic() - start, error)


def closed_loop(clients, requests):
    """Each client asks its requests one after the other; all begin at once. A request: what ask takes."""
    answers, lock = [], threading.Lock()
    barrier = threading.Barrier(clients + 1)

    def work(client):
        barrier.wait()
        for request in requests[client::clients]:
            answer = ask(*request)
            with lock:
                answers.append(answer)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.monotonic()
    for thread in threads:
        thread.join()
    return answers, time.monotonic() - start


def open_loop(per_second, requests, seed):
    """Requests begin when their time comes, whatever became of those before."""
    answers, lock, threads, draw = [], threading.Lock(), [], random.Random(seed)
    arrival = start = time.monotonic()

    def work(request, arrived):
        answer = ask(*request, arrived=arrived)
        with lock:
            answers.append(answer)

    for request in requests:
        arrival += draw.expovariate(per_second)
        time.sleep(max(0, arrival - time.monotonic()))
        threads.append(threading.Thread(target=work, args=(request, arrival)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return answers, time.monotonic() - start


def summary(answers, seconds):
    good = [a for a in answers if a.error is None and a.tokens > 0]
    firsts, gaps = [a.first_s for a in good], [gap for a in good for gap in a.gaps_s]
    return {"answers": len(good), "errors": len(answers) - len(good), "seconds": seconds,
            "tokens": sum(a.tokens for a in good),
            "tokens_per_s": sum(a.tokens for a in good) / seconds,
            "first_token_s": {"p50": percentile(firsts, 0.5), "p99": percentile(firsts, 0.99)},
            "between_tokens_ms": {"p50": 1000 * (percentile(gaps, 0.5) or 0),
                                  "p99": 1000 * (percentile(gaps, 0.99) or 0)}}


def completion_piece(chunk):
    return chunk["choices"][0].get("text", "") if chunk.get("choices") else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="http://HOST:PORT")
    parser.add_argument("--model", required=True, help="as a request names it: NAME@CONTEXT")
    parser.add_argument("--questions", required=True, help="JSON lines with prompt")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--per-second", type=float, help="open loop: so many requests arrive, on average; > 0")
    parser.add_argument("--seed", type=int, help="of the arrivals; by default drawn, and printed")
    parser.add_argument("--requests", type=int, help="in all, the questions again and again; by default each once")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    if args.per_second is not None and args.per_second <= 0:
        parser.error(f"--per-second {args.per_second}: must be > 0")
    if args.requests is not None and args.requests <= 0:
        parser.error(f"--requests {args.requests}: must be > 0")
    with open(args.questions, encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    requests = [(str(i), args.address, "/v1/completions",
                 {"model": args.model, "prompt": prompt, "max_tokens": args.max_tokens, "temperature": 0},
                 completion_piece)
                for i, prompt in enumerate(itertools.islice(itertools.cycle(prompts), args.requests or len(prompts)))]
    if args.per_second is None:
        answers, seconds = closed_loop(args.clients, requests)
        print(json.dumps({"clients": args.clients, **summary(answers, seconds)}))
        return
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    answers, seconds = open_loop(args.per_second, requests, seed)
    print(json.dumps({"per_second": args.per_second, "seed": seed, **summary(answers, seconds)}))


if __name__ == "__main__":
    main()
