#!/usr/bin/env python3
"""LangChain's and LlamaIndex's OpenAI classes, as they come from PyPI, against `carrel api`: they need its address and
`model=NAME@CONTEXT`; the key may be anything where the server has none.

  pip install langchain-openai llama-index-llms-openai-like
  tests/openai/clients_test.py CARREL --store STORE --context NAME --questions FILE.jsonl --model MODEL

Each client's answer must be the same as that of a plain request over HTTP, whole and streamed. Starts its own server.
"""
import argparse
import json
import sys
import urllib.request

from langchain_openai import ChatOpenAI, OpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from openai_test import Server


def plain(server, target, body):
    request = urllib.request.Request(server.url + target, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


class Test:
    def __init__(self, arguments, server):
        self.server, self.model = server, f"model@{arguments.context}"
        self.base = server.url + "/v1"
        with open(arguments.questions) as lines:
            self.questions = [json.loads(line)["prompt"] for line in lines if line.strip()][:arguments.most]
        self.chats = json.load(urllib.request.urlopen(self.base + "/models"))["data"][0]["carrel"]["chat"]

    def expected(self, question, chat):
        if chat:
            body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]}
            answer = plain(self.server, "/v1/chat/completions", {"model": self.model, "temperature": 0, "max_tokens": 48, **body})
            return answer["choices"][0]["message"]["content"]
        answer = plain(self.server, "/v1/completions", {"model": self.model, "prompt": question, "temperature": 0, "max_tokens": 48})
        return answer["choices"][0]["text"]

    def same(self, ask, chat):
        if chat and not self.chats:
            return "left out: the model knows no chats"
        for question in self.questions:
            wanted, got = self.expected(question, chat), ask(question)
            assert got == wanted, (question, wanted, got)
        return f"{len(self.questions)} answers as over HTTP, the last {wanted!r}"

    def langchain_chat(self):
        client = ChatOpenAI(base_url=self.base, api_key="anything", model=self.model, temperature=0, max_tokens=48, max_retries=0)
        whole = self.same(lambda question: client.invoke([("system", "Be brief."), ("user", question)]).content, chat=True)
        self.same(lambda question: "".join(chunk.content for chunk in client.stream([("system", "Be brief."), ("user", question)])),
                  chat=True)
        return whole

    def langchain_completion(self):
        client = OpenAI(base_url=self.base, api_key="anything", model=self.model, temperature=0, max_tokens=48, max_retries=0)
        whole = self.same(client.invoke, chat=False)
        self.same(lambda question: "".join(client.stream(question)), chat=False)
        return whole

    def llama_index_chat(self):
        client = OpenAILike(api_base=self.base, api_key="anything", model=self.model, temperature=0, max_tokens=48,
                            is_chat_model=True, max_retries=0)

        def messages(question):
            return [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=question)]
        whole = self.same(lambda question: client.chat(messages(question)).message.content, chat=True)
        self.same(lambda question: "".join(part.delta or "" for part in client.stream_chat(messages(question))), chat=True)
        return whole

    def llama_index_completion(self):
        client = OpenAILike(api_base=self.base, api_key="anything", model=self.model, temperature=0, max_tokens=48,
                            is_chat_model=False, max_retries=0)
        return self.same(lambda question: client.complete(question).text, chat=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("carrel")
    for name in ("model", "store", "context", "questions"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--most", type=int, default=4, help="questions that are asked")
    parser.add_argument("--adapter")
    arguments = parser.parse_args()
    server = Server(arguments)
    failed = 0
    try:
        test = Test(arguments, server)
        for step in (test.langchain_chat, test.langchain_completion, test.llama_index_chat, test.llama_index_completion):
            try:
                print(f"{step.__name__}: {step()}", flush=True)
            except Exception as error:  # the others are worth knowing
                failed += 1
                print(f"{step.__name__}: FAILED: {type(error).__name__}: {error}", flush=True)
    finally:
        server.stop()
    sys.exit(1 if failed else 0)


main()
