"""What a model's answers are worth: benchmark files, prompts, rules, results and pages.  No model is known here."""
