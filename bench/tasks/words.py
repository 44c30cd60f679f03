"""What documents of tasks are made of: English prose, its words, and names that no two facts share."""
import functools
import pathlib
import random
import re
import uuid
from collections import Counter

DOCS = pathlib.Path(__file__).resolve().parents[2] / "models" / "real" / "docs"
NOVELS = ("novel-64k", "novel-32k", "novel-8k")
# The sentences that models/real/docs hides among Jane Austen's.
HIDDEN = re.compile(r"(?:The [a-z ]+ of [^.\n]+ is [^.\n]+|A spare key of [^.\n]+ is kept in [^.\n]+"
                    r"|[A-Z]\w+ [A-Z]\w+ (?:lives in|was born in) [^.\n]+|The keeper of [^.\n]+"
                    r"|The invoice of [^.\n]+)\.")
END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"']?\s+(?=[\"'A-Z])")

KINDS = ("amber ancient autumn azure blue brass bright bronze calm cedar chalk cherry clear cobalt copper coral crimson "
         "crystal dusty early eastern elder emerald empty fading faithful false famous fern final floral foggy forest "
         "frozen gentle gilded golden grand granite gray green hidden hollow honest humble icy iron ivory jade late "
         "lavender lemon little lonely lost lower lucky maple marble mellow misty mossy narrow noble northern oaken "
         "olive opal open orange outer pale pearl pewter pine plain proud purple quiet rainy rapid red restless rocky "
         "rose royal ruby rustic sandy scarlet secret shady shallow silent silver simple slate sleepy slender smoky "
         "snowy solar solid southern stormy sunny swift tall tidal timber tranquil upper velvet violet warm western "
         "white wild willow winding windy winter wooden yellow").split()
PLACES = ("abbey academy airport aquarium archive arena attic bakery bank barn bazaar bridge brewery cabin canal canyon "
          "castle cathedral cave cellar chapel cinema citadel clinic college cottage courtyard dairy depot dock dome "
          "factory farm ferry fort foundry fountain gallery garage garden gate granary grove hall harbour hospital "
          "hostel island jetty kennel kitchen laboratory lagoon library lighthouse lodge mansion market meadow mill "
          "mine monument museum nursery observatory office orchard palace park pavilion pharmacy pier plaza pond "
          "prison quarry railway reef refinery reservoir ruin sawmill school shipyard shop shrine smithy spring "
          "stable stadium station studio swamp tavern temple theatre tower tunnel valley vault villa vineyard "
          "warehouse waterfall well wharf windmill workshop").split()
FIRST = ("Ada Agnes Albert Alfred Alma Amos Anton Bella Bruno Carla Cecil Clara Conrad Cora Daphne Dennis Dora Edgar Edith "
         "Elias Elsa Emil Ernest Esther Felix Fiona Flora Frieda Gilbert Greta Gustav Hanna Hector Hilda Hugo Ida Igor "
         "Ines Irma Ivan Jasper Jonas Julius Karl Kurt Lars Lena Leo Lola Lorenz Lucas Magda Marco Martha Max Mina "
         "Moritz Nadia Nils Nora Oskar Otto Paula Petra Quentin Rafael Rita Roland Rosa Rufus Selma Silas Sonja Stella "
         "Tessa Theo Tilda Ulrich Ursula Vera Viktor Walter Wanda Xaver Yvonne Zelda").split()
LAST = ("Abbott Ashby Barlow Beckett Birch Bishop Blake Brandt Calder Carver Chase Clay Conway Crane Dalton Decker Drake "
        "Eaton Ellis Falk Farrell Finch Forbes Frost Gale Garner Goss Hale Harper Hobbs Holt Hurst Irving Jarvis Keller "
        "Kemp Knox Lambert Larkin Lowe Maddox Marsh Mercer Monroe Nash Neville Norton Oakley Osborn Parrish Pike Porter "
        "Quinn Ramsey Rhodes Rowe Sadler Sharp Slater Sutton Tate Thorne Tucker Underhill Vance Vaughn Wade Weber "
        "Whitlock Winslow Yates York Zimmer").split()


@functools.cache
def paragraphs():
    """Of Jane Austen, in their order, as lists of sentences; nothing is hidden in them."""
    found = []
    for name in NOVELS:
        text = (DOCS / (name + ".txt")).read_text(encoding="utf-8").split("\n", 1)[1]
        for paragraph in HIDDEN.sub("", text).split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) <= 40:
                continue
            sentences, begin = [], 0
            for match in END.finditer(words):
                sentences.append(words[begin:match.end()].strip())
                begin = match.end()
            found.append(sentences + [words[begin:]])
    return found


@functools.cache
def vocabulary():
    """Lower-case words of the prose, four to nine letters long, the most frequent first."""
    counts = Counter()
    for paragraph in paragraphs():
        counts.update(re.findall(r"(?<![\w'-])[a-z]{4,9}(?![\w'-])", " ".join(paragraph)))
    return [word for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count > 1]


class Names:
    """Names and numbers, each given away once."""

    def __init__(self, rng):
        self.rng = rng
        self.taken = set()
        self.nouns = []

    def once(self, draw):
        while True:
            name = draw()
            if name not in self.taken:
                self.taken.add(name)
                return name

    def number(self):
        return self.once(lambda: str(self.rng.randrange(100000, 1000000)))

    def noun(self):
        """Of a place; none comes again before all have come."""
        if not self.nouns:
            self.nouns = self.rng.sample(PLACES, len(PLACES))
        return self.nouns.pop()

    def place(self):
        noun = self.noun()
        return self.once(lambda: f"{self.rng.choice(KINDS)} {noun}")

    def alike(self, count):
        """Places that differ by their kind alone."""
        noun = self.noun()
        return [self.once(lambda: f"{self.rng.choice(KINDS)} {noun}") for _ in range(count)]

    def person(self):
        return self.once(lambda: f"{self.rng.choice(FIRST)} {self.rng.choice(LAST)}")

    def variable(self):
        """Five capitals that can be spoken."""
        return self.once(lambda: "".join(
            self.rng.choice("BDFGKLMNPRSTVZ" if i % 2 == 0 else "AEIOU") for i in range(5)))

    def coded(self):
        """Six small letters that are no word."""
        return self.once(lambda: "".join(
            self.rng.choice("bdfgklmnprstvz" if i % 2 == 0 else "aeiou") for i in range(6)))

    def uuid(self):
        return self.once(lambda: str(uuid.UUID(int=self.rng.getrandbits(128), version=4)))


def seeded(*parts):
    """A generator of random numbers for what these parts name."""
    return random.Random("/".join(str(part) for part in parts))
