"""Lines of results: what names one, and files of them."""
import json
import os
import threading

KEY = ("commit", "machine", "device", "threads", "model_digest", "chat", "document", "family", "flags")


def key(line):
    return json.dumps([line[name] for name in KEY])


def read(path):
    """Of lines alike the last."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    return list({key(line): line for line in lines}.values())


class File:
    """Adds lines to a file, each at once: what was interrupted goes on. Of lines alike the last counts. timed: lines of
    runs beside other jobs are not there."""

    def __init__(self, path, timed=False):
        self.path, self.timed = path, timed
        self.found = {key(line): line for line in read(path)}
        self.lock = threading.Lock()

    def get(self, wanted):
        line = self.found.get(key(wanted))
        return None if line is None or (self.timed and line["jobs"] > 1) else line

    def lines(self):
        with self.lock:
            return [line for line in self.found.values() if not (self.timed and line["jobs"] > 1)]

    def add(self, line):
        with self.lock:
            self.found[key(line)] = line
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
