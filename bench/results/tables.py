"""Tables of JSON lines. Those that benchmarks write (plans, ways, promises, cores, choices): a section of docs/results.md each, and
what README.md takes of them. Those with one line per row of a table, written by hand or by a program: measured()."""
import json
import pathlib
import re
import statistics

from report import table  # bench/tasks, where render looks

HERE = pathlib.Path(__file__).resolve().parent


def lines_of(name):
    path = HERE / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


FIELDS = {"bench", "what", "machine", "commit", "date", "command", "figures"}


def measurements():
    """Lines with one row each, by file and bench."""
    found = {}
    for path in sorted(HERE.glob("*.jsonl")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            line = json.loads(text, parse_float=str)  # digits as they were written
            if "figures" not in line:
                break  # of a benchmark that is summed up
            if set(line) != FIELDS:
                raise SystemExit(f"{path}:{number}: fields are {sorted(line)}, not {sorted(FIELDS)}")
            found.setdefault((path.name, line["bench"]), []).append(line)
    return found


def measured(lines):
    """A table with a row of each what and machine, the newest; under it how and where each was measured."""
    newest = {}
    for line in lines:
        key = (*line["what"].items(), line["machine"])
        if key not in newest or newest[key]["date"] <= line["date"]:
            newest[key] = line
    lines = list(newest.values())
    names = list(dict.fromkeys(name for line in lines for name in line["what"]))
    figures = list(dict.fromkeys(name for line in lines for name in line["figures"]))
    machines = ["machine"] if len({line["machine"] for line in lines}) > 1 else []
    rows = [[said(line["what"].get(name, "")) for name in names] + [line["machine"] for _ in machines] +
            [said(line["figures"].get(name)) for name in figures] for line in lines]
    head = names + machines + figures
    right = [all(re.match(r"[-+−(]?[0-9]|-$|$", row[i]) for row in rows) for i in range(len(head))]
    made = ["| " + " | ".join(head) + " |", "|" + "".join("---:|" if number else "---|" for number in right)]
    made += ["| " + " | ".join(row) + " |" for row in rows]
    sources = [f"`{command}`; {where(group)}." for (command, _), group in grouped(lines, "command", "machine").items()]
    return "\n".join(made + [""] + (sources if len(sources) == 1 else [f"- {source}" for source in sources]))


def said(value):
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


def short(model):
    """Qwen2.5-Coder-1.5B of qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"""
    name = model.removesuffix(".gguf").split("-instruct", maxsplit=1)[0]
    return name.replace("qwen", "Qwen").replace("coder", "Coder").replace("b", "B") if name.startswith("qwen") else name


def grouped(lines, *names):
    found = {}
    for line in lines:
        found.setdefault(tuple(line.get(name) for name in names), []).append(line)
    return found


def where(lines):
    """Machines, commits and days, each once."""
    def once(name):
        return ", ".join(dict.fromkeys(str(line[name]) for line in lines))
    return f"{once('machine')}; {once('commit')}, {once('date')}"


class Section:
    """lines: of one benchmark."""

    def __init__(self, lines):
        self.lines = lines

    def after(self):
        """What stands below the table."""
        return ""


class Plans(Section):
    """bench/plans: the default beside each way by name."""
    title, command = "The plan beside every way by name", "./run bench plans MODEL"
    text = ("Tokens per second, all clients together, of greedy answers: without a flag, and with each way that "
            "`--plan` can fix. `ask`: the median of runs in turns; clients: over `carrel api`, likewise. Each way's newest run counts.\n\n*Of the best* compares the "
            "default with the fastest way by name; where it is that way itself, what is left is noise. Ways that select rows "
            "promise the default fidelity's error of 3% (below: what questions measure); dense ones lose nothing.")

    def rows(self):
        """model, machine, tokens, clients (0: ask), the way taken, its speed, the best by name, its speed, the others'."""
        timed = [line for line in self.lines if line["what"] in ("ask", "api") and "tokens_per_s" in line]
        read = [line for line in self.lines if line["what"] == "prefill"]
        tokens = {(line["machine"], line["model"], line["length"]): line["tokens"] for line in read}
        of_commit = {(line["machine"], line["model"], line["length"], line["commit"]): line["tokens"] for line in read}
        for key, group in grouped(timed, "machine", "cores", "model", "length", "clients").items():
            machine, cores, model, length, clients = key
            speeds = {way: statistics.median(line["tokens_per_s"] for line in of_way if line["commit"] == of_way[-1]["commit"])
                      for (way,), of_way in grouped(group, "way").items()}
            taken = next(line["taken"] for line in group if line["way"] == "auto")
            named = {way: speed for way, speed in speeds.items() if way != "auto"}
            if not named:
                continue
            best = max(named, key=named.get)
            count = of_commit.get((machine, model, length, group[-1]["commit"]), tokens[machine, model, length])
            yield {"machine": machine, "cores": cores, "model": model, "tokens": count, "clients": clients or 0, "taken": taken,
                   "speed": speeds["auto"], "best": best, "best_speed": named[best], "named": named}

    def table(self):
        rows = []
        for row in sorted(self.rows(), key=lambda row: (row["machine"], row["model"], row["tokens"], row["clients"])):
            others = ", ".join(f"{way} {speed:,.0f}" if speed >= 100 else f"{way} {speed:.1f}"
                               for way, speed in sorted(row["named"].items(), key=lambda item: -item[1]))
            rows.append([f"{short(row['model'])}, {row['machine']}", f"{row['tokens']:,}",
                         str(row["clients"]) if row["clients"] else "ask", f"{row['taken']} {row['speed']:,.1f}",
                         f"{row['speed'] / row['best_speed']:.2f}", others])
        return table(["model, machine", "tokens", "clients", "default: its way", "of the best", "by name"], rows)

    def alike(self):
        """Of questions asked by 1, 16 and 32 clients how many were answered alike."""
        found = [line for line in self.lines if line["what"] == "alike"]
        return sum(line["alike"] for line in found), sum(line["questions"] for line in found)

    def after(self):
        alike, all_of = self.alike()
        return f"Answers that were the same for every number of clients: {alike} of {all_of}." if all_of else ""


class Ways(Section):
    """bench/shape ways: what a plan foresees of an 8B shape."""
    title, command = "An 8B shape: what a plan foresees, and what each way takes", "./run bench shape ways cuda 4 TOKENS"
    text = ("Milliseconds per token of four layers of Llama-3.1-8B's shape (random weights) over synthetic contexts, in one run; in "
            "parentheses what the plan foresaw of the zone's attention alone. Bold: the way taken. Times of ways on the GPU were "
            "measured for the plan, those of host and store assumed.")

    def table(self):
        names = list(dict.fromkeys(line["way"] for line in self.lines))
        rows = []
        for (tokens,), group in grouped(self.lines, "context_tokens").items():
            cells = {}
            for line in group:
                cell = f"{line['ms_per_token']:.2f} ({line['planned_attention_ms']:.2f})"
                cells[line["way"]] = f"**{cell}**" if line["taken"] else cell
            rows.append([f"{tokens:,}", *(cells.get(name, "-") for name in names)])
        return table(["tokens", *names], rows)


class Promises(Section):
    """bench/promises: what a fidelity promises of chat questions, and what came out."""
    title, command = "What fidelities promise, and what questions measure", "./run bench promises"
    text = ("The error of attention's output (root of the mean square over layers) that a fidelity promised of a document when it was "
            "read, and the one that `ask --stats` measured on three questions of a chat. Zones below 1,024 rows are attended to "
            "whole: nothing is promised to be lost, and nothing is. The newest run of each document counts.")

    @staticmethod
    def ratio(line):
        return line["measured"] / line["promised"] if line["promised"] > 0 else None

    def newest(self):
        """Of each model and document the lines of the run that was written last."""
        last = {(line["model"], line["document"]): line["commit"] for line in self.lines}
        return [line for line in self.lines if last[line["model"], line["document"]] == line["commit"]]

    def table(self):
        rows = []
        for (model,), of_model in grouped(self.newest(), "model").items():
            for (document, tokens), group in grouped(of_model, "document", "tokens").items():
                cells = []
                for (_,), of_fidelity in grouped(group, "fidelity").items():
                    ratios = [self.ratio(line) for line in of_fidelity if self.ratio(line) is not None]
                    cells.append(f"{statistics.mean(ratios):.2f}, {max(ratios):.2f}" if ratios else "every row")
                rows.append([f"{short(model)}: {document.split('-')[0]}", f"{tokens:,}", *cells])
        fidelities = list(dict.fromkeys(line["fidelity"] for line in self.lines))
        return table(["document", "tokens", *(f"{name}: measured / promised, worst question" for name in fidelities)], rows)

    def after(self):
        said = []
        for (model,), of_model in grouped(self.newest(), "model").items():
            documents = [[self.ratio(line) for line in group if self.ratio(line) is not None]
                         for group in grouped(of_model, "document", "fidelity").values()]
            documents = [ratios for ratios in documents if ratios]
            means = [statistics.mean(ratios) for ratios in documents]
            said.append(f"{short(model)}: {statistics.mean(means):.2f} in the mean, {max(means):.2f} of the worst document, "
                        f"{max(map(max, documents)):.2f} of the worst question.")
        return " ".join(said)


class Cores(Section):
    """bench/cores: how prefill and decoding grow with threads."""
    title, command = "Threads", "./run bench cores MODEL"
    text = ("Tokens per second. Products: matrices of the model's shapes alone, 128 tokens at a time; weights: reading them once per "
            "token, which no decoding beats. The newest run of each cell counts, the best of it.\n\nllama.cpp reads the same text, or a sample of its middle, since a token's time grows evenly with what is before it; it goes on from saved rows.\n\nThe cores of a virtual machine "
            "are not all one's own: the floors of one run and the next differ by a third ([decision 096](decisions/096-all-the-cores.md)).")

    def table(self):
        threads = sorted({line["threads"] for line in self.lines if "threads" in line})
        found, run = {}, {}
        for line in self.lines:  # of runs, the newest one last
            model = short(line["model"])
            if line["what"] == "floor":
                found.setdefault((model, "products alone"), {})[line["threads"]] = line["products_tokens_per_s"]
                found.setdefault((model, "weights alone"), {})[line["threads"]] = 1e3 / line["read_ms"]
            elif line["what"] in ("prefill", "decode"):
                what = f"prefill of {line['tokens']:,} tokens" if line["what"] == "prefill" else \
                    f"decoding, {line['setting']}, {line['length'] / 1000:g}k"
                cell = found.setdefault((model, f"{what}: {line['program']}"), {})
                known = cell.get(line["threads"], 0) if run.get((id(cell), line["threads"])) == line["commit"] else 0
                run[id(cell), line["threads"]] = line["commit"]
                cell[line["threads"]] = max(known, line["tokens_per_s"])
        rows = []
        for (model, what), speeds in found.items():
            most = speeds.get(threads[-1], 0) / speeds[threads[0]] if threads[0] in speeds else 0
            rows.append([f"{model}: {what}", *(f"{speeds[n]:,.0f}" if n in speeds else "-" for n in threads),
                         f"{most:.2f}" if most else "-"])
        return table(["", *(f"{n} threads" for n in threads), "times"], rows) + self.samples()

    def samples(self):
        """What a sample of a text's middle stands for, where the same run has the whole text, too."""
        speeds = {}
        for line in self.lines:
            if line["what"] == "prefill" and line["program"] == "llama.cpp":
                key = line["commit"], short(line["model"]), line["tokens"], line["threads"]
                speeds.setdefault(key, {})[line.get("sampled", 0)] = line["tokens_per_s"]
        said = [f"{model}, {tokens:,} tokens, {threads} threads: {of[sampled]:,.0f} tokens/s so, {of[0]:,.0f} read whole"
                for (_, model, tokens, threads), of in speeds.items() if 0 in of for sampled in of if sampled]
        tokens = sorted({sampled for of in speeds.values() for sampled in of if sampled})
        return f"\n\nWith {spoken(tokens)} tokens of a text's middle as a sample, behind rows that repeat: {joined(said)}." if said else ""


class Choices(Section):
    """bench/tasks/choice_bench: what each method's choice of rows is worth on the same queries."""
    title, command = "What methods choose, on the same queries", "./run bench choices MODEL STORE CONTEXT QUESTIONS ROWS,.. METHOD..."
    text = ("Queries of dense decoding's answers to five questions; means over layers and tokens.\n\nRecall: the share of as many rows "
            "with the largest exact scores that a method found; mass: the share of the softmax that its rows carry, with sink, local "
            "and new ones; error: of attention's output, relative to dense.\n\n`exact` is the best that a choice can do, and still leaves "
            "an error: what was not chosen is missing. `term` is the same with the estimation term, `balanced` the rows that the "
            "context's plan gives each KV head. That is where methods differ: codes compared by "
            "signs alone, few channels, blocks, pages and means of chunks find a quarter to a half of the best rows, and none counts the rest.")

    def table(self):
        counts = sorted({line["rows"] for line in self.lines if line["rows"]})
        rows = []
        for (method,), group in grouped(self.lines, "method").items():
            by = {line["rows"]: line for line in group}
            cells = []
            for count in counts:
                line = by.get(count)
                cells += [f"{line['recall']:.2f}", f"{line['mass']:.3f}", f"{line['error']:.3f}"] if line else ["-", "-", "-"]
            if 0 in by:
                line = by[0]
                cells[-3:] = [f"{line['recall']:.2f}", f"{line['mass']:.3f}", f"{line['error']:.3f}"]
                method = f"{method} ({line['attended']:.0f} rows)"
            rows.append([method, *cells])
        heads = [f"{count} rows: {name}" for count in counts for name in ("recall", "mass", "error")]
        return table(["method", *heads], rows)


KINDS = {"choices": Choices, "plans": Plans, "ways": Ways, "promises": Promises, "cores": Cores}


def joined(words):
    """a, b and c"""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def spoken(values):
    return joined([f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in values])


def headline():
    """README.md's table, of the largest model that was measured on a GPU and on a CPU."""
    rows, found = [], {}
    for row in Plans(lines_of("plans")).rows():
        if row["machine"].endswith("of it"):  # a GPU that was given less memory than the rows take
            continue
        of_gpu = row["taken"].startswith("device")
        found.setdefault(of_gpu, {}).setdefault((row["model"], row["machine"], row["cores"]), []).append(row)
    for of_gpu, groups in found.items():
        model, machine, cores = max(groups)
        group = groups[model, machine, cores]
        asked = sorted((row for row in group if row["clients"] == 0), key=lambda row: row["tokens"])
        served = sorted((row for row in group if row["clients"] == 32), key=lambda row: row["tokens"])
        said = f"{spoken([row['speed'] for row in asked])} tokens/s behind {spoken_tokens(asked)} tokens"
        if served:
            said += f"; 32 clients of `carrel api` {spoken([row['speed'] for row in served])} behind {spoken_tokens(served)}"
        ways = joined([f"`{way}`" for way in dict.fromkeys(row["taken"] for row in asked)])
        loss = "none: every row is attended" if all(row["taken"].endswith("dense") for row in asked) else \
            "an error of 3% is promised where rows are selected"
        rows.append([f"{short(model)}, {machine if of_gpu else f'{cores} cores of {machine}'}", said, f"{ways}: {loss}"])
    for name, say in (("ways", of_ways), ("promises", of_promises)):
        lines = lines_of(name)
        if lines:
            rows.append(say(lines))
    return table(["without a flag", "measured", "the plan taken, and what is lost"], rows).replace("---:", "---")


def spoken_tokens(rows):
    return joined([f"{row['tokens']:,}" for row in rows])


def of_ways(lines):
    tokens = max(line["context_tokens"] for line in lines)
    found = {line["way"]: line for line in lines if line["context_tokens"] == tokens}
    layers, taken = lines[0]["layers"], next(line for line in found.values() if line["taken"])
    return [f"an 8B shape (random weights and rows), {layers} layers, {tokens:,} tokens, {lines[0]['machine']}",
            f"{taken['ms_per_token']:.2f} ms per token; rows in pinned host memory instead {found['host']['ms_per_token']:.2f}, at the "
            f"store {found['store']['ms_per_token']:.2f}; all rows there {found['store-dense']['ms_per_token']:.1f}",
            f"`{taken['way']}`: " + ("none; those that select promise an error of 3%" if taken["way"].endswith("dense") else
                                    "an error of 3% is promised")]


def of_promises(lines):
    return ["what fidelities promise of chat questions", Promises(lines).after(),
            "measured error / promised error, over documents of "
            f"{min(line['tokens'] for line in lines):,} to {max(line['tokens'] for line in lines):,} tokens"]


def sections():
    """Of docs/results.md."""
    found = []
    for name, kind in KINDS.items():
        lines = lines_of(name)
        if lines:
            made = kind(lines)
            found.append("\n".join([f"## {made.title}", "", made.text, "", made.table(), "",
                                    *([made.after(), ""] if made.after() else []), f"`{made.command}`; {where(lines)}.", ""]))
    return found
