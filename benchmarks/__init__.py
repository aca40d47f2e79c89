"""One question a file: `python benchmarks/QUESTION.py`; the last line that it prints is JSON."""
