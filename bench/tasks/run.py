"""Asks the questions of generated documents under many settings: `./run bench tasks`.

Each document is prefilled once, and all settings ask the same questions of it. Every setting of a family of a document
is a JSON line of --out; what is there already, of the same commit, machine and model, is not run again."""
import argparse
import collections
import concurrent.futures
import datetime
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import document as documents
import families
import provenance
import results
import settings

# Characters of a document by which its tokens are foreseen: fewer tokens than a GPU has room for in a prompt.
SAMPLE, SAMPLE_OF_PAIRS = 9000, 4500
NEAR = 0.04    # how far from the length asked for a document's may be


def fail(message):
    raise SystemExit("bench tasks: " + message)


def run(command):
    """The JSON object that a command prints last."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        fail(f"{' '.join(command[:4])} ... failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def digest(path):
    """Of a file, or of all files of a folder."""
    sha = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb") as data:
                while piece := data.read(1 << 24):
                    sha.update(piece)
    return sha.hexdigest()[:12]


def short(text):
    return hashlib.sha256(text.encode()).hexdigest()[:6]


class Bench:
    """What all documents share."""

    def __init__(self, args):
        self.args = args
        self.folder = pathlib.Path(args.folder)
        self.file = results.File(args.out, args.timed)
        self.device = ["--device", "cuda"] if args.device == "cuda" else []
        self.prefill_device = ["--device", args.prefill_device or args.device]
        self.beyond = ["--lab", "beyond-trained"] if args.beyond_trained else []
        self.same = {"commit": args.commit or provenance.commit() or fail("no git here: --commit says which it is"),
                     "machine": provenance.machine(args.device), "device": args.device, "threads": args.threads,
                     "model": os.path.basename(args.model.rstrip("/")),
                     "model_digest": digest(pathlib.Path(args.model)), "chat": args.chat}
        self.ratios, self.lock = {}, threading.Lock()

    def carrel(self, command, *arguments):
        return run([self.args.carrel, command, *arguments, "--json"])

    def of_model(self, command, *arguments):
        return self.carrel(command, "--model", self.args.model, "--threads", str(self.args.threads), *arguments)

    def ratio(self, wanted):
        """Characters per token, of pieces of a document of these families."""
        name = " ".join(wanted)
        sample = SAMPLE_OF_PAIRS if wanted == ["pairs"] else SAMPLE
        with self.lock:
            if name not in self.ratios:
                text = documents.make(wanted, 4 * sample, self.args.questions, 0).text
                pieces = [text[at:at + sample // 3] for at in (500, len(text) // 2, len(text) - sample // 3)]
                asked = self.of_model("ask", *self.prefill_device, "--raw", "--max-tokens", "1", "".join(pieces))
                self.ratios[name] = sample / 3 * len(pieces) / asked["prompt_tokens"]
            return self.ratios[name]

    def settings(self, tokens, balanced_rows):
        """Those that are asked for. balanced_rows(): of which the equal rows are."""
        found = [setting for setting in settings.OURS if setting.name in self.args.settings]
        if "rows" in self.args.settings:
            found += settings.equal_rows(balanced_rows())
        if "published" in self.args.settings:
            found += settings.as_published(tokens)
        methods = self.args.methods
        if self.args.device == "cpu":  # a GPU's prompts attend to every row as they are
            found = [setting if setting in settings.OURS else settings.dense_prompts(setting) for setting in found]
        return [setting for setting in found if not (setting.cpu_only and self.args.device == "cuda") and
                (setting in settings.OURS or not methods or setting.name.split(",")[0] in methods)]

    def is_done(self, wanted, length, seed):
        """Whether nothing is left to run, as far as lines tell: no document is prefilled to find that out."""
        done, parts = collections.Counter(), collections.Counter()
        for line in self.file.lines():
            if (all(line[name] == value for name, value in self.same.items()) and line["with"] == wanted and
                    (line["length"], line["seed"], line["asked"]) == (length, seed, self.args.questions)):
                which = line["family"], line["setting"]
                done[which] += line["questions"]
                parts[which] += 1
        return all(done[family, setting.name] >= self.args.questions or
                   parts[family, setting.name] >= self.args.documents
                   for family in wanted for setting in self.settings(length, lambda: 1))


class Case:
    """One length and seed of families that share documents, in a folder and a store of its own."""

    def __init__(self, bench, wanted, length, seed):
        self.bench, self.args = bench, bench.args
        self.wanted, self.length, self.seed = wanted, length, seed
        self.folder = bench.folder / f"{'-'.join(wanted)}-{length}-{seed}"
        self.store = self.folder / "store"

    def inspect(self, name):
        done = subprocess.run([self.args.carrel, "inspect", name, "--store", str(self.store), "--json"],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def prefill(self, document):
        """The name of its context, which is made unless it is there."""
        same = self.bench.same
        name = f"{same['model_digest'][:6]}-{document.digest(self.args.chat)}-{same['commit'].rstrip('+')}"
        if self.inspect(name) is None:
            path = self.folder / "document.txt"
            path.write_text(documents.CHATS[self.args.chat][0] + document.text, encoding="utf-8")
            self.bench.of_model("prefill", *self.bench.prefill_device, *self.bench.beyond, "--raw", "--quiet", "--input",
                                str(path), "--store", str(self.store), "--name", name)
        return name

    def reindexed(self, name, setting):
        """The context whose index the setting wants."""
        if not setting.index:
            return name
        other = f"{name}-{short(' '.join(setting.index))}"
        if self.inspect(other) is None:
            self.bench.carrel("reindex", name, "--as", other, "--store", str(self.store), "--quiet", *setting.index)
        return other

    def ask(self, context, shape, document, wanted, line):
        """A line of each setting wanted, those that are not there from one run of the program."""
        lines = {setting: {**line, "setting": setting.name, "flags": " ".join(setting.flags)} for setting in wanted}
        new = [setting for setting in wanted if self.bench.file.get(lines[setting]) is None]
        if new:
            questions = self.folder / f"{line['family']}-{line['part']}.questions.jsonl"
            questions.write_text(document.prompts(line["family"], self.args.chat), encoding="utf-8")
            compared = self.folder / f"{line['family']}-{line['part']}.settings.json"
            compared.write_text(json.dumps([{**settings.flags_of(setting), "context": self.reindexed(context, setting)}
                                            for setting in new]), encoding="utf-8")
            most = max(question.max_tokens for question in document.questions if question.family == line["family"])
            zone = "device" if self.args.device == "cuda" else "host"
            found = self.bench.of_model("eval", "--store", str(self.store), "--context", context, "--questions",
                                        str(questions), "--max-tokens", str(most), "--answers", "all", "--compare",
                                        str(compared), "--measure", "0", "--together", str(self.args.at_once),
                                        *self.bench.device, "--zone", zone, *self.bench.beyond)
            for setting, run_of in zip(new, found["runs"], strict=True):
                self.add(lines[setting], setting, shape, found["questions"], run_of)
        return [self.bench.file.get(lines[setting]) for setting in wanted]

    def add(self, line, setting, shape, questions, found):
        rows = found["rows_attended_per_token"] / shape["layers"] / shape["kv_heads"]
        line.update({
            "questions": questions, "score": found["score"], "scores": found["scores"],
            "texts": [short(answer["text"]) for answer in found["answers"]],
            "rows": min(shape["tokens"], rows + setting.window),
            "share": min(1, (rows + setting.window) / shape["tokens"]), "zone_rows": rows,
            "bytes": found["bytes_moved_per_token"], "ms_per_token": found["ms_per_token"],
            "prompt_ms_per_token": found["ms_per_prompt_token"], "generated_tokens": found["generated_tokens"],
            "promised_error": found["promised_error"], "jobs": self.args.jobs * self.args.at_once,
            "date": datetime.date.today().isoformat()})
        self.bench.file.add(line)
        print(f"{line['model']} {line['length']} {line['family']} seed {line['seed']}.{line['part']}: {setting.name} "
              f"{line['score']:.3f} of {line['questions']}, {line['rows']:.0f} rows, {line['ms_per_token']:.1f} ms",
              file=sys.stderr, flush=True)

    def length_fits(self, wanted, part):
        """A document of the length, its context and that context's shape."""
        ratio = self.bench.ratio(wanted)
        for _ in range(3):
            document = documents.make(wanted, int(self.length * ratio), self.args.questions, self.seed, part)
            context = self.prefill(document)
            shape = self.inspect(context)
            if abs(shape["tokens"] / self.length - 1) <= NEAR:
                return document, context, shape
            ratio = len(document.text) / shape["tokens"]
        return fail(f"{' '.join(wanted)}: no document of {self.length} tokens comes out")

    def run(self):
        """Documents until each family has its questions."""
        if self.bench.is_done(self.wanted, self.length, self.seed):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        left = {family: self.args.questions for family in self.wanted}
        for part in range(self.args.documents):
            still = [family for family in self.wanted if left[family] > 0]
            if not still:
                break
            document, context, shape = self.length_fits(still, part)
            for family in still:
                line = {**self.bench.same, "with": self.wanted, "family": family, "length": self.length,
                        "tokens": shape["tokens"], "seed": self.seed, "part": part,
                        "document": document.digest(self.args.chat), "asked": self.args.questions,
                        "prefill_tokens_per_s": shape["tokens"] / max(1e-9, shape["prefill_seconds"])}

                ours = [setting for setting in settings.OURS if setting.name in self.args.settings]
                self.ask(context, shape, document, ours, line)

                def balanced_rows(line=line):
                    return self.ask(context, shape, document, [settings.BALANCED], line)[0]["zone_rows"]

                self.ask(context, shape, document, self.bench.settings(shape["tokens"], balanced_rows), line)
                left[family] -= sum(question.family == family for question in document.questions)
            if not self.args.keep:
                shutil.rmtree(self.store, ignore_errors=True)
        if not self.args.keep:
            shutil.rmtree(self.folder)


def number(text):
    """4k, 8000"""
    return int(float(text[:-1]) * 1000) if text.endswith("k") else int(text)


def documents_of(names, together):
    """Families that share a document: each alone, or all that can."""
    for name in names:
        if name not in families.FAMILIES:
            fail(f'no family "{name}"; there are {" ".join(families.FAMILIES)}')
    if not together:
        return [[name] for name in names]
    groups = [[name for name in names if name in kind] for kind in (families.PROSE, families.SHEETS)]
    return [group for group in groups if group] + [["pairs"]] * ("pairs" in names)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("carrel", "model", "folder", "out"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prefill-device", choices=["cpu", "cuda"], help="by default --device")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chat", choices=list(documents.CHATS), default="chatml", help="what a turn looks like")
    parser.add_argument("--lengths", nargs="+", type=number, default=[8000], help="tokens of a document: 8k, 30k")
    parser.add_argument("--families", nargs="+", default=families.FAMILIES)
    parser.add_argument("--together", action="store_true", help="families share documents where they can")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--questions", type=int, default=25, help="of a family, length and seed, at least")
    parser.add_argument("--documents", type=int, default=100, help="of a family, length and seed, at most: with fewer "
                        "questions, then, where one has no room for more")
    parser.add_argument("--settings", nargs="+", default=[setting.name for setting in settings.OURS],
                        choices=[*(setting.name for setting in settings.OURS), "rows", "published"],
                        help="rows: every method with balanced's rows; published: as its paper has it")
    parser.add_argument("--methods", nargs="+", default=[], metavar="METHOD",
                        help="of rows and published these alone: pages landmarks; default: all")
    parser.add_argument("--beyond-trained", action="store_true", help="take documents beyond the trained length")
    parser.add_argument("--jobs", type=int, default=1, help="documents at a time; more of them are sooner done, but then "
                        "times say nothing")
    parser.add_argument("--at-once", type=int, default=1, help="questions of a document at a time; the same of times")
    parser.add_argument("--timed", action="store_true", help="run again what was run beside other jobs")
    parser.add_argument("--commit", help="of the program, where git does not tell")
    parser.add_argument("--keep", action="store_true", help="leave contexts and questions in the folder")
    args = parser.parse_args(arguments)
    start = time.monotonic()
    bench = Bench(args)
    cases = [Case(bench, wanted, length, seed) for length in args.lengths
             for wanted in documents_of(args.families, args.together) for seed in args.seeds]
    failed = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = {pool.submit(case.run): case for case in cases}
        for done in concurrent.futures.as_completed(runs):
            if done.exception() is not None:  # of one document: the others go on
                failed.append(runs[done].folder.name)
                print(f"{failed[-1]}: {done.exception()}", file=sys.stderr, flush=True)
    print(f"bench tasks: {time.monotonic() - start:.0f} s", file=sys.stderr)
    if failed:
        fail(f"{len(failed)} of {len(cases)} failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
