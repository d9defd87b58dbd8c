"""Chapter 4: numbers that stand in its prose, recomputed. (Cells are checked by `pytest --nbval notebooks`.)"""

from __future__ import annotations

import dataclasses

import pytest
from chapter import Chapter

from nanoqwen import kv
from nanoqwen.config import Dims, load_settings
from nanoqwen.model import bytes_per_token, schema

CHAPTER = Chapter("04_paged_kv")
prose = CHAPTER.prose

SETTINGS, DIMS = load_settings(), Dims.qwen2_5_coder_7b()
SPEC, GROUP = SETTINGS.kv, SETTINGS.quant.group
TOKEN = kv.kv_bytes_per_token(DIMS, SPEC)
ROW_KIB = DIMS.kv_size * SPEC.value_bytes // 1024
POOLS = 2 * DIMS.num_layers
ROW_BYTES = DIMS.head_dim * SPEC.value_bytes
SMALL = Dims(24, 896, 4864, 14, 2, 64, 151936, 32768, tied=True)  # Qwen2.5-0.5B


@pytest.mark.parametrize(
    "sentence",
    [
        f"a page holds {SPEC.page_tokens}. How many pages",
        f"{SPEC.page_tokens - kv.tokens_in_last_page(49, SPEC.page_tokens)} slots lie behind the end",
        f"Eight rows of a page lie {ROW_BYTES} bytes apart",
        f"A token costs {TOKEN // (ROW_KIB * 1024)} times as much",
        f"a context of {DIMS.max_position:,} tokens needs {DIMS.max_position * ROW_KIB // 1024} MB",
        f"*each* of the {POOLS} pools ({DIMS.num_layers} layers, K and V)",
        f"**{TOKEN // 1024} KiB** of cache: {ROW_KIB} KiB, for K and for V, in {DIMS.num_layers} layers",
        f'"1 KB" forgets the factor {POOLS}',
        f"it would need {POOLS} tables instead of one",
        f"A slice arrives in shared memory as {SPEC.page_tokens} rows of {ROW_BYTES} bytes",
        f"{kv.kv_bytes_per_token(SMALL, SPEC) // 1024} KiB a token. The weights shrink by more than ten and the cache by less than five",
        f"The length of the last page is `(n - 1) % {SPEC.page_tokens} + 1`",
    ],
)
def test_sentence_says_what_the_package_computes(sentence):
    assert sentence in prose()


def test_words_that_stand_for_numbers():
    share = {n: kv.kv_bytes_per_token(DIMS, SPEC) * n / bytes_per_token(DIMS, GROUP, n)["total"] for n in (512, DIMS.max_position)}
    assert share[512] < 0.01 and "less than one percent of what a token reads" in prose()
    assert 0.28 < share[DIMS.max_position] < 1 / 3 and "it is almost a third" in prose()
    assert 0.06 <= 16 / ROW_BYTES < 0.065 and "six percent more bytes" in prose()
    weights = [sum(s.rows * s.cols for s in schema(d)) for d in (DIMS, SMALL)]
    assert weights[0] / weights[1] > 10 and TOKEN / kv.kv_bytes_per_token(SMALL, SPEC) < 5
    shared = dataclasses.replace(DIMS, num_kv_heads=DIMS.num_heads)
    assert kv.kv_bytes_per_token(shared, SPEC) == 7 * TOKEN and "Seven times as much a token" in prose()
