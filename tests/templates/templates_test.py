#!/usr/bin/env python3
"""Chats by many models' templates: what the child of carrel api renders is what transformers renders, byte for byte.

  tests/templates/templates_test.py PATH...    files, and of folders every *.jinja below them

Needs transformers, or at least jinja2, in the Python that runs it; the child is the system's, as in carrel api. Templates
come in the source of the Python package llama-cpp-python:

  pip download llama-cpp-python==0.3.36 --no-binary llama-cpp-python --no-deps && tar xzf llama_cpp_python-0.3.36.tar.gz
"""
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def chat(*contents, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


CONVERSATIONS = {
    "one question": chat("What is the capital of France?"),
    "a system message": chat("What is the capital of France?", system="Answer in one word."),
    "three turns": chat("a", "b", "c", "d", "e"),
    "three turns, a system message": chat("a", "b", "c", system="s"),
    "white space": chat("  two\n\n spaces \t", " \n", "\u00a0no break\u2003", system=" \n "),
    "signs": chat("<a href='x'>&amp; \"q\" {{ 7 * 7 }} {% raw %} \\n</a>", "\u00e9\u4e2d\U0001f600\u200d", "<|im_end|></s>"),
    "a long document": chat("Read this.\n\n" + "All the words of it. " * 2000 + "\n\nWhat are they?"),
    "thoughts": chat("a", "<think>\nhm\n</think>\n\nb", "c"),
    "an empty message": chat(""),
    "the assistant is last": chat("a", "b"),
    "two of one role": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "a role of nobody": [{"role": "critic", "content": "a"}],
}


class Child:
    """The program of carrel api that renders, started as carrel api starts it."""

    def __init__(self, template):
        script = (ROOT / "serving/render_chat.py").read_text()
        self.process = subprocess.Popen(["/usr/bin/python3", "-I", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.compiled = self.ask({"template": template, "max_bytes": 1 << 24, **TOKENS})

    def ask(self, request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def render(self, messages):
        if "error" in self.compiled:
            return None
        return self.ask({"messages": messages, "add_generation_prompt": True}).get("text")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def transformers_reference():
    from transformers import __version__
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(template, messages):
        rendered = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **TOKENS)
        return (rendered[0] if isinstance(rendered, tuple) else rendered)[0]
    return "transformers " + __version__, render


def jinja2_reference():
    import datetime
    import jinja2.ext
    import jinja2.sandbox

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def render(template, messages):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                                   extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
        environment.globals.update(raise_exception=refuse,
                                   strftime_now=lambda form: datetime.datetime.now().strftime(form))
        return environment.from_string(template).render(messages=messages, tools=None, documents=None,
                                                        add_generation_prompt=True, **TOKENS)
    return "jinja2 " + jinja2.__version__, render


def expected(reference, template, messages):
    try:
        return reference(template, messages)
    except Exception:  # whatever a template raises: it refuses these messages
        return None


def differences(path, reference, counts):
    template = path.read_text()
    child = Child(template)
    for name, messages in CONVERSATIONS.items():
        ours, theirs = child.render(messages), expected(reference, template, messages)
        if ours != theirs:  # perhaps a minute has passed
            ours, theirs = child.render(messages), expected(reference, template, messages)
        counts["different" if ours != theirs else "refused by both" if ours is None else "equal"] += 1
        if ours != theirs:
            yield f"{path.name}: {name}:\n  ours   {ours!r:.600}\n  theirs {theirs!r:.600}"
    child.close()


def main():
    given = [pathlib.Path(path) for path in sys.argv[1:]]
    if not given or not all(path.exists() for path in given):
        sys.exit(__doc__)
    try:
        name, reference = transformers_reference()
    except ImportError:
        name, reference = jinja2_reference()
    paths = sorted(found for path in given for found in ([path] if path.is_file() else path.rglob("*.jinja")))
    if not paths:
        sys.exit(f"templates_test: no *.jinja in {' '.join(sys.argv[1:])}")
    counts = {"equal": 0, "refused by both": 0, "different": 0}
    wrong = 0
    for path in paths:
        found = list(differences(path, reference, counts))
        wrong += bool(found)
        print("\n".join(found), end="\n" if found else "")
    print(f"{len(paths)} templates, {len(CONVERSATIONS)} conversations each, against {name}: "
          f"{len(paths) - wrong} templates byte-equal; " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    sys.exit(1 if wrong else 0)


main()
