"""Lines of results: what names one, and files of them."""
import json
import os

KEY = ("commit", "machine", "device", "threads", "model_digest", "chat", "document", "family", "flags")


def key(line):
    return json.dumps([line[name] for name in KEY])


def read(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


class File:
    """Adds lines to a file, each at once: what was interrupted goes on."""

    def __init__(self, path):
        self.path = path
        self.found = {key(line): line for line in read(path)}

    def get(self, wanted):
        return self.found.get(key(wanted))

    def add(self, line):
        self.found[key(line)] = line
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
