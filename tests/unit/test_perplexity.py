"""Perplexity: windows that score every token once, sums that weigh tokens alike, and two independent programs to agree with."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tiny

torch = pytest.importorskip("torch")

from nanoqwen.config import Dims
from nanoqwen.demo import checkpoint_dir, heldout_dir, training_record
from nanoqwen.errors import InputError, NonFiniteError
from nanoqwen.evals import perplexity
from nanoqwen.evals.perplexity import Score, Text, score_texts, together, window_loss, windows
from nanoqwen.reference import ReferenceModel
from nanoqwen.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> ReferenceModel:
    folder = tiny.make(tmp_path_factory.mktemp("small"), tiny.Sizes(context=256))
    return ReferenceModel.from_checkpoint(folder)


@pytest.fixture(scope="module")
def demo() -> ReferenceModel:
    return ReferenceModel.from_checkpoint(checkpoint_dir())


def heldout(name: str, characters: int | None = None) -> Text:
    raw = (heldout_dir() / name).read_text(encoding="utf-8")[:characters]
    tokenizer = Tokenizer.from_parts((checkpoint_dir() / "tokenizer.json").read_bytes())
    return Text(name, tokenizer.encode(raw), len(raw.encode("utf-8")))


def some_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 512, count).tolist()


# -------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("window, stride", [(2, 1), (8, 4), (8, 7), (8, 1), (9, 4)])
@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 12, 16, 17, 40])
def test_every_token_but_the_first_is_scored_once(window, stride, length):
    scored = []
    for begin, end, count in windows(length, window, stride):
        assert 0 < count < end - begin <= window and begin % stride == 0, "a scored token has at least one token before it in its window"
        assert begin == 0 or end - count - begin >= window - stride, "context beyond the first window"
        scored += range(end - count, end)
    assert scored == list(range(1, length))


def test_the_protocol_of_the_training_record():
    """The same windows as the command that wrote training.json, which has its own code for them."""
    from nanoqwen.demo import evaluate

    for length in (2, 511, 512, 513, 1023, 1024, 1025, 1536, 1537, 5000):
        ids = list(range(length))
        assert [(ids[b:e], n) for b, e, n in windows(length, evaluate.WINDOW, evaluate.STRIDE)] == evaluate.windows(ids)
    assert (perplexity.WINDOW, perplexity.STRIDE) == (evaluate.WINDOW, evaluate.STRIDE)


@pytest.mark.parametrize("window, stride, words", [(300, 8, "context of 256"), (8, 8, "from 1 to 7"), (8, 0, "from 1 to 7"), (8, 9, "from 1 to 7")])
def test_a_protocol_that_does_not_fit(small, window, stride, words):
    with pytest.raises(InputError, match=words):
        score_texts(small, [Text("t", some_ids(20), 20)], window=window, stride=stride)


# --------------------------------------------------------------------------------------------------------- losses


def plain_loss(model: ReferenceModel, ids: list[int], scored: int) -> float:
    """From the definition, in float64, all logits at once."""
    logits = model.forward(torch.tensor(ids), 0).double()
    each = [float(logits[at].logsumexp(0) - logits[at, ids[at + 1]]) for at in range(len(ids) - 1)]
    return sum(each[-scored:])


@pytest.mark.parametrize("scored", [1, 30, 62, 63])
@pytest.mark.parametrize("tokens_at_once", [1, 7, 512])
def test_pieces_do_not_matter(small, monkeypatch, scored, tokens_at_once):
    """The context, the scored tokens and the slices of logits go through the cache in pieces; the loss is the definition's."""
    monkeypatch.setattr(perplexity, "LOGIT_BUDGET", tokens_at_once * small.dims.vocab)
    monkeypatch.setattr(perplexity, "CONTEXT_CHUNK", max(tokens_at_once, 5))
    ids = some_ids(64)
    assert window_loss(small, ids, scored) == pytest.approx(plain_loss(small, ids, scored), rel=2e-6)


def test_tokens_are_weighed_alike_over_texts_and_windows(small):
    texts = [Text("long", some_ids(150, 1), 900), Text("short", some_ids(5, 2), 7), Text("two", some_ids(2, 3), 2)]
    scores = score_texts(small, texts, window=64, stride=32)
    assert [s.tokens for s in scores] == [149, 4, 1]
    wanted = sum(plain_loss(small, texts[0].ids[b:e], n) for b, e, n in windows(150, 64, 32))
    assert scores[0].loss == pytest.approx(wanted, rel=2e-6)
    whole = together(scores)
    losses = sum(s.loss for s in scores)
    assert (whole.tokens, whole.bytes, whole.loss) == (154, 909, losses)
    assert whole.perplexity == math.exp(losses / 154) and whole.bits_per_byte == losses / math.log(2) / 909
    assert whole.perplexity != pytest.approx(np.mean([s.perplexity for s in scores]), rel=1e-3), "not a mean of means"


def test_a_certain_model_has_perplexity_one_and_a_uniform_one_the_vocabulary():
    score = Score("t", 0.0, 10, 10)
    assert score.perplexity == 1 and score.bits_per_byte == 0
    assert Score("t", 10 * math.log(512), 10, 10).perplexity == pytest.approx(512)
    assert Score("t", 1e6, 10, 10).perplexity == math.inf


def test_texts_that_cannot_be_scored(small):
    with pytest.raises(InputError, match="a.py: tokens: 1, needed: at least two"):
        score_texts(small, [Text("a.py", [5], 1)], window=64, stride=32)
    with pytest.raises(InputError, match="a.py: token id 512 has no row in a vocabulary of 512"):
        score_texts(small, [Text("a.py", [5, 512], 1)], window=64, stride=32)


def test_nan_is_an_error_and_not_a_number(tmp_path):
    tensors = tiny.weights()
    tensors["model.layers.1.mlp.down_proj.weight"].values[3] = np.nan
    model = ReferenceModel.from_checkpoint(tiny.make(tmp_path, tensors=tensors))
    with pytest.raises(NonFiniteError, match="layer 1"):
        score_texts(model, [Text("t", some_ids(20), 20)], window=16, stride=8)


def test_progress_counts_predictions(small):
    seen = []
    score_texts(small, [Text("a", some_ids(100), 1), Text("b", some_ids(10), 1)], window=64, stride=32, progress=lambda *call: seen.append(call))
    assert seen[-1] == (108, 108, "b") and [call[0] for call in seen] == sorted(call[0] for call in seen)


# ------------------------------------------------------------------------------------------- two other programs


def test_transformers_agrees_to_four_digits(demo):
    """The same directory, FP32, the usual strided loop over `transformers` logits."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_dir(), dtype=torch.float32, attn_implementation="eager").eval()
    text = heldout("heapq.py", 2400)
    window, stride = 256, 96
    loss, done = 0.0, 1
    with torch.inference_mode():
        for begin in range(0, len(text.ids), stride):
            part = torch.tensor([text.ids[begin : begin + window]])
            end = begin + part.shape[1]
            labels = part.clone()
            labels[:, : done - begin] = -100
            count = end - done
            if count:
                each = torch.nn.functional.cross_entropy(theirs(part).logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
                loss += float(each)
            done = end
            if end == len(text.ids):
                break
    (mine,) = score_texts(demo, [text], window=window, stride=stride)
    assert mine.tokens > 600 and mine.tokens == len(text.ids) - 1
    assert mine.perplexity == pytest.approx(math.exp(loss / mine.tokens), rel=5e-5)


@pytest.mark.parametrize("name", ["bisect.py", "colorsys.py"])
def test_the_training_record_is_met_to_the_printed_digits(demo, name):
    recorded = json.loads(training_record().read_text(encoding="utf-8"))["results"]["sample"]["fp32"][name]
    (score,) = score_texts(demo, [heldout(name)])
    assert (score.tokens, score.bytes) == (recorded["tokens"], recorded["bytes"])
    assert f"{score.perplexity:.4f}" == f"{recorded['perplexity']:.4f}"
    assert f"{score.bits_per_byte:.4f}" == f"{recorded['bits_per_byte']:.4f}"
    assert f"{score.mean_loss:.4f}" == f"{recorded['loss']:.4f}"


# ------------------------------------------------------------------------------------------------------- by an engine


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    from nanoqwen.pack import pack

    folder = tmp_path_factory.mktemp("engine")
    pack(tiny.make(folder / "source", tiny.Sizes(context=96)), folder / "m.nanoqwen")
    return folder / "m.nanoqwen"


class Recorder(perplexity.Engine):
    """Logits from all ids held: whoever leaves something in the cache, or skips something, changes the loss. ``log`` lists the calls."""

    name = "recorder"

    def __init__(self, context: int = 96) -> None:
        super().__init__(Dims(1, 128, 128, 2, 1, 64, 50, context), 128, device="none", description="", context_limit=context)
        self.log: list[tuple[str, int]] = []

    def logits(self, ids: list[int]) -> np.ndarray:
        return np.random.default_rng(ids).normal(0, 2, self.dims.vocab).astype(np.float32)

    def _prefill(self, ids):
        self.log.append(("prefill", len(ids)))
        return self.logits(self._tokens + ids)

    def _decode(self, token):
        self.log.append(("decode", 1))
        return self.logits([*self._tokens, token])

    def _rewind(self, position):
        pass

    def _close(self):
        pass


@pytest.mark.parametrize("length, window, stride", [(2, 8, 4), (40, 8, 3), (40, 96, 48), (41, 9, 8)])
def test_an_engine_predicts_each_token_from_its_own_window(length, window, stride):
    engine = Recorder()
    engine.prefill([1, 2, 3])  # left over from something else
    ids = [i % 50 for i in some_ids(length, 3)]
    (score,) = score_texts(engine, [Text("t", ids, length)], window=window, stride=stride)
    wanted, done = 0.0, 1
    for end in range(2, length + 1):  # the token at end - 1, from the first window that reaches it
        begin = next(b for b in range(0, length, stride) if min(b + window, length) >= end)
        row = engine.logits(ids[begin : end - 1]).astype(np.float64)
        wanted += np.log(np.exp(row).sum()) - row[ids[end - 1]]
        done += 1
    assert score.tokens == done - 1 == length - 1 and score.loss == pytest.approx(wanted, rel=1e-12)
    assert sum(kind == "prefill" for kind, _ in engine.log[1:]) == sum(1 for _ in windows(length, window, stride)), "one prefill a window"


def test_an_engine_agrees_with_whole_windows(small_file):
    from nanoqwen.engines import open_engine
    from nanoqwen.packfile import open_pack

    texts = [Text("t", some_ids(150, 5), 600)]
    with open_pack(small_file) as opened:
        model = ReferenceModel.from_pack(opened)
        (whole,) = score_texts(model, texts, window=64, stride=40)
        with open_engine(opened, "cpu") as engine:
            (stepped,) = score_texts(engine, texts, window=64, stride=40)
        del model
    assert stepped.loss == pytest.approx(whole.loss, rel=1e-5)


@pytest.mark.parametrize("name", ["eager", "graph"])
def test_the_hopper_engines_on_a_played_card(small_file, monkeypatch, name):
    import cardkit

    from nanoqwen.engines import open_engine
    from nanoqwen.packfile import open_pack

    texts = [Text("t", some_ids(120, 6), 600)]
    with open_pack(small_file) as opened, cardkit.played(monkeypatch) as card:
        card.pack = opened
        with open_engine(opened, name) as engine:
            (stepped,) = score_texts(engine, texts, window=48, stride=31)
        model = ReferenceModel.from_pack(opened)
        (whole,) = score_texts(model, texts, window=48, stride=31)
        del model
    assert stepped.loss == pytest.approx(whole.loss, rel=2e-4)


def test_nan_from_an_engine_is_an_error():
    engine = Recorder()
    engine.logits = lambda ids: np.full(50, np.nan, np.float32)
    with pytest.raises(NonFiniteError, match="not finite"):
        score_texts(engine, [Text("t", [1, 2, 3], 3)], window=8, stride=4)
