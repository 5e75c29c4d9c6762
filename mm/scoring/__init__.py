"""Scoring a model's answers: benchmark files, prompts, rules, results and pages."""
