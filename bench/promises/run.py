"""Asks what a fidelity promised and what came out: `./run bench promises`.

Each of ten documents is prefilled by each model; three questions of a chat are asked about it under every fidelity, and
`ask --stats` says what was aimed at, what was promised and what was left. Every question is a JSON line of --out; the
table of this run is made of them."""
import argparse
import json
import math
import pathlib
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import provenance
import texts

FIDELITIES = ("fast", "balanced", "faithful")


def carrel(binary, *arguments):
    done = subprocess.run([binary, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=3600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"bench promises: carrel {arguments[0]} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def came_out(stats):
    """As `ask --stats` has it: over layers, the root of the mean square of the mean error."""
    errors = [layer["output_error"] for layer in stats["layers"] if layer["output_error"] is not None]
    return math.sqrt(sum(error * error for error in errors) / len(errors)) if errors else 0.0


def prefilled(args, model, document, folder):
    text, store = folder / f"{document.name}.txt", folder / "store"
    text.write_text(document.text, encoding="utf-8")
    return carrel(args.carrel, "prefill", "--model", model, "--store", str(store), "--name", document.name, "--input",
                  str(text), "--quiet", "--json", "--threads", str(args.threads), "--device", args.prefill_device)


def asked(args, model, document, folder):
    """One line of each fidelity and question."""
    made = prefilled(args, model, document, folder)
    for fidelity in FIDELITIES:
        for number, question in enumerate(document.questions, 1):
            stats = carrel(args.carrel, "ask", "--model", model, "--store", str(folder / "store"), "--context",
                           document.name, "--plan", "store", "--fidelity", fidelity, "--stats", "--json", "--max-tokens", str(args.max_tokens),
                           "--threads", str(args.threads), question)["stats"]
            yield {"bench": "promises", **args.where, "model": pathlib.Path(model).name, "document": document.name,
                   "tokens": made["tokens"], "prefill_seconds": made["seconds"], "fidelity": fidelity, "question": number,
                   "aimed_at": stats["target_error"], "promised": stats["promised_error"], "measured": came_out(stats),
                   "rows": stats["rows_per_layer_and_token"]}


def ratio(line):
    """None where nothing was promised to be lost, and nothing was."""
    if line["promised"] > 0:
        return line["measured"] / line["promised"]
    return None if line["measured"] < 1e-4 else math.inf


def table(lines):
    rows = ["| model | document | tokens | fidelity | promised | measured | ratio | worst question | rows |",
            "|---|---|---|---|---|---|---|---|---|"]
    ratios, worst, groups = [], [], {}
    for line in lines:
        groups.setdefault((line["model"], line["document"], line["fidelity"]), []).append(line)
    for (model, document, fidelity), group in groups.items():
        mean = {name: sum(line[name] for line in group) / len(group) for name in ("promised", "measured", "rows")}
        found = [ratio(line) for line in group if ratio(line) is not None]
        if found:
            ratios.append(sum(found) / len(found))
            worst.append(max(found))
        shown = [f"{ratios[-1]:.2f}", f"{worst[-1]:.2f}"] if found else ["all rows", ""]
        rows.append(f"| {model} | {document} | {group[0]['tokens']} | {fidelity} | {mean['promised']:.4f} | "
                    f"{mean['measured']:.4f} | {shown[0]} | {shown[1]} | {mean['rows']:.0f} |")
    if ratios:
        rows.append(f"\nmeasured / promised: {sum(ratios) / len(ratios):.2f} in the mean, {max(ratios):.2f} of the worst document, "
                    f"{max(worst):.2f} of the worst question.")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--carrel", required=True)
    parser.add_argument("--folder", required=True, help="for stores, which are removed")
    parser.add_argument("--out", required=True, help="JSON lines are added here")
    parser.add_argument("--most", type=int, default=40000, help="tokens of the longest document")
    parser.add_argument("--least", type=int, default=0, help="tokens of the shortest")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--prefill-device", default="cpu", choices=["cpu", "cuda"], help="questions are asked on the CPU")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--commit", help="of the program, where git does not tell")
    parser.add_argument("models", nargs="+")
    args = parser.parse_args()
    args.where = provenance.of("cpu", args.commit)
    folder, lines = pathlib.Path(args.folder), []
    with open(args.out, "a", encoding="utf-8") as out:
        for model in args.models:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for document in texts.documents(args.most):
                if document.tokens < args.least:
                    continue
                for line in asked(args, model, document, folder):
                    lines.append(line)
                    out.write(json.dumps(line) + "\n")
                    out.flush()
            shutil.rmtree(folder)
    print(table(lines))


if __name__ == "__main__":
    main()
