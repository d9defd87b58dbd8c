"""Arguments: whatever is wrong with them is one line that names the argument, and exit status 2."""

from __future__ import annotations

import pytest

from nanoqwen import __version__, cli
from nanoqwen.errors import InputError

COMMANDS = ("run", "pack", "inspect", "generate", "chat", "validate", "doctor")


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], ["no command", *COMMANDS, "--help"]),
        (["inspct", "x"], ["'inspct'", "did you mean inspect", *COMMANDS]),
        (["--verbose"], ["'--verbose'", "--debug", "--help"]),
        (["pack"], ["SRC", "nanoqwen pack --help"]),
        (["inspect", "a", "b"], ["unexpected argument 'b'"]),
        (["inspect", "a", "--jsn"], ["'--jsn'", "did you mean --json", "--verify"]),
        (["generate", "--temp", "1"], ["'--temp'", "--temperature"]),  # no abbreviations
        (["generate", "--prompt"], ["--prompt", "--option=VALUE"]),
        (["generate", "--prompt", "--x"], ["--prompt", "--option=VALUE"]),
        (["generate", "--prompt", "a", "--prompt-file", "b"], ["--prompt-file", "--prompt"]),
        (["generate", "--max-tokens", "-1"], ["--max-tokens", "at least 0", "-1"]),
        (["generate", "--max-tokens", "abc"], ["--max-tokens", "whole number", "'abc'"]),
        (["generate", "--max-tokens", "1.5"], ["--max-tokens", "whole number", "'1.5'"]),
        (["generate", "--temperature", "-0.1"], ["--temperature", "at least 0", "-0.1"]),
        (["generate", "--temperature", "nan"], ["--temperature", "nan"]),
        (["generate", "--temperature", "inf"], ["--temperature", "inf"]),
        (["generate", "--top-p", "0"], ["--top-p", "(0, 1]"]),
        (["generate", "--top-p", "1.01"], ["--top-p", "(0, 1]"]),
        (["generate", "--top-k", "-1"], ["--top-k", "at least 0"]),
        (["generate", "--repetition-penalty", "0"], ["--repetition-penalty", "greater than 0"]),
        (["generate", "--seed", "-1"], ["--seed", "at least 0"]),
        (["generate", "--stop", ""], ["--stop", "empty"]),
        (["chat", "--max-tokens", "x"], ["--max-tokens", "'x'"]),
        (["validate", "--tier", "roof"], ["--tier", "'roof'", "unit", "layer", "graph"]),
        (["validate", "--prompts", "0"], ["--prompts", "from 1 to 100"]),
        (["validate", "--prompts", "101"], ["--prompts", "from 1 to 100"]),
        (["pack", "src"], ["-o/--output", "nanoqwen pack --help"]),
        (["pack", "src", "-o", "x", "--group-size", "none"], ["--group-size", "'none'"]),
    ],
)
def test_a_wrong_argument_is_one_line(run, argv, words):
    line = run(*argv).error_line()
    for word in words:
        assert word in line


def test_help_is_a_page_and_names_every_command(run):
    page = run("--help")
    assert page.status == 0 and page.err == ""
    assert all(f"    {command}" in page.out for command in COMMANDS)
    assert "NANOQWEN_CACHE" in page.out and "exit status" in page.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_fits_its_options(run, command):
    page = run(command, "--help")
    assert page.status == 0
    assert f"usage: nanoqwen {command}" in page.out
    assert "--debug" in page.out


def test_help_says_what_zero_tokens_and_special_mean(run):
    page = " ".join(run("generate", "--help").out.split())
    assert "0 generates none" in page
    assert "<|fim_prefix|>" in page


def test_version(run):
    assert run("--version").out == f"nanoqwen {__version__}\n"


def test_no_traceback_without_debug(run, tmp_path):
    outcome = run("inspect", tmp_path / "missing.nanoqwen")
    assert "missing.nanoqwen" in outcome.error_line()


@pytest.mark.parametrize("argv", [["--debug", "inspect", "missing"], ["inspect", "missing", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(run, argv):
    outcome = run(*argv)
    assert outcome.status == 2
    assert "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("nanoqwen: error: missing")


# Faults that reach the top: each becomes one line, with the status that the help page promises.
@pytest.mark.parametrize(
    "fault, status, words",
    [
        (InputError("two\n  lines"), 2, "two lines"),
        (FileNotFoundError(2, "No such file or directory", "a b.txt"), 2, "a b.txt: No such file or directory"),
        (PermissionError(13, "Permission denied", "secret"), 2, "secret: Permission denied"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (MemoryError(), 2, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 2, "out of memory (DefaultCPUAllocator"),
        (ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers"), 2, "inspect needs the package tokenizers"),
        (KeyError("x"), 70, "internal fault, KeyError: 'x'"),
    ],
)
def test_every_fault_is_one_line(run, monkeypatch, fault, status, words):
    def explode(args):
        raise fault

    monkeypatch.setattr(cli.inspect, "run", explode)
    outcome = run("inspect", "x")
    assert outcome.status == status
    assert len(outcome.err.splitlines()) == 1
    assert words in outcome.err
    assert "Traceback" in run("inspect", "x", "--debug").err


def test_ctrl_c_outside_a_reply(run, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.inspect, "run", interrupt)
    outcome = run("inspect", "x")
    assert (outcome.status, outcome.out, outcome.err) == (130, "", "nanoqwen: interrupted\n")
