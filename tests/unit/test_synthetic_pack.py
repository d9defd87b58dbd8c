"""``synthetic:NAME`` as a file: the recipe's bits, made once, and a plan where a file would be too large."""

import numpy as np
import pytest

from nanoqwen import synthetic_pack
from nanoqwen.engines import open_engine
from nanoqwen.errors import InputError
from nanoqwen.model import schema
from nanoqwen.packfile import open_pack
from nanoqwen.synthetic import recipe, stream_key, values, words


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("NANOQWEN_CACHE", str(tmp_path_factory.mktemp("cache")))
    notes = []
    path = synthetic_pack.ensure_synthetic_pack("synthetic:demo", notes=notes)
    assert len(notes) == 1 and "made synthetic:demo" in notes[0]
    written = path.stat().st_mtime_ns
    again = []
    assert synthetic_pack.ensure_synthetic_pack("synthetic:demo", notes=again) == path and again == [] and path.stat().st_mtime_ns == written
    with open_pack(path) as pack:
        yield pack
    patch.undo()


def test_the_file_is_sound_and_holds_the_recipes_bits(demo):
    dims = demo.dims
    assert demo.verify() == [] and dims == synthetic_pack.dims_of("synthetic:demo")
    for spec in schema(dims):
        r = recipe(spec, dims)
        if spec.int4:
            codes, scales = demo.int4(spec.name)
            assert np.array_equal(codes.reshape(-1), words(stream_key(0, spec.name), 0, codes.size))
            assert np.array_equal(scales.reshape(-1), values(stream_key(0, spec.name + ".scales"), 0, scales.size, r.size, r.centre))
        else:
            found = demo.fp16(spec.name)
            assert np.array_equal(found.reshape(-1), values(stream_key(0, spec.name), 0, found.size, r.size, r.centre))


def test_an_engine_runs_it(demo):
    with open_engine(demo, "cpu") as engine:
        logits = engine.prefill(list(range(100)))
    assert np.isfinite(logits).all() and 0.5 < logits.std() < 20


def test_the_plan_is_the_files_own_header(demo):
    plan = synthetic_pack.planned("synthetic:demo")
    assert plan.header.file_bytes == demo.header.file_bytes and plan.header.tokenizer_entries == demo.header.tokenizer_entries
    assert [(e.name, e.offset, e.nbytes) for e in plan.tensors.values()] == [(e.name, e.offset, e.nbytes) for e in demo.tensors.values()]
    assert synthetic_pack.is_planned(plan) and not synthetic_pack.is_planned(demo)


def test_a_large_model_is_refused_with_what_it_would_take(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOQWEN_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"synthetic:7b would be a file of 5.55 GB, and 30.5 GB of memory .* Hopper card makes it without a file") as caught:
        synthetic_pack.ensure_synthetic_pack("synthetic:7b")
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_names():
    assert synthetic_pack.is_synthetic("synthetic:x") and not synthetic_pack.is_synthetic("model.nanoqwen") and not synthetic_pack.is_synthetic(None)
    assert synthetic_pack.is_small("synthetic:0.5b") and not synthetic_pack.is_small("synthetic:1.5b")
    with pytest.raises(InputError, match="synthetic:demo"):
        synthetic_pack.planned("synthetic:8b")
