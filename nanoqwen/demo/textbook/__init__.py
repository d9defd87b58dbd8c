"""A seeded generator of small textbook functions: our own training data, and a small part of it (about 3% of the tokens).

Installed libraries hold surprisingly few of the functions a person tries first. The problems here supply them, in many
spellings: other names, with and without docstring, annotations and examples. The examples' results are not written
down: they come from running the rendered function.

Notation of a problem, one block of lines:

    @ name other_name(argument: type, ...) -> type      the first name is the most frequent
    ? A sentence that says what it does.                 one or more; the first is the most frequent
    > arguments ; arguments                              calls that serve as examples (may be empty)
    body
    --
    another body                                         the first is the most frequent

    @class Name                                          a class: one sentence, one body

`$word` stands for a name that varies: an argument, or a local name of _POOLS. `$f` is the function's own name.
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass

from . import algorithms, classes, lists, numbers, sequences, text

_POOLS = {
    "n": "n n n n number num x", "k": "k k count steps", "a": "a a a first x", "b": "b b b second y", "c": "c c c third z",
    "x": "x x value number", "s": "s s s text string", "first": "first a s1", "second": "second b s2",
    "items": "items items numbers values nums lst data", "item": "item x value element", "char": "char c ch letter",
    "result": "result result result output out", "total": "total total result acc", "target": "target target value key",
    "base": "base base x", "exponent": "exponent n power", "limit": "limit n maximum", "count": "count n",
    "size": "size n length", "matrix": "matrix m", "d": "d mapping dictionary", "pattern": "pattern sub needle",
    "graph": "graph adjacency", "start": "start source", "node": "node root tree", "year": "year y", "path": "path filename",
    "name": "name person", "amount": "amount total_amount",
    "celsius": "celsius c temperature", "fahrenheit": "fahrenheit f temperature", "radius": "radius r", "width": "width w", "height": "height h",
    "lists": "lists items nested lst list_of_lists", "nums": "nums items numbers values", "line": "line row text", "shift": "shift key n",
}
_TOGETHER = {"a", "b", "c", "first", "second"}


@dataclass(frozen=True)
class Problem:
    """One block of the notation. `arguments` are (name, annotation or '') pairs; `returns` is '' for a class."""

    kind: str
    names: tuple[str, ...]
    arguments: tuple[tuple[str, str], ...]
    returns: str
    sentences: tuple[str, ...]
    examples: tuple[str, ...]
    bodies: tuple[str, ...]


@dataclass(frozen=True)
class Rendered:
    """A function or class as training text; `bare` is `source` without docstring, `kind` is 'function' or 'class'."""

    name: str
    source: str
    bare: str
    sentence: str
    kind: str


def _parse(block: str) -> Problem:
    lines = block.strip("\n").split("\n")
    sentences = tuple(line[2:] for line in lines if line.startswith("? "))
    examples = next((line[1:] for line in lines if line.startswith(">")), "")
    body = "\n".join(line for line in lines[1:] if not line.startswith(("? ", ">")))
    bodies = tuple(part.strip("\n") for part in re.split(r"^--$", body, flags=re.MULTILINE))
    if lines[0].startswith("@class "):
        return Problem("class", (lines[0].split()[1],), (), "", sentences, (), bodies)
    names, arguments, returns = re.fullmatch(r"@ ([\w ]+)\((.*)\) -> (.+)", lines[0]).groups()
    pairs = [tuple(part.split(": ")) if ": " in part else (part, "") for part in re.split(r", (?![^\[]*\])", arguments) if part]
    examples = tuple(e.strip() for e in examples.split(" ; ") if e.strip())
    return Problem("function", tuple(names.split()), tuple(pairs), returns, sentences, examples, bodies)


def problems() -> list[Problem]:
    """All problems, in a fixed order."""
    blocks = "".join(module.PROBLEMS for module in (sequences, numbers, text, lists, algorithms, classes))
    return [_parse(block) for block in re.split(r"\n(?=@)", blocks) if block.strip()]


def _pick(options, rng: random.Random):
    """The first option half of the time, else any of them."""
    return options[0] if rng.random() < 0.5 else rng.choice(options)


def run_example(source: str, name: str, arguments: str) -> str:
    """repr of `name(arguments)` after executing `source`, which is our own text from this package."""
    scope: dict = {}
    exec(source, scope)
    return repr(eval(f"{name}({arguments})", copy.copy(scope)))


def render(problem: Problem, rng: random.Random) -> Rendered:
    """One spelling of a problem, drawn from `rng`. Examples are run to learn their results."""
    sentence, body, name = _pick(problem.sentences, rng), _pick(problem.bodies, rng), _pick(problem.names, rng)
    if problem.kind == "class":
        doc = f'    """{sentence}"""\n\n' if rng.random() < 0.7 else ""
        inner = "\n".join("    " + line if line else "" for line in body.split("\n"))
        return Rendered(name, f"class {name}:\n{doc}{inner}\n", f"class {name}:\n{inner}\n", sentence, "class")
    words = set(re.findall(r"\$(\w+)", " ".join((body, sentence))))
    fixed = set(re.findall(r"(?<![$\w.])[A-Za-z_]\w*", body))
    words.discard("f")
    given = {argument: argument for argument, _ in problem.arguments if argument not in words}
    slot = rng.randrange(15)  # shared by words that go together, so that `a` and `second` do not meet
    for word in sorted(words):  # no two words get one name, and none gets a name that the body uses as it stands
        pool = _POOLS.get(word, word).split()
        if word in _TOGETHER:
            pool = [pool[slot % len(pool)]]
        free = [n for n in pool if n not in given.values() and n not in fixed and n != name]
        given[word] = rng.choice(free) if free else word
    given["f"] = name
    fill = lambda text: re.sub(r"\$(\w+)", lambda m: given[m[1]], text)  # noqa: E731
    typed = rng.random() < 0.25
    arguments = ", ".join(given[a] + (f": {t}" if typed and t else "") for a, t in problem.arguments)
    head = f"def {name}({arguments})" + (f" -> {problem.returns}" if typed else "") + ":\n"
    inner = "".join("    " + line + "\n" if line else "\n" for line in fill(body).split("\n"))
    sentence, bare = fill(sentence), head + inner
    style, doc = rng.random(), ""
    if style < 0.62:
        doc = f'    """{sentence}"""\n'
    elif style < 0.80 and problem.examples:
        calls = [(e, run_example(bare, name, e)) for e in problem.examples[:2]]
        shown = "".join(f"    >>> {name}({e})\n    {result}\n" for e, result in calls)
        doc = f'    """{sentence}\n\n{shown}    """\n'
    elif style > 0.95:
        head = f"# {sentence}\n{head}"
    return Rendered(name, head + doc + inner, bare, sentence, "function")


def generate(count: int, seed: int) -> list[Rendered]:
    """`count` renderings, all problems in turn, without exact repetitions where the problem allows it."""
    rng, everything, seen, out = random.Random(f"textbook/{seed}"), problems(), set(), []
    for i in range(count):
        for _ in range(4):
            rendered = render(everything[i % len(everything)], rng)
            if rendered.source not in seen:
                break
        seen.add(rendered.source)
        out.append(rendered)
    return out
