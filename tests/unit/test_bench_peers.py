"""llama.cpp as a peer: what is asked of it, what is read from its answer, and every way in which it can be missing."""

import json
import os

import pytest
from benchkit import SHAPE, fake_llama_bench, rows, write_gguf

from nanoqwen.bench import peers
from nanoqwen.bench.gguf import cache_bytes_per_token, embedding_bytes
from nanoqwen.bench.protocol import Protocol, mbu
from nanoqwen.config import Dims
from nanoqwen.model import kv_bytes_per_token

PROTOCOL = Protocol.standard(prompt_tokens=32, gen_tokens=8, runs=2)
TENSORS = {"token_embd.weight": 0, "blk.0.attn_q.weight": 300_000_000, "output.weight": 500_000_000}


def test_the_answer_becomes_a_peer(tmp_path):
    tool = peers.find(str(fake_llama_bench(tmp_path)), str(write_gguf(tmp_path / "m.gguf", TENSORS)))
    results, samples = peers.run(tool, PROTOCOL, on_gpu=True, ceiling_gb_s=2000.0)
    asked = json.loads((tmp_path / "arguments.json").read_text(encoding="utf-8"))
    assert asked == ["-m", tool.gguf, "-p", "32", "-n", "8", "-d", "0,32", "-r", "2", "-ngl", "99", "-fa", "1", "-o", "json"]
    assert (results["ttft_ms"], results["itl_ms"], results["tokens_per_s"]) == (40.0, 4.0, 250.0)
    assert results["spread"]["ttft_ms"] == {"median": 40.0, "min": 39.999, "max": 40.001} and results["spread"]["itl_ms"]["min"] == 3.9999
    assert results["bits_per_weight"] == 4.913 and results["kv_type"] == "FP16" and results["deviations"] == list(peers.DEVIATIONS)
    read = 4_377_000_000 + 36 * 57_344
    assert results["bytes_per_token"] == read and results["mbu"] == mbu(read, 4.0, 2000.0) and results["depth"] == 32
    assert samples["generation"]["n_gen"] == 8


def test_no_layer_goes_to_a_card_on_the_cpu(tmp_path):
    tool = peers.Tool("llama-bench", "m.gguf")
    assert peers.command(tool, PROTOCOL, on_gpu=False)[-4:] == ["-ngl", "0", "-o", "json"]


def test_a_file_that_is_no_gguf_gives_no_mbu(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF but short")
    results, _ = peers.run(peers.find(str(fake_llama_bench(tmp_path)), str(tmp_path / "m.gguf")), PROTOCOL, on_gpu=False, ceiling_gb_s=40.0)
    assert results["mbu"] is None and "does not tell" in results["mbu_note"]


def test_another_cache_type_gives_no_mbu(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "_kv_type", lambda row: "Q8_0")
    results, _ = peers.run(peers.find(str(fake_llama_bench(tmp_path)), str(write_gguf(tmp_path / "m.gguf", TENSORS))), PROTOCOL, on_gpu=False, ceiling_gb_s=40.0)
    assert results["mbu"] is None and "bytes_per_token" not in results


def test_the_cache_is_computed_from_the_keys(tmp_path):
    assert cache_bytes_per_token(write_gguf(tmp_path / "a", TENSORS)) == kv_bytes_per_token(Dims.qwen2_5_coder_7b())
    explicit = {**SHAPE, "attention.key_length": 64, "attention.value_length": 32}
    assert cache_bytes_per_token(write_gguf(tmp_path / "b", TENSORS, explicit)) == 28 * 4 * (64 + 32) * 2
    alone = {name: value for name, value in SHAPE.items() if not name.endswith("kv")}
    assert cache_bytes_per_token(write_gguf(tmp_path / "c", TENSORS, alone)) == 28 * 28 * 256 * 2, "every query head has its own pair"
    assert cache_bytes_per_token(write_gguf(tmp_path / "d", TENSORS, {**SHAPE, "attention.head_count_kv": [4] * 28})) is None
    assert cache_bytes_per_token(write_gguf(tmp_path / "e", TENSORS, {})) is None and cache_bytes_per_token(str(tmp_path / "none")) is None


def test_every_field_that_is_read_is_in_the_pinned_build():
    """The names that b11312 writes (tools/llama-bench/llama-bench.cpp, get_fields and samples_ns), and no other, serve."""
    written = """build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch n_ubatch n_threads
        cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices tensor_split
        tensor_buft_overrides load_mode lazy_mode embeddings no_op_offload no_host repack fit_target fit_min_ctx n_prompt n_gen n_depth test_time
        avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts""".split()
    asked = set()

    class Row(dict):
        def __getitem__(self, key):
            asked.add(key)
            return super().__getitem__(key)

        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers.json, "loads", lambda text: [Row(row) for row in rows()])
        peers.parse("", PROTOCOL)
    assert asked <= set(written) and {"n_depth", "samples_ns", "model_size"} <= asked


def test_the_embedding_is_measured_by_its_offsets(tmp_path):
    assert embedding_bytes(write_gguf(tmp_path / "a", TENSORS)) == 300_000_000
    assert embedding_bytes(write_gguf(tmp_path / "b", {"token_embd.weight": 0, "output_norm.weight": 64})) == 0, "a tied head reads all of it"
    assert embedding_bytes(write_gguf(tmp_path / "c", {"output.weight": 0})) is None
    assert embedding_bytes(str(tmp_path / "none")) is None
    raw = (tmp_path / "a").read_bytes()
    for length in range(0, len(raw), 7):
        (tmp_path / "d").write_bytes(raw[:length])
        assert embedding_bytes(str(tmp_path / "d")) is None


@pytest.mark.parametrize("program, gguf, said", [
    ("no-such-llama-bench", "m.gguf", "no-such-llama-bench: no such program"),
    (None, "m.gguf", "without --llama-bench"),
    ("true", None, "needs --gguf"),
    ("true", "no/such.gguf", "no/such.gguf: no such file"),
])  # fmt: skip
def test_what_is_missing_is_named(program, gguf, said):
    with pytest.raises(peers.Skipped, match=said):
        peers.find(program, gguf)


def test_no_peer_is_no_complaint():
    assert peers.find(None, None) is None


def test_it_is_found_on_the_path(tmp_path, monkeypatch):
    fake_llama_bench(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    assert peers.find("llama-bench", str(write_gguf(tmp_path / "m.gguf", TENSORS))).program == str(tmp_path / "llama-bench")


@pytest.mark.parametrize("body, said", [
    ("sys.exit('error: failed to load model')", "ended with status 1: error: failed to load model"),
    ("print('not json')", "cannot be read"),
    ("print('[]')", "has no pp32 and tg8 @ d32"),
    ("print('[{\"n_prompt\": 32}]')", "cannot be read"),
])  # fmt: skip
def test_a_peer_that_fails_is_skipped_with_its_own_words(tmp_path, body, said):
    with pytest.raises(peers.Skipped, match=said):
        peers.run(peers.Tool(str(fake_llama_bench(tmp_path, body)), "m.gguf"), PROTOCOL, on_gpu=False, ceiling_gb_s=None)


def test_unlike_types_of_keys_and_values_are_both_named():
    answer = rows()
    answer[3]["type_k"] = "q8_0"
    assert peers.parse(json.dumps(answer), PROTOCOL)[0]["kv_type"] == "Q8_0 keys, FP16 values"
