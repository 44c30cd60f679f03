"""A document of about so many characters, of one or several families, and the questions about it. The same arguments
give the same bytes."""
import dataclasses
import hashlib
import json

import families
import words

FACTS = 0.6          # of a document of prose, at most
PIECE_WORDS = 300    # of a list or coded text, at least


# What a user's turn is wrapped in: before it, and behind it up to where the answer begins.
CHATS = {
    "chatml": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    "llama3": ("<|start_header_id|>user<|end_header_id|>\n\n",
               "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    "mistral": ("[INST] ", "[/INST]"),
    "gemma": ("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
    "plain": ("", "\nAnswer: "),
}


@dataclasses.dataclass
class Document:
    text: str
    questions: list

    def prompts(self, family, chat):
        """Its questions as carrel eval reads them, one JSON object a line."""
        lines = []
        for question in self.questions:
            if question.family == family:
                prompt = "\n\n" + question.text + CHATS[chat][1] + question.begun
                lines.append(json.dumps({"prompt": prompt, "begun": question.begun, "family": family,
                                         **question.expected}))
        return "".join(line + "\n" for line in lines)

    def digest(self, chat):
        """Of every byte that a model is given, and of what is right."""
        sha = hashlib.sha256((CHATS[chat][0] + self.text).encode())
        for question in self.questions:
            sha.update(self.prompts(question.family, chat).encode())
        return sha.hexdigest()[:12]


def scatter(topics, characters, rng):
    """Prose from a random paragraph on, with the topics' sentences between its own, each anywhere, but those of a topic
    in their order."""
    of_facts = sum(len(sentence) + 1 for topic in topics for sentence in topic.sentences)
    source = words.paragraphs()
    at, prose, left = rng.randrange(len(source)), [], characters - of_facts
    while left > 0:
        for i, sentence in enumerate(source[at % len(source)]):
            if prose and len(sentence) > 2 * left:  # nearer to the length without it
                left = 0
                break
            prose.append(("\n\n" if i == 0 and prose else " ") + sentence)
            left -= len(prose[-1])
        at += 1
    count = sum(len(topic.sentences) for topic in topics)
    if not count:
        return "".join(prose)[1:], []
    # A fact behind each of these sentences, evenly but for chance; which one is drawn, and then put in order.
    places = [int((i + rng.random()) * len(prose) / count) for i in range(count)]
    order = [i for i, topic in enumerate(topics) for _ in topic.sentences]
    rng.shuffle(order)
    nexts = [iter(topic.sentences) for topic in topics]
    behind = {}
    for place, topic in zip(places, order):
        behind.setdefault(place, []).append(next(nexts[topic]))
    text = []
    for i, sentence in enumerate(prose):
        text.append(sentence)
        text += [" " + fact for fact in behind.get(i, ())]
    return "".join(text)[1:]


def of_prose(wanted, characters, questions, rng):
    """As many questions of each family as were asked for, or as leave room for the prose."""
    share = FACTS * characters / len(wanted)
    topics = []
    for family in wanted:
        for count in range(questions, 0, -1):
            names = words.Names(words.seeded(family, count, rng.getrandbits(64)))
            found = families.PROSE[family](names, count)
            if count == 1 or sum(len(s) + 1 for topic in found for s in topic.sentences) <= share:
                topics += found
                break
    head = ("Below is a text. Between its sentences stand facts that do not belong to it. Remember them: you will be "
            "asked about them.\n\n")
    text = head + scatter(topics, characters - len(head), rng)
    return Document(text, [question for topic in topics for question in topic.questions])


def of_sheets(wanted, characters, questions, rng):
    names = words.Names(rng)
    head = "Below are numbered lists of words. You will be asked which words occur most often in one of them.\n\n"
    pieces, asked = [], []
    for family in wanted:
        letters = (characters - len(head)) / len(wanted)
        count = max(1, min(questions, int(letters / families.LETTERS[family] / PIECE_WORDS)))
        for number in range(1, count + 1):
            piece, question = families.SHEETS[family](names, number, letters / count - 10)
            pieces.append(piece)
            asked.append(question)
    return Document(head + "".join(pieces).rstrip("\n"), asked)


def of_pairs(characters, questions, rng):
    names = words.Names(rng)
    head = "Below is a JSON object. You will be asked for the values of some of its keys.\n\n"
    pairs = [families.pair(names) for _ in range(max(1, (characters - len(head)) // 82))]
    text = head + "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in pairs) + "}"
    count = min(questions, len(pairs))  # evenly over the object, but for chance
    asked = [pairs[int((i + rng.random()) * len(pairs) / count)] for i in range(count)]
    return Document(text, [families.pair_question(*pair) for pair in asked])


def make(wanted, characters, questions, seed, part=0):
    """wanted: families of prose, or of sheets, or pairs. part: of documents that are alike but for what is drawn."""
    rng = words.seeded("carrel tasks", *wanted, characters, questions, seed, part)
    if set(wanted) <= set(families.PROSE):
        return of_prose(wanted, characters, questions, rng)
    if set(wanted) <= set(families.SHEETS):
        return of_sheets(wanted, characters, questions, rng)
    if wanted == ["pairs"]:
        return of_pairs(characters, questions, rng)
    raise ValueError(f"{', '.join(wanted)} do not stand in one document")
