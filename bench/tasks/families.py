"""The families of tasks, from their published definitions (README.md says which, and what differs).

A family of prose gives topics: sentences to be scattered over a document, in their order, and what is asked of them.
A family of sheets gives pieces of a document of its own, each with its question.
"""
import dataclasses
import math

import words


@dataclasses.dataclass
class Question:
    family: str
    text: str            # what is asked
    begun: str           # how the answer is begun for the model
    expected: dict       # "answers": pieces of text, or "records": objects
    max_tokens: int      # of the answer


@dataclasses.dataclass
class Topic:
    """Sentences that one question may be about."""
    sentences: list
    questions: list


ALIKE = 8     # keys of multikey that differ by one word
VALUES = 4    # of a key of multivalue, and keys of a question of multiquery
CHAIN = 5     # names of a chain of tracking
GUESTS = 3    # records of a question of extraction
COMMON, FREQUENT = 10, 3  # words asked for


def listing(names):
    return ", ".join(names[:-1]) + " and " + names[-1]


def number_of(place, number):
    return f"The special number of the {place} is {number}."


def one_number(family, place, number):
    return Question(family, f"What is the special number of the {place}?", f"The special number of the {place} is",
                    {"answers": [number]}, 16)


def single(names, count):
    topics = []
    for _ in range(count):
        place, number = names.place(), names.number()
        topics.append(Topic([number_of(place, number)], [one_number("single", place, number)]))
    return topics


def multikey(names, count):
    topics = []
    while len(topics) < count:
        for place in names.alike(ALIKE):
            number = names.number()
            asked = [one_number("multikey", place, number)] if len(topics) < count else []
            topics.append(Topic([number_of(place, number)], asked))
    return topics


def multivalue(names, count):
    topics = []
    for _ in range(count):
        place, numbers = names.place(), [names.number() for _ in range(VALUES)]
        question = Question("multivalue", f"The {place} has several special numbers. Which are they?",
                            f"The special numbers of the {place} are", {"answers": numbers}, 64)
        topics.append(Topic([f"One special number of the {place} is {number}." for number in numbers], [question]))
    return topics


def multiquery(names, count):
    keys = [(names.place(), names.number()) for _ in range(min(VALUES * count, 40))]
    topics = [Topic([number_of(*key)], []) for key in keys]
    for i in range(count):
        asked = names.rng.sample(keys, VALUES)
        places = listing([f"the {place}" for place, _ in asked])
        topics[i % len(topics)].questions.append(
            Question("multiquery", f"What are the special numbers of {places}?",
                     f"The special numbers of {places} are", {"answers": [number for _, number in asked]}, 64))
    return topics


def tracking(names, count):
    topics = []
    for _ in range(count):
        chain, value = [names.variable() for _ in range(CHAIN)], names.number()
        sentences = [f"After {value} comes {chain[0]}."]
        sentences += [f"After {before} comes {name}." for before, name in zip(chain, chain[1:])]
        question = Question("tracking", f"What comes after {value}, what comes after that, and so on? Go on to the last of "
                            f"the {CHAIN} names.", f"After {value} comes {chain[0]}, after {chain[0]} comes",
                            {"answers": chain[1:]}, 40)
        topics.append(Topic(sentences, [question]))
    return topics


def extraction(names, count):
    topics = []
    for _ in range(count):
        house = names.place()
        records = [{"house": house, "guest": names.person(), "room": int(names.number()[:3])} for _ in range(GUESTS)]
        sentences = [f"In the {house} sleeps {record['guest']}, in room {record['room']}." for record in records]
        question = Question("extraction", f"Who sleeps in the {house}, and in which room? Answer with a JSON array in one "
                            'line, an object with "house", "guest" and "room" for each guest.',
                            f'[{{"house": "{house}", "guest":', {"records": records}, 112)
        topics.append(Topic(sentences, [question]))
    return topics


PROSE = {"single": single, "multikey": multikey, "multivalue": multivalue, "multiquery": multiquery,
         "tracking": tracking, "extraction": extraction}


LETTERS = {"common": 7.9, "frequent": 5.2}  # of a word with what is between words, about


def common(names, number, letters):
    """A list of about so many letters: ten of its words stand in it ten times as often as the others."""
    often = max(4, min(30, int(letters / LETTERS["common"] / 20)))
    rarely = max(1, often // 10)
    vocabulary = names.rng.sample(words.vocabulary(), len(words.vocabulary()))
    asked, listed = vocabulary[:COMMON], vocabulary[:COMMON] * often
    left = letters - sum(len(word) + 2 for word in listed)
    for word in vocabulary[COMMON:]:
        if left <= 0:
            break
        listed += [word] * rarely
        left -= rarely * (len(word) + 2)
    names.rng.shuffle(listed)
    question = Question("common", f"Which {COMMON} words occur most often in list {number}?",
                        f"The {COMMON} words that occur most often in list {number} are", {"answers": asked}, 64)
    return f"List {number}: " + ", ".join(listed) + ".\n\n", question


def zipfian(size):
    """How often words of rank 1, 2, ... stand in a text of about so many, in proportion to rank^-2 (zeta, alpha 2)."""
    times = []
    while (count := round(6 / math.pi**2 * size / (len(times) + 1)**2)) > 0:
        times.append(count)
    return times


def frequent(names, number, letters):
    """A text of about so many letters of coded words, the first of which are dots."""
    size = int(letters / LETTERS["frequent"])
    while sum((7 if rank else 4) * count for rank, count in enumerate(zipfian(size))) < letters:
        size += 1
    coded = ["..."] + [names.coded() for _ in zipfian(size)[1:]]
    text = [word for word, count in zip(coded, zipfian(size)) for _ in range(count)]
    names.rng.shuffle(text)
    question = Question("frequent", f"Do not count the dots. Which {FREQUENT} words occur most often in coded text "
                        f"{number}?", f"The {FREQUENT} words that occur most often in coded text {number} are",
                        {"answers": coded[1:1 + FREQUENT]}, 40)
    return f"Coded text {number}: " + " ".join(text) + "\n\n", question


SHEETS = {"common": common, "frequent": frequent}


def pair(names):
    return names.uuid(), names.uuid()


def pair_question(key, value):
    return Question("pairs", f'What is the value of the key "{key}" in the JSON object?', 'The value is "',
                    {"answers": [value]}, 48)


FAMILIES = [*PROSE, *SHEETS, "pairs"]
