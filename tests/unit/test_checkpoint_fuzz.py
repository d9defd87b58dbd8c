"""Whatever stands in a checkpoint's files, opening it succeeds or says one plain line: no other exception, ever.

Every value of every JSON file, and of a weight file's header, is replaced in turn by values of other types and sizes; then
bytes are flipped at random. The seeds are fixed, so a failure repeats.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from tiny import Sizes

from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.errors import InputError

SIZES = Sizes(hidden=128, intermediate=128, layers=1, heads=2, kv_heads=1, vocab=300)
ODD_VALUES = [
    None, [], {}, "x", "", -1, 0, 1, True, False, float("inf"), float("nan"), 10**30, 2.5, [1], ["x"], {"a": 1}, [[]], [{}], [None],
    {"content": 5}, 10**9, "default", {"rope_type": 5}, {"name": []},
]  # fmt: skip
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json", "tokenizer.json")


@pytest.fixture
def folder(tmp_path) -> Path:
    config = tiny.config(
        SIZES, rope_scaling={"type": "default"}, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, layer_types=["full_attention"],
        quantization_config=None, head_dim=64,
    )  # fmt: skip
    side = tiny.tokenizer_config(
        added_tokens_decoder={"258": {"content": "<|endoftext|>", "special": True}}, chat_template=[{"name": "default", "template": "x"}]
    )
    return tiny.make(tmp_path, SIZES, config=config, tokenizer_config=side, shards=2)


def places(value, path: tuple = ()) -> Iterator[tuple]:
    """The path to every value inside ``value``; of long lists and objects, the first few."""
    yield path
    if isinstance(value, dict):
        for key in list(value)[:40]:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 4)):
            yield from places(value[index], (*path, index))


def replaced(value, path: tuple, by):
    """A copy of ``value`` with the value at ``path`` replaced."""
    if not path:
        return by
    whole = copy.deepcopy(value)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = by
    return whole


def opens_or_says_why(folder: Path, what) -> bool:
    """True when the folder opens; False when it is refused in one line. Anything else fails the test, naming ``what``."""
    try:
        open_checkpoint(folder).close()
        return True
    except InputError as e:
        assert "\n" not in str(e) and len(str(e)) < 700, (what, str(e))
        return False
    except Exception as e:
        raise AssertionError(f"{what}: {type(e).__name__}: {e}") from e


@pytest.mark.parametrize("name", JSON_FILES)
def test_any_value_in_a_json_file(folder, name):
    path = folder / name
    whole = json.loads(path.read_bytes())
    outcomes = set()
    for place in places(whole):
        for odd in ODD_VALUES:
            path.write_text(json.dumps(replaced(whole, place, odd)), encoding="utf-8")
            outcomes.add(opens_or_says_why(folder, (name, place, odd)))
    assert outcomes == {True, False}  # some replacements are harmless, some are not


@pytest.mark.parametrize("name", [*JSON_FILES, tiny.shard_name(0, 2)])
def test_flipped_bytes(folder, name):
    path, chosen = folder / name, random.Random(name)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if name.endswith(".safetensors") else len(whole)
    for _ in range(200):
        spoiled = bytearray(whole)
        for _ in range(chosen.choice((1, 1, 3))):
            spoiled[chosen.randrange(header)] = chosen.randrange(256)
        path.write_bytes(spoiled)
        opens_or_says_why(folder, (name, bytes(spoiled)[:100]))


def test_any_value_in_the_header_of_a_weight_file(folder):
    path, chosen = folder / tiny.shard_name(0, 2), random.Random(7)
    content = path.read_bytes()
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    for place in places(header):
        for odd in chosen.sample(ODD_VALUES, 5):
            text = json.dumps(replaced(header, place, odd)).encode("utf-8")
            path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + n :])
            opens_or_says_why(folder, (place, odd))
