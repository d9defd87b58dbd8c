"""From a model's text to the code that is scored: what is cut, what is kept, and that nothing else is touched."""

import pytest

from nanoqwen.evals import execute
from nanoqwen.evals.completions import completion_of_reply, cut, extract_code, find_end
from nanoqwen.evals.problems import load_problems

pytestmark = pytest.mark.usefixtures("alone")

PROMPT = 'from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    """ Sum. """\n'
PROBLEMS = load_problems().problems


def passes(completion: str) -> bool:
    return execute.run_program(f"{PROMPT}{completion}\nassert add(2, 3) == 5\n").passed


# ------------------------------------------------------------------------------------------------------- base form

KEPT = {
    "indentation": "    return a + b\n",
    "no newline at the end": "    return a + b",
    "begins with a newline": "\n    return a + b\n",
    "a comment at column 0 in the body": "    x = a\n# the other\n    return x + b\n",
    "an if in the body": "    if a:\n        return a + b\n    return b\n",
    "class inside a string": '    text = """\nclass X:\ndef f():\nprint(1)\n"""\n    return a + b\n',
    "brackets that close at column 0": "    return sum([\na,\nb,\n])\n",
    "a helper after its use": "    return helper(a, b)\n\n\ndef helper(x, y):\n    return x + y\n",
    "a helper of a helper": "    return one(a, b)\n\ndef one(x, y):\n    return two(x, y)\n\ndef two(x, y):\n    return x + y\n",
    "a decorated helper": "    return one(a, b)\n\nimport functools\n@functools.lru_cache\ndef one(x, y):\n    return x + y\n",
    "a class that is used": "    return Adder(a).plus(b)\n\nclass Adder:\n    def __init__(self, a):\n        self.a = a\n    def plus(self, b):\n        return self.a + b\n",
    "a constant that is used": "    return a + b + ZERO\n\nZERO = 0\n",
    "a helper first, the function anew": "    pass\n\ndef helper(x, y):\n    return x + y\n\ndef add(a, b):\n    return helper(a, b)\n",
    "a helper at once, the function anew": "\ndef helper(x, y):\n    return x + y\n\ndef add(a, b):\n    return helper(a, b)\n",
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_good_code_survives_whole(name):
    assert cut(PROMPT, "add", KEPT[name]) == KEPT[name]
    assert passes(KEPT[name])


@pytest.mark.parametrize("tail", [
    'if __name__ == "__main__":\n    raise SystemExit\n', "print(add(1, 2))\n", "def other(a):\n    return a\n", "class Other:\n    pass\n",
    "def add(a, b):\n    return 0\n", "assert add(1, 2) == 4\n", "import antigravity\n", "x = input()\n", "Here is the explanation.\n",
])  # fmt: skip
@pytest.mark.parametrize("name", KEPT)
def test_what_follows_the_answer_is_cut(name, tail):
    whole = KEPT[name] if KEPT[name].endswith("\n") else KEPT[name] + "\n"
    assert cut(PROMPT, "add", whole + "\n" + tail) == whole + "\n"


def test_a_comment_line_and_a_final_main_block():
    raw = '    return a + b\n# done\n\nif __name__ == "__main__":\n    print(add(1, 2))\n'
    assert cut(PROMPT, "add", raw) == "    return a + b\n# done\n\n"


def test_tabs_are_left_as_they_are():
    raw = "\treturn a + b\n"
    assert cut(PROMPT, "add", raw) == raw  # after a body that began with spaces, Python refuses it; nobody repairs it here
    assert not passes(raw)
    inner = "    if a:\n    \treturn a + b\n    return b\n"
    assert cut(PROMPT, "add", inner) == inner and passes(inner)


def test_code_that_is_no_python_is_left_to_fail():
    raw = "    return (a +\n\ndef other():\n    pass\n"
    assert cut(PROMPT, "add", raw) == raw and not passes(raw)


def test_the_end_is_found_early_and_stays():
    raw = "    return helper(a, b)\n\ndef helper(x, y):\n    return x + y\n\nprint(add(1, 2))\nprint(3)\n"
    end = raw.index("print")
    found = [find_end(PROMPT, "add", raw[:n]) for n in range(len(raw) + 1)]
    certain = raw.index("\n", end) + 1  # when the line that ends it is whole
    assert found == [None] * certain + [end] * (len(raw) + 1 - certain)


def test_canonical_solutions_are_not_touched():
    assert len(PROBLEMS) == 164
    for problem in PROBLEMS:
        assert problem.prompt.endswith("\n")
        for tail in ("", "\n\ndef check(f):\n    pass\n", "\nprint(1)\n", '\n\nif __name__ == "__main__":\n    pass\n'):
            kept = cut(problem.prompt, problem.entry_point, problem.canonical_solution + tail)
            assert kept.startswith(problem.canonical_solution) and kept.strip() == problem.canonical_solution.strip(), problem.task_id


# ------------------------------------------------------------------------------------------------------- chat form

CODE = "def add(a, b):\n    return a + b\n"
REPLIES = {
    "python fence": f"Sure!\n\n```python\n{CODE}```\nIt adds.",
    "fence without a language": f"```\n{CODE}```",
    "one line": "```\ndef add(a, b): return a + b\n```",
    "other language names": f"```Python3\n{CODE}```",
    "code on the fence's line": f"```{CODE}```",
    "a fence that is never closed": f"```python\n{CODE}",
    "bare code": CODE,
    "bare code after prose": f"Here you are:\n\n{CODE}",
    "line ends of another system": f"```python\r\n{CODE}```",
    "an indented fence": f"1. So:\n   ```python\n{CODE}   ```\n",
    "usage first": f"```\nadd(1, 2)\n```\nand\n```python\n{CODE}```",
    "usage last": f"```python\n{CODE}```\nUse:\n```python\nprint(add(1, 2))\n```",
    "with imports": f"```python\nimport os\n\n{CODE}```",
}


@pytest.mark.parametrize("name", REPLIES)
def test_code_is_taken_whole_from_a_reply(name):
    code = extract_code("add", REPLIES[name])
    assert code.lstrip("import os\n").startswith("def add(a, b):") or code.startswith(("def add", "import os")), code
    assert "```" not in code
    assert passes(completion_of_reply("add", REPLIES[name]))


def test_a_body_in_a_fence_continues_the_prompt():
    assert completion_of_reply("add", "```python\n    return a + b\n```") == "    return a + b\n"


def test_a_reply_without_code_fails():
    assert not passes(completion_of_reply("add", "I cannot help with that."))


def test_canonical_solutions_as_replies_pass():
    replies = [(p.task_id, p.program(completion_of_reply(p.entry_point, f"```python\n{p.prompt}{p.canonical_solution}\n```\n"))) for p in PROBLEMS]
    outcomes = execute.run_all(replies)
    assert [name for name, outcome in outcomes.items() if not outcome.passed] == []
