"""Scores: HumanEval (its problems, what becomes of a completion, the processes that run it under limits) and perplexity."""
