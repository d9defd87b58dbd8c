"""`nanoqwen bench`: real measurements of the CPU engine, small; receipts; refusals before anything is timed."""

from __future__ import annotations

import json

import pytest
from benchkit import Card, CardEngine, fake_llama_bench, write_gguf

from nanoqwen import synthetic_pack
from nanoqwen.bench import ceiling, e2e, itl, peer_torch, prefill, suite
from nanoqwen.bench.protocol import Protocol
from nanoqwen.bench.peers import DEVIATIONS
from nanoqwen.bench.receipts import check_receipt, read_receipt
from nanoqwen.bench.prepare import Setup
from nanoqwen.cli import bench
from nanoqwen.engines import hopper_problem

FAST = ["--warmup", "1", "--runs", "2", "--ceiling-mb", "8"]
SMALL = ["--prompt-tokens", "20", "--gen-tokens", "4", *FAST]
TENSORS = {"token_embd.weight": 0, "output.weight": 1000}
no_hopper = pytest.mark.skipif(hopper_problem() is None, reason="a Hopper card is here")


# --------------------------------------------------------------------------------------------------------- measuring


def test_end_to_end_keeps_the_phases_apart(run, plain):
    done = run("bench", "e2e", *SMALL, plain, "--engine", "cpu")
    assert done.status == 0, done.err
    first = [line.split()[0] for line in done.out.splitlines() if line.startswith("  ")]
    assert first == ["load", "prefill", "first", "decode", "read"]
    assert done.out.startswith("ceiling: ") and "CPU, PyTorch sum of int64" in done.out
    assert "benchmark_e2e, shortened" in done.out and "end ids ignored" in done.out and "at a context of 20 to 24 tokens" in done.out
    assert "data sheet" not in done.out, "a CPU has no row in the book's list of data sheets"


def test_end_ids_do_not_end_a_run(run, letters):
    """This model says its end id after a few letters; each run makes all its tokens all the same."""
    found = json.loads(run("bench", "e2e", "--prompt-tokens", "8", "--gen-tokens", "40", *FAST, "--engine", "cpu", "--json", letters).out)
    assert [len(r["steps_ms"]) for r in found["samples"]["engines"]["cpu"]["runs"]] == [39, 39]
    assert found["results"]["engines"]["cpu"]["same_ids_in_every_run"] is True and "ignored" in found["protocol"]["end_ids"]


def test_json_holds_what_the_book_reads(run, plain):
    found = json.loads(run("bench", "e2e", *SMALL, plain, "--engine", "cpu", "--json").out)
    cpu = found["results"]["engines"]["cpu"]
    assert found["results"]["ceiling_gb_s"] > 0 and {"ttft_ms", "itl_ms", "tokens_per_s", "mbu"} <= cpu.keys()
    assert cpu["ttft_ms"] >= cpu["prefill_ms"] > 0 and 0 < cpu["mbu"] and found["receipt"] is None
    assert len(found["samples"]["ceiling"]["gb_s"]) == ceiling.RUNS and found["protocol"]["context_of_mbu"] == 22


def test_single_steps_and_depths(run, plain):
    done = run("bench", "itl", plain, *SMALL, "--engine", "cpu")
    assert done.status == 0 and "6 steps at a context of 20 to 24 tokens" in done.out and "slowest" in done.out
    found = json.loads(run("bench", "context", plain, "--gen-tokens", "3", *FAST, "--depth", "40", "--depth", "17", "--engine", "cpu", "--json").out)
    assert list(found["results"]["engines"]["cpu"]) == ["17", "40"] and found["results"]["engines"]["cpu"]["40"]["itl_ms"] > 0
    table = run("bench", "context", plain, "--gen-tokens", "3", *FAST, "--depth", "17", "--engine", "cpu").out
    assert "ms a token" in table.splitlines()[-2] and table.splitlines()[-1].split()[0] == "17"


def test_prompts_of_many_lengths(run, plain, monkeypatch):
    monkeypatch.setattr(prefill, "PAUSE_S", 0.0)
    monkeypatch.setattr(prefill, "LENGTHS", (1, 16, 33, 100_000))
    done = run("bench", "prefill", plain, "--ceiling-mb", "8", "--engine", "cpu")
    assert done.status == 0 and "ms a token" not in done.out, done.err
    table = [line.split() for line in done.out.partition("TFLOP/s")[2].splitlines() if line.strip()]
    found = json.loads(run("bench", "prefill", plain, "--ceiling-mb", "8", "--engine", "cpu", "--seed", "3", "--json").out)
    lengths = found["results"]["engines"]["cpu"]["lengths"]
    assert [row[0] for row in table] == list(lengths) == ["1", "16", "33"] and found["protocol"]["seed"] == 3 and found["protocol"]["name"] == "prefill"
    assert all(row["same_id_in_every_run"] and row["cold_ms"] > 0 and row["ttft_ms"] > 0 for row in lengths.values())
    assert "workspace" not in done.out, "that is a card's"


def test_the_ceiling_alone(run):
    done = run("bench", "ceiling", "--ceiling-mb", "8", "--engine", "cpu")
    assert done.status == 0 and len(done.out.splitlines()) == 1 and "GB/s" in done.out and "8.00 MB" in done.out


def test_a_synthetic_model_is_measured(run, monkeypatch, tmp_path):
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path))
    found = json.loads(run("bench", "e2e", "synthetic:demo", *SMALL, "--engine", "cpu", "--json").out)
    assert found["results"]["model"]["name"] == "synthetic:demo" and found["results"]["model"]["layers"] == 6


# ---------------------------------------------------------------------------------------------------------- receipts


def test_a_receipt_is_written_only_when_it_is_asked_for(run, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("bench", "e2e", plain, *SMALL, "--engine", "cpu")
    assert list(tmp_path.iterdir()) == []
    done = run("bench", "e2e", plain, *SMALL, "--engine", "cpu", "--out", tmp_path / "new")
    path = tmp_path / "new" / "e2e.json"
    assert done.status == 0 and f"receipt written to {path}" in done.err
    receipt = read_receipt(path)
    assert check_receipt(path) == [] and receipt["name"] == "e2e" and receipt["versions"]["torch"]
    assert {"ttft_ms", "itl_ms", "tokens_per_s", "mbu"} <= receipt["results"]["engines"]["cpu"].keys()
    assert receipt["command"] == "nanoqwen bench e2e plain.nanoqwen --engine cpu --prompt-tokens 20 --gen-tokens 4 --warmup 1 --runs 2 --ceiling-mb 8 --receipt"
    assert str(plain.parent) not in path.read_text(encoding="utf-8"), "a receipt names no folder of this machine"


def test_an_installed_package_refuses_a_receipt_before_it_measures(run, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "repo_root", lambda: None)
    monkeypatch.setattr(suite, "measure_ceiling", lambda *_: pytest.fail("measured"))
    assert "written in a clone" in run("bench", "e2e", plain, *SMALL, "--engine", "cpu", "--out", tmp_path).error_line()


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("words, said", [
    (["e2e", "--prompt-tokens", "8100", "--gen-tokens", "128"], "8,100 prompt tokens and 128 generated make 8,228, the model's context is 8,192"),
    (["itl", "--prompt-tokens", "8192"], "8,192 prompt tokens and 128 generated"),
    (["context", "--depth", "9000"], "9,000 context tokens and 128 generated make 9,128"),
    (["e2e", "--engine", "fast"], "there is no engine 'fast', use one of cpu"),
    (["e2e", "--engine", "persistent"], "engine persistent"),
])  # fmt: skip
def test_refused_before_anything_is_timed(run, plain, monkeypatch, words, said):
    monkeypatch.setattr(suite, "measure_ceiling", lambda *_: pytest.fail("measured"))
    engine = [] if "--engine" in words else ["--engine", "cpu"]
    assert said in run("bench", words[0], plain, *words[1:], *engine).error_line()


@no_hopper
@pytest.mark.parametrize("words", [["gemv"], ["e2e", "--engine", "graph"], ["itl", "--engine", "eager"], ["ceiling", "--engine", "graph"], ["e2e", "synthetic:7b", "--engine", "graph"]])
def test_what_needs_a_hopper_card_says_so_in_one_line(run, plain, monkeypatch, words):
    monkeypatch.setattr(suite, "measure_ceiling", lambda *_: pytest.fail("measured"))
    file = [] if words[0] == "ceiling" or "synthetic:7b" in words else [plain]  # a first use of the shipped model would add a line
    assert hopper_problem() in run("bench", words[0], *file, *words[1:]).error_line()


def test_a_large_synthetic_model_on_the_cpu(run):
    line = run("bench", "e2e", "synthetic:7b", "--engine", "cpu").error_line()
    assert line == synthetic_pack.too_large("synthetic:7b")


@pytest.mark.parametrize("words, said", [
    ([], "no mode given; the modes are e2e, itl"),
    (["fast"], "invalid choice: 'fast'"),
    (["e2e", "--gen-tokens", "1"], "at least 2"),
    (["e2e", "--run", "3"], "did you mean --runs?"),
    (["e2e", "--out", "x", "--receipt"], "not allowed with"),
])  # fmt: skip
def test_wrong_words(run, words, said):
    assert said in run("bench", *words).error_line()


# -------------------------------------------------------------------------------------------------------------- peer


def test_a_peer_stands_in_the_same_receipt(run, plain, tmp_path):
    program, gguf = fake_llama_bench(tmp_path), write_gguf(tmp_path / "m.gguf", TENSORS)
    done = run("bench", "e2e", plain, *SMALL, "--engine", "cpu", "--llama-bench", program, "--gguf", gguf, "--out", tmp_path)
    assert done.status == 0, done.err
    assert "llama.cpp 7000 (abc1234), qwen2 7B Q4_K - Medium, 4.91 bits a weight, KV cache FP16" in done.out
    assert "bits a weight, KV cache FP16" in done.out.splitlines()[1], "ours is named too"
    assert done.out.count("  differs") == len(DEVIATIONS) and "behind 20 tokens" in done.out and "draws its own random token ids" in done.out
    receipt = read_receipt(tmp_path / "e2e.json")
    assert {"ttft_ms", "itl_ms", "tokens_per_s", "mbu", "bits_per_weight", "kv_type"} <= receipt["results"]["peers"]["llama.cpp"].keys()
    assert receipt["command"].endswith("--llama-bench llama-bench --gguf m.gguf --receipt")
    asked = json.loads((tmp_path / "arguments.json").read_text(encoding="utf-8"))
    assert asked[asked.index("-p") + 1] == "20" and asked[asked.index("-n") + 1] == "4" and asked[asked.index("-ngl") + 1] == "0"


def test_an_absent_peer_is_skipped_with_its_own_status(run, plain, tmp_path):
    done = run("bench", "e2e", plain, *SMALL, "--engine", "cpu", "--llama-bench", tmp_path / "none", "--gguf", "m.gguf")
    assert done.status == bench.EXIT_PEER_SKIPPED == 3
    assert "peer skipped: " in done.err and "no such program" in done.err and "decode" in done.out
    assert "3 measured, but a peer was asked for and skipped" in " ".join(run("bench", "--help").out.split())


def test_a_peer_that_fails_is_skipped_and_the_rest_stands(run, plain, tmp_path):
    program, gguf = fake_llama_bench(tmp_path, "sys.exit('cannot load')"), write_gguf(tmp_path / "m.gguf", TENSORS)
    done = run("bench", "e2e", plain, *SMALL, "--engine", "cpu", "--llama-bench", program, "--gguf", gguf)
    assert done.status == 3 and "ended with status 1: cannot load" in done.err and "decode" in done.out


@pytest.fixture
def torch_on_the_cpu(monkeypatch):
    """PyTorch's decoder beside the CPU engine, its step not compiled: everything else is as on a card."""
    import torch

    monkeypatch.setattr(peer_torch, "find", lambda asked, *_: "cpu" if asked else None)
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)


def test_pytorch_stands_in_the_same_receipt(run, plain, tmp_path, torch_on_the_cpu):
    done = run("bench", "e2e", plain, *SMALL, "--engine", "cpu", "--torch-peer", "--out", tmp_path)
    assert done.status == 0, done.err
    text = done.out[done.out.index("\ntorch ") :]
    assert "INT4 group 128 with zero points" in text and "KV cache BF16, CPU" in text and "without a CUDA graph, the prompt eager" in text
    first = [line.split("  ")[1].strip() for line in text.splitlines()[3:]]
    assert first == ["build", "compile", "prompt", "decode", "one by one", "read", *["differs"] * len(peer_torch.DEVIATIONS)]
    receipt = read_receipt(tmp_path / "e2e.json")
    assert {"ttft_ms", "itl_ms", "tokens_per_s", "mbu", "bytes_per_token", "description", "versions"} <= receipt["results"]["peers"]["torch"].keys()
    assert len(receipt["samples"]["peers"]["torch"]["runs"]) == 2 and receipt["command"].endswith("--torch-peer --receipt")
    assert set(peer_torch.SOURCES) <= receipt["sources"].keys() and check_receipt(tmp_path / "e2e.json") == []


def test_both_peers_are_measured_or_named(run, plain, tmp_path, torch_on_the_cpu, monkeypatch):
    program, gguf = fake_llama_bench(tmp_path), write_gguf(tmp_path / "m.gguf", TENSORS)
    words = ["bench", "e2e", plain, *SMALL, "--engine", "cpu", "--torch-peer", "--json", "--llama-bench"]
    found = json.loads(run(*words, program, "--gguf", gguf).out)
    assert list(found["results"]["peers"]) == list(found["samples"]["peers"]) == ["llama.cpp", "torch"] and found["skipped"] is None
    monkeypatch.setattr(peer_torch, "disagreement", lambda *_: float("nan"))
    done = run(*words, tmp_path / "none", "--gguf", gguf)
    assert done.status == 3 and done.err.count("peer skipped: ") == 2 and "no such program" in done.err and "differ by nan" in done.err
    found = json.loads(done.out)
    assert "peers" not in found["results"] and "no such program" in found["skipped"] and "differ by nan" in found["skipped"]


def test_pytorch_beside_the_cpu_engine_is_skipped_in_one_line(run, plain):
    done = run("bench", "e2e", plain, *SMALL, "--engine", "cpu", "--torch-peer")
    assert done.status == 3 and "decode" in done.out and "torch" not in done.out.replace("PyTorch sum", "")
    assert [line for line in done.err.splitlines() if "peer skipped" in line] == [
        "nanoqwen: peer skipped: PyTorch's INT4 decoder is measured on an NVIDIA GPU, beside an engine that runs there; give --engine graph, eager or reference"
    ]


def test_pytorch_is_a_peer_of_end_to_end_alone(run, plain):
    assert "--torch-peer" in run("bench", "e2e", "--help").out
    assert "--torch-peer" in run("bench", "itl", plain, "--torch-peer").error_line()


# ------------------------------------------------------------------------- the tables of a card, on a made-up clock


def test_tables_of_a_card_name_every_number(monkeypatch):
    made = Card()
    monkeypatch.setitem(__import__("sys").modules, "cupy", made.cupy)
    protocol = Protocol.standard(prompt_tokens=20, gen_tokens=4, warmup=0, runs=2)
    measured = ceiling.Ceiling([4567.0], 6_000_000_000, "kernels/setup/ceiling.cu, CUDA events", "NVIDIA H200")
    model = {"name": "synthetic:7b", "bits_per_weight": 5.8, "kv_type": "FP16"}
    setup = Setup(1.25, 12.5, "17 of 17 sources compiled", 0.02)

    def lines(mode, results):
        report = suite.Report(mode, ["graph"], protocol.as_dict(), {"model": model, **results}, {}, {}, {}, {"hopper": measured})
        return "\n".join(bench.table(report))

    graph = e2e.measure(CardEngine("graph", made), setup, protocol, measured)[0]
    text = lines("e2e", {"engines": {"graph": graph}})
    assert "95% of the data sheet's 4,800 GB/s" in text and "compile       12.50 s, 17 of 17 sources compiled" in text
    assert "capture       0.020 s" in text and "device alone  6.000 ms a token" in text and "with logits" in text
    eager = itl.measure(CardEngine("eager", made), setup, protocol, measured)[0]
    assert "kernel_gap" in lines("itl", {"engines": {"eager": eager}})
    shape = {"rows": 37888, "cols": 3584, "us": 18.2, "gb_s": 3800.0, "mbu": 0.83}
    assert lines("gemv", {"shapes": {"gate_up": shape}}).splitlines()[-1].split() == ["gate_up", "37888", "x", "3584", "18.2", "3,800", "83.0%"]
