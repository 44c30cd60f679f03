"""What a document's questions are asked under: Carrel's own fidelities, and the papers' methods, each with as many rows
as `balanced` attends there, and as its paper has it (docs/methods.md; README.md beside this says where each number is
from)."""
import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Setting:
    name: str
    flags: tuple             # of carrel eval, beside those of the zone
    index: tuple = ()        # of carrel reindex, where it wants an index of its own
    cpu_only: bool = False
    window: int = 4 + 64     # first and last rows of the document that are attended besides


def flags_of(setting):
    """As `carrel eval --compare` takes them: names and values."""
    found, words = {"name": setting.name}, iter(setting.flags)
    for word in words:
        value = next(words)
        name, value = value.split("=", 1) if word == "--lab" else (word.removeprefix("--"), value)
        found[name] = value
    return found


def lab(**values):
    return tuple(word for name, value in values.items() for word in ("--lab", f"{name.replace('_', '-')}={value}"))


def dense_prompts(setting):
    """The same, and the question attends to every row: what the papers measure. Carrel's own choose rows for it on a CPU."""
    return dataclasses.replace(setting, flags=(*setting.flags, *lab(prompt_rows="all")))


DENSE, BALANCED = Setting("dense", ("--top-k", "all")), Setting("balanced", ("--fidelity", "balanced"))
OURS = (DENSE, BALANCED, Setting("fast", ("--fidelity", "fast")), Setting("faithful", ("--fidelity", "faithful")))

# Those of the lab, and the two rivals, which a CPU has alone. codes: an index with HATA's learned codes.
SIGNS = "hash:query=signs,oversample=1"
TRAINED = "hash:codes=stored,query=signs,oversample=1"
LEARNED = ("--index", "code", "--lab", "code-train=hata")
METHODS = {"exact": "exact", "hash": "hash", "channels": "channels", "signs": SIGNS, "hip": "hip",
           "infinitehip": "infinitehip"}
RIVALS = {"pages": "pages", "landmarks": "landmarks"}


def equal_rows(rows):
    """Each method with so many rows per KV head in every layer, and nothing else."""
    plain = lab(dense_layers=0, estimate="off")
    budget = ("--top-k", str(max(1, math.ceil(rows))))
    found = [Setting(f"{name}, equal rows", (*budget, *plain, *lab(method=method)))
             for name, method in METHODS.items()]
    found.append(Setting("hata, equal rows", (*budget, *plain, *lab(method=TRAINED)), LEARNED))
    found += [Setting(f"{name}, equal rows", (*budget, *plain, *lab(method=method)), cpu_only=True)
              for name, method in RIVALS.items()]
    return found


def by_length(tokens, *steps):
    """steps: (most tokens, rows), the last without a bound."""
    return next(rows for most, rows in steps if most is None or tokens <= most)


def as_published(tokens):
    """Each paper's own: rows, layers that stay dense, first and last rows that are always attended. No estimation
    term."""
    def own(name, rows, dense, sink, local, method, index=(), cpu_only=False):
        return Setting(f"{name}, as published",
                       ("--top-k", str(rows), *lab(dense_layers=dense, estimate="off", sink=sink, local=local,
                                                   method=method)), index, cpu_only, sink + local)

    # HATA's token budgets by length.
    budget = by_length(tokens, (16384, 512), (65536, 1024), (None, 2048))
    return [own("top-k", max(1, tokens // 50), 0, 4, 64, "exact"),
            own("hip", 1024, 3, 256, 1024, "hip"),
            own("infinitehip", 2048, 3, 256, 1024, "infinitehip"),
            own("hata", budget, 2, 4, 64, TRAINED, LEARNED),
            own("channels", max(1, tokens // 16), 0, 4, 64, "channels:share=16,oversample=1"),
            own("pages", by_length(tokens, (16384, 1024), (None, 4096)), 2, 4, 64, "pages", cpu_only=True),
            own("landmarks", tokens // 64 + 384, 0, 4, 64, "landmarks:outliers=48", cpu_only=True)]
