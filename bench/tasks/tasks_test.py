"""Documents of tasks hold together: what is asked stands in them, the same arguments give the same bytes, and what the
table says of known scores is right. Nothing of Carrel's is run."""
import json
import pathlib
import random
import re
import struct
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import document  # noqa: E402
import families  # noqa: E402
import report  # noqa: E402
import results  # noqa: E402
import run  # noqa: E402
import settings  # noqa: E402
import words  # noqa: E402
import yarn  # noqa: E402

SEED = random.SystemRandom().randrange(10**6)
GROUPS = [[family] for family in families.FAMILIES] + [list(families.PROSE), list(families.SHEETS)]


def pieces(question):
    expected = question.expected
    return expected["answers"] if "answers" in expected else \
        [str(value) for record in expected["records"] for value in record.values()]


class DocumentsTest(unittest.TestCase):
    def test_what_is_asked_stands_in_the_document(self):
        for wanted in GROUPS:
            with self.subTest(wanted, seed=SEED):
                made = document.make(wanted, 40000, 12, SEED)
                for question in made.questions:
                    self.assertIn(question.family, wanted)
                    for piece in pieces(question):
                        self.assertRegex(made.text, r"(?<![A-Za-z0-9])" + re.escape(piece) + r"(?![A-Za-z0-9])")

    def test_it_is_as_long_as_asked(self):
        for wanted in GROUPS:
            for characters in (15000, 33000, 200000):
                with self.subTest(wanted, seed=SEED):
                    made = document.make(wanted, characters, 25, SEED)
                    self.assertLess(abs(len(made.text) - characters), 0.02 * characters + 500)

    def test_the_same_arguments_give_the_same_bytes_and_others_others(self):
        for wanted in GROUPS:
            first = document.make(wanted, 20000, 5, SEED).digest("chatml")
            self.assertEqual(first, document.make(wanted, 20000, 5, SEED).digest("chatml"))
            for other in (document.make(wanted, 20000, 5, SEED + 1), document.make(wanted, 20000, 5, SEED, part=1)):
                self.assertNotEqual(first, other.digest("chatml"))

    def test_there_are_as_many_questions_as_asked_where_there_is_room(self):
        for family in families.FAMILIES:
            self.assertEqual(len(document.make([family], 100000, 25, SEED).questions), 25)
            few = document.make([family], 3000, 25, SEED)
            self.assertGreaterEqual(len(few.questions), 1)

    def test_prose_is_most_of_it_or_nearly(self):
        made = document.make(["multivalue"], 8000, 100, SEED)
        facts = sum(len(sentence) for sentence in re.findall(r"One special number of the [a-z ]+ is \d+\.", made.text))
        self.assertLess(facts, 0.62 * len(made.text))

    def test_prompts_are_lines_that_eval_reads(self):
        made = document.make(list(families.PROSE), 60000, 3, SEED)
        for family in families.PROSE:
            lines = made.prompts(family, "chatml").splitlines()
            self.assertEqual(len(lines), 3)
            for line in lines:
                question = json.loads(line)
                self.assertTrue(question["prompt"].startswith("\n\n"))
                self.assertIn("<|im_end|>\n<|im_start|>assistant\n", question["prompt"])
                self.assertEqual(("answers" in question) + ("records" in question), 1)

    def test_the_prose_hides_nothing_of_its_own(self):
        for paragraph in words.paragraphs():
            self.assertNotRegex(" ".join(paragraph), r"\d{4}")


class FamiliesTest(unittest.TestCase):
    def names(self):
        return words.Names(random.Random(SEED))

    def test_alike_keys_differ_by_one_word(self):
        topics = families.multikey(self.names(), 20)
        self.assertEqual(len(topics), 24)
        self.assertEqual(sum(len(topic.questions) for topic in topics), 20)
        for at in range(0, len(topics), families.ALIKE):
            nouns = {topic.sentences[0].split(" is ")[0].split()[-1] for topic in topics[at:at + families.ALIKE]}
            self.assertEqual(len(nouns), 1)

    def test_a_chain_stands_in_its_order(self):
        made = document.make(["tracking"], 30000, 10, SEED)
        for question in made.questions:
            chain = question.expected["answers"]
            places = [made.text.index(f" comes {name}.") for name in chain]
            self.assertEqual(places, sorted(places))
            for before, name in zip(chain, chain[1:]):
                self.assertIn(f"After {before} comes {name}.", made.text)

    def test_common_words_are_common(self):
        piece, question = families.common(self.names(), 1, 15800)
        listed = piece.split(": ")[1].strip(" .\n").split(", ")
        counts = {word: listed.count(word) for word in set(listed)}
        asked = question.expected["answers"]
        self.assertEqual({counts[word] for word in asked}, {30})
        self.assertEqual(max(count for word, count in counts.items() if word not in asked), 3)
        self.assertLess(abs(len(piece) / 15800 - 1), 0.01)

    def test_frequent_words_fall_with_the_square_of_their_rank(self):
        piece, question = families.frequent(self.names(), 1, 10400)
        text = piece.split(": ")[1].split()
        counts = sorted(((text.count(word), word) for word in set(text)), reverse=True)
        self.assertEqual([word for _, word in counts[:4]], ["...", *question.expected["answers"]])
        for rank, (count, _) in enumerate(counts[:4], start=1):
            self.assertAlmostEqual(count, counts[0][0] / rank**2, delta=1)
        self.assertLess(abs(len(piece) / 10400 - 1), 0.01)

    def test_names_do_not_come_twice(self):
        names = self.names()
        places = [names.place() for _ in range(200)] + names.alike(8) + names.alike(8)
        self.assertEqual(len(set(places)), 216)
        self.assertEqual(len({names.number() for _ in range(500)}), 500)

    def test_pairs_are_one_json_object(self):
        made = document.make(["pairs"], 30000, 10, SEED)
        pairs = json.loads(made.text.split("\n\n", 1)[1])
        for question in made.questions:
            key = re.search(r'key "([0-9a-f-]{36})"', question.text).group(1)
            self.assertEqual([pairs[key]], question.expected["answers"])


def line(setting, scores, **others):
    return {"commit": "a", "machine": "m", "device": "cpu", "threads": 2, "model": "x.gguf", "model_digest": "d",
            "chat": "chatml", "document": "doc", "family": "single", "flags": setting, "setting": setting,
            "length": 8000, "seed": 1, "scores": scores, "texts": [str(score) for score in scores], "rows": 10.0,
            "share": 0.01, "bytes": 1e6, "ms_per_token": 2.0, "generated_tokens": 7, "jobs": 1, "date": "2026-01-01", **others}


class ReportTest(unittest.TestCase):
    def test_intervals_are_those_of_the_plain_bootstrap(self):
        rng = random.Random(SEED)
        for zeros, n in ((0, 40), (30, 100), (380, 400)):
            values = [0.0] * zeros + [rng.choice([-100.0, 25.0, 100.0, 50.0]) for _ in range(n - zeros)]
            means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(4000))
            wide = max(1.0, means[-1] - means[0])
            for found, plain in zip(report.interval(values), (means[100], means[3900])):
                self.assertLess(abs(found - plain), 0.08 * wide, (SEED, zeros, n))

    def test_no_difference_has_no_interval_and_one_alone_none_either(self):
        self.assertEqual(report.interval([0.0] * 50), (0.0, 0.0))
        self.assertEqual(report.interval([25.0] * 50), (25.0, 25.0))

    def test_the_table_pairs_by_question(self):
        run, = report.runs([line("dense", [1, 0, 1, 0.5]), line("balanced", [0, 1, 1, 0.5]),
                            line("dense", [1], document="e"), line("fast", [0.5], document="e")])
        self.assertEqual(run.pairs("balanced"), [(1, 0, False), (0, 1, False), (1, 1, True), (0.5, 0.5, True)])
        self.assertEqual(run.pairs("fast"), [(1, 0.5, False)])
        text = report.section(run)
        self.assertIn("| fast | 50.0 | +50.0 [+50.0, +50.0] | 0 of 1 |", text)
        self.assertIn("| one key | 5 | 70.0 | 0.0 [", text)

    def test_pages_have_every_method_and_every_run(self):
        found = report.runs([line("dense", [1, 1]), line("balanced", [1, 1]), line("hip, equal rows", [0, 1]),
                             line("dense", [1], model="y.gguf")])
        methods, headline = (make(found) for make in report.PARTS.values())
        self.assertIn("| hip, equal rows | 50.0 | +50.0 [", methods)
        self.assertEqual(methods.count("(commit a)"), 1)
        self.assertIn("x, 2 threads, m, 8k tokens | balanced | 100.0 | 100.0 | 0.0 [0.0, 0.0] | 1.0% |", headline)

    def test_the_last_commit_counts(self):
        found = report.runs([line("dense", [1]), line("dense", [0], commit="b"), line("dense", [0.5], device="cuda")])
        self.assertEqual([[x["scores"] for x in run.lines] for run in found], [[[0.5]], [[0]]])

    def test_lines_are_found_again(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "new" / "tasks.jsonl"
            first = line("dense", [1])
            file = results.File(path)
            self.assertIsNone(file.get(first))
            file.add(first)
            again = results.File(path)
            self.assertEqual(again.get(first), first)
            for other in ({"commit": "b"}, {"flags": "x"}, {"document": "y"}, {"model_digest": "z"}):
                self.assertIsNone(again.get({**first, **other}))


class SettingsTest(unittest.TestCase):
    def test_equal_rows_are_equal(self):
        for setting in settings.equal_rows(33.2):
            self.assertEqual(setting.flags[:2], ("--top-k", "34"))
            self.assertIn("dense-layers=0", setting.flags)
            self.assertIn("estimate=off", setting.flags)

    def test_names_are_of_one_setting(self):
        names = [setting.name for setting in
                 (*settings.OURS, *settings.equal_rows(9), *settings.as_published(8000))]
        self.assertEqual(len(set(names)), len(names))


FAKE = """#!/usr/bin/env python3
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
command, words = sys.argv[1], sys.argv[2:]
with open(folder / "calls", "a") as calls:
    calls.write(command + "\\n")
flags = {word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}
if command == "ask":
    print(json.dumps({"prompt_tokens": len(words[-2]) // 4}))
elif command == "prefill":
    (folder / flags["--name"]).write_text(pathlib.Path(flags["--input"]).read_text())
    print("{}")
elif command == "reindex":
    (folder / flags["--as"]).write_text((folder / words[0]).read_text())
    print("{}")
elif command == "inspect":
    if not (folder / words[0]).exists():
        sys.exit(1)
    print(json.dumps({"tokens": len((folder / words[0]).read_text()) // 4, "kv_heads": 2, "layers": 3, "prefill_seconds": 2}))
elif command == "eval":
    asked = pathlib.Path(flags["--questions"]).read_text().splitlines()
    runs = []
    for one in json.loads(pathlib.Path(flags["--compare"]).read_text()):
        assert (folder / one["context"]).exists()
        with open(folder / "calls", "a") as calls:
            calls.write("setting\\n")
        runs.append({"score": 1.0, "scores": [1.0] * len(asked), "answers": [{"text": "yes"}] * len(asked),
                     "ms_per_token": 100, "ms_per_prompt_token": 100, "generated_tokens": 11,
                     "bytes_moved_per_token": 8, "promised_error": 0.03,
                     "rows_attended_per_token": 3 * 2 * (50 if one.get("top-k") == "all" else 5)})
    print(json.dumps({"questions": len(asked), "runs": runs}))
"""


class RunTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.carrel = self.folder / "carrel"
        self.carrel.write_text(FAKE)
        self.carrel.chmod(0o755)
        (self.folder / "model.gguf").write_text("weights")

    def bench(self, *flags):
        """What a run calls the program for; the lines there are then."""
        calls = self.folder / "calls"
        calls.write_text("")
        sys.stderr, err = open(self.folder / "err", "w", encoding="utf-8"), sys.stderr
        try:
            run.main(["--carrel", str(self.carrel), "--model", str(self.folder / "model.gguf"), "--folder",
                      str(self.folder / "work"), "--out", str(self.folder / "out.jsonl"), "--commit", "a",
                      "--lengths", "8k", "--questions", "5", *flags])
        finally:
            sys.stderr.close()
            sys.stderr = err
        return calls.read_text().split(), results.read(self.folder / "out.jsonl")

    def test_each_setting_is_asked_once_of_each_document_and_nothing_stays(self):
        flags = ("--families", "pairs", "--seeds", "1", "2")
        calls, lines = self.bench(*flags)
        self.assertEqual((calls.count("prefill"), calls.count("setting"), calls.count("eval")), (2, 8, 2))
        self.assertEqual(list((self.folder / "work").iterdir()), [])
        self.assertEqual({(x["family"], x["seed"], x["setting"], x["questions"]) for x in lines},
                         {("pairs", seed, setting.name, 5) for seed in (1, 2) for setting in settings.OURS})
        self.assertEqual((lines[0]["rows"], lines[0]["bytes"], lines[0]["ms_per_token"]), (50 + 68, 8, 100))
        calls, again = self.bench(*flags)
        self.assertEqual((calls, again), ([], lines))
        calls, more = self.bench(*flags[:-1], "--settings", "dense", "balanced", "rows")
        self.assertEqual((calls.count("setting"), calls.count("eval")), (len(settings.equal_rows(1)), 1))
        self.assertEqual({x["flags"].split()[1] for x in more if x["setting"] == "hip, equal rows"}, {"5"})
        self.assertEqual(self.bench(*flags[:-1], "--settings", "dense", "balanced", "rows"), ([], more))

    def test_jobs_give_the_same_lines_and_times_are_taken_alone(self):
        flags = ("--families", "pairs", "--seeds", "1", "2", "3", "--settings", "dense", "--questions", "3")
        calls, lines = self.bench(*flags, "--jobs", "3")
        self.assertEqual((len(lines), {x["jobs"] for x in lines}), (3, {3}))
        self.assertEqual(report.times(lines), "-")
        self.assertEqual(self.bench(*flags)[0], [])
        calls, again = self.bench(*flags, "--timed")
        self.assertEqual((calls.count("eval"), {x["jobs"] for x in again}), (3, {1}))
        self.assertEqual(report.times(again), "100.0")
        self.assertEqual({x["document"]: x["scores"] for x in again}, {x["document"]: x["scores"] for x in lines})

    def test_families_that_share_a_document_go_on_alone_until_each_has_its_questions(self):
        calls, lines = self.bench("--families", "single", "extraction", "common", "--seeds", "1", "--questions", "40",
                                  "--together", "--settings", "dense", "--lengths", "4k")
        asked = {}
        for x in lines:
            asked[x["family"]] = asked.get(x["family"], 0) + x["questions"]
            self.assertEqual(x["with"], ["common"] if x["family"] == "common" else ["single", "extraction"])
        self.assertTrue(all(count >= 40 for count in asked.values()), asked)
        self.assertEqual(calls.count("prefill"), len({x["document"] for x in lines}))
        self.assertEqual(len([x for x in lines if x["family"] == "single"]), 1)

    def test_one_document_has_the_questions_that_it_has_room_for(self):
        flags = ("--families", "single", "common", "--seeds", "1", "--questions", "40", "--documents", "1", "--settings",
                 "dense", "--lengths", "4k")
        calls, lines = self.bench(*flags)
        self.assertEqual((calls.count("prefill"), [x["family"] for x in lines]), (2, ["single", "common"]))
        self.assertEqual((lines[0]["questions"], lines[1]["questions"] < 10), (40, True))
        self.assertEqual(self.bench(*flags), ([], lines))

    def test_a_document_of_another_length_is_made_anew(self):
        self.carrel.write_text(FAKE.replace("len(words[-2]) // 4", "len(words[-2]) // 5"))
        calls, lines = self.bench("--families", "single", "--seeds", "1", "--settings", "dense")
        self.assertEqual(calls.count("prefill"), 2)
        self.assertLess(abs(lines[0]["tokens"] / 8000 - 1), run.NEAR)


class YarnTest(unittest.TestCase):
    def test_metadata_change_and_tensors_stay(self):
        entries = [yarn.entry("general.architecture", yarn.STRING, yarn.text("qwen2")),
                   yarn.entry("qwen2.context_length", yarn.U32, struct.pack("<I", 1000)),
                   yarn.entry("words", yarn.ARRAY, struct.pack("<IQ", yarn.STRING, 2) + yarn.text("a") + yarn.text("b")),
                   yarn.entry("numbers", yarn.ARRAY, struct.pack("<IQ3f", yarn.F32, 3, 1, 2, 3))]
        info = yarn.text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(entries)) + b"".join(entries) + info
        rows = bytes(range(32))
        data = head + bytes(-len(head) % 32) + rows
        made = yarn.stretched(data, 4)
        self.assertEqual(len(made) % 32, 0)
        self.assertTrue(made.endswith(rows))
        self.assertIn(yarn.entry("qwen2.context_length", yarn.U32, struct.pack("<I", 4000)), made)
        self.assertIn(yarn.entry("qwen2.rope.scaling.factor", yarn.F32, struct.pack("<f", 4)), made)
        self.assertIn(entries[2] + entries[3], made)
        with self.assertRaises(ValueError):
            yarn.stretched(made, 4)


if __name__ == "__main__":
    unittest.main()
