"""The lab: tasks with exact checkers, the small models trained on them, and the measurement of answers.

Tasks: `task.py` the seam · `tasks/` one file a task · `sheet.py` thousands of problems at once · `forms.py` prompt
forms · `lookup.py` tasks by name. Models in plain torch: `model.py`, `sample.py`, `export.py`, `tokenizer.py`,
`chat.py`. On top of both: `evaluation/`, then `training/` (`train.py` is its command), then `drafters/`
and `healing/` (converted models). `solving/` compares strategies, `bench/` and `kernels/` measure what only developers
measure, and `commands/` are what all of it adds to ``kvasir``.
"""

__version__ = "0.1.0"
