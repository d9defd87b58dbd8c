"""config/nanoqwen.yaml is the one source of constants: what the code repeats must equal it."""

import dataclasses

import pytest

from nanoqwen import config, int4
from nanoqwen.errors import InputError
from nanoqwen.model import bytes_per_token, flops_per_token, kv_bytes_per_token, pick_group, schema


def test_constants_that_the_code_spells_out_equal_the_yaml():
    quant = config.load_settings().quant
    assert int4.SHIFTS == quant.shuffle_bits
    assert (int4.CODE_MIN, int4.CODE_MAX) == (quant.code_min, quant.code_max)
    assert sorted(quant.shuffle_bits) == list(range(0, 32, quant.bits))


def test_a_missing_and_an_unknown_key_are_named():
    with pytest.raises(InputError, match="section kv lacks page_tokens"):
        config._build(config.KVSpec, "kv", {"value_bytes": 2, "page_align_bytes": 128})
    with pytest.raises(InputError, match="section kv has unknown key pages"):
        config._build(config.KVSpec, "kv", {"page_tokens": 16, "value_bytes": 2, "page_align_bytes": 128, "pages": 1})


def test_the_7b_has_the_facts_of_the_book():
    dims = config.Dims.qwen2_5_coder_7b()
    assert (dims.q_size, dims.kv_size, dims.gqa_ratio) == (3584, 512, 7)
    assert kv_bytes_per_token(dims) == 56 * 1024
    moved = bytes_per_token(dims, 128, 0)
    assert moved["int4"] == 3_262_644_224 and moved["lm_head"] == 1_089_994_752
    assert moved["total"] == sum(v for k, v in moved.items() if k != "total")
    assert bytes_per_token(dims, 128, 4096)["kv"] == 4096 * 56 * 1024
    assert flops_per_token(dims, 0) == 2 * (2 * 3_262_644_224 + 152064 * 3584)
    assert len(schema(dims)) == 28 * 12 + 3


def test_a_page_of_the_7b_is_16_kib_and_aligned():
    kv, dims = config.load_settings().kv, config.Dims.qwen2_5_coder_7b()
    page = kv.page_tokens * dims.kv_size * kv.value_bytes
    assert page == 16 * 1024 and page % kv.page_align_bytes == 0
    assert page // dims.num_kv_heads == 4 * 1024


def test_a_tied_head_has_no_matrix_of_its_own_but_is_still_read():
    dims = config.Dims.qwen2_5_coder_7b()
    tied = dataclasses.replace(dims, tied=True)
    assert len(schema(tied)) == len(schema(dims)) - 1
    assert bytes_per_token(tied, 128, 7) == bytes_per_token(dims, 128, 7)


@pytest.mark.parametrize(("hidden", "heads", "group"), [(256, 2, 128), (192, 3, 64), (96, 3, 32)])
def test_the_group_is_the_first_allowed_one_that_divides(hidden, heads, group):
    assert pick_group(config.Dims(1, hidden, 2 * hidden, heads, 1, hidden // heads, 64, 64)) == group


def test_a_size_that_no_group_divides_is_refused_by_name():
    dims = config.Dims(1, 136, 256, 1, 1, 136, 64, 64)
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.q_proj\.weight.* 136 "):
        pick_group(dims)
    with pytest.raises(InputError, match="136 is not a multiple of the group size 128"):
        pick_group(dims, 128)
    with pytest.raises(InputError, match="group size 48"):
        pick_group(dims, 48)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"num_kv_heads": 3}, "evenly"), ({"head_dim": 63}, "RoPE"), ({"hidden": 0}, "hidden"), ({"rope_theta": float("nan")}, "rope_theta"), ({"rms_eps": -1.0}, "rms_eps")],
)
def test_impossible_dimensions_say_why(change, word):
    dims = dataclasses.replace(config.Dims.qwen2_5_coder_7b(), **change)
    assert any(word in line for line in dims.problems())
