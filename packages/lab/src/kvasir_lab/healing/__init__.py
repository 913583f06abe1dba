"""Training of converted models on their sources' answers.

`student.py` is the model, `heal.py` the run, `data.py` its texts."""
