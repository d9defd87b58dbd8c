"""Chapter 05's kernels without a GPU: they compile, the file says of each what the model proves, and a child that hangs is survived."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import types

import pytest

from nanoqwen.config import data_path
from nanoqwen.cuda.compile import compile_source
from nanoqwen.errors import DeviceError, InputError
from nanoqwen.lessons import barriers
from nanoqwen.lessons.barriers import KERNELS, LENGTHS, SOURCE, Trial, constants, run
from nanoqwen.warpmodel import explore, ring
from nanoqwen.warpmodel.lessons import LESSONS, lesson, verdict

TEXT = data_path("kernels", *SOURCE.split("/")).read_text(encoding="utf-8")
#: What the file's header calls it -> what the model must say of a partial last page.
WORDS = {
    "reads stale bytes": "reads too early", "sums are read too early": "reads too early", "stale at every length": "reads too early",
    "hangs": "hangs", "right": "right",
}  # fmt: skip
RIGHT = {"verdict": "right", "wrong_runs": 0, "stale": [0] * 5, "stale_total": 0, "wrong_dims": 0, "error": 0.0}


# ----------------------------------------------------------------------------------------------------------------- the kernels


def test_they_compile_without_a_spill_and_fit_an_sm_twice():
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: the test extra brings it on Linux")
    binary = compile_source(SOURCE, constants())
    assert set(binary.kernels) == {f"lesson_{name}" for name in KERNELS}
    for name, use in binary.kernels.items():
        assert (use.spill_bytes, use.stack_bytes) == (0, 0), name
        assert use.shared_bytes <= 48 * 1024 and use.registers * 160 <= 65536


def test_every_kernel_is_shown_launched_and_described():
    assert tuple(re.findall(r"^LESSON\((\w+)\)$", TEXT, re.MULTILINE)) == KERNELS
    described = re.findall(r"^//   (\w+) {2,}\S", TEXT, re.MULTILINE)
    assert tuple(described) == KERNELS
    for name in KERNELS:
        assert f"// [{name}]" in TEXT and f"// [/{name}]" in TEXT


def test_python_numbers_places_as_the_kernel_does(monkeypatch):
    """The child needs CuPy; what is compared here does not."""
    for name in ("cupy", "nanoqwen.cuda.launch", "nanoqwen.engines.hopper"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(Kernels=None, Launch=None, kernel_cache=None))
    monkeypatch.delitem(sys.modules, "nanoqwen.lessons.barriers_child", raising=False)
    from nanoqwen.lessons import barriers_child as child

    assert len(child.PLACES) == len(re.search(r"enum Place \{ (.*?) \};", TEXT).group(1).split(","))
    consumers = int(re.search(r"kConsumers = (\d+)", TEXT).group(1))
    assert (child.CONSUMERS, child.WARPS) == (consumers, 1 + consumers)
    record = re.search(r"struct Record \{(.*?)\n\};", TEXT, re.DOTALL).group(1)
    assert [name for name, _ in child.Record._fields_] == re.findall(r"^  \w+ (\w+)[;\[]", record, re.MULTILINE)
    case = re.search(r"struct Case \{(.*?)\n\};", TEXT, re.DOTALL).group(1)
    declared = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", case))
    assert [name for name, _ in child.Case._fields_] == declared


# ------------------------------------------------------------------------------------------------------------------- the model


def test_the_model_has_every_kernel_but_the_one_that_splits_a_warp():
    assert tuple(LESSONS) == tuple(name for name in KERNELS if name != "branch_lane")
    with pytest.raises(ValueError, match="no lesson is called 'branch_lane'; there are: right, branch_join"):
        lesson("branch_lane", 8)


@pytest.mark.parametrize("name", LESSONS)
def test_the_file_says_of_each_kernel_what_the_model_proves(name):
    line = re.search(rf"^//   {name} .*$", TEXT, re.MULTILINE).group(0)
    said = next(meaning for phrase, meaning in WORDS.items() if phrase in line.replace(f"//   {name}", ""))
    assert verdict(explore(lesson(name, 5))) == said


@pytest.mark.parametrize("name", LESSONS)
def test_full_pages_are_right_but_in_two_kernels(name):
    expected = {"branch_each": "hangs", "fences": "reads too early"}.get(name, "right")
    assert verdict(explore(lesson(name, 8))) == expected


def test_what_the_chapter_says_of_single_lengths():
    assert verdict(explore(lesson("branch_each", 4))) == "right"  # one page
    assert verdict(explore(lesson("token_branch", 7))) == "right"  # every warp has a token
    for name in ("branch_join", "branch_exit", "branch_named"):
        report = explore(lesson(name, 7))
        assert set(report.schedules) == {"early", "in flight"} and report.clean is not None


def test_the_ring_with_two_warps_to_a_page():
    assert explore(ring(3, 2, consumers=4, warps_a_page=2)).proved
    assert explore(ring(3, 2, consumers=2, warps_a_page=2)).proved
    assert "overwritten" in explore(ring(3, 1, consumers=2, warps_a_page=2, empty_barrier=False)).schedules
    with pytest.raises(ValueError, match="3 consumers do not divide into groups of 2"):
        ring(3, 2, consumers=3, warps_a_page=2)


# ------------------------------------------------------------------------------------------------------------------- the child


@pytest.fixture
def play(monkeypatch):
    """``play(scripts)``: the n-th child runs the n-th script; ``say(x)`` in it prints a line as the real child does."""
    monkeypatch.setattr(barriers, "RECOVERY", 1.0)
    started = []

    def given(*scripts):
        def command(trials, patience):
            started.append(len(trials))
            script = scripts[min(len(started), len(scripts)) - 1]
            head = "import json, os, subprocess, sys, time\ndef say(x): print(x if x == 'ready' else json.dumps(x), flush=True)\n"
            return [sys.executable, "-c", head + f"RIGHT = {RIGHT!r}\n" + script]

        monkeypatch.setattr(barriers, "_command", command)
        return started

    return given


def test_outcomes_come_in_order(play):
    play("say('ready'); say(RIGHT); say({**RIGHT, 'verdict': 'wrong', 'stale': [0, 0, 0, 1, 0]})")
    trials = [Trial("right", 48), Trial("branch_join", 49)]
    first, second = run(trials)
    assert (first.trial, first.verdict, first.stale) == (trials[0], "right", (0,) * 5)
    assert (second.trial, second.verdict, second.stale) == (trials[1], "wrong", (0, 0, 0, 1, 0))


def test_a_child_that_hangs_is_killed_with_its_children_and_the_rest_goes_on(play, tmp_path):
    mark = tmp_path / "grandchild"
    hang = f"say('ready'); say(RIGHT); p = subprocess.Popen(['sleep', '60']); open({str(mark)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    started = play(hang, "say('ready'); say(RIGHT)")
    outcomes = run([Trial("right", 48), Trial("branch_two", 49), Trial("right", 64)], timeout=2)
    assert [o.verdict for o in outcomes] == ["right", "hangs", "right"] and outcomes[1].note == "killed after 2 s"
    assert started == [3, 1]
    pid = int(mark.read_text(encoding="utf-8"))
    for _ in range(100):
        try:
            state = open(f"/proc/{pid}/stat", encoding="utf-8").read().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    os.kill(pid, 9)
    pytest.fail("the child's own child is still running")


def test_a_child_that_cannot_leave_is_not_waited_for(play):
    """After the watchdog's word the context is gone; the process may hang in the driver. The next trial is not its fault."""
    play("say('ready'); say({'verdict': 'hangs', 'places': {'producer': 'x'}, 'note': 'ended by the watchdog'}); time.sleep(60)", "say('ready'); say(RIGHT)")
    start = time.monotonic()
    first, second = run([Trial("branch_two", 49), Trial("right", 49)], timeout=20)
    assert (first.verdict, first.places, second.verdict) == ("hangs", {"producer": "x"}, "right")
    assert time.monotonic() - start < 15


def test_a_child_that_breaks_down_is_an_outcome(play):
    play("say('ready'); sys.exit('out of memory')", "say('ready'); say(RIGHT)")
    first, second = run([Trial("right", 48), Trial("right", 49)])
    assert (first.verdict, first.note, second.verdict) == ("fails", "out of memory", "right")


def test_a_second_start_is_tried(play):
    started = play("sys.exit('busy')", "say('ready'); say(RIGHT)")
    assert [o.verdict for o in run([Trial("right", 48)])] == ["right"] and started == [1, 1]


def test_without_a_card_there_is_one_line(play):
    play("sys.exit('no CUDA device')")
    with pytest.raises(DeviceError, match="the lesson cannot start: no CUDA device"):
        run([Trial("right", 48)])
    play("time.sleep(60)")
    with pytest.raises(DeviceError, match="has not started after 0.3 s"):
        run([Trial("right", 48)], start=0.3)


def test_when_no_child_starts_any_more_the_rest_is_not_run(play):
    hung = {"verdict": "hangs", "note": "ended by the watchdog"}
    play(f"say('ready'); say({hung!r})", "sys.exit('the card is lost')")
    outcomes = run([Trial("branch_two", 49), Trial("right", 48), Trial("right", 49)])
    assert [(o.verdict, o.note) for o in outcomes[1:]] == [("not run", "the lesson cannot start: the card is lost")] * 2


@pytest.mark.parametrize("trial", [Trial("none", 49), Trial("right", 0), Trial("right", 81), Trial("right", 49, repeats=0)])
def test_what_is_no_trial_is_refused(trial):
    with pytest.raises(InputError, match="no lesson is called|a trial has 1 to 80 tokens"):
        run([trial])


def test_the_request_is_what_the_child_reads():
    *_, request = barriers._command([Trial("right", 49, cold=True)], 0.5)
    assert json.loads(request) == {"trials": [{"kernel": "right", "length": 49, "supply_delay": 0, "use_delay": 0, "cold": True, "repeats": 1}], "patience": 0.5}
    assert LENGTHS == (48, 49, 63, 64, 65)


# --------------------------------------------------------------------------------------------------------------- the sanitizer

LOG = """========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at nanoqwen::branch_join(nanoqwen::Cta &)+0x1230 in barriers.cu:222
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Barrier error detected. Divergent thread(s) in block.
=========     at nanoqwen::branch_join(nanoqwen::Cta &)+0x1230 in barriers.cu:222
=========
========= ERROR SUMMARY: 2 errors
"""


def test_a_log_is_read():
    assert barriers._read_log(LOG) == ("ERROR SUMMARY: 2 errors", {"Barrier error detected. Divergent thread(s) in block.": 2})
    assert barriers._read_log("") == ("", {})


def test_a_sanitizer_that_hangs_is_ended_with_its_target(monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\nprintf '%s' '{LOG}' > \"$4\"\nsleep 60\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setattr(barriers, "sanitizer", lambda: str(tool))
    found = barriers.sanitize("synccheck", Trial("branch_join", 49), timeout=1)
    assert not found.finished and found.tool == "synccheck" and sum(found.messages.values()) == 2 and found.log == LOG
    monkeypatch.setattr(barriers, "sanitizer", lambda: None)
    with pytest.raises(DeviceError, match="compute-sanitizer is not installed"):
        barriers.sanitize("synccheck", Trial("branch_join", 49))
