"""Generate captions with a model: a loop (`loop.py`), strategies (`beam.py`, `sample.py`) and rules (`rules.py`)."""
