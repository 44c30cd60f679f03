#!/usr/bin/env python3
"""OpenAI's own Python client, as it comes from PyPI, against `carrel api`: what people's programs will do.

  pip install openai
  tests/openai/openai_test.py CARREL --store STORE --context NAME --questions FILE.jsonl --model MODEL [--adapter FOLDER]

Each question's answer must be that of `carrel ask`. Starts its own server on the store, and ends it.
"""
import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

import openai

STREAMS = 256


class Server:
    def __init__(self, arguments):
        command = [arguments.carrel, "api", "--model", arguments.model, "--store", arguments.store, "--read-only",
                   "--listen", "127.0.0.1:0", "--model-name", "model"]
        self.process = subprocess.Popen(command + adapter(arguments), stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"http://([0-9.:]+)/", line):
                self.url = f"http://{found[1]}"
                return
        sys.exit("openai_test: carrel api ended")

    def metric(self, line):
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        found = re.search("^" + re.escape(line) + r" (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate()[1]
        assert self.process.returncode == 0, said


def adapter(arguments):
    return ["--adapter", arguments.adapter] if arguments.adapter else []


def asked(arguments, prompt):
    """What the program itself answers."""
    out = subprocess.check_output([arguments.carrel, "ask", "--model", arguments.model, "--store", arguments.store, "--context",
                                   arguments.context, "--json", "--raw", *adapter(arguments), prompt])
    return json.loads(out)["text"]


class Test:
    def __init__(self, arguments, server):
        self.arguments, self.server = arguments, server
        self.client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with open(arguments.questions) as lines:
            self.questions = [json.loads(line) for line in lines if line.strip()]
        self.model = f"model@{arguments.context}"

    def complete(self, prompt, **more):
        return self.client.completions.create(model=self.model, prompt=prompt, **{"temperature": 0, "max_tokens": 64, **more})

    def models(self):
        names = [model.id for model in self.client.models.list()]
        assert names[0] == "model" and self.model in names, names
        return ", ".join(names)

    def answers(self):
        equal = right = 0
        self.expected = []
        for question in self.questions:
            expected = asked(self.arguments, question["prompt"])
            answer = self.complete(question["prompt"]).choices[0].text
            self.expected.append(expected)
            equal += answer == expected
            right += answer.strip() == question["answer"].strip()
        assert equal == len(self.questions), f"{equal} of {len(self.questions)}"
        return f"{equal} of {len(self.questions)} as carrel ask's, {right} right"

    def streaming_and_usage(self):
        prompt = self.questions[0]["prompt"]
        whole = self.complete(prompt)
        text, usage, finish = "", None, None
        for chunk in self.complete(prompt, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.text
                finish = choice.finish_reason or finish
        assert text == whole.choices[0].text and finish == whole.choices[0].finish_reason == "stop"
        assert usage.total_tokens == whole.usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details.cached_tokens > 0
        return f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"

    def chat(self):
        messages = [{"role": "user", "content": re.sub(r"<\|.*", "", self.questions[0]["prompt"], flags=re.S).strip()}]
        whole = self.client.chat.completions.create(model=self.model, messages=messages, temperature=0, max_tokens=64)
        text = ""
        for chunk in self.client.chat.completions.create(model=self.model, messages=messages, temperature=0, max_tokens=64,
                                                         stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content and whole.choices[0].message.role == "assistant"
        # The next turn of it reads nothing again.
        more = messages + [{"role": "assistant", "content": text}, {"role": "user", "content": "Is that so?"}]
        second = self.client.chat.completions.create(model=self.model, messages=more, temperature=0, max_tokens=8)
        known = second.usage.prompt_tokens_details.cached_tokens
        assert known >= whole.usage.prompt_tokens, (known, whole.usage)
        return f"{text!r}; of the next turn's {second.usage.prompt_tokens} tokens {known} cached, {whole.usage.prompt_tokens} were the first's"

    def stop_seed_and_length(self):
        prompt = self.questions[0]["prompt"]
        text = self.expected[0]
        middle = text[len(text) // 2:][:3]
        cut = self.complete(prompt, stop=[middle]).choices[0]
        assert cut.text == text[:text.index(middle)] and cut.finish_reason == "stop", cut
        short = self.complete(prompt, max_tokens=1).choices[0]
        assert short.finish_reason == "length"
        drawn = [self.complete(prompt, temperature=2, seed=seed, max_tokens=16).choices[0].text for seed in (1, 1, 2, 3)]
        assert drawn[0] == drawn[1] and len(set(drawn)) > 1, drawn
        return "stop, max_tokens, seed"

    def errors(self):
        for error, call in ((openai.NotFoundError, lambda: self.client.completions.create(model="model@none", prompt="x")),
                            (openai.NotFoundError, lambda: self.client.completions.create(model="another", prompt="x")),
                            (openai.BadRequestError, lambda: self.complete("x", temperature=9)),
                            (openai.BadRequestError, lambda: self.complete("x", logprobs=3))):
            try:
                call()
            except error as said:
                assert said.body["message"], said
            else:
                raise AssertionError(error)
        return "NotFoundError, BadRequestError, with their messages"

    def leave(self, begin):
        """Seconds from when a client closed until its sequence was free. An answer that ended by itself before says nothing."""
        def ended():
            return [self.server.metric(f'carrel_api_answers_total{{finish="{how}"}}') for how in ("left", "stop")]
        for _ in range(10):
            before = ended()
            close = begin()
            start = time.monotonic()
            close()
            while (now := ended()) == before:
                if time.monotonic() - start > 30:
                    raise AssertionError("the sequence was not freed")
            if now[0] > before[0]:
                return time.monotonic() - start
        raise AssertionError("ten answers ended by themselves: none was left")

    def cancel(self):
        def in_the_answer():
            stream = self.complete("\n\nTell me everything.", stream=True, temperature=2, max_tokens=8192)
            next(iter(stream))
            return stream.close

        def in_the_prompt():
            words = " ".join(str(i) for i in range(4000))
            impatient = openai.OpenAI(base_url=self.server.url + "/v1", api_key="none", max_retries=0, timeout=1.0)

            def close():
                pass
            try:
                impatient.completions.create(model="model", prompt=words, max_tokens=1)
            except openai.APITimeoutError:
                return close
            raise AssertionError("the prompt was read within a second: take a longer one")

        answers, prompts = [self.leave(in_the_answer) for _ in range(20)], [self.leave(in_the_prompt) for _ in range(3)]
        return (f"in the answer {len(answers)} times, freed after {1e3 * max(answers):.0f} ms at most; "
                f"in the prompt {len(prompts)} times, {1e3 * max(prompts):.0f} ms at most")

    def streams(self):
        async def one(client, i):
            text = ""
            question = self.questions[i % len(self.questions)]
            stream = await client.completions.create(model=self.model, prompt=question["prompt"], temperature=0, max_tokens=64,
                                                     stream=True, timeout=3600)
            async for chunk in stream:
                for choice in chunk.choices:
                    text += choice.text
            return text == self.expected[i % len(self.questions)]

        async def all_of_them():
            most = 0

            async def look():
                nonlocal most
                while True:
                    most = max(most, await asyncio.to_thread(self.server.metric, "carrel_api_connections"))
                    await asyncio.sleep(0.2)
            async with openai.AsyncOpenAI(base_url=self.server.url + "/v1", api_key="none", max_retries=0) as client:
                looking = asyncio.create_task(look())
                equal = await asyncio.gather(*(one(client, i) for i in range(STREAMS)))
                looking.cancel()
            return sum(equal), most
        start = time.monotonic()
        equal, most = asyncio.run(all_of_them())
        assert equal == STREAMS and most > STREAMS, (equal, most)
        return f"{STREAMS} at once ({most:.0f} connections seen), all as carrel ask's, {time.monotonic() - start:.0f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("carrel")
    for name in ("model", "store", "context", "questions"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--adapter")
    arguments = parser.parse_args()
    server = Server(arguments)
    test = Test(arguments, server)
    print(f"openai {openai.__version__}")
    try:
        for step in (test.models, test.answers, test.streaming_and_usage, test.chat, test.stop_seed_and_length, test.errors,
                     test.cancel, test.streams):
            print(f"{step.__name__}: {step()}", flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
