"""Ten documents of 200 to 32,000 tokens, some prose, facts, code, a list and a talk, and questions of a chat about each.
The same checkout gives the same bytes."""
import dataclasses
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "tasks"))

import families  # noqa: E402
import words  # noqa: E402

# Characters of a token of Qwen2.5's, by kind; lengths are about right.
LETTERS = {"prose": 4.4, "facts": 4.6, "code": 3.2, "list": 3.7, "talk": 4.2}
GOODS = "kettles ropes lamps blankets saddles hinges buckets mirrors candles spades bells barrels".split()


@dataclasses.dataclass
class Document:
    kind: str
    tokens: int
    text: str
    questions: list

    @property
    def name(self):
        return f"{self.kind}-{self.tokens}"


def prose(size, rng):
    source = words.paragraphs()
    at, text = rng.randrange(len(source) // 2), ""
    while len(text) < size:
        text += " ".join(source[at % len(source)]) + "\n\n"
        at += 1
    return text[:size], ["Who are the people of this story, and what do they want?",
                         "How does the last paragraph end?",
                         "Is anybody unhappy here? Say why."]


def facts(size, rng):
    text, first = "", None
    for topic in families.single(words.Names(rng), size // 40):
        first = first or topic.questions[0].text
        text += topic.sentences[0] + "\n"
        if len(text) >= size:
            break
    return text, [first, "Name three of the places with their special numbers.",
                  "Is there a place here whose special number begins with a 7?"]


def code(size, _):
    """Of this repository."""
    text = ""
    for path in sorted((ROOT / "model" / "tokenizer").glob("*.cc")):
        text += f"// {path.name}\n{path.read_text(encoding='utf-8')}\n"
        if len(text) >= size:
            break
    return text[:size], ["What does this code do?", "Which functions return an error, and when?",
                         "Write a test for the first function."]


def inventory(size, rng):
    names, text, number = words.Names(rng), "Inventory of the warehouse\n", 0
    while len(text) < size:
        number += 1
        if number % 200 == 0:
            names = words.Names(rng)
        text += (f"{number}. {rng.randrange(2, 90)} {rng.choice(words.KINDS)} {rng.choice(GOODS)}, "
                 f"shelf {rng.choice('ABCDEFGH')}{rng.randrange(1, 40)}, checked by {names.person()}\n")
    return text[:size], ["How many lamps are there on the first shelves?", "Who checked item 12?",
                         "Which goods are kept on shelves of the letter B?"]


def talk(size, rng):
    names = words.Names(rng)
    people, source, text = [names.person() for _ in range(3)], words.paragraphs(), ""
    while len(text) < size:
        said = rng.choice(source)[0]
        if rng.random() < 0.3:
            said = f"The key of the {names.place()} has the number {names.number()}. Do not forget it."
        text += f"{rng.choice(people)}: {said}\n"
    return text[:size], [f"What does {people[0]} talk about?", "Which keys are mentioned, and which numbers have they?",
                         "Do they agree with one another?"]


KINDS = {"prose": prose, "facts": facts, "code": code, "list": inventory, "talk": talk}
PLAN = (("facts", 200), ("list", 600), ("talk", 1300), ("facts", 1500), ("prose", 2000), ("code", 3000),
        ("list", 4000), ("prose", 8000), ("code", 16000), ("prose", 32000))


def documents(most):
    """Those of up to so many tokens."""
    for kind, tokens in PLAN:
        if tokens <= most:
            text, questions = KINDS[kind](int(tokens * LETTERS[kind]), words.seeded("carrel promises", kind, tokens))
            yield Document(kind, tokens, text, questions)
