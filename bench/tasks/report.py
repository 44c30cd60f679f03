"""Tables of bench/tasks' JSON lines, as Markdown: report.py FILE

Of each model and machine the lines of the last commit in the file. Intervals are of the mean over questions, paired: what
a question scores under two settings, questions drawn again with replacement (bootstrap, 95%)."""
import bisect
import math
import random
import sys

import results

DRAWS = 4000
OURS = ("dense", "fast", "balanced", "faithful")
FAMILIES = {"single": "one key", "multikey": "eight alike keys", "multivalue": "four values of a key",
            "multiquery": "four keys at once", "tracking": "tracking of names", "common": "common words",
            "frequent": "frequent words", "pairs": "pairs of UUIDs", "extraction": "records as JSON"}


def mean(values):
    return math.fsum(values) / len(values)


def binomial(n, p):
    """The cumulative distribution of how many of n come out, each with probability p."""
    total, sums = 0.0, []
    for k in range(n + 1):
        total += math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) +
                          (n - k) * math.log1p(-p))
        sums.append(total)
    return sums


def interval(differences, seed="carrel"):
    """95% of the means of as many differences, drawn with replacement. Most are 0: so first how many are not."""
    others = [x for x in differences if x != 0]
    n = len(differences)
    if not others:
        return 0.0, 0.0
    rng = random.Random(f"{seed}/{n}/{math.fsum(others):.9f}")
    sums = binomial(n, len(others) / n) if len(others) < n else None
    means = []
    for _ in range(DRAWS):
        count = n if sums is None else bisect.bisect_left(sums, rng.random() * sums[-1])
        means.append(math.fsum(rng.choices(others, k=count)) / n)
    means.sort()
    return means[int(0.025 * DRAWS)], means[int(0.975 * DRAWS)]


class Run:
    """The lines of one model on one machine, of one commit."""

    def __init__(self, lines):
        self.lines = lines
        self.first = lines[0]
        found = list(dict.fromkeys(line["setting"] for line in lines))
        self.settings = [name for name in OURS if name in found] + [name for name in found if name not in OURS]
        self.lengths = sorted({line["length"] for line in lines})
        self.families = [family for family in FAMILIES if any(line["family"] == family for line in lines)]
        self.scores = {}  # by setting and question
        for line in lines:
            for i, (score, text) in enumerate(zip(line["scores"], line["texts"])):
                question = (line["length"], line["family"], line["document"], i)
                self.scores.setdefault(line["setting"], {})[question] = score, text

    def select(self, setting, length=None, family=None):
        return [line for line in self.lines if line["setting"] == setting and length in (None, line["length"]) and
                family in (None, line["family"])]

    def pairs(self, setting, length=None, family=None, base="dense"):
        """What questions score under base and under the setting, where both were asked, and whether in the same words."""
        mine, theirs = self.scores.get(setting, {}), self.scores.get(base, {})
        return [(theirs[question][0], score, theirs[question][1] == text)
                for question, (score, text) in mine.items() if question in theirs and
                length in (None, question[0]) and family in (None, question[1])]


def signed(value):
    return f"{0.0 if abs(value) < 0.05 else value:+.1f}".replace("+0.0", "0.0").replace("-", "\u2212")


def less(pairs):
    """Dense less the setting in points, with its interval."""
    differences = [100 * (dense - score) for dense, score, _ in pairs]
    low, high = interval(differences)
    return f"{signed(mean(differences))} [{signed(low)}, {signed(high)}]"


def thousands(length):
    return f"{length / 1000:g}k"


def weighted(lines, name):
    """Of lines by how many tokens they are of."""
    return sum(line[name] * line["generated_tokens"] for line in lines) / sum(line["generated_tokens"] for line in lines)


def times(lines):
    """ms per token, of lines that nothing else ran beside."""
    alone = [line for line in lines if line["jobs"] == 1]
    return f"{weighted(alone, 'ms_per_token'):.1f}" if alone else "-"


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)] +
                     ["| " + " | ".join(row) + " |" for row in rows])


def by_setting(run, length):
    rows = []
    for setting in run.settings:
        lines, pairs = run.select(setting, length), run.pairs(setting, length)
        if not lines or not pairs:
            continue
        rows.append([setting, f"{100 * mean([score for _, score, _ in pairs]):.1f}",
                     "-" if setting == "dense" else less(pairs),
                     "-" if setting == "dense" else f"{sum(same for _, _, same in pairs)} of {len(pairs)}",
                     f"{weighted(lines, 'rows'):,.0f} ({100 * weighted(lines, 'share'):.1f}%)",
                     f"{weighted(lines, 'bytes') / 1e6:.1f}" if run.first["device"] == "cpu" else "-",
                     times(lines)])
    return table(["setting", "score", "dense less it [95%]", "same words", "rows per KV head", "MB read per token",
                  "ms per token"], rows)


def by_family(run, settings):
    rows = []
    for family in run.families:
        pairs = {setting: run.pairs(setting, family=family) for setting in settings}
        dense = run.pairs("dense", family=family)
        rows.append([FAMILIES[family], str(len(dense)), f"{100 * mean([score for _, score, _ in dense]):.1f}",
                     *(less(pairs[setting]) if pairs[setting] else "-" for setting in settings)])
    every = {setting: run.pairs(setting) for setting in settings}
    rows.append(["all", str(len(run.pairs("dense"))),
                 f"{100 * mean([score for _, score, _ in run.pairs('dense')]):.1f}",
                 *(less(every[setting]) if every[setting] else "-" for setting in settings)])
    return table(["family", "questions", "dense", *(f"less {setting}" for setting in settings)], rows)


def runs(lines):
    """Of each model, machine and device the lines of its last commit; the largest model first."""
    last, found = {}, {}
    for line in lines:
        name = (line["model"], line["machine"], line["device"], line["threads"])
        last[name] = line["commit"]
    for line in lines:
        name = (line["model"], line["machine"], line["device"], line["threads"])
        if line["commit"] == last[name]:
            found.setdefault(name, []).append(line)
    return [Run(found[name]) for name in sorted(found, key=lambda name: (name[0], name[2]), reverse=True)]


def heading(run):
    where = run.first["machine"] if run.first["device"] == "cuda" else \
        f"{run.first['threads']} threads, {run.first['machine']}"
    return f"{run.first['model'].removesuffix('.gguf').split('-instruct', maxsplit=1)[0]}, {where}"


def section(run, mark="###"):
    ours = [name for name in ("balanced", "fast", "faithful") if name in run.settings]
    parts = [f"{mark} {heading(run)}", "",
             f"Commit {run.first['commit']}, {run.first['date']}; {', '.join(thousands(x) for x in run.lengths)} tokens, "
             f"seeds {', '.join(str(seed) for seed in sorted({line['seed'] for line in run.lines}))}. Scores and "
             "differences in points of 100.", "", by_family(run, ours), ""]
    for length in run.lengths:
        parts += [f"At {thousands(length)}, all families:", "", by_setting(run, length), ""]
    return "\n".join(parts)


def by_method(run):
    """Dense less each method, at every length where any was asked."""
    methods = [name for name in run.settings if name.endswith((", equal rows", ", as published"))]
    lengths = [length for length in run.lengths if any(run.select(name, length) for name in methods)]
    rows = []
    for setting in [*(name for name in OURS if name in run.settings), *methods]:
        cells = []
        for length in lengths:
            lines, pairs = run.select(setting, length), run.pairs(setting, length)
            cells += ["-", "-", "-"] if not pairs else [
                f"{100 * mean([score for _, score, _ in pairs]):.1f}", "-" if setting == "dense" else less(pairs),
                f"{weighted(lines, 'rows'):,.0f} ({100 * weighted(lines, 'share'):.1f}%)"]
        rows.append([setting, *cells])
    heads = [f"{thousands(length)}: {name}" for length in lengths for name in ("score", "dense less it", "rows")]
    return table(["setting", *heads], rows)


def methods_part(found):
    """For docs/methods.md: the methods of every run that asked them."""
    parts = [f"{heading(run)} (commit {run.first['commit']}):\n\n{by_method(run)}" for run in found
             if any(", " in name for name in run.settings)]
    return "\n\n".join(parts)


def headline_part(found):
    """For README.md: a line of each model and device, of the machine where most was asked."""
    rows, most = [], {}
    for run in found:
        where = run.first["model"], run.first["device"]
        most[where] = max(most.get(where, run), run, key=lambda other: len(other.pairs("balanced")))
    for run in most.values():
        for setting in ("balanced",):
            pairs, lines = run.pairs(setting), run.select(setting)
            if pairs:
                rows.append([f"{heading(run)}, {thousands(run.lengths[0])} to {thousands(run.lengths[-1])} tokens"
                             if len(run.lengths) > 1 else f"{heading(run)}, {thousands(run.lengths[0])} tokens",
                             setting, f"{100 * mean([dense for dense, _, _ in pairs]):.1f}",
                             f"{100 * mean([score for _, score, _ in pairs]):.1f}", less(pairs),
                             f"{100 * weighted(lines, 'share'):.1f}%"])
    return table(["model, documents", "fidelity", "dense", "score", "dense less it [95%]", "rows attended"], rows)


# What pages take between comments that name it.
PARTS = {"methods": methods_part, "headline": headline_part}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lines = results.read(sys.argv[1])
    if not lines:
        sys.exit(f"bench tasks: {sys.argv[1]} has no lines")
    print("\n".join(section(run) for run in runs(lines)))


if __name__ == "__main__":
    main()
