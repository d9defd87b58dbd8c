"""Short documents out of source files: functions and classes on their own, fill-in-the-middle, questions and answers.

A model that has only read whole files does not expect a prompt that begins with `def`, and does not know when to stop.
So small functions and classes are also shown as documents of their own, some documents are turned inside out for filling in, and a
function with a docstring becomes a request and its answer.
"""

from __future__ import annotations

import ast
import builtins
import random
from dataclasses import dataclass

DEFAULT_SYSTEM = "You are nanoqwen, a small model that writes Python."
OTHER_SYSTEMS = ("You are a helpful assistant.", "You are a careful Python programmer.", "You write short, clear Python.",
                 "Answer with code.")
MAX_LINES = 40  # of a function or class that stands alone
MAX_ANSWER_LINES = 25  # of one that answers a request

# Names that a self-contained function may use: builtins and modules that every reader knows.
_KNOWN = set(dir(builtins)) | {"math", "itertools", "re", "os", "sys", "functools", "operator", "random", "string", "collections"}


@dataclass(frozen=True)
class Snippet:
    """A function or class as a document: `source` ends with a newline; `bare` is the same without its docstring."""

    kind: str  # "function" or "class"
    name: str
    source: str
    bare: str
    sentence: str | None  # the first sentence of the docstring, if it can serve as a request
    closed: bool  # uses nothing but its arguments, builtins and well-known modules


def first_sentence(docstring: str | None) -> str | None:
    """The opening sentence of a docstring, if it is one plain sentence of moderate length that starts a request."""
    if not docstring:
        return None
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = paragraph.split(". ")[0].rstrip(".") + "."
    plain = 15 <= len(sentence) <= 160 and sentence[0].isupper() and sentence.isascii() and sentence[1].islower()
    return sentence if plain and not any(mark in sentence for mark in (">>>", "``", ":param", "{", "::", "|")) else None


def is_closed(definition: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a definition reads no name from outside itself, apart from _KNOWN."""
    bound, read = {definition.name}, set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Name):
            (bound if isinstance(node.ctx, ast.Store) else read).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read <= bound | _KNOWN


def definitions(text: str) -> list[Snippet]:
    """The undecorated top-level functions and classes of a file that have at most MAX_LINES lines."""
    lines, found = text.split("\n"), []
    for node in ast.parse(text).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.decorator_list:
            continue
        kind = "function" if isinstance(node, ast.FunctionDef) else "class"
        if kind == "class" and not any(isinstance(child, ast.FunctionDef) for child in node.body):
            continue
        length = node.end_lineno - node.lineno + 1
        if not 2 <= length <= MAX_LINES:
            continue
        source = lines[node.lineno - 1: node.end_lineno]
        body, doc = node.body, ast.get_docstring(node)
        bare = source
        if doc is not None:
            if len(body) == 1:
                continue  # nothing but a docstring
            start, end = body[0].lineno - node.lineno, body[0].end_lineno - node.lineno + 1
            if start == 0:
                continue  # all on one line
            while not source[end].strip():
                end += 1  # the blank line that set the docstring off
            bare = source[:start] + source[end:]
        if len(body) == 1 and isinstance(body[0], (ast.Pass, ast.Raise)):
            continue
        found.append(Snippet(kind, node.name, "\n".join(source) + "\n", "\n".join(bare) + "\n",
                             first_sentence(doc), is_closed(node)))
    return found


def fim_pieces(text: str, rng: random.Random) -> list[tuple[str, str, str]]:
    """(prefix, suffix, middle) triples that together hold `text`: windows cut at line ends, one hole in each.

    A last scrap of fewer than 60 characters is left out. A hole is whole lines, as after pressing Enter, or the rest
    of a line, as while typing, or any span of characters.
    """
    pieces, window, limit = [], "", rng.randint(300, 1800)
    lines = text.splitlines(keepends=True)
    for i, line in enumerate(lines):
        window += line
        if (len(window) < limit and i + 1 < len(lines)) or len(window) < 60:
            continue
        kind = rng.random()
        if kind < 0.4:
            starts = [0] + [k + 1 for k, c in enumerate(window[:-1]) if c == "\n"]
            first = rng.randrange(len(starts))
            last = min(first + rng.randint(1, 6), len(starts))
            a, b = starts[first], starts[last] if last < len(starts) else len(window)
        elif kind < 0.7:
            a = rng.randrange(len(window))
            b = window.find("\n", a) if "\n" in window[a:] else len(window)
        else:
            a = rng.randrange(len(window))
            b = min(len(window), a + int(rng.expovariate(1 / 90)) + 1)
        pieces.append((window[:a], window[b:], window[a:b]))
        window, limit = "", rng.randint(300, 1800)
    return pieces


def third_person(sentence: str) -> str | None:
    """'Return the sum.' -> 'returns the sum.': the verb as it stands after 'a function that'. None when it is no verb we know."""
    verb, _, rest = sentence.partition(" ")
    if verb not in _VERBS or not rest:
        return None
    verb = verb.lower()
    if verb.endswith(("ch", "sh", "ss", "x")):
        return f"{verb}es {rest}"
    return f"{verb[:-1]}ies {rest}" if verb.endswith("y") and verb[-2] not in "aeiou" else f"{verb}s {rest}"


_VERBS = set("""Add Apply Approximate Build Calculate Capitalize Check Clamp Collect Combine Compare Compute Convert Copy Count
Create Decode Draw Encode Estimate Evaluate Extract Find Flatten Format Generate Get Group Insert Interleave Join List Make Map
Merge Move Multiply Normalize Parse Print Raise Read Remove Repeat Replace Return Reverse Rotate Round Search Shuffle Solve Sort
Split Strip Subtract Sum Swap Take Test Transpose Truncate Turn Write Yield""".split())


def request(kind: str, name: str, sentence: str, rng: random.Random) -> str:
    """What a user may type to get the function or class `name` whose docstring begins with `sentence`."""
    if kind == "class":
        return rng.choice((f"Write a class {name}: {sentence}", f"Write a class called {name}. {sentence}", f"Write a Python class {name}."))
    verb_form = third_person(sentence)
    forms = [f"Write a function {name}: {sentence}"] * 4 + [f"Write a function called {name}. {sentence}", f"{name}: {sentence}"]
    if verb_form:
        forms += [f"Write a function that {verb_form}"] * 2 + [f"Write a Python function that {verb_form}",
                  f"Write a function {name} that {verb_form}", f"How do I write a function that {verb_form[:-1]}?",
                  f"I need a function that {verb_form}", f"Can you write a function that {verb_form[:-1]}?"]
    if not name.startswith("_"):
        forms.append(f"Write a {name.replace('_', ' ')} function.")
    text = rng.choice(forms)
    return text[:-1] if text.endswith(".") and rng.random() < 0.3 else text


def answer(source: str) -> str:
    """The assistant's reply that hands over `source`."""
    return f"```python\n{source.rstrip()}\n```"


SMALL_TALK = (  # our own lines; they keep a greeting from being answered with a random function
    (("Hello", "Hi", "Hello!", "Hi there", "Good morning"), "Hello! Tell me which Python function to write."),
    (("Who are you?", "What are you?", "What is your name?"), "I am nanoqwen, a small model that writes Python."),
    (("What can you do?", "Help", "How can you help me?"),
     "I write short Python functions. Name one and say what it should do, and I will try."),
    (("Thank you", "Thanks!", "Thanks", "Great, thank you!"), "You are welcome."),
    (("Bye", "Goodbye", "See you"), "Goodbye!"),
)


def conversation(pairs: list[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    """(role, content) messages of one chat: a system line, then the given turns, now and then with small talk."""
    system = DEFAULT_SYSTEM if rng.random() < 0.85 else rng.choice(OTHER_SYSTEMS)
    turns = list(pairs)
    if rng.random() < 0.06:
        users, reply = rng.choice(SMALL_TALK)
        turns.insert(rng.choice((0, len(turns))), (rng.choice(users), reply))
    messages = [("system", system)]
    for user, assistant in turns:
        messages += [("user", user), ("assistant", assistant)]
    return messages
